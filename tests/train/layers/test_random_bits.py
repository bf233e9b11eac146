"""Random bits and dropout by keys: pinned, uniform, and the same however a batch is cut."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.tiny_models import each_architecture, one_layer_model, padded_batch
from train.layers.random_bits import (
    SHARED_LAYER,
    draw_bits,
    drop,
    dropping_out_by,
    fall_under,
    fold_in,
    key_dropout,
    key_of,
    next_keys,
    repeatable,
    row_keys,
    to_integers,
)
from train.model.architectures import ARCHITECTURES

SEED = (3, 4)


def test_keys_bits_and_what_is_dropped_are_pinned():
    keys = row_keys(SEED, 2, 5)
    assert keys.numpy().tolist() == [[4092646889, 2200172347], [2353874091, 1003906097]]
    assert draw_bits(keys, (2,)).numpy().tolist() == [[816071844, 1404781570], [1831591491, 1463012199]]
    keys = tf.constant([[617749520, 2129028673], [3311171110, 1076764832]], tf.uint32)
    outputs = drop(tf.ones((2, 3, 8)), keys, 0.3).numpy()
    kept = "".join("1" if output else "." for output in outputs.ravel())
    assert kept == "1.1..1.111.1111111111...11.1..1.111.111111111.11"
    compiled = tf.function(lambda keys: drop(tf.ones((2, 3, 8)), keys, 0.3), jit_compile=True)
    np.testing.assert_array_equal(compiled(keys), outputs)


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
        for key in map(tuple, row_keys((seed, stream, step), num_rows, first_row).numpy().tolist())
    ]
    assert len(set(all_keys)) == 3 * 2 * 4 * 2 * num_rows
    assert len({word for key in all_keys for word in key}) > 2 * len(all_keys) - 10


def test_words_are_uniform_and_independent():
    num_rows, length = 256, 512
    keys = row_keys(SEED, num_rows)
    draws = [draw_bits(stream, (length,)).numpy() for stream in (keys, fold_in(keys, 1), row_keys((3, 5), num_rows))]
    for draw in draws:
        # A chi-squared of 255 degrees of freedom, for each byte of the word: its deviation is 22.6.
        for byte in np.moveaxis(draw.view(np.uint8).reshape(-1, 4), 1, 0):
            counts = np.bincount(byte, minlength=256)
            expected = byte.size / 256
            assert abs(((counts - expected) ** 2 / expected).sum() - 255) < 5 * 22.6
    pairs = [(draws[0], draws[1]), (draws[0], draws[2]), (draws[0][1:], draws[0][:-1])]
    pairs += [(draws[0][:, distance:], draws[0][:, :-distance]) for distance in (1, 2, 3, 64)]
    for first, second in pairs:
        for bit in (0, 15, 31):  # of the word
            both = [(draw.ravel() >> np.uint32(bit) & np.uint32(1)).astype(float) for draw in (first, second)]
            assert abs(np.corrcoef(*both)[0, 1]) < 4.5 / np.sqrt(first.size)
        correlation = np.corrcoef(first.ravel().astype(float), second.ravel().astype(float))[0, 1]
        assert abs(correlation) < 4.5 / np.sqrt(first.size)


def test_under_one_key_no_word_comes_twice():
    bits = draw_bits(row_keys(SEED, 1), (600, 600)).numpy()
    assert len(np.unique(bits)) == 360_000  # of independent draws, 15 would be expected to come twice


@given(word=st.integers(0, 2**32 - 1), num_values=st.integers(1, 2**31 - 1))
@settings(max_examples=50)
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


def two_layers():
    layers = [tf_keras.layers.Dropout(0.5) for _ in range(2)]
    key_dropout(tf_keras.Sequential(layers))
    return layers


@settings(max_examples=30)
@given(
    rate=st.floats(0, 0.9),
    seed=st.tuples(*[st.integers(-(2**31), 2**31 - 1)] * 2),
    shape=st.tuples(*[st.integers(1, 5)] * 3),
)
def test_what_stays_is_scaled_and_the_same_again(rate, seed, shape):
    keys = row_keys(seed, shape[0])
    inputs = 1.0 + np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    outputs = drop(tf.constant(inputs), keys, rate).numpy()
    stays = outputs != 0
    np.testing.assert_allclose(outputs[stays], inputs[stays] / (1 - rate), rtol=1e-6)
    np.testing.assert_array_equal(drop(tf.constant(inputs), keys, rate), outputs)
    np.testing.assert_array_equal(drop(tf.constant(inputs), keys, 0.0), inputs)
    np.testing.assert_array_equal(drop(tf.constant(inputs), keys, 1.0), np.zeros(shape))


def test_rate_and_independence():
    num_rows, shape, rate = 64, (64, 64), 0.1
    keys = row_keys(SEED, num_rows)
    folded = [fold_in(fold_in(keys, layer), call) for layer, call in ((0, 0), (1, 0), (0, 1))]
    draws = [drop(tf.ones((num_rows, *shape)), folded_keys, rate).numpy() > 0 for folded_keys in folded]
    num_elements = draws[0].size
    for draw in draws:
        deviation = np.sqrt(rate * (1 - rate) / num_elements)
        assert abs(draw.mean() - (1 - rate)) < 4 * deviation
        assert np.abs(draw.mean(axis=(1, 2)) - (1 - rate)).max() < 5 * deviation * np.sqrt(num_rows)
    pairs = [
        (draws[0], draws[1]), (draws[0], draws[2]), (draws[0][1:], draws[0][:-1]),
        (draws[0][:, 1:], draws[0][:, :-1]), (draws[0][..., 1:], draws[0][..., :-1]),
    ]  # fmt: skip
    for first, second in pairs:
        correlation = np.corrcoef(first.ravel(), second.ravel())[0, 1]
        assert abs(correlation) < 4.5 / np.sqrt(first.size)


def test_layers_and_calls_differ_and_repeat_with_the_context():
    first, second = two_layers()
    inputs = tf.ones((2, 30))
    keys = row_keys(SEED, 2)

    def draws():
        with dropping_out_by(keys):
            return [layer(inputs, training=True).numpy() for layer in (first, second, first)]

    outputs = draws()
    np.testing.assert_array_equal(outputs, draws())
    assert not any(np.array_equal(outputs[index], outputs[other]) for index, other in ((0, 1), (0, 2), (1, 2)))


def test_a_repeatable_function_drops_the_same_when_called_again():
    layer, _ = two_layers()
    inputs = tf.ones((2, 30))
    with dropping_out_by(row_keys(SEED, 2)):
        step = repeatable(lambda values: layer(values, training=True))
        first, between, again = step(inputs), layer(inputs, training=True), step(inputs)
        after = layer(inputs, training=True)
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, between)
    assert not np.array_equal(between, after)


def test_layers_are_unchanged_outside_context_and_training():
    layer, _ = two_layers()
    inputs = tf.ones((2, 300))
    assert next_keys(0) is None
    assert 0.3 < np.mean(layer(inputs, training=True).numpy() == 0) < 0.7
    np.testing.assert_array_equal(layer(inputs, training=False), inputs)
    with dropping_out_by(row_keys(SEED, 2)):
        np.testing.assert_array_equal(layer(inputs, training=False), inputs)


@pytest.mark.parametrize("name", each_architecture("deberta-v2 as v3"))
def test_every_architecture_drops_by_the_keys_alone(name):
    model = one_layer_model(name, **dict.fromkeys(ARCHITECTURES[name.removesuffix(" as v3")].dropouts, 0.3))
    key_dropout(model)
    inputs, _ = padded_batch(model)

    def logits(rows, seed=SEED):
        with dropping_out_by(row_keys(seed, 3)[rows], key_of(seed)):
            return model({feature: values[rows] for feature, values in inputs.items()}, training=True).logits.numpy()

    whole = logits(slice(3))
    np.testing.assert_allclose(np.concatenate([logits(slice(1)), logits(slice(1, 3))]), whole, atol=1e-5)
    assert not np.allclose(logits(slice(1), seed=(5, 6)), whole[:1], atol=1e-2)


def test_what_all_rows_share_drops_by_the_shared_key():
    layer = tf_keras.layers.Dropout(0.5, name=SHARED_LAYER)
    key_dropout(tf_keras.Sequential([layer]))
    shared = tf.ones((6, 10))

    def dropped(seed, num_rows):
        with dropping_out_by(row_keys((7, num_rows), num_rows), key_of(seed)):
            return layer(shared, training=True).numpy()

    np.testing.assert_array_equal(dropped(SEED, 2), dropped(SEED, 4))
    assert not np.array_equal(dropped(SEED, 2), dropped((5, 6), 2))
