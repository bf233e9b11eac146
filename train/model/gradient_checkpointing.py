"""Recompute the activations of layers in the backward pass, instead of keeping them (Chen et al. 2016).

Of each encoder layer only the input is kept: memory for activations falls to about that of one layer, for a third more
computing. `tf.recompute_grad` does not serve: under XLA, which ignores control dependencies, the compiler sees that a
layer is computed twice and keeps the first result.
"""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from train.layers.stateless_dropout import repeatable
from train.model.architectures import architecture_of
from train.model.block_attention import attending_within, current_documents


def enable_gradient_checkpointing(model: Any) -> None:
    """Recompute each encoder layer of a TF model where its gradient is taken.

    Results stay the same, and so does what a layer drops, if it drops by keys (`train.layers.stateless_dropout`).
    """
    for layer in encoder_layers(model):
        layer.call = _checkpointed(layer.call)


def encoder_layers(model: Any) -> list[Any]:
    """List the layers of a TF model's encoder, first to last.

    Raises:
        ValueError: the encoder is not built as those of the supported architectures.
    """
    encoder = getattr(model, model.base_model_prefix)
    name = architecture_of(model.config).layer_list
    modules = (encoder, *encoder.submodules)
    lists = [getattr(module, name) for module in modules if isinstance(getattr(module, name, None), list)]
    if len(lists) != 1:
        raise ValueError(f"The layers of a {model.config.model_type} are not found: {len(lists)} lists of layers.")
    return list(lists[0])


def _checkpointed(call: Callable[..., Any]) -> Callable[..., Any]:
    """Make of a layer's `call` one that keeps only its tensor arguments for the backward pass.

    It returns the new hidden states alone, (hidden_states,): attentions are not for training.
    """

    @functools.wraps(call)
    def call_and_forget(*args: Any, **kwargs: Any) -> tuple[tf.Tensor]:
        arguments = tf.nest.flatten((args, kwargs))
        documents = current_documents()

        def compute(*tensors: tf.Tensor) -> tf.Tensor:
            rest = iter(tensors)
            filled = [next(rest) if tf.is_tensor(argument) else argument for argument in arguments]
            new_args, new_kwargs = tf.nest.pack_sequence_as((args, kwargs), filled)
            with attending_within(documents):  # they are no longer known where the gradient is taken
                return call(*new_args, **new_kwargs)[0]

        tensors = [argument for argument in arguments if tf.is_tensor(argument)]
        return (_keeping_arguments(repeatable(compute))(*tensors),)

    return call_and_forget


def _keeping_arguments(compute: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    """Let `compute`, a function of tensors to a tensor, be called again to take its gradient."""

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

    return keep_arguments


def _optimization_barrier(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
    """Give the same tensors, available when the last of them is, and unknown to the compiler as the same."""
    if GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        return xla.optimization_barrier(*tensors)
    with tf.control_dependencies(tensors[-1:]):
        return [tf.identity(tensor) for tensor in tensors]
