"""Gradient checkpointing: what a layer computed is computed again where its gradient is taken (Chen et al. 2016).

Of each layer only the input is kept: memory for activations falls to about that of one layer, for a third more
computing. `tf.recompute_grad` does not serve: under XLA, which ignores control dependencies, the compiler sees that a
layer is computed twice and keeps the first result.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla

from train.layers.random_bits import repeatable
from train.runtime.private import is_for_xla


def recomputed(function: Callable[..., tf.Tensor], *tensors: tf.Tensor) -> tf.Tensor:
    """Compute `function` of tensors, keeping nothing but these for its gradient.

    Results stay the same, and so does what its layers drop, if they drop by keys (`train.layers.random_bits`).
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
    """Give the same tensors, available when the last of them is, and unknown to the compiler as the same."""
    if is_for_xla():
        return xla.optimization_barrier(*tensors)
    with tf.control_dependencies(tensors[-1:]):
        return [tf.identity(tensor) for tensor in tensors]
