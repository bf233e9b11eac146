"""Random numbers for rows of a global batch: a replica draws for its own rows what one draw for all would give them.

Philox (Salmon et al. 2011) makes the n-th four words of a stream from a key and the counter n, so a stream can be
entered anywhere. `tf.random.stateless_uniform` fills an array in that order, from 0 on.
"""

from collections.abc import Callable

import tensorflow as tf

# Named, since "auto_select" differs between devices.
RANDOM_ALGORITHM = "philox"
# Its number in TensorFlow's raw operations (tensorflow/core/framework/rng_alg.h).
PHILOX = 1
# The key under which TensorFlow makes a key of a seed (tensorflow/core/kernels/stateless_random_ops.cc).
SEED_KEY = 0x02461E293EC8F720
WORDS_PER_COUNT = 4


def draw_bits(seed: tf.Tensor, num_rows: int, length: int, first_row: int | tf.Tensor) -> tf.Tensor:
    """Return uint32 (num_rows, length), all values as likely, of the rows from `first_row` on.

    They are those that `tf.random.stateless_uniform` draws for the whole batch with this seed, int32 (2,).
    """
    return _draw(
        lambda shape, key, counter: tf.raw_ops.StatelessRandomUniformFullIntV2(
            shape=shape, key=key, counter=counter, alg=PHILOX, dtype=tf.uint32
        ),
        *(seed, num_rows, length, first_row),
    )


def draw_integers(
    seed: tf.Tensor, num_rows: int, length: int, first_row: int | tf.Tensor, *, num_values: int
) -> tf.Tensor:
    """Return int32 (num_rows, length) from 0 to `num_values`, which is excluded; otherwise as `draw_bits`."""
    return _draw(
        lambda shape, key, counter: tf.raw_ops.StatelessRandomUniformIntV2(
            shape=shape, key=key, counter=counter, alg=PHILOX, minval=0, maxval=num_values
        ),
        *(seed, num_rows, length, first_row),
    )


def _draw(
    draw: Callable[..., tf.Tensor], seed: tf.Tensor, num_rows: int, length: int, first_row: int | tf.Tensor
) -> tf.Tensor:
    key, high = tf.split(_scrambled(seed), 2)
    first_word = tf.cast(first_row, tf.int64) * length
    counter = tf.concat([tf.cast([first_word // WORDS_PER_COUNT], tf.uint64), high], 0)  # the low word first
    if length % WORDS_PER_COUNT == 0:
        return draw((num_rows, length), key, counter)
    # The first row may begin within the words of one count.
    num_words = num_rows * length
    words = draw((num_words + WORDS_PER_COUNT - 1,), key, counter)
    begin = tf.cast(first_word % WORDS_PER_COUNT, tf.int32)
    return tf.reshape(tf.slice(words, (begin,), (num_words,)), (num_rows, length))


def _scrambled(seed: tf.Tensor) -> tf.Tensor:
    """Return the key, and the high word of all counters, that a seed stands for: uint64 (2,).

    TensorFlow has an operation for it, `StatelessRandomGetKeyCounter`, but that gives what suits the device.
    """
    key = tf.constant([SEED_KEY], tf.uint64)
    return tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=(2,), key=key, counter=tf.cast(seed, tf.uint64), alg=PHILOX, dtype=tf.uint64
    )
