import numpy as np
import pytest
import tensorflow as tf

from tests.fixtures.arrays import assert_all_close, assert_all_equal
from train.layers import tpu_attention
from train.layers.attention import is_near
from train.layers.random_bits import dropout_mask, fold_in, row_keys
from train.layers.tpu_attention import attend

BATCH, HEADS, LENGTH, RATE = 3, 2, 16, 0.25
KEYS = row_keys((5, 6), BATCH)
ATTENDED = np.arange(LENGTH) < np.array([[LENGTH], [9], [1]])  # (batch, length)


def falls_of_heads(shape, rate, number=None):
    head_keys = fold_in(KEYS[:, tf.newaxis], tf.range(HEADS))
    return dropout_mask(head_keys if number is None else fold_in(head_keys, number), shape, rate)


def plain_attention(query, key, value, attended, rate, near=True, falls=None):
    """The textbook's, with the probabilities that `attend` drops, 0 at padding; (batch, heads, head size, queries)."""
    num_keys, num_queries = key.shape[3], query.shape[3]
    scores = tf.einsum("bnhk,bnhq->bnkq", key, query) / np.sqrt(query.shape[2])
    scores = tf.where(attended[:, np.newaxis, :, np.newaxis] & near, scores, -1e30)
    probabilities = tf.nn.softmax(scores, axis=2)
    falls = falls_of_heads((num_keys, num_queries), rate) if falls is None else falls
    context = tf.einsum("bnkq,bnhk->bnhq", tf.where(falls, 0.0, probabilities / (1 - rate)), value)
    first = (num_keys - num_queries) // 2
    return context * attended[:, np.newaxis, np.newaxis, first : first + num_queries]


def with_gradients(function, *arguments):
    with tf.GradientTape() as tape:
        tape.watch(arguments)
        outputs = function(*arguments)
    by_output = tf.constant(np.random.default_rng(9).normal(size=outputs.shape), outputs.dtype)
    return outputs, *tape.gradient(outputs, arguments, by_output)


def attention(query, key, value, attended, rate, keys=KEYS, **options):
    """Attend, and differentiate, one operation after the other; compiling takes seconds."""
    mask = tf.cast(attended, query.dtype)[:, tf.newaxis]
    return with_gradients(lambda *args: attend(*args, mask, keys if rate else None, rate, **options), query, key, value)


def compiled(query, key, value, attended, rate, **options):
    compute = tf.autograph.experimental.do_not_convert(lambda *args: attention(*args, attended, rate, **options))
    return tf.function(compute, jit_compile=True)(query, key, value)


def draw(head_size, scale=1.0, dtype=tf.float32):
    shape = (BATCH, HEADS, head_size, LENGTH)
    query, key, value = (tf.random.stateless_normal(shape, (seed, 0)) for seed in range(3))
    return [tf.cast(tensor, dtype) for tensor in (query * scale, key * scale, value)]


# Scores of ±3 and of ±3,000, whose exponentials are finite and far too large for float32.
@pytest.mark.parametrize(("head_size", "scale", "rate"), [(8, 1, 0.0), (128, 30, RATE)])
def test_results_and_gradients_are_those_of_plain_attention(head_size, scale, rate):
    arguments = draw(head_size, scale)
    expected = with_gradients(lambda *args: plain_attention(*args, ATTENDED, rate), *arguments)
    assert_all_close(compiled(*arguments, ATTENDED, rate), expected, rtol=1e-4, atol=3e-5 * max(1, scale))


def test_documents_attend_to_themselves_alone():
    scale, rate = 30, RATE
    attended = np.arange(LENGTH) < np.array([[LENGTH], [9], [7]])  # (batch, length)
    is_second = np.arange(LENGTH) >= np.array([[5], [4], [6]])

    def one_by_one(*args):
        first, second = (plain_attention(*args, attended & own, rate) for own in (~is_second, is_second))
        return tf.where(is_second[:, np.newaxis, np.newaxis], second, first)

    arguments = draw(8, scale)
    numbers = tf.constant(is_second, tf.int32)[:, tf.newaxis]
    outputs = attention(*arguments, attended, rate, documents=(numbers, numbers))
    assert_all_close(outputs, with_gradients(one_by_one, *arguments), rtol=1e-4, atol=3e-5 * scale)


def test_local_attention_with_more_keys_than_queries():
    reach, margin, scale = 3, 4, 100
    query, key, value = draw(8, scale)
    arguments = (query[..., margin:-margin], key, value)
    near = is_near(LENGTH - 2 * margin, LENGTH, reach).T
    expected = with_gradients(lambda *args: plain_attention(*args, ATTENDED, RATE, near), *arguments)
    assert_all_close(attention(*arguments, ATTENDED, RATE, reach=reach), expected, rtol=1e-4, atol=3e-5 * scale)


def test_in_bfloat16_it_is_near():
    arguments = draw(64, dtype=tf.bfloat16)
    exact = [tf.cast(argument, tf.float32) for argument in arguments]
    expected = with_gradients(lambda *args: plain_attention(*args, ATTENDED, RATE), *exact)
    for output, value in zip(compiled(*arguments, ATTENDED, RATE), expected, strict=True):
        assert output.dtype == tf.bfloat16
        np.testing.assert_allclose(tf.cast(output, tf.float32), value, atol=0.02 * np.abs(value).max())


@pytest.mark.parametrize(
    ("fitting_rows", "dtype", "tolerance", "options"),
    [
        (2, tf.float32, 1e-5, {"has_documents": True}),
        (4, tf.bfloat16, 0.02, {"reach": 3}),  # of six rows, three at a time
    ],
)
def test_gradients_of_groups_of_rows_are_those_of_all_rows(monkeypatch, fitting_rows, dtype, tolerance, options):
    batch = 6
    shape = (batch, HEADS, 8, LENGTH)
    arguments = [tf.cast(tf.random.stateless_normal(shape, (seed, 1)), dtype) for seed in range(3)]
    attended = np.arange(LENGTH) < np.array([LENGTH, 9, 1, 0, 12, 15])[:, np.newaxis]
    if "has_documents" in options:
        numbers = np.arange(LENGTH) >= np.array([5, 4, 0, 0, 12, 16])[:, np.newaxis]
        options = {"documents": (tf.constant(numbers, tf.int32)[:, tf.newaxis],) * 2}
    options = {**options, "keys": row_keys((5, 7), batch)}
    expected = attention(*arguments, attended, RATE, **options)
    monkeypatch.setattr(tpu_attention, "GROUP_BYTES", fitting_rows * 4 * HEADS * LENGTH**2)
    outputs = attention(*arguments, attended, RATE, **options)
    for output, value in zip(outputs, expected, strict=True):
        assert output.dtype == dtype
        value = tf.cast(value, tf.float32)
        np.testing.assert_allclose(tf.cast(output, tf.float32), value, atol=tolerance * np.abs(value).max())


# Of RoBERTa-base, with 64 rows all at once; of BERT-large; of a model of which single rows fit; with wide heads.
@pytest.mark.parametrize(
    ("num_rows", "num_heads", "head_size", "expected"),
    [(16, 12, 64, 4), (32, 12, 64, 4), (64, 12, 64, 0), (16, 16, 64, 2), (8, 27, 64, 0), (16, 6, 128, 0)],
)
def test_groups_are_of_several_rows_and_few(num_rows, num_heads, head_size, expected):
    tensor = tf.TensorSpec((num_rows, num_heads, head_size, 512), tf.bfloat16)
    assert tpu_attention._rows_of_group(tensor, tensor) == expected


def test_rows_of_padding_alone_give_0_and_padding_takes_no_part():
    query, key, value = draw(8)
    attended = ATTENDED.copy()
    attended[1] = False
    outputs = attention(query, key, value, attended, 0.0)
    assert all(np.isfinite(output).all() for output in outputs)
    np.testing.assert_array_equal(outputs[0][1], 0)
    padding = ~attended[:, np.newaxis, np.newaxis]
    for gradient in outputs[2:]:
        assert not np.any(gradient * padding)
    # Scores at padding that would overflow.
    changed = attention(query, tf.where(padding, 1e4, key), tf.where(padding, 1e4, value), attended, 0.0)
    assert_all_equal(changed, outputs)


BLOCK_QUERIES, BLOCK_KEYS = 32, 16


def make_long(monkeypatch):
    """Let rows of the tests below count as long, in small blocks."""
    monkeypatch.setattr(tpu_attention, "LONG_ROW_TOKENS", 2 * BLOCK_QUERIES)
    monkeypatch.setattr(tpu_attention, "BLOCK_QUERIES", BLOCK_QUERIES)
    monkeypatch.setattr(tpu_attention, "BLOCK_KEYS", BLOCK_KEYS)


def draw_long(length, scale=1):
    generator = np.random.default_rng(3)
    shape = (BATCH, HEADS, 8, length)
    return [tf.constant(generator.normal(size=shape) * factor, tf.float32) for factor in (scale, scale, 1)]


def numbers_of(first_tokens, length):
    """Number the documents of rows that begin at these tokens, as `attend` takes them."""
    rows = [np.searchsorted(first, np.arange(length), side="right") for first in first_tokens]
    return (tf.constant(np.array(rows)[:, np.newaxis], tf.int32),) * 2


@pytest.mark.parametrize(
    ("length", "first_tokens", "scale"),
    [
        (100, None, 100),  # no whole blocks, and exponentials that are not safe
        (128, [[31, 32, 33, 96], [64], range(0, 128, 5)], 1),
        (77, [[10, 76], [32, 64], [16, 48, 70]], 100),
    ],
)
def test_blocks_of_long_rows_give_what_plain_attention_gives(monkeypatch, length, first_tokens, scale):
    arguments = draw_long(length, scale)
    attended = np.arange(length) < np.array([[length], [length // 2], [0]])
    documents = numbers_of(first_tokens or [[]] * BATCH, length)
    near = documents[0][:, :, :, np.newaxis] == documents[1][:, :, np.newaxis]
    expected = with_gradients(lambda *args: plain_attention(*args, attended, 0.0, near), *arguments)
    make_long(monkeypatch)
    results = attention(*arguments, attended, 0.0, documents=first_tokens and documents)
    assert_all_close(results, expected, rtol=1e-4, atol=3e-5 * scale)


def test_blocks_of_long_rows_have_their_dropout(monkeypatch):
    make_long(monkeypatch)
    length = 80
    arguments = draw_long(length)
    attended = np.arange(length) < np.array([[length], [50], [1]])
    falls = [
        [
            falls_of_heads((BLOCK_KEYS, BLOCK_QUERIES), RATE, query * length + key)
            for key in range(0, length, BLOCK_KEYS)
        ]
        for query in range(0, length, BLOCK_QUERIES)
    ]
    falls = tf.concat([tf.concat(of_query, axis=2) for of_query in falls], axis=3)[..., :length]
    expected = with_gradients(lambda *args: plain_attention(*args, attended, RATE, falls=falls), *arguments)
    assert_all_close(compiled(*arguments, attended, RATE), expected, rtol=1e-4, atol=3e-5)


def test_blocks_without_a_common_document_are_left_out(monkeypatch):
    make_long(monkeypatch)
    length = 128
    numbers = numbers_of([[32, 96]] * BATCH, length)
    is_second = (np.arange(length) >= 32) & (np.arange(length) < 96)
    arguments = [tf.where(is_second, np.nan, tensor) for tensor in draw_long(length)]
    # A product with them would not be finite, whatever the mask.
    for output in compiled(*arguments, np.full((BATCH, length), True), 0.0, documents=numbers):
        assert np.isfinite(output.numpy()[..., ~is_second]).all()
        assert np.isnan(output.numpy()[..., is_second]).any()


def test_long_local_rows_are_attended_as_short_ones(monkeypatch):
    make_long(monkeypatch)
    arguments = draw_long(100)
    attended = np.full((BATCH, 100), True)
    expected = with_gradients(lambda *args: plain_attention(*args, attended, 0.0, is_near(100, 100, 20).T), *arguments)
    assert_all_close(attention(*arguments, attended, 0.0, reach=20), expected, rtol=1e-4, atol=3e-5)


def test_what_counts_in_a_safe_sum_is_no_denormal():
    """A TPU flushes these to 0."""
    smallest_part = 2.0**-24  # of a sum in float32 that still changes it
    assert tpu_attention.SAFE_SUMS[0] * smallest_part > np.finfo(np.float32).tiny
    assert tpu_attention.SAFE_SUMS[1] / smallest_part < np.finfo(np.float32).max
