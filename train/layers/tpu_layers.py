"""The computations of an encoder's layers, written so that XLA's compiler for TPUs turns them into fast programs.

The functions have the same names and results as the functions of `train.layers.reference_layers`, and must be compiled
by XLA. A run compares both modules on its first rows (`train.step.proofs`). Within attention, states are (batch, heads,
head size, length).
"""

from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

from train.layers import reference_layers
from train.layers.activations import ACTIVATION_FUNCTIONS
from train.layers.attention import Rows, can_use_blocks, in_blocks, with_halo
from train.layers.random_bits import fold_in
from train.layers.reference_layers import rotary_tables
from train.layers.tpu_attention import attend
from train.layers.tpu_functions import (
    dense,
    dense_of_heads,
    gated_gelu,
    gelu,
    heads,
    layer_norm,
    normalized_products,
    scaled,
)
from train.runtime.private import in_float32


def normalize(norm: tf_keras.layers.LayerNormalization | None, states: tf.Tensor) -> tf.Tensor:
    if norm is None:
        return states
    beta = tf.zeros_like(norm.gamma) if norm.beta is None else norm.beta
    with tf.name_scope(norm.name):
        return layer_norm(states, norm.gamma, beta, norm.epsilon)


def project(layer: tf_keras.layers.Dense, states: tf.Tensor) -> tf.Tensor:
    """Apply a dense layer to states (batch, length, width), or to heads (batch, heads, head size, length)."""
    kernel = tf.cast(layer.kernel, states.dtype)
    bias = tf.zeros(layer.units, states.dtype) if layer.bias is None else tf.cast(layer.bias, states.dtype)
    if states.shape.rank == 4:
        return dense_of_heads(states, tf.reshape(kernel, (*states.shape[1:3], -1)), bias)
    return dense(states, kernel, bias)


def expanded(layer: Any, states: tf.Tensor) -> tf.Tensor:
    """Compute the first half of the feed-forward network, (batch, length, inner)."""
    anatomy = layer.anatomy
    norm: Any = layer.feed_forward_norm if anatomy.is_pre_norm else None
    is_gelu, activate = anatomy.activation == "gelu", ACTIVATION_FUNCTIONS[anatomy.activation]
    if not anatomy.is_gated:
        states = project(layer.expansion, normalize(norm, states))
        return gelu(states) if is_gelu else activate(states)
    if _can_join(norm, layer.expansion):
        with in_float32():  # see `num_parts`
            kernel = tf.convert_to_tensor(layer.expansion.kernel)
        (states,), scale = normalized_products(states, norm.gamma, norm.epsilon, [kernel], "bld,de->ble", num_parts=2)
        inputs, gate = scaled(scale, *tf.split(states, 2, axis=-1))
    else:
        inputs, gate = tf.split(project(layer.expansion, normalize(norm, states)), 2, axis=-1)
    return gated_gelu(inputs, gate) if is_gelu else activate(inputs) * gate


def _can_join(norm: Any, layer: tf_keras.layers.Dense) -> bool:
    """Return whether `normalized_products` can compute the norm and the layer together."""
    return norm is not None and norm.beta is None and layer.bias is None


def attention(layer: Any, states: tf.Tensor, rows: Rows, training: bool) -> tf.Tensor:
    """Compute the attention's output, (batch, length, hidden), which is added to the states."""
    rate = float(layer.probability_dropout.rate) if training else 0.0
    row_keys = layer.probability_dropout.next_keys() if rate else None
    if rate and row_keys is None:
        return reference_layers.attention(layer, states, rows, training)
    length, dtype = states.shape[1], states.dtype
    reach, base = layer.attention.reach, layer.attention.rotary_base
    norm: Any = layer.attention_norm if layer.anatomy.is_pre_norm else None
    reach_of_blocks = reach if reach is not None and can_use_blocks(length, reach) else None
    joins = reach_of_blocks is None and len(layer.projections) == 1 and _can_join(norm, layer.projections[0])
    if not joins:
        states = normalize(norm, states)
    documents = rows.documents
    queries, around, attended = states, states, tf.cast(rows.attended, dtype)
    of_queries: Any = documents
    of_keys: Any = documents
    first = 0  # position of the first query
    if reach_of_blocks is not None:
        # Rotary positions are relative, so each block counts them from its first key.
        first = reach_of_blocks
        queries, of_queries = (_as_rows(in_blocks(tensor, first)) for tensor in (states, documents))
        around, attended, of_keys = (_as_rows(with_halo(tensor, first)) for tensor in (states, attended, documents))
        if row_keys is not None:
            num_blocks = queries.shape[0] // states.shape[0]
            row_keys = tf.reshape(fold_in(row_keys[:, tf.newaxis], tf.range(num_blocks)), (-1, 2))
    kernels, biases = _projections(layer, dtype)
    scale = None
    if joins:
        # XLA then computes the gradients of the inputs and of the residual stream together.
        projected, scale = normalized_products(states, norm.gamma, norm.epsilon, kernels, "bld,dnh->bnhl")
    else:
        arguments = zip((queries, around, around), kernels, biases, strict=True)
        projected = [heads(tensor, kernel, bias) for tensor, kernel, bias in arguments]
    query, key, value = projected
    if base is not None:
        query, key = rotated(query, base, first), rotated(key, base)
    of_both = None if documents is None else (of_queries[:, tf.newaxis], of_keys[:, tf.newaxis])
    context = attend(query, key, value, attended[:, tf.newaxis], row_keys, rate, of_both, reach, scale)
    outputs = project(layer.attention_output, context)
    return tf.reshape(outputs, (states.shape[0], -1, layer.anatomy.hidden_size))[:, :length]


def _projections(layer: Any, dtype: tf.DType) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Return kernels, (hidden, heads, head size), and biases, (heads, head size), of queries, keys and values."""
    anatomy = layer.anatomy
    shape, kernels, biases = (anatomy.num_heads, anatomy.head_size), [], []
    for projection in layer.projections:
        num_matrices = 3 // len(layer.projections)
        kernel = tf.reshape(tf.cast(projection.kernel, dtype), (anatomy.hidden_size, num_matrices, *shape))
        kernels += tf.unstack(kernel, axis=1)
        bias = tf.zeros(projection.units, dtype) if projection.bias is None else tf.cast(projection.bias, dtype)
        biases += tf.unstack(tf.reshape(bias, (num_matrices, *shape)))
    return kernels, biases


def _as_rows(blocks: Any) -> Any:
    """Turn blocks into rows: (batch, blocks, …) into (batch * blocks, …)."""
    return None if blocks is None else tf.reshape(blocks, (-1, *blocks.shape[2:]))


def rotated(states: tf.Tensor, base: float, first: int = 0) -> tf.Tensor:
    """Rotate queries or keys, (batch, heads, head size, length), by positions that count from `first`."""
    head_size, length = states.shape[2:]
    cosines, sines = (
        np.tile(table[first:].T, (2, 1)) for table in rotary_tables(first + length, head_size, base)
    )  # (head size, length)
    # The compiler fuses this product with the next operations. Swapping the halves of a head would need a copy.
    turned = tf.einsum("bnhl,kh->bnkl", states, tf.constant(quarter_turn(head_size), states.dtype))
    return tf.cast(tf.cast(states, tf.float32) * cosines + tf.cast(turned, tf.float32) * sines, states.dtype)


def quarter_turn(head_size: int) -> np.ndarray:
    """Return a (head size, head size) matrix that maps the two halves of a head, (a, b), to (-b, a)."""
    half = np.eye(head_size // 2)
    return np.block([[np.zeros_like(half), -half], [half, np.zeros_like(half)]])
