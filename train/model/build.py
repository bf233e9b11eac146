"""The network that is trained: a TF class of transformers with fresh weights, its activations recomputed if asked for.

With gradient checkpointing (Chen et al. 2016) the activations of layers are recomputed in the backward pass. Of each
encoder layer only the input is kept: memory for activations falls to about that of one layer, for a third more
computing. `tf.recompute_grad` does not serve: under XLA, which ignores control dependencies, the compiler sees that a
layer is computed twice and keeps the first result.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras
import transformers
from tensorflow.compiler.tf2xla.python import xla
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext
from transformers import PretrainedConfig

from train.config.learning import ModelConfig
from train.layers.random_bits import repeatable
from train.model.architectures import align_padding_positions, architecture_of, vocabulary_axis
from train.model.attention import attend_within_documents, attending_within, current_documents

# Settings of the sizes that states between layers, and before logits, may have.
HIDDEN_SIZES = ("hidden_size", "embedding_size", "output_embedding_size")


def build_network(
    model_config: PretrainedConfig,
    settings: ModelConfig,
    *,
    vocabulary_size: int,
    seed: int,
    tpu_layers: bool = False,
    model_class: str = "TFAutoModelForMaskedLM",
) -> Any:
    """Build a TF model with fresh weights, the same for the same seed.

    Args:
        model_config: of `resolve_model_config`, its vocabulary padded.
        vocabulary_size: ids of the tokenizer; padding of the vocabulary starts as 0.
        tpu_layers: use the TPU-optimized layers, if the architecture has them.
        model_class: the auto class of transformers.
    """
    tf_keras.utils.set_random_seed(seed)
    network = auto_class(model_class, model_config).from_config(model_config)
    network(network.dummy_inputs, training=False)
    align_padding_positions(network)
    if settings.position_init == "sinusoidal":
        start_positions_as_sinusoids(network)
    clear_padding(network, vocabulary_size)
    if settings.block_attention:
        attend_within_documents(network)
    if tpu_layers:
        from train.model.tpu_layers import use_tpu_layers  # not for CPUs

        use_tpu_layers(network)
    if settings.gradient_checkpointing:
        enable_gradient_checkpointing(network)
    return network


def auto_class(name: str, config: PretrainedConfig) -> Any:
    """Look up an auto class of transformers by its name, once it knows our class for the configuration, if any."""
    if config.model_type == "modernbert":
        import train.model.modernbert  # noqa: F401  (registers its classes)
    return getattr(transformers, name)


def start_positions_as_sinusoids(model: Any) -> None:
    """Fill the position table of a new TF…ForMaskedLM with sinusoids, of the size its random start had.

    The table stays trainable and the architecture is as it was. Among sinusoids (Vaswani et al. 2017, section 3.5) a
    shift by n positions is the same rotation everywhere, so "the token before" is one thing to learn, where random
    rows would make it one for each position. benchmarks/position_init.py compares the two.
    """
    tables = [variable for variable in model.trainable_variables if "position_embeddings" in variable.name]
    for table in tables:
        num_positions, width = table.shape
        root_mean_square = float(np.sqrt(np.mean(np.square(table.numpy()))))
        table.assign(sinusoids(num_positions, width) * root_mean_square * np.sqrt(2))


def sinusoids(num_positions: int, width: int) -> np.ndarray:
    """Compute sines, then cosines, of wavelengths 2π to 20,000π: float32 (num_positions, width)."""
    half = -(-width // 2)
    frequencies = 10_000.0 ** (-np.arange(half) / half)
    angles = np.arange(num_positions)[:, np.newaxis] * frequencies  # (num_positions, half)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)[:, :width].astype(np.float32)


def clear_padding(model: Any, vocabulary_size: int) -> None:
    """Set what a TF…ForMaskedLM holds for ids from `vocabulary_size` on to 0.

    They get no gradient, so they stay 0 and add nothing to a norm, such as LAMB's of each weight.
    """
    for variable in model.weights:
        axis = vocabulary_axis(variable.name, model.config.model_type)
        if axis is not None and variable.shape[axis] > vocabulary_size:
            is_real = np.arange(variable.shape[axis]) < vocabulary_size
            variable.assign(variable.numpy() * np.expand_dims(is_real, tuple(set(range(variable.shape.rank)) - {axis})))


def enable_gradient_checkpointing(model: Any) -> None:
    """Recompute each encoder layer of a TF model where its gradient is taken.

    Results stay the same, and so does what a layer drops, if it drops by keys (`train.layers.random_bits`).
    """
    for layer in encoder_layers(model):
        layer.call = _checkpointed(layer.call)


def encoder_layers(model: Any) -> list[Any]:
    """List the layers of a TF model's encoder, first to last."""
    encoder = getattr(model, model.base_model_prefix)
    name = architecture_of(model.config).layer_list
    modules = (encoder, *encoder.submodules)
    lists = [getattr(module, name) for module in modules if isinstance(getattr(module, name, None), list)]
    if len(lists) != 1:
        raise ValueError(f"The layers of a {model.config.model_type} are not found: {len(lists)} lists of layers.")
    return list(lists[0])


def hidden_matrices(model: Any) -> tuple[int, ...]:
    """Count, for each trainable variable of a TF model in their order, the hidden matrices that it holds.

    They make hidden states of hidden states: those of layers, side by side in a fused one, and of a head before its
    logits. For embeddings, positions, and what makes logits it is 0. A second network that trains with the model has
    them too.
    """
    counts: dict[int, int] = {}
    others = [part for part in model.submodules if isinstance(part, transformers.TFPreTrainedModel)]
    for network in [model, *others]:
        config = network.config
        fused = architecture_of(config).fused
        for layer in encoder_layers(network):
            for variable in layer.trainable_variables:
                is_matrix = len(variable.shape) == 2 and min(variable.shape) > 1
                counts[id(variable)] = fused.get(variable.name.split("/")[-2], 1) if is_matrix else 0
        sizes = {getattr(config, name, config.hidden_size) for name in HIDDEN_SIZES}
        of_encoder = {id(one) for one in getattr(network, network.base_model_prefix).trainable_variables}
        for variable in network.trainable_variables:
            is_head = id(variable) not in of_encoder and vocabulary_axis(variable.name, config.model_type) is None
            if is_head and len(variable.shape) == 2 and sizes.issuperset(variable.shape):
                counts.setdefault(id(variable), 1)
    return tuple(counts.get(id(variable), 0) for variable in model.trainable_variables)


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
