"""Attention as XLA's compiler for TPUs computes it cheapest.

It keeps no scores in memory, as in FlashAttention (Dao et al. 2022), but without a custom kernel. The compiler joins a
matrix product, what is done to its elements and the next product into one loop where no result in between is used
twice. So the output is divided by the softmax's sum, not the probabilities; the backward pass recomputes the
probabilities; dropout is made in the loop; and padding is removed from keys and values, not from scores. The backward
pass of long rows goes through blocks whose exponentials stay in the chip's fast memory.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from train.layers.random_bits import dropout_mask, fold_in
from train.layers.tpu_functions import NUM_ONES, einsum, optimization_barrier
from train.runtime.named_scopes import RARELY, custom_gradient, named

# Exponentials are taken of the scores as they are while their sums stay within these, far from the limits of float32
# and bfloat16 (1e-38 and 3e38); else the largest score is subtracted first.
SAFE_SUMS = (1e-25, 1e30)
# Keeps exponentials finite, whatever the scores: sums of larger ones are not safe.
LARGEST_EXPONENT = 80.0
# From this length on, the backward pass goes through blocks of as many scores as a v5e's fast memory of 128 MiB holds
# in float32 beside what else is there.
LONG_ROW_TOKENS = 1024
BLOCK_SCORES = 2**24


def attend(
    query: tf.Tensor,
    key: tf.Tensor,
    value: tf.Tensor,
    attended: tf.Tensor,
    row_keys: tf.Tensor | None,
    rate: float,
    documents: tuple[tf.Tensor, tf.Tensor] | None = None,
    reach: int | None = None,
) -> tf.Tensor:
    """Compute softmax(keyᵀ query / √head size) applied to `value`, (batch, heads, head size, queries).

    Args:
        query: (batch, heads, head size, queries), static shape.
        key: (batch, heads, head size, keys), the same number, or more at both ends alike; `value` has the same shape.
        attended: (batch, 1, keys), 1 at tokens that are attended, 0 at padding. Queries there give 0.
        row_keys: uint32 (batch, KEY_WORDS) by which probabilities are dropped; None without dropout.
        rate: fraction of the probabilities that is dropped.
        documents: int32 (batch, 1, queries) and (batch, 1, keys), the numbers of their documents: a query attends only
            to keys of its document, one of which must be attended. None where it attends to all.
        reach: the largest distance of a key that a query attends to; None for any distance.
    """
    shape = query.shape
    num_heads, head_size, num_queries = shape[1:]
    head_keys = None if row_keys is None else fold_in(row_keys[:, tf.newaxis], tf.range(num_heads))
    attended = attended[:, :, tf.newaxis]  # (batch, 1, 1, keys)
    of_rows: Sequence[tf.Tensor] = (
        () if documents is None else (documents[0][:, :, tf.newaxis], documents[1][..., tf.newaxis])
    )
    is_long = num_queries >= LONG_ROW_TOKENS
    if is_long:  # each head becomes a row
        query, key, value = (tf.reshape(tensor, (-1, 1, *tensor.shape[2:])) for tensor in (query, key, value))
        head_keys = None if head_keys is None else tf.reshape(head_keys, (-1, 1, head_keys.shape[-1]))
        attended, *of_rows = (tf.repeat(tensor, num_heads, axis=0) for tensor in (attended, *of_rows))
    attention = _Attention(attended, head_keys, rate, 1 / math.sqrt(head_size), tuple(of_rows), reach)
    backward = attention.backward_in_blocks if is_long else attention.backward

    @custom_gradient
    def apply(query: tf.Tensor, key: tf.Tensor, value: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        passed = attention.forward(query, key, value)

        def gradient(by_context: tf.Tensor) -> tuple[tf.Tensor, ...]:
            return backward(passed, by_context)

        return passed.context, gradient

    return tf.reshape(apply(query, key * attended, value * attended), shape)


class _Passed(NamedTuple):
    """What the forward pass leaves to the backward pass."""

    query: tf.Tensor  # (batch, heads, head size, queries)
    key: tf.Tensor  # (batch, heads, head size, keys)
    value: tf.Tensor  # (batch, heads, head size, keys)
    context: tf.Tensor  # (batch, heads, head size, queries)
    shift: tf.Tensor  # subtracted from the scores, float32 (batch, heads, 1, queries)
    inverse_sum: tf.Tensor  # 1 / (sum of exponentials * fraction that is kept), float32 (batch, heads, 1, queries)


class _Attention:
    """Forward and backward pass. Letters of einsum: batch, n heads, h head size, k keys, q queries.

    Keys and values are 0 at padding: results there are finite, and count nowhere.
    """

    def __init__(
        self,
        attended: tf.Tensor,
        head_keys: tf.Tensor | None,
        rate: float,
        scale: float,
        documents: tuple[tf.Tensor, ...],
        reach: int | None,
    ):
        self.attended = attended  # (batch, 1, 1, keys)
        self.head_keys = head_keys  # uint32 (batch, heads, KEY_WORDS) or None
        self.rate = rate
        self.scale = scale
        self.documents = documents  # int32 (batch, 1, 1, queries) and (batch, 1, keys, 1), or nothing
        self.reach = reach

    def forward(self, query: tf.Tensor, key: tf.Tensor, value: tf.Tensor) -> _Passed:
        ones = tf.broadcast_to(self.attended, (*value.shape[:2], NUM_ONES, value.shape[3]))
        is_joint = self.head_keys is None and query.shape[3] >= LONG_ROW_TOKENS
        if is_joint:  # what sums the exponentials can multiply them with the values
            shift, products = self._shift_and_products(query, key, tf.concat([value, ones], axis=2))
            context, sums = products[:, :, :-NUM_ONES], products[:, :, -1:]
        else:
            shift, products = self._shift_and_products(query, key, ones)
            # Else the compiler makes the shift of all scores, a tensor of their size, in the conditional's branches.
            shift, sums = optimization_barrier(shift, products[:, :, -1:])
            query_again, key_again = optimization_barrier(query, key)  # else exponentials are kept for both products
            weights = tf.cast(tf.nn.relu(self._signed_weights(query_again, key_again, shift)), value.dtype)
            context = einsum("bnkq,bnhk->bnhq", weights, value)
        inverse_sum = tf.where(self._is_query(query), tf.math.reciprocal_no_nan(sums * (1 - self.rate)), 0.0)
        context = tf.cast(context * inverse_sum, value.dtype)
        if is_joint:
            (context,) = optimization_barrier(context)  # else the products would be kept, in float32
        return _Passed(query, key, value, context, shift, inverse_sum)

    def backward(
        self, passed: _Passed, by_context: tf.Tensor, kept_type: tf.DType | None = None
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Compute the gradients by query, key and value, in their shapes.

        Args:
            passed: of the forward pass.
            by_context: the gradient by the context, in its shape.
            kept_type: in which exponentials are kept, by default that of the query.
        """
        query, key, value, context, shift, inverse_sum = passed
        dtype = query.dtype
        by_context = tf.cast(by_context, tf.float32)
        # Σ over keys of probability times its gradient, without a tensor of all probabilities (Dao et al. 2022, eq. 4).
        mean = _sum_over_head(tf.cast(by_context * tf.cast(context, tf.float32), dtype))
        mean *= inverse_sum * (1 - self.rate)
        by_context = tf.cast(by_context * inverse_sum, dtype)
        # Else the compiler would keep the forward pass's exponentials, or make these before they are needed.
        query, key, shift, by_context = optimization_barrier(query, key, shift, by_context)
        weights = tf.cast(self._signed_weights(query, key, shift), kept_type or dtype)

        def by_scores(value: tf.Tensor) -> tf.Tensor:
            by_weights = einsum("bnhk,bnhq->bnkq", value, by_context)
            if self.head_keys is not None:
                by_weights = tf.where(weights > 0, by_weights, 0.0)
            return tf.cast(tf.cast(tf.abs(weights), tf.float32) * (by_weights - mean), dtype)

        by_value = tf.einsum("bnkq,bnhq->bnhk", tf.cast(tf.nn.relu(weights), dtype), by_context)
        by_query = einsum("bnkq,bnhk->bnhq", by_scores(value), key) * self.scale
        # The scores' gradients are recomputed for each product, in its layout: only the sum is transposed.
        by_key = einsum("bnkq,bnhq->bnkh", by_scores(*optimization_barrier(value)), query) * self.scale
        (by_key,) = optimization_barrier(tf.cast(by_key, dtype))
        return tf.cast(by_query, dtype), tf.transpose(by_key, (0, 1, 3, 2)), by_value

    def backward_in_blocks(self, passed: _Passed, by_context: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Compute as `backward`, for long rows of one head: some rows, or parts of a row's queries, after another.

        Their exponentials stay in fast memory in float32, which costs a quarter of bfloat16 in the chip's.
        """
        query, key, value, *of_queries = passed
        num_rows, length = query.shape[0], query.shape[3]
        sizes = [size for size in range(128, length, 128) if length % size == 0 and size * length <= BLOCK_SCORES]
        # A mask's bits and the distance of a key depend on where the row begins.
        is_whole = length * length <= BLOCK_SCORES or self.head_keys is not None or self.reach is not None
        num_parts = 1 if is_whole or not sizes else length // max(sizes)
        num_fitting = max(1, BLOCK_SCORES * num_parts // length**2)
        num_together = max(num for num in range(1, num_fitting + 1) if num_rows * num_parts % num == 0)

        def parts(tensor: tf.Tensor) -> tf.Tensor:
            """Cut the queries, the last axis, into parts: (blocks, parts together, …)."""
            cut = tf.stack(tf.split(tensor, num_parts, axis=-1), axis=1)
            return tf.reshape(cut, (-1, num_together, *cut.shape[2:]))

        def repeated(tensor: tf.Tensor) -> tf.Tensor:
            """Repeat each row for its parts: (blocks, parts together, …)."""
            return tf.reshape(tf.repeat(tensor, num_parts, axis=0), (-1, num_together, *tensor.shape[1:]))

        def gradients(block: tuple) -> tuple[tf.Tensor, ...]:
            passed, by_context, attended, head_keys, documents = block
            keys = head_keys[0] if head_keys else None
            part = _Attention(attended, keys, self.rate, self.scale, documents, self.reach)
            return part.backward(passed, by_context, kept_type=tf.float32)

        block = (
            _Passed(parts(query), repeated(key), repeated(value), *map(parts, of_queries)),
            parts(by_context),
            repeated(self.attended),
            () if self.head_keys is None else (repeated(self.head_keys),),
            (parts(self.documents[0]), repeated(self.documents[1])) if self.documents else (),
        )
        by_query, *by_keys = (
            tf.reshape(gradient, (num_rows, num_parts, *gradient.shape[2:]))
            for gradient in tf.map_fn(gradients, block, fn_output_signature=(query.dtype,) * 3, parallel_iterations=1)
        )
        by_key, by_value = (tf.reduce_sum(tf.cast(gradient, tf.float32), axis=1) for gradient in by_keys)
        by_query = tf.concat(tf.unstack(by_query, axis=1), axis=-1)
        return by_query, tf.cast(by_key, key.dtype), tf.cast(by_value, value.dtype)

    def _shift_and_products(self, query: tf.Tensor, key: tf.Tensor, factors: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Find what to subtract from the scores, mostly 0, and multiply their exponentials.

        Args:
            query: as in `attend`; `key`, too.
            factors: (batch, heads, rows, keys), in whose last row each key that counts has a 1.
        """

        def products_after(shift: tf.Tensor) -> tf.Tensor:
            return einsum("bnkq,bnrk->bnrq", tf.cast(self._exponentials(query, key, shift), factors.dtype), factors)

        zero = tf.zeros((*query.shape[:2], 1, query.shape[3]))
        products = products_after(zero)
        sums = products[:, :, -1:]
        is_safe = tf.reduce_all((sums > SAFE_SUMS[0]) & (sums < SAFE_SUMS[1]) | ~self._is_query(query))

        def largest_of_row(row: tuple[tf.Tensor, ...]) -> tf.Tensor:
            query, key, attended, *documents = (tensor[tf.newaxis] for tensor in row)
            is_key = tf.transpose(attended, (0, 1, 3, 2)) > 0  # (1, 1, keys, 1)
            scores = tf.where(is_key, self._scores(query, key), tf.float32.min)
            scores = self._among_near(_within(documents, scores, tf.float32.min), tf.float32.min)
            return tf.reduce_max(scores, axis=2, keepdims=True)[0]

        @named(RARELY)
        def largest_scores() -> tuple[tf.Tensor, tf.Tensor]:
            # Row by row: memory for all scores would be set aside in every step, and crowd out what is needed.
            rows = (query, key, self.attended, *self.documents)
            shift = tf.map_fn(largest_of_row, rows, fn_output_signature=tf.float32)
            return shift, products_after(shift)

        return tf.cond(is_safe, lambda: (zero, products), largest_scores)

    def _scores(self, query: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
        return einsum("bnhk,bnhq->bnkq", key, query) * self.scale

    def _exponentials(self, query: tf.Tensor, key: tf.Tensor, shift: tf.Tensor) -> tf.Tensor:
        """Compute exp(scores - shift), float32 (batch, heads, keys, queries), 0 at keys that a query does not see."""
        exponentials = tf.exp(tf.minimum(self._scores(query, key) - shift, LARGEST_EXPONENT))
        return self._among_near(_within(self.documents, exponentials, 0.0), 0.0)

    def _is_query(self, query: tf.Tensor) -> tf.Tensor:
        """Return which queries are of attended tokens, so each has a key, itself: bool (batch, 1, 1, queries)."""
        num_queries, num_keys = query.shape[3], self.attended.shape[3]
        first = (num_keys - num_queries) // 2
        return self.attended[..., first : first + num_queries] > 0

    def _among_near(self, values: tf.Tensor, other: float) -> tf.Tensor:
        """Replace values, (batch, heads, keys, queries), of keys that are out of reach by `other`."""
        if self.reach is None:
            return values
        num_keys, num_queries = values.shape[2:]
        # A constant of that size would be read from memory each time.
        queries = tf.range(num_queries) + (num_keys - num_queries) // 2
        return tf.where(tf.abs(tf.range(num_keys)[:, tf.newaxis] - queries) <= self.reach, values, other)

    def _signed_weights(self, query: tf.Tensor, key: tf.Tensor, shift: tf.Tensor) -> tf.Tensor:
        """Compute exp(scores - shift), with a minus where they are dropped: drawn once, it is read three times."""
        weights = self._exponentials(query, key, shift)
        if self.head_keys is None:
            return weights
        return tf.where(dropout_mask(self.head_keys, weights.shape[2:], self.rate), -weights, weights)


def _within(documents: Sequence[tf.Tensor], values: tf.Tensor, other: float) -> tf.Tensor:
    """Replace values, (batch, heads, keys, queries), of keys in other documents than the query's by `other`.

    Args:
        documents: of queries (batch, 1, 1, queries) and keys (batch, 1, keys, 1); nothing where all are of one.
    """
    return tf.where(documents[0] == documents[1], values, other) if documents else values


def _sum_over_head(values: tf.Tensor) -> tf.Tensor:
    """Sum over the head size, to float32 (batch, heads, 1, length)."""
    if values.dtype == tf.float32:
        return tf.reduce_sum(values, axis=2, keepdims=True)
    return einsum("bnhq,hr->bnrq", values, tf.ones((values.shape[2], NUM_ONES), values.dtype))[:, :, :1]
