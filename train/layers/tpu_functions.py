"""Products, sums, normalization and activations, written so that XLA's compiler for TPUs turns them into fast programs.

Each pass over a tensor is expensive, and the matrix unit is cheap. So sums are computed as products with a matrix of
ones, and the compiler fuses these products with the operations that compute the terms. No tensor changes its layout.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla

from train.runtime.named_scopes import custom_gradient

# Number of rows of a matrix of ones. With fewer rows, XLA would sum in the vector unit, which is slower.
NUM_ONES = 8


def einsum(equation: str, left: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
    """Return a product in float32. `tf.einsum` would round it to the type of its arguments.

    Args:
        equation: as in `tf.einsum` for two tensors, such as `bld,de->ble`. Each letter occurs in two or three parts of
            the equation.
        left: float32 or bfloat16.
        right: of the same type as `left`.
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
    product = xla.dot_general(left, right, dimensions, preferred_element_type=tf.float32)
    order = [*batch, *(letter for part in (first, second) for letter in part if letter not in (*batch, *summed))]
    return tf.transpose(product, [order.index(letter) for letter in result])


def sum_over_last(values: tf.Tensor, weights: tf.Tensor | None = None) -> tf.Tensor:
    """Sum the values, or the values times weights, over the last axis; return float32 (batch, length, 1).

    Args:
        values: (batch, length, width).
        weights: (width,), of the same type as `values`.
    """
    if values.dtype == tf.float32:
        return tf.reduce_sum(values if weights is None else values * weights, axis=-1, keepdims=True)
    if weights is None:
        weights = tf.ones(values.shape[-1:], values.dtype)
    columns = tf.broadcast_to(weights[:, tf.newaxis], (values.shape[-1], NUM_ONES))
    return einsum("bld,dr->blr", values, columns)[..., :1]


def sum_over_head(values: tf.Tensor) -> tf.Tensor:
    """Sum (batch, heads, head size, length) over the head size; return float32 (batch, heads, 1, length)."""
    if values.dtype == tf.float32:
        return tf.reduce_sum(values, axis=2, keepdims=True)
    return einsum("bnhq,hr->bnrq", values, tf.ones((values.shape[2], NUM_ONES), values.dtype))[:, :, :1]


def sum_over_rows(values: tf.Tensor) -> tf.Tensor:
    """Sum (batch, length, width) over all axes but the last; return float32 (width,)."""
    if values.dtype == tf.float32:
        return tf.reduce_sum(values, axis=(0, 1))
    return einsum("blr,bld->rd", tf.ones((*values.shape[:2], NUM_ONES), values.dtype), values)[0]


def optimization_barrier(*tensors: tf.Tensor | None) -> list[Any]:
    """Return copies of the tensors that XLA treats as new tensors.

    From the copies, XLA computes again what it has computed from the originals, instead of keeping results in memory.
    """
    kept = iter(xla.optimization_barrier(*[tensor for tensor in tensors if tensor is not None]))
    return [None if tensor is None else next(kept) for tensor in tensors]


@custom_gradient
def heads(inputs: tf.Tensor, kernel: tf.Tensor, bias: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    """Project inputs for each head; return (batch, heads, head size, length), the layout that attention needs.

    Args:
        inputs: (batch, length, width).
        kernel: (width, heads, head size), of the inputs' type.
        bias: (heads, head size), of the inputs' type.
    """

    def gradient(by_output: tf.Tensor) -> tuple[tf.Tensor, ...]:
        if by_output.dtype == tf.float32:
            by_bias = tf.reduce_sum(by_output, axis=(0, 3))
        else:
            batch, length, _ = inputs.shape
            by_bias = einsum("bnhl,blr->nhr", by_output, tf.ones((batch, length, NUM_ONES), by_output.dtype))[..., 0]
        return (
            tf.einsum("bnhl,dnh->bld", by_output, kernel),
            tf.einsum("bld,bnhl->dnh", inputs, by_output),
            tf.cast(by_bias, bias.dtype),
        )

    return tf.einsum("bld,dnh->bnhl", inputs, kernel) + bias[..., tf.newaxis], gradient


@custom_gradient
def dense(inputs: tf.Tensor, kernel: tf.Tensor, bias: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    """Compute inputs @ kernel + bias.

    Args:
        inputs: (batch, length, width).
        kernel: (width, units), of the inputs' type.
        bias: (units,), of the inputs' type.
    """

    def gradient(by_output: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return (
            tf.einsum("ble,de->bld", by_output, kernel),
            tf.einsum("bld,ble->de", inputs, by_output),
            tf.cast(sum_over_rows(by_output), bias.dtype),
        )

    return tf.einsum("bld,de->ble", inputs, kernel) + bias, gradient


@custom_gradient
def dense_of_heads(inputs: tf.Tensor, kernel: tf.Tensor, bias: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    """Compute inputs @ kernel, summed over heads, + bias. The inputs have the layout that `heads` returns.

    The result is (batch, length, units).

    Args:
        inputs: (batch, heads, head size, length).
        kernel: (heads, head size, units), of the inputs' type.
        bias: (units,), of the inputs' type.
    """

    def gradient(by_output: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return (
            tf.einsum("ble,nhe->bnhl", by_output, kernel),
            tf.einsum("bnhl,ble->nhe", inputs, by_output),
            tf.cast(sum_over_rows(by_output), bias.dtype),
        )

    return tf.einsum("bnhl,nhe->ble", inputs, kernel) + bias, gradient


@custom_gradient
def gelu(inputs: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    """Compute x Φ(x) (Hendrycks & Gimpel 2016) in float32; the result has the inputs' type.

    In bfloat16, XLA would round after each operation, and keep the intermediate results for the gradient.
    """

    def gradient(by_output: tf.Tensor) -> tf.Tensor:
        _, slope = _gelu_and_slope(inputs)
        return tf.cast(tf.cast(by_output, tf.float32) * slope, inputs.dtype)

    return tf.cast(_gelu_and_slope(inputs)[0], inputs.dtype), gradient


@custom_gradient
def gated_gelu(inputs: tf.Tensor, gate: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    """Compute x Φ(x) times the gate (GeGLU, Shazeer 2020), with the precision of `gelu`."""

    def gradient(by_output: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        values, slope = _gelu_and_slope(inputs)
        by_output = tf.cast(by_output, tf.float32)
        by_inputs = by_output * tf.cast(gate, tf.float32) * slope
        return tf.cast(by_inputs, inputs.dtype), tf.cast(by_output * values, gate.dtype)

    return tf.cast(_gelu_and_slope(inputs)[0] * tf.cast(gate, tf.float32), inputs.dtype), gradient


def _gelu_and_slope(inputs: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Compute gelu and its derivative in float32."""
    values = tf.cast(inputs, tf.float32)
    cumulative = 0.5 * (1 + tf.math.erf(values / math.sqrt(2)))
    density = tf.exp(-0.5 * tf.square(values)) / math.sqrt(2 * math.pi)
    return values * cumulative, cumulative + values * density


def layer_norm(inputs: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor, epsilon: float) -> tf.Tensor:
    """Normalize over the last axis (Ba et al. 2016), computed in float32; the result has the inputs' type.

    Args:
        inputs: (batch, length, width).
        gamma, beta: float32 (width,), scale and offset.
        epsilon: added to the variance.
    """
    dtype, width = inputs.dtype, inputs.shape[-1]

    @custom_gradient
    def apply(inputs: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        mean, centered, inverse_deviation = _moments(inputs, epsilon)

        def gradient(by_output: tf.Tensor) -> tuple[tf.Tensor, ...]:
            normalized = (tf.cast(inputs, tf.float32) - mean) * inverse_deviation
            by_output_float32 = tf.cast(by_output, tf.float32)
            product = tf.cast(by_output_float32 * normalized, dtype)
            scale = tf.cast(gamma, dtype)
            by_mean = sum_over_last(by_output, scale) / width
            by_deviation = sum_over_last(product, scale) / width
            by_input = (by_output_float32 * gamma - by_mean - normalized * by_deviation) * inverse_deviation
            return tf.cast(by_input, dtype), sum_over_rows(product), sum_over_rows(by_output)

        return tf.cast(centered * (inverse_deviation * gamma) + beta, dtype), gradient

    return apply(inputs, tf.convert_to_tensor(gamma), tf.convert_to_tensor(beta))


def normalized_products(
    inputs: tf.Tensor,
    gamma: tf.Tensor,
    epsilon: float,
    kernels: Sequence[tf.Tensor],
    equation: str,
    num_parts: int = 1,
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Normalize as `layer_norm` does, but without an offset, and multiply the result by kernels.

    The gradient with respect to the inputs needs no sum over the norm's output, so XLA can fuse this gradient with the
    last matrix product:

    - The part of the gradient that flows through the standard deviation follows from Σ product * gradient, because
      products are proportional to the inverse standard deviation of their token. The caller must provide this sum as
      the gradient of the second result, a 1 for each token, float32 (batch, length, 1). To do so, pass the second
      result to `scaled`, with each product or a rotation of the product, and use the tensors that `scaled` returns.
    - The part that flows through the mean is 0 if each column of a kernel has the mean 0, so the kernels are centered.

    Args:
        inputs: (batch, length, width).
        gamma: float32 (width,), the scale.
        epsilon: added to the variance.
        kernels: (width, …) each, of the inputs' type or float32.
        equation: the product of (batch, length, width) and a kernel, `bld,de->ble`.
        num_parts: number of parts that a kernel's last axis is divided into, with one product for each part. XLA fuses
            operations on all parts with the last product; after a single product they would need an extra pass. This
            saves time when kernels are float32, because each product then rounds only its part of the kernel.
    """
    dtype, width = inputs.dtype, inputs.shape[-1]
    operands, result = equation.split("->")
    of_inputs, of_kernel = operands.split(",")

    def product(states: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
        # Without the barriers, XLA would first write a bfloat16 copy of a float32 kernel that is read several times.
        copies = [kernel, *(optimization_barrier(kernel)[0] for _ in range(1, num_parts))]
        parts = [tf.split(copy, num_parts, axis=-1)[number] for number, copy in enumerate(copies)]
        return tf.concat([tf.einsum(equation, states, tf.cast(part, dtype)) for part in parts], axis=-1)

    @custom_gradient
    def apply(inputs: tf.Tensor, gamma: tf.Tensor, *kernels: tf.Tensor) -> tuple[tuple[tf.Tensor, ...], Callable]:
        mean, centered, inverse_deviation = _moments(inputs, epsilon)
        states = tf.cast(centered * (inverse_deviation * gamma), dtype)
        products = [product(states, kernel) for kernel in kernels]

        def gradient(*by_outputs: tf.Tensor) -> tuple[tf.Tensor, ...]:
            *by_products, by_scale = by_outputs
            normalized = (tf.cast(inputs, tf.float32) - mean) * inverse_deviation
            by_input, by_gamma, by_kernels = -normalized * (by_scale / width), tf.zeros_like(gamma), []
            rows = tf.reshape(gamma, (-1, *[1] * (kernels[0].shape.rank - 1)))
            for kernel, by_product in zip(kernels, by_products, strict=True):
                scaled_kernel = tf.cast(kernel, tf.float32) * rows
                centered_kernel = tf.cast(scaled_kernel - tf.reduce_mean(scaled_kernel, axis=0), dtype)
                by_input += tf.cast(
                    tf.einsum(f"{result},{of_kernel}->{of_inputs}", by_product, centered_kernel), tf.float32
                )
                by_kernel = einsum(f"{of_inputs},{result}->{of_kernel}", tf.cast(normalized, dtype), by_product)
                by_gamma += tf.reduce_sum(by_kernel * tf.cast(kernel, tf.float32), axis=range(1, kernel.shape.rank))
                by_kernels.append(tf.cast(by_kernel * rows, kernel.dtype))
            return tf.cast(by_input * inverse_deviation, dtype), by_gamma, *by_kernels

        return (*products, tf.ones_like(mean)), gradient

    *products, scale = apply(inputs, tf.convert_to_tensor(gamma), *kernels)
    return products, scale


@custom_gradient
def scaled(scale: tf.Tensor, *tensors: tf.Tensor) -> tuple[tuple[tf.Tensor, ...], Callable]:  # noqa: ARG001
    """Return the tensors unchanged, as if multiplied by 1; the gradient of `scale` is Σ tensor * gradient per token.

    Args:
        scale: float32 (batch, length, 1).
        tensors: (batch, length, width) or (batch, heads, head size, length) each.
    """

    def summed(products: tf.Tensor) -> tf.Tensor:
        if products.shape.rank == 3:
            return sum_over_last(products)
        if products.dtype == tf.float32:
            return tf.reduce_sum(products, axis=(1, 2))[..., tf.newaxis]
        columns = tf.ones((*products.shape[1:3], NUM_ONES), products.dtype)
        return einsum("bnhl,nhr->brl", products, columns)[:, 0, :, tf.newaxis]

    def gradient(*by_tensors: tf.Tensor) -> tuple[tf.Tensor, ...]:
        sums = [summed(tensor * by_tensor) for tensor, by_tensor in zip(tensors, by_tensors, strict=True)]
        return tf.add_n(sums), *by_tensors

    return tensors, gradient


def _moments(inputs: tf.Tensor, epsilon: float) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Compute, in float32, the last axis's mean, the inputs minus the mean, and the inverse standard deviation."""
    width = inputs.shape[-1]
    mean = sum_over_last(inputs) / width
    centered = tf.cast(inputs, tf.float32) - mean
    # Rounding the terms to bfloat16 does no harm: over hundreds of terms the errors average out.
    variance = sum_over_last(tf.cast(tf.square(centered), inputs.dtype)) / width
    return mean, centered, tf.math.rsqrt(variance + epsilon)
