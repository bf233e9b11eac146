"""Self-attention without scores in memory, as in FlashAttention (Dao et al. 2022), but without a kernel of our own.

XLA's compiler for TPUs joins a matrix product, what is done to its elements and the next product into one loop where no
result in between is used twice. So the output is divided by the softmax's sum, not the probabilities; the backward pass
makes the probabilities anew; dropout is made in the loop; and padding is taken out of keys and values, not of scores.
"""

import math
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla

from train.model.random_bits import fold_in
from train.model.stateless_dropout import dropout_mask
from train.runtime.named_scopes import RARELY, custom_gradient, named

# Exponentials are taken of the scores as they are while their sums stay within these, far from the limits of float32
# and bfloat16 (1e-38 and 3e38); else the largest score is subtracted first.
SAFE_SUMS = (1e-25, 1e30)
# Keeps exponentials finite, whatever the scores: sums of larger ones are not safe.
LARGEST_EXPONENT = 80.0
# A matrix unit is as wide. Of narrower heads, the scores are made anew for each product that takes them.
MATRIX_UNIT_WIDTH = 128
# Rows of a matrix of ones: of fewer, XLA would make a sum of its vector unit's, which is slower.
NUM_ONES = 8


def attend(
    query: tf.Tensor, key: tf.Tensor, value: tf.Tensor, attended: tf.Tensor, row_keys: tf.Tensor | None, rate: float
) -> tf.Tensor:
    """Compute softmax(keyᵀ query / √head size) applied to `value`, (batch, heads, head size, length).

    Args:
        query: (batch, heads, head size, length), static shape; so are `key` and `value`.
        attended: (batch, 1, length), 1 at tokens that are attended, 0 at padding. A row without any gives 0.
        row_keys: uint32 (batch, KEY_WORDS) by which probabilities are dropped; None without dropout.
        rate: share of the probabilities that is dropped.
    """
    num_heads, head_size = query.shape[1:3]
    head_keys = None if row_keys is None else fold_in(row_keys[:, tf.newaxis], tf.range(num_heads))
    attended = attended[:, :, tf.newaxis]  # (batch, 1, 1, length)
    attention = _Attention(attended, head_keys, rate, 1 / math.sqrt(head_size), head_size < MATRIX_UNIT_WIDTH)

    @custom_gradient
    def apply(query: tf.Tensor, key: tf.Tensor, value: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        context, shift, inverse_sum = attention.forward(query, key, value)

        def gradient(by_context: tf.Tensor) -> tuple[tf.Tensor, ...]:
            return attention.backward(query, key, value, context, shift, inverse_sum, by_context)

        return context, gradient

    return apply(query, key * attended, value * attended)


class _Attention:
    """Forward and backward pass. Letters of einsum: batch, n heads, h head size, k keys, q queries.

    Keys and values are 0 at padding: what is made of them there is finite, and counts nowhere.
    """

    def __init__(self, attended: tf.Tensor, head_keys: tf.Tensor | None, rate: float, scale: float, makes_anew: bool):
        self.attended = attended  # (batch, 1, 1, length)
        self.head_keys = head_keys  # uint32 (batch, heads, KEY_WORDS) or None
        self.rate = rate
        self.scale = scale
        self.makes_anew = makes_anew

    def forward(self, query: tf.Tensor, key: tf.Tensor, value: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Compute the context, what was subtracted from the scores, and 1 / (sum * share that is kept).

        The latter two are float32 (batch, heads, 1, length).
        """
        shift, sums = self._shift_and_sums(query, key)
        inverse_sum = tf.math.reciprocal_no_nan(sums * (1 - self.rate))
        if self.makes_anew:
            query, key = optimization_barrier(query, key)
        weights = self._dropped(self._exponentials(query, key, shift), self.head_keys)
        context = einsum("bnkq,bnhk->bnhq", weights, value) * inverse_sum
        return tf.cast(context, value.dtype), shift, inverse_sum

    def backward(
        self,
        query: tf.Tensor,
        key: tf.Tensor,
        value: tf.Tensor,
        context: tf.Tensor,
        shift: tf.Tensor,
        inverse_sum: tf.Tensor,
        by_context: tf.Tensor,
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Compute the gradients by query, key and value."""
        dtype = query.dtype
        by_context = tf.cast(by_context, tf.float32)
        # Σ over keys of probability times its gradient, without a tensor of all probabilities (Dao et al. 2022, eq. 4).
        mean = _sum_over_head(tf.cast(by_context * tf.cast(context, tf.float32), dtype))
        mean *= inverse_sum * (1 - self.rate)
        by_context = tf.cast(by_context * inverse_sum, dtype)
        # Else the compiler would keep the forward pass's exponentials, or make these before they are needed.
        query, key, shift, by_context = optimization_barrier(query, key, shift, by_context)
        weights = self._exponentials(query, key, shift)

        def by_scores(value: tf.Tensor, head_keys: tf.Tensor | None) -> tf.Tensor:
            by_weights = self._dropped(einsum("bnhk,bnhq->bnkq", value, by_context), head_keys)
            return tf.cast(tf.cast(weights, tf.float32) * (by_weights - mean), dtype)

        by_value = tf.einsum("bnkq,bnhq->bnhk", self._dropped(weights, self.head_keys), by_context)
        by_score = by_scores(value, self.head_keys)
        by_query = einsum("bnkq,bnhk->bnhq", by_score, key) * self.scale
        if self.makes_anew:
            by_score = by_scores(*optimization_barrier(value, self.head_keys))
        by_key = einsum("bnkq,bnhq->bnhk", by_score, query) * self.scale
        return tf.cast(by_query, dtype), tf.cast(by_key, dtype), by_value

    def _shift_and_sums(self, query: tf.Tensor, key: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Find what to subtract from the scores, mostly 0, and the sums of their exponentials over the keys."""
        batch, num_heads, _, length = query.shape
        ones = tf.broadcast_to(self.attended, (batch, num_heads, NUM_ONES, length))

        def sums_after(shift: tf.Tensor) -> tf.Tensor:
            return einsum("bnkq,bnhk->bnhq", self._exponentials(query, key, shift), ones)[:, :, :1]

        zero = tf.zeros((batch, num_heads, 1, length))
        sums = sums_after(zero)
        any_attended = tf.reduce_any(self.attended > 0, axis=-1, keepdims=True)  # (batch, 1, 1, 1)
        is_safe = tf.reduce_all((sums > SAFE_SUMS[0]) & (sums < SAFE_SUMS[1]) | ~any_attended)

        @named(RARELY)
        def largest_scores() -> tuple[tf.Tensor, tf.Tensor]:
            is_key = tf.transpose(self.attended, (0, 1, 3, 2)) > 0  # (batch, 1, length, 1)
            shift = tf.reduce_max(tf.where(is_key, self._scores(query, key), tf.float32.min), axis=2, keepdims=True)
            return shift, sums_after(shift)

        return tf.cond(is_safe, lambda: (zero, sums), largest_scores)

    def _scores(self, query: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
        return einsum("bnhk,bnhq->bnkq", key, query) * self.scale

    def _exponentials(self, query: tf.Tensor, key: tf.Tensor, shift: tf.Tensor) -> tf.Tensor:
        """Compute exp(scores - shift), (batch, heads, keys, queries)."""
        return tf.cast(tf.exp(tf.minimum(self._scores(query, key) - shift, LARGEST_EXPONENT)), query.dtype)

    def _dropped(self, weights: tf.Tensor, head_keys: tf.Tensor | None) -> tf.Tensor:
        """Set the weights that are dropped to 0, without scaling the others."""
        if head_keys is None:
            return weights
        falls = dropout_mask(head_keys, weights.shape[2:], self.rate)
        return tf.where(falls, tf.zeros((), weights.dtype), weights)


def _sum_over_head(values: tf.Tensor) -> tf.Tensor:
    """Sum over the head size, to float32 (batch, heads, 1, length)."""
    if values.dtype == tf.float32:
        return tf.reduce_sum(values, axis=2, keepdims=True)
    return einsum("bnhq,hr->bnrq", values, tf.ones((values.shape[2], NUM_ONES), values.dtype))[:, :, :1]


def einsum(equation: str, one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """Multiply in float32, before any rounding; `tf.einsum` rounds it to the type of its arguments.

    Args:
        equation: as in `tf.einsum`, of two tensors: `bld,de->ble`. A letter stands in two or three of the parts.
        one: float32 or bfloat16.
        other: of the same type.
    """
    arguments, result = equation.split("->")
    first, second = arguments.split(",")
    batch = [letter for letter in first if letter in second and letter in result]
    summed = [letter for letter in first if letter in second and letter not in result]
    dimensions = xla.DotDimensionNumbers(
        lhs_batch_dimensions=[first.index(letter) for letter in batch],
        rhs_batch_dimensions=[second.index(letter) for letter in batch],
        lhs_contracting_dimensions=[first.index(letter) for letter in summed],
        rhs_contracting_dimensions=[second.index(letter) for letter in summed],
    )
    product = xla.dot_general(one, other, dimensions, preferred_element_type=tf.float32)
    order = [*batch, *(letter for part in (first, second) for letter in part if letter not in (*batch, *summed))]
    return tf.transpose(product, [order.index(letter) for letter in result])


def sum_over_last(values: tf.Tensor, weights: tf.Tensor | None = None) -> tf.Tensor:
    """Compute Σ values (times weights) over the last axis, float32 (…, 1).

    Args:
        values: (batch, length, width).
        weights: (width,), of the same type.
    """
    if values.dtype == tf.float32:
        return tf.reduce_sum(values if weights is None else values * weights, axis=-1, keepdims=True)
    if weights is None:
        weights = tf.ones(values.shape[-1:], values.dtype)
    columns = tf.broadcast_to(weights[:, tf.newaxis], (values.shape[-1], NUM_ONES))
    return einsum("bld,dr->blr", values, columns)[..., :1]


def sum_over_rows(values: tf.Tensor) -> tf.Tensor:
    """Compute Σ values over all axes but the last, float32 (width,), of (batch, length, width)."""
    if values.dtype == tf.float32:
        return tf.reduce_sum(values, axis=(0, 1))
    ones = tf.ones((*values.shape[:2], NUM_ONES), values.dtype)
    return einsum("blr,bld->rd", ones, values)[0]


def optimization_barrier(*tensors: tf.Tensor | None) -> list[Any]:
    """Make of the tensors ones of which XLA does not know that it has computed with them before.

    What is computed of them is computed anew, in the place of a tensor that is kept.
    """
    kept = iter(xla.optimization_barrier(*[tensor for tensor in tensors if tensor is not None]))
    return [None if tensor is None else next(kept) for tensor in tensors]
