"""The layers of BERT and its kin as a TPU's compiler computes them cheapest, with the same weights and results.

XLA charges a TPU for each pass over a tensor, hardly for the matrix unit: so sums are products with a matrix of ones,
which it joins to what makes their terms, and no tensor changes its layout. Variables, their names and what is exported
stay those of transformers' layers, whose `call` alone is replaced. For programs that XLA compiles.
"""

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
import tf_keras

from train.model.architectures import architecture_of
from train.model.stateless_dropout import next_keys
from train.model.tpu_attention import NUM_ONES, attend, einsum, sum_over_last, sum_over_rows
from train.runtime.named_scopes import custom_gradient


def use_tpu_layers(model: Any) -> bool:
    """Replace how the encoder of a built TF model computes, if its layers are known; return whether they are.

    Attention that is called with what pretraining has no use for (head masks, attentions as an output, a mask of more
    than one row a sample) computes as before.
    """
    if not architecture_of(model.config).is_plain_bert:
        return False
    encoder = getattr(model, model.base_model_prefix).encoder
    for layer in encoder.submodules:
        if type(layer).__name__.endswith("SelfAttention"):
            layer.call = _attention_call(layer)
        elif isinstance(layer, tf_keras.layers.Dense):
            layer.call = _dense_call(layer)
        elif isinstance(layer, tf_keras.layers.LayerNormalization):
            layer.call = _layer_norm_call(layer)
    return True


def _attention_call(layer: Any) -> Callable[..., tuple]:
    stock_call = layer.call
    num_heads, head_size = layer.num_attention_heads, layer.attention_head_size

    @functools.wraps(stock_call)
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
            return stock_call(
                *(hidden_states, attention_mask, head_mask, encoder_hidden_states, encoder_attention_mask),
                *(past_key_value, output_attentions),
                training=training,
            )
        query, key, value = (_heads(hidden_states, dense, num_heads) for dense in (layer.query, layer.key, layer.value))
        # transformers adds 0 where a token is attended, -10000 elsewhere.
        attended = tf.cast(attention_mask[:, 0] > -1, hidden_states.dtype)  # (batch, 1, length)
        context = attend(query, key, value, attended, keys, rate)
        batch, length, _ = hidden_states.shape
        return (tf.reshape(tf.transpose(context, (0, 3, 1, 2)), (batch, length, num_heads * head_size)),)

    return call


def _heads(inputs: tf.Tensor, layer: tf_keras.layers.Dense, num_heads: int) -> tf.Tensor:
    kernel = tf.reshape(tf.cast(layer.kernel, inputs.dtype), (inputs.shape[-1], num_heads, -1))
    return heads(inputs, kernel, tf.reshape(tf.cast(layer.bias, inputs.dtype), (num_heads, -1)))


@custom_gradient
def heads(inputs: tf.Tensor, kernel: tf.Tensor, bias: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    """Project inputs for each head, to (batch, heads, head size, length): the layout in which products take it.

    Args:
        inputs: (batch, length, width).
        kernel: (width, heads, head size), of the same type.
        bias: (heads, head size), of the same type.
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


def _dense_call(layer: tf_keras.layers.Dense) -> Callable[[tf.Tensor], tf.Tensor]:
    def call(inputs: tf.Tensor) -> tf.Tensor:
        outputs = dense(inputs, tf.cast(layer.kernel, inputs.dtype), tf.cast(layer.bias, inputs.dtype))
        return layer.activation(outputs) if layer.activation else outputs

    return call


@custom_gradient
def dense(inputs: tf.Tensor, kernel: tf.Tensor, bias: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    """Compute inputs @ kernel + bias: (batch, length, width) by (width, units) and (units,), all of one type."""

    def gradient(by_output: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return (
            tf.einsum("ble,de->bld", by_output, kernel),
            tf.einsum("bld,ble->de", inputs, by_output),
            tf.cast(sum_over_rows(by_output), bias.dtype),
        )

    return tf.einsum("bld,de->ble", inputs, kernel) + bias, gradient


def _layer_norm_call(layer: tf_keras.layers.LayerNormalization) -> Callable[[tf.Tensor], tf.Tensor]:
    return lambda inputs: layer_norm(inputs, layer.gamma, layer.beta, layer.epsilon)


def layer_norm(inputs: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor, epsilon: float) -> tf.Tensor:
    """Normalize over the last axis (Ba et al. 2016), computed in float32; the result has the inputs' type.

    Args:
        inputs: (batch, length, width).
        gamma: float32 (width,), the scale; so is `beta`, the offset.
        epsilon: added to the variance.
    """
    dtype, width = inputs.dtype, inputs.shape[-1]

    @custom_gradient
    def apply(inputs: tf.Tensor, gamma: tf.Tensor, beta: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        mean = sum_over_last(inputs) / width
        centered = tf.cast(inputs, tf.float32) - mean
        # Terms rounded to bfloat16 leave the variance as exact as the outputs are: the errors of hundreds average out.
        variance = sum_over_last(tf.cast(tf.square(centered), dtype)) / width
        inverse_deviation = tf.math.rsqrt(variance + epsilon)

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
