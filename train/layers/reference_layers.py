"""The computations of an encoder's layers, written as in their papers. CPUs and GPUs train with these functions.

`train.layers.tpu_layers` has functions with the same names and results. A `layer` is an `EncoderLayer` of
`train.model.encoder`.
"""

import math
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

from train.layers.activations import ACTIVATION_FUNCTIONS
from train.layers.attention import Rows, can_use_blocks, in_blocks, is_near, with_halo
from train.layers.cpu_functions import split_dense

# Score of a key that is not attended: far below any other, but finite, so that a query without keys does not give NaN.
NEVER = -1e30


def normalize(norm: tf_keras.layers.LayerNormalization | None, states: tf.Tensor) -> tf.Tensor:
    return states if norm is None else norm(states)


def project(dense: tf_keras.layers.Dense, states: tf.Tensor) -> tf.Tensor:
    return dense(states)


def expanded(layer: Any, states: tf.Tensor) -> tf.Tensor:
    """Compute the first half of the feed-forward network, (batch, length, inner)."""
    anatomy = layer.anatomy
    if anatomy.is_pre_norm:
        states = normalize(layer.feed_forward_norm, states)
    activate = ACTIVATION_FUNCTIONS[anatomy.activation]
    if not anatomy.is_gated:
        return activate(layer.expansion(states))
    inputs, gate = split_dense(layer.expansion, states, 2)
    return activate(inputs) * gate


def attention(layer: Any, states: tf.Tensor, rows: Rows, training: bool) -> tf.Tensor:
    """Compute the attention's output, (batch, length, hidden), which is added to the states."""
    anatomy, length = layer.anatomy, states.shape[1]
    reach, base = layer.attention.reach, layer.attention.rotary_base
    if anatomy.is_pre_norm:
        states = normalize(layer.attention_norm, states)
    query, key, value = _heads(layer, states)  # (batch, length, heads, head size)
    query *= anatomy.head_size**-0.5
    if base is not None:
        query, key = rotated(query, base), rotated(key, base)
    attended, documents = rows
    of_queries: Any = documents
    of_keys: Any = documents
    if reach is not None and can_use_blocks(length, reach):
        query, of_queries = (in_blocks(tensor, reach) for tensor in (query, documents))
        key, value, attended, of_keys = (with_halo(tensor, reach) for tensor in (key, value, attended, documents))
    allowed = attended[..., tf.newaxis, tf.newaxis, :]  # (batch, …, heads, queries, keys)
    if reach is not None:
        allowed &= is_near(query.shape[-3], key.shape[-3], reach)
    if documents is not None:
        allowed &= of_queries[..., tf.newaxis, :, tf.newaxis] == of_keys[..., tf.newaxis, tf.newaxis, :]
    query, key, value = (_swapped(tensor) for tensor in (query, key, value))  # (batch, …, heads, length, head size)
    scores = tf.cast(tf.matmul(query, key, transpose_b=True), tf.float32)
    probabilities = tf.nn.softmax(tf.where(allowed, scores, NEVER))
    probabilities = layer.probability_dropout(tf.cast(probabilities, value.dtype), training=training)
    context = _swapped(tf.matmul(probabilities, value))
    # Without the padding of the last block.
    context = tf.reshape(context, (-1, math.prod(context.shape[1:-2]), anatomy.hidden_size))[:, :length]
    return layer.attention_output(context)


def _heads(layer: Any, states: tf.Tensor) -> list[tf.Tensor]:
    """Project states to queries, keys and values, (batch, length, heads, head size) each."""
    anatomy = layer.anatomy
    shape = (-1, states.shape[1], anatomy.num_heads, anatomy.head_size)
    if len(layer.projections) == 3:
        return [tf.reshape(projection(states), shape) for projection in layer.projections]
    (projection,) = layer.projections
    return tf.unstack(tf.reshape(projection(states), (*shape[:2], 3, *shape[2:])), axis=2)


def _swapped(states: tf.Tensor) -> tf.Tensor:
    """Swap the axes of heads and tokens, the third and second from last."""
    *first, length, heads, size = range(states.shape.rank)
    return tf.transpose(states, (*first, heads, length, size))


def rotary_tables(length: int, head_size: int, base: float) -> tuple[np.ndarray, np.ndarray]:
    """Compute cosines and sines of each position's angles (Su et al. 2021), float32 (length, head size / 2)."""
    frequencies = base ** (-np.arange(0, head_size, 2) / head_size)
    angles = np.arange(length)[:, np.newaxis] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rotated(states: tf.Tensor, base: float) -> tf.Tensor:
    """Rotate queries or keys, (batch, length, heads, head size), by their positions; computes in float32."""
    cosines, sines = (table[:, np.newaxis] for table in rotary_tables(states.shape[1], states.shape[3], base))
    first, second = tf.split(tf.cast(states, tf.float32), 2, axis=-1)
    turned = tf.concat([first * cosines - second * sines, second * cosines + first * sines], axis=-1)
    return tf.cast(turned, states.dtype)
