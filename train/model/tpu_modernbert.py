"""The layers of ModernBERT as a TPU's compiler computes them cheapest; see `train.model.tpu_layers`."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from transformers.activations_tf import get_tf_activation

from train.layers.local_attention import can_use_blocks, in_blocks, with_halo
from train.layers.random_bits import fold_in
from train.layers.stateless_dropout import next_keys
from train.layers.tpu_attention import attend
from train.layers.tpu_functions import gated_gelu, heads
from train.model.block_attention import current_documents
from train.model.modernbert import TFModernBertAttention, TFModernBertMLP, rotary_tables


def modernbert_attention_call(layer: TFModernBertAttention) -> Callable[..., tf.Tensor]:
    """Make another `call` of the layer."""
    stock_call = layer.call
    num_heads, head_size, reach = layer.num_heads, layer.head_size, layer.reach

    def call(hidden_states: tf.Tensor, attended: tf.Tensor, training: bool = False) -> tf.Tensor:
        rate = float(layer.dropout.rate) if training else 0.0
        row_keys = next_keys(layer.dropout) if rate else None
        if rate and row_keys is None:
            return stock_call(hidden_states, attended, training=training)
        length, width = hidden_states.shape[1:]
        dtype = hidden_states.dtype
        documents = current_documents()
        rows, around, attended = hidden_states, hidden_states, tf.cast(attended, dtype)
        of_queries: Any = documents
        of_keys: Any = documents
        first = 0  # position of the first query
        if reach is not None and can_use_blocks(length, reach):
            # Rotary positions are relative: each block counts from the start of what it sees.
            first = reach
            rows, of_queries = (_as_rows(in_blocks(tensor, reach)) for tensor in (hidden_states, documents))
            around, attended, of_keys = (
                _as_rows(with_halo(tensor, reach)) for tensor in (hidden_states, attended, documents)
            )
            if row_keys is not None:
                num_blocks = rows.shape[0] // hidden_states.shape[0]
                row_keys = tf.reshape(fold_in(row_keys[:, tf.newaxis], tf.range(num_blocks)), (-1, 2))
        kernels = tf.unstack(tf.reshape(tf.cast(layer.Wqkv.kernel, dtype), (width, 3, num_heads, head_size)), axis=1)
        biases = tf.zeros((3, num_heads, head_size), dtype)
        if layer.Wqkv.bias is not None:
            biases = tf.reshape(tf.cast(layer.Wqkv.bias, dtype), biases.shape)
        query, key, value = (
            heads(states, kernel, bias)
            for states, kernel, bias in zip((rows, around, around), kernels, tf.unstack(biases), strict=True)
        )
        query, key = rotated(query, layer.rotary_base, first), rotated(key, layer.rotary_base)
        of_both = None if documents is None else (of_queries[:, tf.newaxis], of_keys[:, tf.newaxis])
        context = attend(query, key, value, attended[:, tf.newaxis], row_keys, rate, documents=of_both, reach=reach)
        outputs = tf.reshape(layer.Wo(context), (hidden_states.shape[0], -1, width))[:, :length]
        return layer.out_drop(outputs, training=training)

    return call


def _as_rows(blocks: Any) -> Any:
    """Make rows of blocks: (batch, blocks, …) to (batch * blocks, …)."""
    return None if blocks is None else tf.reshape(blocks, (-1, *blocks.shape[2:]))


def rotated(states: tf.Tensor, base: float, first: int = 0) -> tf.Tensor:
    """Turn queries or keys, (batch, heads, head size, length), by their positions, the first of which is given."""
    head_size, length = states.shape[2:]
    cosines, sines = (
        np.tile(table[first:].T, (2, 1)) for table in rotary_tables(first + length, head_size, base)
    )  # (head size, length)
    # A product, which the compiler joins to what follows; halves of a head that change places it would copy.
    turned = tf.einsum("bnhl,kh->bnkl", states, tf.constant(quarter_turn(head_size), states.dtype))
    return tf.cast(tf.cast(states, tf.float32) * cosines + tf.cast(turned, tf.float32) * sines, states.dtype)


def quarter_turn(head_size: int) -> np.ndarray:
    """Make the matrix that takes the halves of a head (a, b) to (-b, a), (head size, head size)."""
    half = np.eye(head_size // 2)
    return np.block([[np.zeros_like(half), -half], [half, np.zeros_like(half)]])


def gated_call(layer: TFModernBertMLP) -> Callable[..., tf.Tensor]:
    """Make another `call` of the layer."""
    is_gelu = layer.act is get_tf_activation("gelu")

    def call(hidden_states: tf.Tensor, training: bool = False) -> tf.Tensor:
        inputs, gate = tf.split(layer.Wi(hidden_states), 2, axis=-1)
        states = gated_gelu(inputs, gate) if is_gelu else layer.act(inputs) * gate
        return layer.Wo(layer.drop(states, training=training))

    return call
