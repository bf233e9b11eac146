import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from train.layers.random_bits import draw_bits, row_keys
from train.tasks.masking import MAX_SPAN_WORDS, first_tokens_of_spans, first_tokens_of_words, is_special, span_lengths
from train.tasks.masking_rule import MAX_SPAN_TOKENS, MAX_WORD_TOKENS

SPECIAL_IDS = (0, 1, 2)
SEED = (7, 118)
# Ids from 10 on begin a word.
STARTS = np.arange(20) >= 10


def units(rows, seed=SEED, first_row=0):
    """Find the first tokens of words and of spans, and whether tokens are special."""
    ids = tf.constant(rows, tf.int32)
    special = is_special(ids, SPECIAL_IDS)
    words = first_tokens_of_words(ids, special, STARTS)
    spans = first_tokens_of_spans(words, special, row_keys(seed, len(rows), first_row))
    return words.numpy(), spans.numpy(), special.numpy()


def expected_words(row, special):
    first, firsts = 0, []
    for at, token in enumerate(row):
        begins = STARTS[token] or special[at] or at == 0 or special[at - 1] or at - first == MAX_WORD_TOKENS
        first = at if begins else first
        firsts.append(first)
    return firsts


def expected_spans(words, special, lengths):
    """Lay the lengths, in words, end to end over a row."""
    lengths, first, firsts = list(lengths), 0, []
    num_words, since_cut = 0, 0
    for at, word in enumerate(words):
        begins = at == 0 or special[at] or special[at - 1]
        if word == at:
            num_words += 1
            if num_words > lengths[0]:
                num_words, begins = 1, True
                lengths.pop(0)
        since_cut = 0 if begins else since_cut + 1
        first = at if since_cut % MAX_SPAN_TOKENS == 0 else first
        firsts.append(first)
    return firsts


def test_spans_of_a_row():
    """Its spans have 1, 2, 1 and 4 words; a special token cuts the last one short."""
    assert span_lengths(draw_bits(row_keys(SEED, 1), (12,))).numpy()[0, :4].tolist() == [1, 2, 1, 4]
    _, spans, _ = units([[10, 5, 10, 5, 10, 5, 5, 10, 5, 10, 0, 10]])
    assert spans.tolist() == [[0, 0, 2, 2, 2, 2, 2, 7, 7, 9, 10, 11]]


@settings(max_examples=25)
@given(
    rows=st.tuples(st.integers(1, 3), st.integers(1, 70)).flatmap(
        lambda shape: arrays(int, shape, elements=st.sampled_from([0, 2, 5, 5, 5, 5, 5, 5, 10])).map(np.ndarray.tolist)
    ),
    seed=st.tuples(st.integers(-(2**31), 2**31 - 1), st.integers(0, 2**31 - 1)),
    first_row=st.integers(0, 1000),
)
def test_units_are_those_of_a_loop_over_tokens(rows, seed, first_row):
    words, spans, special = units(rows, seed, first_row)
    lengths = span_lengths(draw_bits(row_keys(seed, len(rows), first_row), words.shape[1:])).numpy()
    for index, row in enumerate(rows):
        assert words[index].tolist() == expected_words(row, special[index])
        assert spans[index].tolist() == expected_spans(words[index], special[index], lengths[index])


def test_lengths_of_spans_are_pinned():
    shares = [0.2 * 0.8**n for n in range(10)] / np.sum([0.2 * 0.8**n for n in range(10)])
    assert shares @ np.arange(1, 11) == pytest.approx(3.797, abs=1e-3)
    edges = np.round(np.cumsum(shares[::-1])[::-1] * 2**32).astype(np.uint64)  # of lengths from 1 on
    for length, edge in zip(range(1, MAX_SPAN_WORDS + 1), edges, strict=True):
        below = np.array([edge - 1], np.uint64).astype(np.uint32)
        assert span_lengths(tf.constant(below)).numpy() == [length]
    assert span_lengths(tf.constant([0, 2**32 - 1], tf.uint32)).numpy().tolist() == [10, 1]
