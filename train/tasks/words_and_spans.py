"""The units that are masked as a whole, words or spans of words: for each token, the first token of its unit.

Units cover every row without gaps, and each is masked or not with the same probability, whatever its size: so the
expected share of masked tokens is that probability. All is arithmetic on whole rows, without a loop over tokens.
"""

import numpy as np
import tensorflow as tf

from train.model.random_bits import draw_bits
from train.tasks.masking_rule import MAX_SPAN_TOKENS, MAX_WORD_TOKENS

# Lengths of spans, in words: SpanBERT's (Joshi et al. 2019, section 3.1), whose mean is 3.8.
SPAN_CONTINUES = 0.8
MAX_SPAN_WORDS = 10


def first_tokens_of_words(input_ids: tf.Tensor, is_special: tf.Tensor, word_starts: np.ndarray) -> tf.Tensor:
    """Find for each token the position of the first token of its word, int32 (batch, length).

    A word begins where the table says so, at the beginning of a row, and at and after a special token. What would have
    more than `MAX_WORD_TOKENS` counts as several words, since in scripts without spaces a word may be a paragraph.

    Args:
        input_ids: int32 (batch, length).
        is_special: bool (batch, length).
        word_starts: bool (vocabulary,), whether a word begins with the token.
    """
    # Not a constant of booleans: TensorFlow writes it in a way that the TPU compiler's parser does not read.
    begins = tf.gather(tf.constant(word_starts, tf.int8), input_ids) > 0
    return _first_tokens(begins | _cuts(is_special), MAX_WORD_TOKENS)


def first_tokens_of_spans(words: tf.Tensor, is_special: tf.Tensor, row_keys: tf.Tensor) -> tf.Tensor:
    """Find for each token the position of the first token of its span, int32 (batch, length).

    Each row is cut into spans of whole words, of random lengths laid end to end. A span ends early at a special token,
    and after `MAX_SPAN_TOKENS`.

    Args:
        words: of `first_tokens_of_words`.
        is_special: bool (batch, length).
        row_keys: uint32 (batch, KEY_WORDS), of the lengths.
    """
    length = words.shape[1]
    # No row has more spans than tokens.
    ends = tf.cumsum(span_lengths(draw_bits(row_keys, (length,))), axis=1)
    word = tf.cumsum(tf.cast(words == tf.range(length), tf.int32), axis=1) - 1  # counted in its row, (batch, length)
    span = tf.searchsorted(ends, word, side="right")  # the number of spans that have ended
    begins = span != tf.pad(span[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    return _first_tokens(begins | _cuts(is_special), MAX_SPAN_TOKENS)


def span_lengths(bits: tf.Tensor) -> tf.Tensor:
    """Make int32 lengths of the shape of `bits`, uniform uint32: geometric, given that they are at most 10.

    Integers are compared, since float draws differ between devices.
    """
    longest = SPAN_CONTINUES**MAX_SPAN_WORDS
    exceeds = [(SPAN_CONTINUES**length - longest) / (1 - longest) for length in range(1, MAX_SPAN_WORDS)]
    thresholds = tf.constant([round(probability * 2**32) for probability in exceeds], tf.uint32)
    return 1 + tf.reduce_sum(tf.cast(bits[..., tf.newaxis] < thresholds, tf.int32), axis=-1)


def _cuts(is_special: tf.Tensor) -> tf.Tensor:
    """Tell whether a unit begins here in any case: at and after a special token, and at the beginning of a row."""
    return is_special | tf.pad(is_special[:, :-1], ((0, 0), (1, 0)), constant_values=True)


def _first_tokens(begins: tf.Tensor, max_tokens: int) -> tf.Tensor:
    """Find for each token the position of its unit's first, for units that begin where told, cut to `max_tokens`."""
    positions = tf.range(begins.shape[1])
    first = _latest(begins)
    return first + (positions - first) // max_tokens * max_tokens


def _latest(begins: tf.Tensor) -> tf.Tensor:
    """Find the latest position up to each token where `begins` holds, as it must at 0: int32 (batch, length)."""
    length = begins.shape[1]
    latest = tf.where(begins, tf.range(length), 0)
    reach = 1
    while reach < length:  # the maximum over twice as many tokens each time: XLA has no running maximum
        latest = tf.maximum(latest, tf.pad(latest[:, :-reach], ((0, 0), (reach, 0))))
        reach *= 2
    return latest
