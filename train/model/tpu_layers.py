"""TPU-optimized layers of ModernBERT, BERT and its relatives: cheaper by the TPU's compiler, with the same results.

Variables, their names and exports stay those of the reference layers, of which only `call` is replaced. For programs
that XLA compiles. On untested hardware the first rows of a run decide: see `train.step.proofs`."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras
from tf_keras.src.mixed_precision.autocast_variable import enable_auto_cast_variables
from transformers.activations_tf import get_tf_activation

from train.layers.random_bits import fold_in, next_keys
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
from train.model.architectures import architecture_of
from train.model.attention import can_use_blocks, current_documents, in_blocks, with_halo
from train.model.modernbert import TFModernBertAttention, TFModernBertLayer, TFModernBertMLP, rotary_tables


def use_tpu_layers(model: Any) -> bool:
    """Replace the `call` of the encoder's layers in a built TF model, if they are known; return whether they are.

    Attention with arguments that pretraining does not use (head masks, attentions as an output, a mask of more than one
    row per sample) computes as before.
    """
    for layer, call_of in _known_layers(model):
        reference_call, layer.call = layer.call, call_of(layer)
        layer.call.reference_call = reference_call
    return architecture_of(model.config).has_tpu_layers


def use_reference_layers(model: Any) -> None:
    for layer, _ in _known_layers(model):
        if hasattr(layer.call, "reference_call"):
            layer.call = layer.call.reference_call


def attention_layers(model: Any) -> list[Any]:
    return [
        layer for layer, call_of in _known_layers(model) if call_of in (_attention_call, _modernbert_attention_call)
    ]


def _known_layers(model: Any) -> Iterator[tuple[Any, Callable[[Any], Callable]]]:
    """Yield the layers below the head that can be optimized, each with what makes its optimized `call`."""
    if not architecture_of(model.config).has_tpu_layers:
        return
    for layer in getattr(model, model.base_model_prefix).submodules:
        if isinstance(layer, TFModernBertLayer):
            yield layer, _modernbert_layer_call
        elif isinstance(layer, TFModernBertAttention):
            yield layer, _modernbert_attention_call
        elif isinstance(layer, TFModernBertMLP):
            yield layer, _gated_call
        elif type(layer).__name__.endswith("SelfAttention"):
            yield layer, _attention_call
        elif isinstance(layer, tf_keras.layers.Dense):
            yield layer, _dense_call
        elif isinstance(layer, tf_keras.layers.LayerNormalization):
            yield layer, _layer_norm_call
        elif getattr(layer, "intermediate_act_fn", None) is get_tf_activation("gelu"):
            yield layer, _gelu_call


def _attention_call(layer: Any) -> Callable[..., tuple]:
    reference_call = layer.call
    num_heads = layer.num_attention_heads

    @functools.wraps(reference_call)
    def call(
        hidden_states: tf.Tensor,
        attention_mask: tf.Tensor,
        head_mask: Any,
        encoder_hidden_states: Any,
        encoder_attention_mask: Any,
        past_key_value: Any,
        output_attentions: bool,
        training: bool = False,
    ) -> tuple:
        rate = float(layer.dropout.rate) if training else 0.0
        keys = next_keys(layer.dropout) if rate else None
        is_plain = head_mask is None and encoder_hidden_states is None and past_key_value is None
        has_row_mask = attention_mask is not None and attention_mask.shape[1:3] == (1, 1)
        if not is_plain or not has_row_mask or output_attentions or (rate and keys is None):
            return reference_call(
                *(hidden_states, attention_mask, head_mask, encoder_hidden_states, encoder_attention_mask),
                *(past_key_value, output_attentions),
                training=training,
            )
        query, key, value = (_heads(hidden_states, dense, num_heads) for dense in (layer.query, layer.key, layer.value))
        # transformers adds 0 where a token is attended, -10000 elsewhere.
        attended = tf.cast(attention_mask[:, 0] > -1, hidden_states.dtype)  # (batch, 1, length)
        documents = current_documents()
        if documents is not None:
            documents = (documents[:, tf.newaxis],) * 2
        # The next layer, a dense one, takes heads.
        return (attend(query, key, value, attended, keys, rate, documents=documents),)

    return call


def _heads(inputs: tf.Tensor, layer: tf_keras.layers.Dense, num_heads: int) -> tf.Tensor:
    kernel = tf.reshape(tf.cast(layer.kernel, inputs.dtype), (inputs.shape[-1], num_heads, -1))
    return heads(inputs, kernel, tf.reshape(tf.cast(layer.bias, inputs.dtype), (num_heads, -1)))


def _dense_call(layer: tf_keras.layers.Dense) -> Callable[[tf.Tensor], tf.Tensor]:
    layer.input_spec = None  # which asks for the width last, and that of heads is not
    reference_call = layer.call

    def call(inputs: tf.Tensor) -> tf.Tensor:
        if inputs.shape.rank == 2:  # one token a row, the pooler's
            return reference_call(inputs)
        kernel = tf.cast(layer.kernel, inputs.dtype)
        bias = tf.zeros(layer.units, inputs.dtype) if layer.bias is None else tf.cast(layer.bias, inputs.dtype)
        if inputs.shape.rank == 4:
            outputs = dense_of_heads(inputs, tf.reshape(kernel, (*inputs.shape[1:3], -1)), bias)
        else:
            outputs = dense(inputs, kernel, bias)
        return layer.activation(outputs) if layer.activation else outputs

    return call


def _gelu_call(layer: Any) -> Callable[[tf.Tensor], tf.Tensor]:
    normalize = getattr(layer, "LayerNorm", tf.identity)  # RoBERTa-PreLayerNorm has one before its dense layer
    return lambda hidden_states: gelu(layer.dense(normalize(hidden_states)))


def _layer_norm_call(layer: tf_keras.layers.LayerNormalization) -> Callable[[tf.Tensor], tf.Tensor]:
    def call(inputs: tf.Tensor) -> tf.Tensor:
        beta = tf.zeros_like(layer.gamma) if layer.beta is None else layer.beta
        return layer_norm(inputs, layer.gamma, beta, layer.epsilon)

    return call


def _modernbert_layer_call(layer: TFModernBertLayer) -> Callable[..., tuple[tf.Tensor]]:
    def call(hidden_states: tf.Tensor, attended: tf.Tensor, training: bool = False) -> tuple[tf.Tensor]:
        hidden_states += layer.attn(hidden_states, attended, training=training, norm=layer.attn_norm)
        return (hidden_states + layer.mlp(hidden_states, training=training, norm=layer.mlp_norm),)

    return call


def _can_join(norm: tf_keras.layers.LayerNormalization, layer: tf_keras.layers.Dense) -> bool:
    """Return whether `normalized_products` computes both."""
    return norm.beta is None and layer.bias is None


def _modernbert_attention_call(layer: TFModernBertAttention) -> Callable[..., tf.Tensor]:
    reference_call = layer.call
    num_heads, head_size, reach = layer.num_heads, layer.head_size, layer.reach

    def call(hidden_states: tf.Tensor, attended: tf.Tensor, training: bool = False, norm: Any = None) -> tf.Tensor:
        rate = float(layer.dropout.rate) if training else 0.0
        row_keys = next_keys(layer.dropout) if rate else None
        if rate and row_keys is None:
            inputs = hidden_states if norm is None else norm(hidden_states)
            return reference_call(inputs, attended, training=training)
        length, width = hidden_states.shape[1:]
        reach_of_blocks = reach if reach is not None and can_use_blocks(length, reach) else None
        joins = norm is not None and reach_of_blocks is None and _can_join(norm, layer.Wqkv)
        if norm is not None and not joins:
            hidden_states = norm(hidden_states)
        dtype = hidden_states.dtype
        documents = current_documents()
        rows, around, attended = hidden_states, hidden_states, tf.cast(attended, dtype)
        of_queries: Any = documents
        of_keys: Any = documents
        first = 0  # position of the first query
        if reach_of_blocks is not None:
            # Rotary positions are relative: each block counts from the start of what it sees.
            first = reach_of_blocks
            rows, of_queries = (_as_rows(in_blocks(tensor, first)) for tensor in (hidden_states, documents))
            around, attended, of_keys = (
                _as_rows(with_halo(tensor, first)) for tensor in (hidden_states, attended, documents)
            )
            if row_keys is not None:
                num_blocks = rows.shape[0] // hidden_states.shape[0]
                row_keys = tf.reshape(fold_in(row_keys[:, tf.newaxis], tf.range(num_blocks)), (-1, 2))
        kernels = tf.unstack(tf.reshape(tf.cast(layer.Wqkv.kernel, dtype), (width, 3, num_heads, head_size)), axis=1)
        scale = None
        if joins:
            # The gradient by its inputs is computed with that of the residual stream.
            projected, scale = normalized_products(hidden_states, norm.gamma, norm.epsilon, kernels, "bld,dnh->bnhl")
        else:
            biases = tf.zeros((3, num_heads, head_size), dtype)
            if layer.Wqkv.bias is not None:
                biases = tf.reshape(tf.cast(layer.Wqkv.bias, dtype), biases.shape)
            arguments = zip((rows, around, around), kernels, tf.unstack(biases), strict=True)
            projected = [heads(states, kernel, bias) for states, kernel, bias in arguments]
        query, key, value = projected
        query, key = rotated(query, layer.rotary_base, first), rotated(key, layer.rotary_base)
        of_both = None if documents is None else (of_queries[:, tf.newaxis], of_keys[:, tf.newaxis])
        context = attend(query, key, value, attended[:, tf.newaxis], row_keys, rate, of_both, reach, scale)
        outputs = tf.reshape(layer.Wo(context), (hidden_states.shape[0], -1, width))[:, :length]
        return layer.out_drop(outputs, training=training)

    return call


def _as_rows(blocks: Any) -> Any:
    """Make rows of blocks: (batch, blocks, …) to (batch * blocks, …)."""
    return None if blocks is None else tf.reshape(blocks, (-1, *blocks.shape[2:]))


def rotated(states: tf.Tensor, base: float, first: int = 0) -> tf.Tensor:
    """Rotate queries or keys, (batch, heads, head size, length), by their positions, the first of which is given."""
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


def _gated_call(layer: TFModernBertMLP) -> Callable[..., tf.Tensor]:
    is_gelu = layer.act is get_tf_activation("gelu")

    def call(hidden_states: tf.Tensor, training: bool = False, norm: Any = None) -> tf.Tensor:
        if norm is not None and _can_join(norm, layer.Wi):
            with enable_auto_cast_variables(None):  # float32: see `num_parts`
                kernel = tf.convert_to_tensor(layer.Wi.kernel)
            (states,), scale = normalized_products(
                hidden_states, norm.gamma, norm.epsilon, [kernel], "bld,de->ble", num_parts=2
            )
            inputs, gate = scaled(scale, *tf.split(states, 2, axis=-1))
        else:
            states = layer.Wi(hidden_states if norm is None else norm(hidden_states))
            inputs, gate = tf.split(states, 2, axis=-1)
        states = gated_gelu(inputs, gate) if is_gelu else layer.act(inputs) * gate
        return layer.Wo(layer.drop(states, training=training))

    return call
