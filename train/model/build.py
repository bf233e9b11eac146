"""The network that is trained: a TF class of transformers with fresh weights."""

from typing import Any

import numpy as np
import tf_keras
from transformers import PretrainedConfig

from train.config.learning import ModelConfig
from train.model.architectures import align_padding_positions, vocabulary_axis
from train.model.block_attention import attend_within_documents
from train.model.gradient_checkpointing import enable_gradient_checkpointing
from train.model.modernbert import auto_class
from train.model.tpu_layers import use_tpu_layers


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
        settings: how the weights start, whether documents are kept apart, and activations recomputed.
        vocabulary_size: ids of the tokenizer; padding of the vocabulary starts as 0.
        seed: fixes the weights.
        tpu_layers: use the TPU-optimized layers, if the architecture has them.
        model_class: the auto class of transformers.
    """
    tf_keras.utils.set_random_seed(seed)
    network = auto_class(model_class).from_config(model_config)
    network(network.dummy_inputs, training=False)
    align_padding_positions(network)
    if settings.position_init == "sinusoidal":
        start_positions_as_sinusoids(network)
    clear_padding(network, vocabulary_size)
    if settings.block_attention:
        attend_within_documents(network)
    if tpu_layers:
        use_tpu_layers(network)
    if settings.gradient_checkpointing:
        enable_gradient_checkpointing(network)
    return network


def start_positions_as_sinusoids(model: Any) -> None:
    """Fill the position table of a new TF…ForMaskedLM with sinusoids, of the size its random start had.

    The table stays trainable and the architecture is as it was. Among sinusoids (Vaswani et al. 2017, section 3.5) a
    shift by n positions is the same rotation everywhere, so "the token before" is one thing to learn, where random
    rows would make it one for each position. benchmarks/position_init.py compares the two.

    Args:
        model: of an architecture that learns its positions (`train.model.architectures.learns_positions`).
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
