"""Products and sums as a TPU's matrix unit makes them: of float32 or bfloat16, summed up in float32."""

from typing import Any

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla

# Rows of a matrix of ones: of fewer, XLA would make a sum of its vector unit's, which is slower.
NUM_ONES = 8


def einsum(equation: str, one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """Return the product in float32, before any rounding; `tf.einsum` rounds it to the type of its arguments.

    Args:
        equation: as in `tf.einsum`, of two tensors: `bld,de->ble`. A letter stands in two or three of the parts.
        one: float32 or bfloat16.
        other: of the same type.
    """
    arguments, result = equation.split("->")
    first, second = arguments.split(",")
    batch = [letter for letter in first if letter in second and letter in result]
    summed = [letter for letter in first if letter in second and letter not in result]
    dimensions = xla.DotDimensionNumbers(
        lhs_batch_dimensions=[first.index(letter) for letter in batch],
        rhs_batch_dimensions=[second.index(letter) for letter in batch],
        lhs_contracting_dimensions=[first.index(letter) for letter in summed],
        rhs_contracting_dimensions=[second.index(letter) for letter in summed],
    )
    product = xla.dot_general(one, other, dimensions, preferred_element_type=tf.float32)
    order = [*batch, *(letter for part in (first, second) for letter in part if letter not in (*batch, *summed))]
    return tf.transpose(product, [order.index(letter) for letter in result])


def sum_over_last(values: tf.Tensor, weights: tf.Tensor | None = None) -> tf.Tensor:
    """Return Σ values (times weights) over the last axis, float32 (…, 1).

    Args:
        values: (batch, length, width).
        weights: (width,), of the same type.
    """
    if values.dtype == tf.float32:
        return tf.reduce_sum(values if weights is None else values * weights, axis=-1, keepdims=True)
    if weights is None:
        weights = tf.ones(values.shape[-1:], values.dtype)
    columns = tf.broadcast_to(weights[:, tf.newaxis], (values.shape[-1], NUM_ONES))
    return einsum("bld,dr->blr", values, columns)[..., :1]


def sum_over_rows(values: tf.Tensor) -> tf.Tensor:
    """Return Σ values over all axes but the last, float32 (width,), of (batch, length, width)."""
    if values.dtype == tf.float32:
        return tf.reduce_sum(values, axis=(0, 1))
    ones = tf.ones((*values.shape[:2], NUM_ONES), values.dtype)
    return einsum("blr,bld->rd", ones, values)[0]


def apart(*tensors: tf.Tensor | None) -> list[Any]:
    """Return the tensors as ones of which XLA does not know that it has computed with them before.

    What is computed of them is computed anew, in the place of a tensor that is kept.
    """
    kept = iter(xla.optimization_barrier(*[tensor for tensor in tensors if tensor is not None]))
    return [None if tensor is None else next(kept) for tensor in tensors]
