"""Attention, products, normalization and activations as XLA's compiler for TPUs computes them cheapest.

It charges for each pass over a tensor, hardly for the matrix unit: so sums are products with a matrix of ones, which it
joins to what makes their terms, and no tensor changes its layout.

Attention keeps no scores in memory, as in FlashAttention (Dao et al. 2022), but without a custom kernel. The compiler
joins a matrix product, what is done to its elements and the next product into one loop where no result in between is
used twice. So the output is divided by the softmax's sum, not the probabilities; the backward pass recomputes the
probabilities; dropout is made in the loop; and padding is removed from keys and values, not from scores. The backward
pass of long rows goes through blocks whose exponentials stay in the chip's fast memory.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.compiler.tf2xla.python import xla

from train.layers.random_bits import dropout_mask, fold_in
from train.runtime.named_scopes import RARELY, custom_gradient, named

# Exponentials are taken of the scores as they are while their sums stay within these, far from the limits of float32
# and bfloat16 (1e-38 and 3e38); else the largest score is subtracted first.
SAFE_SUMS = (1e-25, 1e30)
# Keeps exponentials finite, whatever the scores: sums of larger ones are not safe.
LARGEST_EXPONENT = 80.0
# Rows of a matrix of ones: of fewer, XLA would make a sum of its vector unit's, which is slower.
NUM_ONES = 8
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
        context, shift, inverse_sum = attention.forward(query, key, value)

        def gradient(by_context: tf.Tensor) -> tuple[tf.Tensor, ...]:
            return backward(query, key, value, context, shift, inverse_sum, by_context)

        return context, gradient

    return tf.reshape(apply(query, key * attended, value * attended), shape)


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

    def forward(self, query: tf.Tensor, key: tf.Tensor, value: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Compute the context, what was subtracted from the scores, and 1 / (sum * fraction that is kept).

        The latter two are float32 (batch, heads, 1, queries).
        """
        ones = tf.broadcast_to(self.attended, (*value.shape[:2], NUM_ONES, value.shape[3]))
        is_joint = self.head_keys is None and query.shape[3] >= LONG_ROW_TOKENS
        if is_joint:  # what sums the exponentials can multiply them with the values
            shift, products = self._shift_and_products(query, key, tf.concat([value, ones], axis=2))
            context, sums = products[:, :, :-NUM_ONES], products[:, :, -1:]
        else:
            shift, products = self._shift_and_products(query, key, ones)
            # Else the compiler makes the shift of all scores, a tensor of their size, in the conditional's branches.
            shift, sums = optimization_barrier(shift, products[:, :, -1:])
            query, key = optimization_barrier(query, key)  # else the exponentials would be kept for both products
            weights = tf.cast(tf.nn.relu(self._signed_weights(query, key, shift)), value.dtype)
            context = einsum("bnkq,bnhk->bnhq", weights, value)
        inverse_sum = tf.where(self._is_query(query), tf.math.reciprocal_no_nan(sums * (1 - self.rate)), 0.0)
        context = tf.cast(context * inverse_sum, value.dtype)
        if is_joint:
            (context,) = optimization_barrier(context)  # else the products would be kept, in float32
        return context, shift, inverse_sum

    def backward(
        self,
        query: tf.Tensor,
        key: tf.Tensor,
        value: tf.Tensor,
        context: tf.Tensor,
        shift: tf.Tensor,
        inverse_sum: tf.Tensor,
        by_context: tf.Tensor,
        kept_type: tf.DType | None = None,
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Compute the gradients; exponentials are kept in `kept_type`, by default that of the query."""
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

    def backward_in_blocks(
        self,
        query: tf.Tensor,
        key: tf.Tensor,
        value: tf.Tensor,
        context: tf.Tensor,
        shift: tf.Tensor,
        inverse_sum: tf.Tensor,
        by_context: tf.Tensor,
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Compute as `backward`, for long rows with one head, some rows or a part of a row's queries after another.

        Their exponentials stay in fast memory in float32, which costs a quarter of bfloat16 in the chip's.
        """
        num_rows, length = query.shape[0], query.shape[3]
        sizes = [size for size in range(128, length, 128) if length % size == 0 and size * length <= BLOCK_SCORES]
        # A mask's bits and the distance of a key depend on where the row begins.
        is_whole = length * length <= BLOCK_SCORES or self.head_keys is not None or self.reach is not None
        num_parts = 1 if is_whole or not sizes else length // max(sizes)
        num_parts_of_all = num_rows * num_parts
        num_together = max(1, BLOCK_SCORES * num_parts // length**2)
        num_together = max(num for num in range(1, num_together + 1) if num_parts_of_all % num == 0)

        def parts(tensor: tf.Tensor) -> tf.Tensor:
            """Cut the queries, the last axis, into parts, (blocks, parts together, …)."""
            cut = tf.stack(tf.split(tensor, num_parts, axis=-1), axis=1)
            return tf.reshape(cut, (-1, num_together, *cut.shape[2:]))

        def repeated(tensor: tf.Tensor) -> tf.Tensor:
            """Repeat each row for its parts, (blocks, parts together, …)."""
            return tf.reshape(tf.repeat(tensor, num_parts, axis=0), (-1, num_together, *tensor.shape[1:]))

        def gradients(block: tuple[tuple[tf.Tensor, ...], ...]) -> tuple[tf.Tensor, ...]:
            (query, *results), (key, value, attended), head_keys, documents = block
            keys = head_keys[0] if head_keys else None
            part = _Attention(attended, keys, self.rate, self.scale, documents, self.reach)
            context, shift, inverse_sum, by_context = results
            return part.backward(query, key, value, context, shift, inverse_sum, by_context, tf.float32)

        block = (
            tuple(map(parts, (query, context, shift, inverse_sum, by_context))),
            tuple(map(repeated, (key, value, self.attended))),
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


def einsum(equation: str, one: tf.Tensor, other: tf.Tensor) -> tf.Tensor:
    """Multiply in float32, before any rounding; `tf.einsum` rounds it to the type of its arguments.

    Args:
        equation: as in `tf.einsum`, of two tensors: `bld,de->ble`. A letter is in two or three of the parts.
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
    """Return the tensors such that XLA does not know that it has computed with them before.

    What is computed from them is recomputed, instead of keeping a tensor.
    """
    kept = iter(xla.optimization_barrier(*[tensor for tensor in tensors if tensor is not None]))
    return [None if tensor is None else next(kept) for tensor in tensors]


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


@custom_gradient
def dense_of_heads(inputs: tf.Tensor, kernel: tf.Tensor, bias: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    """Compute inputs @ kernel + bias over all heads, (batch, length, units), from the layout in which `heads` are.

    Args:
        inputs: (batch, heads, head size, length).
        kernel: (heads, head size, units), of the same type.
        bias: (units,), of the same type.
    """

    def gradient(by_output: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return (
            tf.einsum("ble,nhe->bnhl", by_output, kernel),
            tf.einsum("bnhl,ble->nhe", inputs, by_output),
            tf.cast(sum_over_rows(by_output), bias.dtype),
        )

    return tf.einsum("bnhl,nhe->ble", inputs, kernel) + bias, gradient


@custom_gradient
def gelu(inputs: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    """Compute x Φ(x) (Hendrycks & Gimpel 2016) in float32; the result has the inputs' type.

    In bfloat16, XLA would round after each operation, and keep the intermediate results for the gradient.
    """

    def gradient(by_output: tf.Tensor) -> tf.Tensor:
        _, slope = _gelu_and_slope(inputs)
        return tf.cast(tf.cast(by_output, tf.float32) * slope, inputs.dtype)

    return tf.cast(_gelu_and_slope(inputs)[0], inputs.dtype), gradient


@custom_gradient
def gated_gelu(inputs: tf.Tensor, gate: tf.Tensor) -> tuple[tf.Tensor, Callable]:
    """Compute x Φ(x) times the gate (GeGLU, Shazeer 2020), as `gelu`."""

    def gradient(by_output: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        values, slope = _gelu_and_slope(inputs)
        by_output = tf.cast(by_output, tf.float32)
        by_inputs = by_output * tf.cast(gate, tf.float32) * slope
        return tf.cast(by_inputs, inputs.dtype), tf.cast(by_output * values, gate.dtype)

    return tf.cast(_gelu_and_slope(inputs)[0] * tf.cast(gate, tf.float32), inputs.dtype), gradient


def _gelu_and_slope(inputs: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Compute gelu and its derivative in float32."""
    values = tf.cast(inputs, tf.float32)
    cumulative = 0.5 * (1 + tf.math.erf(values / math.sqrt(2)))
    density = tf.exp(-0.5 * tf.square(values)) / math.sqrt(2 * math.pi)
    return values * cumulative, cumulative + values * density


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
