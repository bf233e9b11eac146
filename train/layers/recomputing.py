"""Gradient checkpointing: compute a layer again when its gradient is needed (Chen et al. 2016).

Only the input of each layer is kept. This reduces the memory for activations to about the need of one layer, and costs
a third more computation. `tf.recompute_grad` does not work under XLA, which ignores control dependencies: the compiler
notices that a layer is computed twice, and keeps the first result.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla

from train.layers.random_bits import repeatable
from train.runtime.private import is_for_xla


def recomputed(function: Callable[..., tf.Tensor], *tensors: tf.Tensor) -> tf.Tensor:
    """Compute `function` of tensors, and keep only these tensors for its gradient.

    Results do not change. Dropout stays the same if it draws from keys (`train.layers.random_bits`).
    """
    compute = repeatable(function)

    @tf.custom_gradient
    def keep_arguments(*tensors: tf.Tensor) -> tuple[tf.Tensor, Callable[..., Any]]:
        def gradient(upstream: tf.Tensor, variables: Any = ()) -> tuple[list[Any], list[tf.Tensor]]:
            *again, upstream = _optimization_barrier([*tensors, upstream])
            with tf.GradientTape() as tape:
                tape.watch(again)
                outputs = compute(*again)
            gradients = tape.gradient(
                outputs,
                [*again, *variables],
                output_gradients=upstream,
                unconnected_gradients=tf.UnconnectedGradients.ZERO,
            )
            return gradients[: len(again)], gradients[len(again) :]

        return compute(*tensors), gradient

    return keep_arguments(*tensors)


def _optimization_barrier(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """Return copies that the compiler treats as new tensors, available only once all `tensors` are computed."""
    if is_for_xla():
        return xla.optimization_barrier(*tensors)
    with tf.control_dependencies(tensors[-1:]):
        return [tf.identity(tensor) for tensor in tensors]
