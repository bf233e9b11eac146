"""Self-attention as the TPU's compiler computes it cheapest: no scores in memory, no transposes, dropout in the loop.

The weights, their names and the results stay those of transformers' layers; only the order of computing differs. As in
FlashAttention (Dao et al. 2022), the output is divided by the softmax's sum, and the backward pass makes the
probabilities anew, so that no tensor of length by length outlives its layer. It takes no kernel of our own: the
compiler joins a matrix product, what is done to its elements and the next product into one loop when no result in
between is used twice.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla

from train.row_dropout import falls_out, fold_in, next_keys

# transformers' layers of these architectures are the same code.
ARCHITECTURES = ("bert", "camembert", "electra", "roberta", "roberta-prelayernorm", "xlm-roberta")
# Exponentials are taken of the scores as they are while their sums stay within these, far from the limits of float32
# and bfloat16 (1e-38 and 3e38); else the largest score is subtracted first.
SAFE_SUMS = (1e-25, 1e30)
# A matrix unit is as wide. Of narrower heads, the scores are made anew for each product that takes them.
MATRIX_UNIT_WIDTH = 128


def compute_attention_cheaply(model: Any) -> bool:
    """Replace how a TF…ForMaskedLM computes self-attention, where its layers are known; return whether they are.

    For programs that XLA compiles. Layers that are called with what pretraining has no use for (head masks, attentions
    as an output, a mask of more than one row a sample) compute as before.
    """
    if model.config.model_type not in ARCHITECTURES:
        return False
    for layer in model.submodules:
        if type(layer).__name__.endswith("SelfAttention"):
            layer.call = _cheap_call(layer)
        if type(layer).__name__.endswith(("SelfOutput", "Intermediate", "Output")):
            layer.dense.call = _dense_call(layer.dense)
    return True


def _cheap_call(layer: Any) -> Callable[..., Any]:
    stock_call = layer.call

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
        if (
            not is_plain
            or output_attentions
            or (rate and keys is None)
            or attention_mask is None
            or attention_mask.shape[1:3] != (1, 1)
        ):
            return stock_call(
                hidden_states,
                attention_mask,
                head_mask,
                encoder_hidden_states,
                encoder_attention_mask,
                past_key_value,
                output_attentions,
                training=training,
            )
        num_heads, head_size = layer.num_attention_heads, layer.attention_head_size

        def project(dense: Any) -> tf.Tensor:
            dtype = hidden_states.dtype
            kernel = tf.reshape(tf.cast(dense.kernel, dtype), (-1, num_heads, head_size))
            bias = tf.reshape(tf.cast(dense.bias, dtype), (num_heads, head_size, 1))
            return tf.einsum("bld,dnh->bnhl", hidden_states, kernel) + bias  # (batch, heads, head size, length)

        # transformers adds 0 where a token is attended, -10000 elsewhere.
        attended = tf.cast(attention_mask[:, 0] > -1, hidden_states.dtype)  # (batch, 1, length)
        context = attend(project(layer.query), project(layer.key), project(layer.value), attended, keys, rate)
        batch, _, _, length = context.shape
        return (tf.reshape(tf.transpose(context, (0, 3, 1, 2)), (batch, length, num_heads * head_size)),)

    return call


def _dense_call(dense: Any) -> Callable[..., tf.Tensor]:
    """As Keras' layer, without the reshape to a matrix and back, which may cost the compiler a copy each."""

    def call(inputs: tf.Tensor) -> tf.Tensor:
        outputs = tf.einsum("bld,de->ble", inputs, tf.cast(dense.kernel, inputs.dtype))
        outputs += tf.cast(dense.bias, inputs.dtype)
        return dense.activation(outputs) if dense.activation else outputs

    return call


def attend(
    query: tf.Tensor, key: tf.Tensor, value: tf.Tensor, attended: tf.Tensor, row_keys: tf.Tensor | None, rate: float
) -> tf.Tensor:
    """Return softmax(keyᵀ query / √head size) applied to `value`, (batch, heads, head size, length).

    Args:
        query: (batch, heads, head size, length), static shape; so are `key` and `value`.
        attended: (batch, 1, length), 1 at tokens that are attended, 0 at padding. A row without any gives 0.
        row_keys: uint32 (batch, KEY_WORDS) by which probabilities are dropped; None without dropout.
        rate: share of the probabilities that is dropped.
    """
    num_heads, head_size = query.shape[1:3]
    head_keys = row_keys
    if row_keys is not None:
        head_keys = fold_in(row_keys[:, tf.newaxis], tf.range(num_heads))[:, :, tf.newaxis, tf.newaxis]
    attention = _Attention(
        attended[:, :, tf.newaxis], head_keys, rate, 1 / math.sqrt(head_size), head_size < MATRIX_UNIT_WIDTH
    )

    @tf.custom_gradient
    def apply(query: tf.Tensor, key: tf.Tensor, value: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        context, shift, inverse_sum = attention.forward(query, key, value)

        def gradient(context_gradient: tf.Tensor) -> tuple[tf.Tensor, ...]:
            return attention.backward(query, key, value, context, shift, inverse_sum, context_gradient)

        return context, gradient

    return apply(query, key, value)


class _Attention:
    """Forward and backward pass. Letters of einsum: batch, n heads, h head size, k keys, q queries."""

    def __init__(self, attended: tf.Tensor, head_keys: tf.Tensor | None, rate: float, scale: float, makes_anew: bool):
        self.attended = attended  # (batch, 1, 1, length)
        self.head_keys = head_keys  # uint32 (batch, heads, 1, 1, KEY_WORDS) or None
        self.rate = rate
        self.scale = scale
        self.makes_anew = makes_anew

    def forward(self, query: tf.Tensor, key: tf.Tensor, value: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Return the context, and what was subtracted from the scores and 1/sum, float32 (batch, heads, 1, length)."""
        shift, sums = self._shift_and_sums(query, key)
        inverse_sum = tf.math.reciprocal_no_nan(sums)
        if self.makes_anew:
            query, key = _apart(query, key)
        weights = self._dropped(self._exponentials(query, key, shift), self.head_keys)
        context = tf.einsum("bnkq,bnhk->bnhq", weights, value * self.attended)
        scaled = tf.cast(context, tf.float32) * (inverse_sum / (1 - self.rate))
        return tf.cast(scaled, value.dtype), shift, inverse_sum

    def backward(
        self,
        query: tf.Tensor,
        key: tf.Tensor,
        value: tf.Tensor,
        context: tf.Tensor,
        shift: tf.Tensor,
        inverse_sum: tf.Tensor,
        context_gradient: tf.Tensor,
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Return the gradients by query, key and value."""
        dtype = query.dtype
        inverse_sum /= 1 - self.rate
        # Σ over keys of probability times its gradient, without a tensor of all probabilities (Dao et al. 2022, eq. 4).
        mean = tf.reduce_sum(
            tf.cast(context_gradient, tf.float32) * tf.cast(context, tf.float32), axis=2, keepdims=True
        )
        mean *= inverse_sum * (1 - self.rate)
        context_gradient = tf.cast(tf.cast(context_gradient, tf.float32) * inverse_sum, dtype)
        # Else the compiler would keep the forward pass's exponentials.
        query, key, shift = _apart(query, key, shift)
        weights = self._exponentials(query, key, shift)

        def score_gradient(value: tf.Tensor, head_keys: tf.Tensor | None) -> tf.Tensor:
            by_weight = tf.cast(tf.einsum("bnhk,bnhq->bnkq", value, context_gradient), tf.float32)
            return tf.cast(tf.cast(weights, tf.float32) * (self._dropped(by_weight, head_keys) - mean), dtype)

        by_value = tf.einsum("bnkq,bnhq->bnhk", self._dropped(weights, self.head_keys), context_gradient)
        by_score = score_gradient(value, self.head_keys)
        attended = self.attended * tf.cast(self.scale, dtype)
        by_query = tf.einsum("bnkq,bnhk->bnhq", by_score, key * attended)
        if self.makes_anew:
            by_score = score_gradient(*_apart(value, self.head_keys))
        by_key = tf.einsum("bnkq,bnhq->bnhk", by_score, query)
        return by_query, by_key * attended, by_value * self.attended

    def _shift_and_sums(self, query: tf.Tensor, key: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Return what to subtract from the scores, mostly 0, and the sums of their exponentials over the keys."""
        batch, num_heads, _, length = query.shape
        # As a product of eight equal rows, which the matrix unit makes in the loop that makes the scores.
        ones = tf.broadcast_to(self.attended, (batch, num_heads, 8, length))

        def sums_after(shift: tf.Tensor) -> tf.Tensor:
            products = tf.einsum("bnkq,bnhk->bnhq", self._exponentials(query, key, shift), ones)
            return tf.cast(products[:, :, :1], tf.float32)

        zero = tf.zeros((batch, num_heads, 1, length))
        sums = sums_after(zero)
        any_attended = tf.reduce_any(self.attended > 0, axis=-1, keepdims=True)  # (batch, 1, 1, 1)
        is_safe = tf.reduce_all((sums > SAFE_SUMS[0]) & (sums < SAFE_SUMS[1]) | ~any_attended)

        def largest_scores() -> tuple[tf.Tensor, tf.Tensor]:
            is_key = tf.transpose(self.attended, (0, 1, 3, 2)) > 0  # (batch, 1, length, 1)
            scores = tf.where(is_key, self._scores(query, key), tf.float32.min)
            shift = tf.stop_gradient(tf.reduce_max(scores, axis=2, keepdims=True))
            return shift, sums_after(shift)

        return tf.cond(is_safe, lambda: (zero, sums), largest_scores)

    def _scores(self, query: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
        return tf.cast(tf.einsum("bnhk,bnhq->bnkq", key, query), tf.float32) * self.scale

    def _exponentials(self, query: tf.Tensor, key: tf.Tensor, shift: tf.Tensor) -> tf.Tensor:
        return tf.cast(tf.exp(self._scores(query, key) - shift), query.dtype)  # (batch, heads, keys, queries)

    def _dropped(self, weights: tf.Tensor, head_keys: tf.Tensor | None) -> tf.Tensor:
        """Return the weights with those that are dropped set to 0, not scaled."""
        if head_keys is None:
            return weights
        length = weights.shape[-1]
        positions = tf.range(length)
        count = positions[tf.newaxis, :] * length + positions[:, tf.newaxis]  # (keys, queries)
        return tf.where(falls_out(head_keys, count, self.rate), tf.zeros((), weights.dtype), weights)


def _apart(*tensors: tf.Tensor | None) -> list[Any]:
    """Return the tensors as ones of which the compiler does not know that it has computed with them before."""
    kept = iter(xla.optimization_barrier(*[tensor for tensor in tensors if tensor is not None]))
    return [None if tensor is None else next(kept) for tensor in tensors]
