import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from train.layers.random_bits import KEY_WORDS, draw_bits, fall_under, fold_in, row_keys, to_integers

SEED = (3, 4)


def as_tuples(keys):
    return [tuple(key) for key in keys.numpy().tolist()]


def test_keys_and_bits_are_pinned():
    keys = row_keys(SEED, 2, 5)
    assert keys.numpy().tolist() == [[4092646889, 2200172347], [2353874091, 1003906097]]
    assert draw_bits(keys, (2,)).numpy().tolist() == [[816071844, 1404781570], [1831591491, 1463012199]]


@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_rows_keys_do_not_depend_on_how_the_batch_is_cut(jit_compile):
    @tf.function(jit_compile=jit_compile)
    @tf.autograph.experimental.do_not_convert
    def draw(step, first_row):
        keys = row_keys((3, step), 2, first_row)
        bits = draw_bits(keys, (3, 5))
        return keys, bits, to_integers(bits, 995)

    keys = row_keys(SEED, 8)
    bits = draw_bits(keys, (3, 5))
    for first_row in range(7):
        own_keys, own_bits, own_integers = draw(tf.constant(4), tf.constant(first_row))
        rows = slice(first_row, first_row + 2)
        np.testing.assert_array_equal(own_keys, keys[rows])
        np.testing.assert_array_equal(own_bits, bits[rows])
        np.testing.assert_array_equal(own_integers, to_integers(bits, 995)[rows])


def test_rows_steps_streams_and_seeds_have_keys_of_their_own():
    num_rows = 50
    all_keys = [
        key
        for seed in (0, 1, 2**31 - 1)
        for stream in (0, 1)
        for step in (0, 1, 2, 2**30)
        for first_row in (0, 2**31 - num_rows)
        for key in as_tuples(row_keys((seed, stream, step), num_rows, first_row))
    ]
    assert len(set(all_keys)) == 3 * 2 * 4 * 2 * num_rows
    assert len({word for key in all_keys for word in key}) > 2 * len(all_keys) - 10


def test_words_are_uniform_and_independent():
    num_rows, length = 256, 512
    keys = row_keys(SEED, num_rows)
    draws = [draw_bits(one, (length,)).numpy() for one in (keys, fold_in(keys, 1), row_keys((3, 5), num_rows))]
    for draw in draws:
        # A chi-squared of 255 degrees of freedom, for each byte of the word: its deviation is 22.6.
        for byte in np.moveaxis(draw.view(np.uint8).reshape(-1, 4), 1, 0):
            counts = np.bincount(byte, minlength=256)
            expected = byte.size / 256
            assert abs(((counts - expected) ** 2 / expected).sum() - 255) < 5 * 22.6
    pairs = [(draws[0], draws[1]), (draws[0], draws[2]), (draws[0][1:], draws[0][:-1])]
    pairs += [(draws[0][:, distance:], draws[0][:, :-distance]) for distance in (1, 2, 3, 64)]
    for one, other in pairs:
        for bit in (0, 15, 31):  # of the word
            both = [(draw.ravel() >> np.uint32(bit) & np.uint32(1)).astype(float) for draw in (one, other)]
            assert abs(np.corrcoef(*both)[0, 1]) < 4.5 / np.sqrt(one.size)
        assert abs(np.corrcoef(one.ravel().astype(float), other.ravel().astype(float))[0, 1]) < 4.5 / np.sqrt(one.size)


def test_under_one_key_no_word_comes_twice():
    bits = draw_bits(row_keys(SEED, 1), (1000, 1000)).numpy()
    assert len(np.unique(bits)) == 1_000_000


@given(word=st.integers(0, 2**32 - 1), num_values=st.integers(1, 2**31 - 1))
@settings(max_examples=100)
def test_integers_are_the_words_scaled_exactly(word, num_values):
    assert to_integers(tf.constant([word], tf.uint32), num_values).numpy() == [word * num_values >> 32]


def test_integers_are_uniform():
    num_values = 1000
    integers = to_integers(draw_bits(row_keys(SEED, 64), (8192,)), num_values).numpy()
    counts = np.bincount(integers.ravel(), minlength=num_values)
    assert counts.size == num_values
    expected = integers.size / num_values
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert abs(statistic - (num_values - 1)) < 5 * np.sqrt(2 * (num_values - 1))


def test_what_falls_under_a_probability_is_exact():
    words = tf.constant([0, 2**31 - 1, 2**31, 2**32 - 1], tf.uint32)
    shares = {0.0: [0, 0, 0, 0], 0.5: [1, 1, 0, 0], 1.0: [1, 1, 1, 1]}
    for probability, expected in shares.items():
        assert fall_under(words, probability).numpy().astype(int).tolist() == expected


def test_keys_have_any_shape():
    keys = fold_in(row_keys(SEED, 3)[:, tf.newaxis], tf.range(2))
    assert keys.shape == (3, 2, KEY_WORDS)
    assert draw_bits(keys, (4, 5)).shape == (3, 2, 4, 5)
    np.testing.assert_array_equal(draw_bits(keys, (4, 5))[1, 1], draw_bits(keys[1, 1], (4, 5)))
