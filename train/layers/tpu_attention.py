"""Attention, written so that XLA's compiler for TPUs turns it into fast programs.

Like FlashAttention (Dao et al. 2022), it keeps no scores in memory, but it needs no custom kernel. The compiler fuses a
matrix product, operations on its elements and the next product into one loop, as long as no intermediate result is used
twice. Therefore the output, instead of the probabilities, is divided by the softmax's sum; the backward pass recomputes
the probabilities; dropout is drawn in the loop; and padding is removed from keys and values instead of scores. Long
rows are computed in blocks whose exponentials stay in the chip's fast memory. Pairs of blocks without a common document
are skipped.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla

from train.layers.random_bits import dropout_mask, fold_in
from train.layers.tpu_functions import NUM_ONES, einsum, optimization_barrier, scaled, sum_over_head
from train.runtime.named_scopes import RARELY, custom_gradient, named

# If sums of exponentials are outside these limits, the largest score is subtracted first. The limits are far from the
# limits of float32 and bfloat16 (1e-38 and 3e38).
SAFE_SUMS = (1e-25, 1e30)
# Larger exponents are replaced by this one, so that exponentials stay finite. Sums with such a term are outside the
# limits anyway.
LARGEST_EXPONENT = 80.0
# Rows of at least this length are computed in blocks.
LONG_ROW_TOKENS = 1024
# The cheapest sizes for 12 heads, according to the compiler for a v5e. With larger blocks, the sums over blocks do not
# fit into the v5e's fast memory; smaller blocks read and write more.
BLOCK_QUERIES = 1024
BLOCK_KEYS = 512
# The size of float32 exponentials that fit a v5e's fast memory together with the results of the backward pass.
GROUP_BYTES = 48 * 2**20
MOST_GROUPS = 8


def attend(
    query: tf.Tensor,
    key: tf.Tensor,
    value: tf.Tensor,
    attended: tf.Tensor,
    row_keys: tf.Tensor | None,
    rate: float,
    documents: tuple[tf.Tensor, tf.Tensor] | None = None,
    reach: int | None = None,
    scale: tf.Tensor | None = None,
) -> tf.Tensor:
    """Compute softmax(keyᵀ query / √head size) applied to `value`, (batch, heads, head size, queries).

    Args:
        query: (batch, heads, head size, queries), static shape.
        key, value: (batch, heads, head size, keys). There are as many keys as queries, or more: then the additional
            keys are divided equally between both ends.
        attended: (batch, 1, keys), 1 at tokens that are attended, 0 at padding. Queries at padding give 0.
        row_keys: keys for the dropout of probabilities, uint32 (batch, KEY_WORDS); None without dropout.
        rate: dropout rate of the probabilities.
        documents: the numbers of the queries' and the keys' documents, int32 (batch, 1, queries) and (batch, 1, keys),
            which never decrease. A query attends only to keys of its document, one of which must be attended. None if
            it attends to all keys.
        reach: largest distance to a key that a query attends to; None for any distance.
        scale: passed to `scaled` with `query`, `key` and `value`; None if they need no such scale.
    """
    num_heads, head_size, num_queries = query.shape[1:]
    head_keys = None if row_keys is None else fold_in(row_keys[:, tf.newaxis], tf.range(num_heads))
    attended = attended[:, :, tf.newaxis]  # (batch, 1, 1, keys)
    of_rows = () if documents is None else (documents[0][:, :, tf.newaxis], documents[1][..., tf.newaxis])
    kind = _AttentionInBlocks if num_queries >= LONG_ROW_TOKENS and reach is None else _Attention
    attention = kind(attended, head_keys, rate, 1 / math.sqrt(head_size), of_rows, reach)

    @custom_gradient
    def apply(query: tf.Tensor, key: tf.Tensor, value: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        context, passed = attention.forward(query, key, value)
        return context, lambda by_context: attention.backward(passed, by_context)

    @custom_gradient
    def without_padding(tensor: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        return tensor * attended, lambda by_tensor: by_tensor  # `backward` returns 0 at padding

    arguments = query, without_padding(key), without_padding(value)
    return apply(*(arguments if scale is None else scaled(scale, *arguments)))


class _Passed(NamedTuple):
    """Results of the forward pass that the backward pass needs."""

    query: tf.Tensor  # (batch, heads, head size, queries)
    key: tf.Tensor  # (batch, heads, head size, keys)
    value: tf.Tensor  # (batch, heads, head size, keys)
    context: tf.Tensor  # (batch, heads, head size, queries)
    shift: tf.Tensor  # subtracted from the scores, float32 (batch, heads, 1, queries)
    inverse_sum: tf.Tensor  # 1 / (sum of exponentials * fraction that is kept), float32 (batch, heads, 1, queries)


class _Attention:
    """Forward and backward pass. Letters in einsum: batch, n heads, h head size, k keys, q queries.

    Keys, values and their gradients are 0 at padding, so results there are finite and have no effect.
    """

    def __init__(
        self,
        attended: tf.Tensor,
        head_keys: tf.Tensor | None,
        rate: float,
        scale: float,
        documents: tuple[tf.Tensor, ...] = (),
        reach: int | None = None,
        mask: tf.Tensor | None = None,
    ):
        self.attended = attended  # (batch, 1, 1, keys)
        self.head_keys = head_keys  # uint32 (batch, heads, KEY_WORDS) or None
        self.rate = rate
        self.scale = scale
        self.documents = documents  # int32 (batch, 1, 1, queries) and (batch, 1, keys, 1), or nothing
        self.reach = reach
        self.mask = mask  # float32 (batch, 1, keys, queries), 0 at keys that a query does not see, else 1; or None

    def forward(self, query: tf.Tensor, key: tf.Tensor, value: tf.Tensor) -> tuple[tf.Tensor, _Passed]:
        """Compute the context, (batch, heads, head size, queries), and the input of `backward`."""
        shift, sums = self._shift_and_sums(query, key)
        # Without the barrier, the compiler broadcasts the shift to all scores in the conditional's branches.
        shift, sums = optimization_barrier(shift, sums)
        query_again, key_again = optimization_barrier(query, key)  # else XLA keeps the exponentials
        weights = tf.cast(tf.nn.relu(self._signed_weights(query_again, key_again, shift)), value.dtype)
        context = einsum("bnkq,bnhk->bnhq", weights, value)
        inverse_sum = tf.where(self._is_query(query), tf.math.reciprocal_no_nan(sums * (1 - self.rate)), 0.0)
        context = tf.cast(context * inverse_sum, value.dtype)
        return context, _Passed(query, key, value, context, shift, inverse_sum)

    def backward(self, passed: _Passed, by_context: tf.Tensor) -> tuple[tf.Tensor, ...]:
        """Compute the gradients of query, key and value from the gradient of the context."""
        query, key, value, _, shift, _ = passed
        dtype = query.dtype
        by_context, mean = self._by_products(passed, by_context)
        num_rows = _rows_of_group(query, key)
        if 0 < num_rows < query.shape[0]:
            return self._backward_of_groups(num_rows, query, key, value, shift, by_context, mean)
        # Without the barrier, the compiler keeps the forward pass's exponentials, or recomputes them too early.
        query, key, shift, by_context = optimization_barrier(query, key, shift, by_context)
        weights = tf.cast(self._signed_weights(query, key, shift), dtype)
        by_value = tf.einsum("bnkq,bnhq->bnhk", tf.nn.relu(weights), by_context)
        by_query = einsum("bnkq,bnhk->bnhq", self._by_scores(weights, value, by_context, mean), key) * self.scale
        # The scores' gradients are recomputed for each product, in its layout: only the sum is transposed.
        (value_again,) = optimization_barrier(value)
        by_scores = self._by_scores(weights, value_again, by_context, mean)
        by_key = einsum("bnkq,bnhq->bnkh", by_scores, query) * self.scale
        (by_key,) = optimization_barrier(tf.cast(by_key, dtype))
        by_key = tf.transpose(by_key, (0, 1, 3, 2)) * self.attended
        return tf.cast(by_query, dtype), by_key, by_value * self.attended

    def _backward_of_groups(self, num_rows: int, *passed: tf.Tensor) -> tuple[tf.Tensor, ...]:
        """Compute `backward` in groups of `num_rows` rows, whose float32 exponentials stay in fast memory."""
        query, key, value, shift, by_context, mean = passed
        dtype, num_groups = query.dtype, query.shape[0] // num_rows

        def of_group(number: tf.Tensor, *results: tf.Tensor) -> tuple[tf.Tensor, ...]:
            def rows(tensor: tf.Tensor, number: tf.Tensor = number) -> tf.Tensor:
                start = [number * num_rows, *[0] * (tensor.shape.rank - 1)]
                return xla.dynamic_slice(tensor, start, [num_rows, *tensor.shape[1:]])

            attended, head_keys = rows(self.attended), None if self.head_keys is None else rows(self.head_keys)
            group = _Attention(attended, head_keys, self.rate, self.scale, tuple(map(rows, self.documents)), self.reach)
            queries, keys, by_contexts = map(rows, (query, key, by_context))
            weights = group._signed_weights(queries, keys, rows(shift))
            by_scores = group._by_scores(weights, rows(value), by_contexts, rows(mean))
            by_query = einsum("bnkq,bnhk->bnhq", by_scores, keys) * self.scale
            (again,) = optimization_barrier(number)  # else XLA keeps the scores' gradients in memory
            by_scores = group._by_scores(weights, *(rows(tensor, again) for tensor in (value, by_context, mean)))
            by_key = tf.transpose(einsum("bnkq,bnhq->bnkh", by_scores, queries) * self.scale, (0, 1, 3, 2))
            by_value = einsum("bnkq,bnhq->bnhk", tf.cast(tf.nn.relu(weights), dtype), by_contexts)
            is_key = tf.cast(attended, tf.float32)
            gradients = (
                tf.cast(gradient[tf.newaxis], dtype) for gradient in (by_query, by_key * is_key, by_value * is_key)
            )
            places = zip(results, gradients, strict=True)
            return number + 1, *(xla.dynamic_update_slice(*place, [number, 0, 0, 0, 0]) for place in places)

        # These zeros are all overwritten, so XLA skips writing them unless another layer shares the buffer. The barrier
        # prevents another layer from sharing it.
        zero, _ = optimization_barrier(tf.zeros((), dtype), by_context)
        results = (tf.fill((num_groups, num_rows, *tensor.shape[1:]), zero) for tensor in (query, key, value))
        turns = tf.while_loop(lambda number, *_: number < num_groups, of_group, (0, *results), parallel_iterations=1)
        return tuple(tf.reshape(groups, (-1, *groups.shape[2:])) for groups in turns[1:])

    def _by_products(self, passed: _Passed, by_context: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Compute the gradient of Σ weight * value, and the sum over the keys of probability * gradient.

        The second result, float32 (batch, heads, 1, queries), needs no tensor of all probabilities (Dao et al. 2022,
        eq. 4).
        """
        dtype = passed.query.dtype
        by_context = tf.cast(by_context, tf.float32)
        mean = sum_over_head(tf.cast(by_context * tf.cast(passed.context, tf.float32), dtype))
        return tf.cast(by_context * passed.inverse_sum, dtype), mean * passed.inverse_sum * (1 - self.rate)

    def _by_scores(self, weights: tf.Tensor, value: tf.Tensor, by_products: tf.Tensor, mean: tf.Tensor) -> tf.Tensor:
        by_weights = einsum("bnhk,bnhq->bnkq", value, by_products)
        if self.head_keys is not None:
            by_weights = tf.where(weights > 0, by_weights, 0.0)
        return tf.cast(tf.cast(tf.abs(weights), tf.float32) * (by_weights - mean), value.dtype)

    def _shift_and_sums(self, query: tf.Tensor, key: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Choose the shift of the scores, mostly 0, and sum their exponentials, (batch, heads, 1, queries)."""
        rows = tf.broadcast_to(self.attended, (*key.shape[:2], NUM_ONES, key.shape[3]))

        def sums_after(shift: tf.Tensor) -> tf.Tensor:
            return einsum("bnkq,bnrk->bnrq", tf.cast(self._exponentials(query, key, shift), key.dtype), rows)[:, :, :1]

        zero = tf.zeros((*query.shape[:2], 1, query.shape[3]))
        sums = sums_after(zero)
        is_safe = tf.reduce_all(_are_safe(sums) | ~self._is_query(query))

        def largest_of_row(row: tuple[tf.Tensor, ...]) -> tf.Tensor:
            query, key, attended, *documents = (tensor[tf.newaxis] for tensor in row)
            of_row = _Attention(attended, None, self.rate, self.scale, tuple(documents), self.reach)
            return of_row.largest_scores(query, key)[0]

        @named(RARELY)
        def after_largest_scores() -> tuple[tf.Tensor, tf.Tensor]:
            # Compute row by row, because XLA would otherwise reserve memory for all scores in every step.
            rows = (query, key, self.attended, *self.documents)
            shift = tf.map_fn(largest_of_row, rows, fn_output_signature=tf.float32)
            return shift, sums_after(shift)

        return tf.cond(is_safe, lambda: (zero, sums), after_largest_scores)

    def largest_scores(self, query: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
        """Find the largest score of each query, (batch, heads, 1, queries)."""
        is_key = tf.transpose(self.attended, (0, 1, 3, 2)) > 0  # (batch, 1, keys, 1)
        scores = tf.where(is_key, self._scores(query, key), tf.float32.min)
        scores = self._among_near(_within(self.documents, scores, tf.float32.min), tf.float32.min)
        if self.mask is not None:
            scores = tf.where(self.mask > 0, scores, tf.float32.min)
        return tf.reduce_max(scores, axis=2, keepdims=True)

    def _scores(self, query: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
        return einsum("bnhk,bnhq->bnkq", key, query) * self.scale

    def _exponentials(self, query: tf.Tensor, key: tf.Tensor, shift: tf.Tensor) -> tf.Tensor:
        """Compute exp(scores - shift), float32 (batch, heads, keys, queries), 0 at keys that are not attended."""
        exponentials = tf.exp(tf.minimum(self._scores(query, key) - shift, LARGEST_EXPONENT))
        if self.mask is not None:
            exponentials *= self.mask
        return self._among_near(_within(self.documents, exponentials, 0.0), 0.0)

    def _is_query(self, query: tf.Tensor) -> tf.Tensor:
        """Return which queries are not padding, and so attend to themselves: bool (batch, 1, 1, queries)."""
        num_queries, num_keys = query.shape[3], self.attended.shape[3]
        first = (num_keys - num_queries) // 2
        return self.attended[..., first : first + num_queries] > 0

    def _among_near(self, values: tf.Tensor, other: float) -> tf.Tensor:
        """Replace values, (batch, heads, keys, queries), by `other` if the key is out of the query's reach."""
        if self.reach is None:
            return values
        num_keys, num_queries = values.shape[2:]
        # The distances are computed, because a constant of that size would be read from memory each time.
        queries = tf.range(num_queries) + (num_keys - num_queries) // 2
        return tf.where(tf.abs(tf.range(num_keys)[:, tf.newaxis] - queries) <= self.reach, values, other)

    def _signed_weights(self, query: tf.Tensor, key: tf.Tensor, shift: tf.Tensor) -> tf.Tensor:
        """Compute exp(scores - shift), negative if dropped, so that dropout is drawn once and read three times."""
        weights = self._exponentials(query, key, shift)
        if self.head_keys is None:
            return weights
        return tf.where(dropout_mask(self.head_keys, weights.shape[2:], self.rate), -weights, weights)


class _AttentionInBlocks(_Attention):
    """Attention in long rows: each block of queries attends to blocks of keys that share a document with it.

    Rows are padded to whole blocks.
    """

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.length = self.attended.shape[3]
        self.num_key_blocks = -(-self.length // BLOCK_KEYS)
        self.attended = _filled(self.attended)
        if self.documents:
            numbers = _filled(self.documents[0][:, 0, 0], tf.int32.max)
            # The first key of each query's document, and the key after the document's last key, (batch, 1, 1, queries).
            self.first, self.end = (
                tf.searchsorted(numbers, numbers, side=side)[:, tf.newaxis, tf.newaxis] for side in ("left", "right")
            )

    def forward(self, query: tf.Tensor, key: tf.Tensor, value: tf.Tensor) -> tuple[tf.Tensor, _Passed]:
        query, key, value = map(_filled, (query, key, value))
        zero = tf.zeros((*query.shape[:2], 1, query.shape[3]))
        context, inverse_sum = self._context(query, key, value, zero)

        @named(RARELY)
        def after_largest_scores() -> tuple[tf.Tensor, ...]:
            shift = self.largest_scores(query, key)
            return shift, *self._context(query, key, value, shift)

        # The sum of each query's exponentials, times 1 - dropout rate. It is 0 for padding, and if the sum overflowed.
        sums = tf.math.reciprocal_no_nan(inverse_sum)
        is_safe = tf.reduce_all(_are_safe(sums) | (self.attended == 0))
        shift, context, inverse_sum = tf.cond(is_safe, lambda: (zero, context, inverse_sum), after_largest_scores)
        return context[..., : self.length], _Passed(query, key, value, context, shift, inverse_sum)

    def _context(self, query: tf.Tensor, key: tf.Tensor, value: tf.Tensor, shift: tf.Tensor) -> Sequence[tf.Tensor]:
        """Compute the context and the inverse sum of `_Passed`."""
        head_size, dtype = query.shape[2], query.dtype
        rows = tf.broadcast_to(self.attended, (*value.shape[:2], NUM_ONES, value.shape[3]))
        factors = tf.concat([value, rows], axis=2)  # one product gives both sums

        def of_queries(block: _Block, context: tf.Tensor, inverse_sum: tf.Tensor) -> tuple[tf.Tensor, ...]:
            queries, shifts, is_query = map(block.queries, (query, shift, self.attended))

            def of_keys(block: _Block, products: tf.Tensor) -> tuple[tf.Tensor]:
                weights = self._pair(block)._signed_weights(queries, block.keys(key), shifts)
                values = block.keys(factors)
                added = einsum("bnkq,bnrk->bnrq", tf.cast(tf.nn.relu(weights), dtype), values)
                if self.head_keys is not None:
                    sums = einsum("bnkq,bnrk->bnrq", tf.cast(tf.abs(weights), dtype), values[:, :, head_size:])
                    added = tf.concat([added[:, :, :head_size], sums], axis=2)
                return (products + added,)

            (products,) = self._over_keys(block, of_keys, tf.zeros((1, *factors.shape[1:3], BLOCK_QUERIES)))
            inverse = tf.math.reciprocal_no_nan(products[:, :, -1:] * (1 - self.rate))
            inverse = tf.where(is_query > 0, inverse, 0.0)
            contexts = tf.cast(products[:, :, :head_size] * inverse, dtype)
            return block.put_queries(context, contexts), block.put_queries(inverse_sum, inverse)

        return self._over_queries(of_queries, tf.zeros_like(query), tf.zeros_like(shift))

    def largest_scores(self, query: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
        def of_queries(block: _Block, largest: tf.Tensor) -> tuple[tf.Tensor]:
            def of_keys(block: _Block, largest: tf.Tensor) -> tuple[tf.Tensor]:
                pair = self._pair(block)
                return (tf.maximum(largest, pair.largest_scores(block.queries(query), block.keys(key))),)

            return (block.put_queries(largest, *self._over_keys(block, of_keys, block.queries(largest))),)

        lowest = tf.fill((*query.shape[:2], 1, query.shape[3]), tf.float32.min)
        return self._over_queries(of_queries, lowest)[0]

    def backward(self, passed: _Passed, by_context: tf.Tensor) -> tuple[tf.Tensor, ...]:
        query, key, value, _, shift, _ = passed
        dtype = query.dtype
        by_context = _filled(by_context)
        by_products = self._by_products(passed, by_context)

        def of_queries(block: _Block, by_query: tf.Tensor, *by_keys: tf.Tensor) -> tuple[tf.Tensor, ...]:
            queries, shifts, *by_product = map(block.queries, (query, shift, *by_products))

            def of_keys(block: _Block, by_queries: tf.Tensor, by_key: tf.Tensor, by_value: tf.Tensor) -> tuple:
                pair, keys, values = self._pair(block), block.keys(key), block.keys(value)
                weights = pair._signed_weights(queries, keys, shifts)
                by_queries += einsum("bnkq,bnhk->bnhq", pair._by_scores(weights, values, *by_product), keys)
                # The scores' gradients are recomputed for each product, in its layout.
                by_scores = pair._by_scores(weights, values, *optimization_barrier(*by_product))
                by_key = block.add_keys(by_key, einsum("bnkq,bnhq->bnhk", by_scores, queries))
                kept = tf.cast(tf.nn.relu(weights), dtype)
                return by_queries, by_key, block.add_keys(by_value, einsum("bnkq,bnhq->bnhk", kept, by_product[0]))

            by_queries, *by_keys = self._over_keys(block, of_keys, tf.zeros(queries.shape), *by_keys)
            return block.put_queries(by_query, tf.cast(by_queries * self.scale, dtype)), *by_keys

        # All blocks of the first tensor are overwritten, so a tensor that is no longer needed can be used here.
        results = by_context, tf.zeros(key.shape), tf.zeros(value.shape)
        by_query, by_key, by_value = self._over_queries(of_queries, *results)
        by_key, by_value = (tf.cast(by_one, dtype) * self.attended for by_one in (by_key * self.scale, by_value))
        return tuple(gradient[..., : self.length] for gradient in (by_query, by_key, by_value))

    def _over_queries(self, step: Callable[..., tuple], *results: tf.Tensor) -> Any:
        """Replace the results by `step(block, *results)` for each block of queries in the batch."""
        num_rows, num_blocks = self.attended.shape[0], self.attended.shape[3] // BLOCK_QUERIES
        return tf.while_loop(
            lambda number, *_: number < num_rows * num_blocks,
            lambda number, *results: (
                number + 1,
                *step(_Block(number // num_blocks, number % num_blocks * BLOCK_QUERIES), *results),
            ),
            (0, *results),
            parallel_iterations=1,
        )[1:]

    def _over_keys(self, block: "_Block", step: Callable[..., tuple], *results: tf.Tensor) -> Any:
        """Replace the results by `step(block, *results)` for each block of keys that the queries attend to."""
        first, end = tf.constant(0), tf.constant(self.num_key_blocks)
        if self.documents:
            first = block.queries(self.first)[0, 0, 0, 0] // BLOCK_KEYS
            end = (block.queries(self.end)[0, 0, 0, -1] - 1) // BLOCK_KEYS + 1
        return tf.while_loop(
            lambda number, *_: number < end,
            lambda number, *results: (number + 1, *step(block._replace(first_key=number * BLOCK_KEYS), *results)),
            (first, *results),
            parallel_iterations=1,
            # The preflight assumes this number of iterations.
            maximum_iterations=self.num_key_blocks if self.documents else None,
        )[1:]

    def _pair(self, block: "_Block") -> _Attention:
        """Return the attention of a block of queries to a block of keys."""
        head_keys = mask = None
        if self.head_keys is not None:
            number = block.first_query * self.length + block.first_key
            head_keys = fold_in(tf.gather(self.head_keys, [block.row]), number)
        if self.documents:
            first, end = block.queries(self.first), block.queries(self.end)
            keys = block.first_key + tf.range(BLOCK_KEYS)[:, tf.newaxis]
            # The mask is stored as floats. Booleans cost three times as much; comparisons in each head's loop cost
            # more.
            (mask,) = optimization_barrier(tf.where((first <= keys) & (keys < end), 1.0, 0.0))
        return _Attention(block.keys(self.attended), head_keys, self.rate, self.scale, mask=mask)


class _Block(NamedTuple):
    """The starts of a block of queries and of a block of keys in a row, to access the blocks in (batch, …, length)."""

    row: tf.Tensor
    first_query: tf.Tensor
    first_key: tf.Tensor | None = None

    def queries(self, tensor: tf.Tensor) -> tf.Tensor:
        return xla.dynamic_slice(tensor, [self.row, 0, 0, self.first_query], [1, *tensor.shape[1:3], BLOCK_QUERIES])

    def put_queries(self, tensor: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
        return xla.dynamic_update_slice(tensor, values, [self.row, 0, 0, self.first_query])

    def keys(self, tensor: tf.Tensor) -> tf.Tensor:
        return xla.dynamic_slice(tensor, [self.row, 0, 0, self.first_key], [1, *tensor.shape[1:3], BLOCK_KEYS])

    def add_keys(self, tensor: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
        return xla.dynamic_update_slice(tensor, self.keys(tensor) + values, [self.row, 0, 0, self.first_key])


def _filled(tensor: tf.Tensor, value: float = 0) -> tf.Tensor:
    """Pad the last axis with `value` to whole blocks."""
    added = -tensor.shape[-1] % math.lcm(BLOCK_QUERIES, BLOCK_KEYS)
    return tf.pad(tensor, [(0, 0)] * (tensor.shape.rank - 1) + [(0, added)], constant_values=value) if added else tensor


def _rows_of_group(query: tf.Tensor, key: tf.Tensor) -> int:
    """Divide the rows into at most MOST_GROUPS groups of equal size; return the number of rows of a group.

    This number is as large as possible, but the exponentials of a group must fit in GROUP_BYTES. Return 0 if no number
    fits.
    """
    num_rows, num_heads, head_size, num_queries = query.shape
    row_bytes = tf.float32.size * num_heads * num_queries * key.shape[3]
    # With heads as wide as the matrix unit, a v5e is faster with all rows at once: 2.3 instead of 2.6 million cycles.
    most = min(num_rows, GROUP_BYTES // row_bytes) if head_size < 128 else 0
    # XLA may reserve memory for the results of all layers' loops from the start of a step, too much in large batches.
    fewest = max(2, math.ceil(num_rows / MOST_GROUPS))
    return max((rows for rows in range(fewest, most + 1) if num_rows % rows == 0), default=0)


def _are_safe(sums: tf.Tensor) -> tf.Tensor:
    return (sums > SAFE_SUMS[0]) & (sums < SAFE_SUMS[1])


def _within(documents: Sequence[tf.Tensor], values: tf.Tensor, other: float) -> tf.Tensor:
    """Replace values, (batch, heads, keys, queries), by `other` if key and query are in different documents.

    Args:
        documents: numbers of queries' documents, (batch, 1, 1, queries), and of keys' documents, (batch, 1, keys, 1);
            empty if all tokens belong to the same document.
    """
    return tf.where(documents[0] == documents[1], values, other) if documents else values
