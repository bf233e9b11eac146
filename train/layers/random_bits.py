"""Random bits as a pure function of keys: the same on every device, in XLA and out of it, however a batch is cut.

Each row of a global batch has its key, and a bit follows from the key and its position in the row. So a
resumed run draws what the run before it would have, and a replica draws for its rows what one device would have. The
bits are made by mixing integers: on a TPU that costs a few operations an element, in the very loop that uses them,
where a draw of TensorFlow's costs more than the attention scores that dropout needs it for.
"""

from collections.abc import Iterable

import tensorflow as tf

from train.runtime.named_scopes import named

# Words of a key.
KEY_WORDS = 2
# 2^32 divided by the golden ratio: neighbours in a count come far apart (Knuth, The Art of Computer Programming, 6.4).
GOLDEN = 0x9E3779B9
# Multipliers of a mixer of 32 bits with little bias, found by search: https://github.com/skeeto/hash-prospector.
MIXERS = (0x7FEB352D, 0x846CA68B)
# The key that all others derive from; any but 0 would do. The first digits of pi.
FIRST_KEY = (0x243F6A88, 0x85A308D3)


def key_of(numbers: Iterable[int | tf.Tensor]) -> tf.Tensor:
    """Make the key of integers such as a seed and a step, uint32 (KEY_WORDS,); other numbers give another key."""
    key = tf.constant(FIRST_KEY, tf.uint32)
    for number in numbers:
        key = fold_in(key, number)
    return key


@named("row_keys")
def row_keys(numbers: Iterable[int | tf.Tensor], num_rows: int, first_row: int | tf.Tensor = 0) -> tf.Tensor:
    """Make the keys of rows `first_row` and following of a global batch, uint32 (num_rows, KEY_WORDS).

    Args:
        numbers: as of `key_of`.
        num_rows: rows of the batch.
        first_row: where it begins in the global batch; a row's key does not depend on how that is cut.
    """
    return fold_in(key_of(numbers), tf.cast(first_row, tf.int32) + tf.range(num_rows))


def fold_in(keys: tf.Tensor, number: int | tf.Tensor) -> tf.Tensor:
    """Make other keys for each number, uint32 (…, KEY_WORDS); `number` broadcasts to `keys` without its last axis."""
    number = tf.cast(number, tf.uint32) * _word(GOLDEN)
    first = _mixed(number + keys[..., 0], keys[..., 1])
    return tf.stack([first, _mixed(number + keys[..., 1], first)], axis=-1)


def draw_bits(keys: tf.Tensor, shape: tf.TensorShape | tuple[int, ...]) -> tf.Tensor:
    """Draw uint32 (…, *shape) under keys, uint32 (…, KEY_WORDS): all values as likely, none twice under one key."""
    word, other_key = keys[..., 0], keys[..., 1]
    stride = tf.TensorShape(shape).num_elements()
    for size in shape:
        # Axis by axis, beginning with the key: else the numbers of all elements would be a constant of the program.
        stride //= size
        word = word[..., tf.newaxis] + tf.cast(tf.range(size), tf.uint32) * _word(stride * GOLDEN)
        other_key = other_key[..., tf.newaxis]
    return _mixed(word, other_key)


def fall_under(bits: tf.Tensor, probability: float) -> tf.Tensor:
    """Return which of uniform uint32 `bits` fall under `probability`, exactly none at 0 and all at 1.

    Integers are compared, since float draws differ between devices.
    """
    threshold = round(min(max(probability, 0.0), 1.0) * 2**32)
    if threshold == 0:
        return tf.zeros_like(bits, tf.bool)
    return bits <= tf.constant(threshold - 1, tf.uint32)


def to_integers(bits: tf.Tensor, num_values: int) -> tf.Tensor:
    """Make int32 from 0 to `num_values`, which is excluded, of uniform uint32 `bits`: their product's high word.

    Each value comes from 2^32 / num_values of the words, rounded up or down: so its probability is off by at most
    num_values / 2^32 of itself, which is 1 in 17,000 for the largest vocabularies of 250,000.
    """
    product = tf.cast(bits, tf.uint64) * tf.constant(num_values, tf.uint64)
    return tf.cast(tf.bitwise.right_shift(product, tf.constant(32, tf.uint64)), tf.int32)


def _mixed(word: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
    """Mix uint32 until they look drawn at random; under one key no two words give the same."""
    word = _shifted_into(word, 16) * _word(MIXERS[0]) ^ key
    word = _shifted_into(word, 15) * _word(MIXERS[1])
    return _shifted_into(word, 16)


def _shifted_into(word: tf.Tensor, num_bits: int) -> tf.Tensor:
    return word ^ tf.bitwise.right_shift(word, _word(num_bits))


def _word(value: int) -> tf.Tensor:
    return tf.constant(value % 2**32, tf.uint32)
