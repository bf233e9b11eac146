"""Rows made in-graph: masks drawn, pairs of segments swapped; and the loss of the answers about pairs.

All is a pure function of keys of the rows, the same on every device, with and without XLA.
"""

from typing import NamedTuple

import numpy as np
import tensorflow as tf

from train.layers.random_bits import KEY_WORDS, draw_bits, fall_under, fold_in, to_integers
from train.runtime.named_scopes import named
from train.tasks.masking_rule import MAX_SPAN_TOKENS, MAX_WORD_TOKENS, MaskingRule


class MaskedRows(NamedTuple):
    """Rows with some of their tokens hidden from the model, which has to predict them."""

    original_ids: tf.Tensor  # int32 (batch, length)
    input_ids: tf.Tensor  # int32 (batch, length), what the model sees
    is_masked: tf.Tensor  # bool (batch, length), whether the token must be predicted


class Predictions(NamedTuple):
    """The masked tokens of a batch, in a fixed number of slots; `weights` is 0 at slots that are not used."""

    positions: tf.Tensor  # int32 (num_predictions,), into the rows laid end to end
    labels: tf.Tensor  # int32 (num_predictions,)
    weights: tf.Tensor  # float32 (num_predictions,)


# The random streams of a row: of its masks, and of the order of its segments.
CHOICE, REPLACEMENT, SPAN, FATE = range(4)
ORDER = 16

# Lengths of spans, in words: SpanBERT's (Joshi et al. 2019, section 3.1), whose mean is 3.8.
SPAN_CONTINUES = 0.8
MAX_SPAN_WORDS = 10


@named("masks")
def mask_rows(input_ids: tf.Tensor, row_keys: tf.Tensor, rule: MaskingRule) -> MaskedRows:
    """Mask rows; the masks of each depend on its key and tokens alone.

    One draw of 32 bits both selects a token and decides its replacement. In a whole word, selected by the bits of its
    first token, each token is replaced independently, as in BERT's whole-word models; in a span all tokens are replaced
    alike, as in SpanBERT (Joshi et al. 2019, section 3.1).

    Args:
        input_ids: int32 (batch, length), static shape.
        row_keys: uint32 (batch, KEY_WORDS).
    """
    length = input_ids.shape[1:]
    num_ordinary = rule.vocabulary_size - len(rule.special_ids)
    ordinary_index = to_integers(draw_bits(fold_in(row_keys, REPLACEMENT), length), num_ordinary)

    special = is_special(input_ids, rule.special_ids)
    choice = draw_bits(fold_in(row_keys, CHOICE), length)
    if rule.masking != "token":
        first_tokens = _first_tokens_of_units(input_ids, special, fold_in(row_keys, SPAN), rule)
        choice = tf.gather(choice, first_tokens, axis=1, batch_dims=1)
    fate, share = choice, rule.mlm_probability
    if rule.masking == "whole_word":
        fate, share = draw_bits(fold_in(row_keys, FATE), length), 1.0

    is_masked = fall_under(choice, rule.mlm_probability) & ~special
    masked_share = share * rule.mask_token_rate
    replaced_share = masked_share + share * rule.random_token_rate
    hidden = tf.where(fall_under(fate, replaced_share), _skip_special(ordinary_index, rule.special_ids), input_ids)
    hidden = tf.where(fall_under(fate, masked_share), rule.mask_token_id, hidden)
    return MaskedRows(input_ids, tf.where(is_masked, hidden, input_ids), is_masked)


def _first_tokens_of_units(
    input_ids: tf.Tensor, special: tf.Tensor, row_keys: tf.Tensor, rule: MaskingRule
) -> tf.Tensor:
    if rule.word_starts is None:
        raise ValueError(f"Masking by {rule.masking} needs the table of word starts.")
    words = first_tokens_of_words(input_ids, special, rule.word_starts)
    return words if rule.masking == "whole_word" else first_tokens_of_spans(words, special, row_keys)


def mask_row_by_content(input_ids: tf.Tensor, rule: MaskingRule) -> MaskedRows:
    """Mask one row, int32 (length,), as a function of its tokens.

    Evaluation uses it: whatever the order, batch size or number of replicas, a row has the same masks.
    """
    masked = mask_rows(input_ids[tf.newaxis], key_of_content(input_ids), rule)
    return MaskedRows(*(tensor[0] for tensor in masked))


def key_of_content(input_ids: tf.Tensor) -> tf.Tensor:
    """Make the key of one row, int32 (length,), from its tokens: uint32 (1, KEY_WORDS)."""
    fingerprint = tf.fingerprint(input_ids[tf.newaxis])  # uint8 (1, 8), FarmHash64
    return tf.bitcast(tf.reshape(fingerprint, (1, KEY_WORDS, 4)), tf.uint32)


@named("masks")
def collect_predictions(rows: MaskedRows, num_predictions: int) -> Predictions:
    """Collect where the masked tokens are and what they were; those over `num_predictions` are not predicted."""
    rank = tf.cumsum(tf.cast(tf.reshape(rows.is_masked, (-1,)), tf.int32))  # (batch * length,)
    # The n-th masked token is where the rank first reaches n. XLA compiles this to comparisons, not to a sort.
    positions = tf.searchsorted(rank, tf.range(1, num_predictions + 1))
    is_used = tf.range(num_predictions) < rank[-1]
    positions = tf.where(is_used, positions, 0)
    labels = tf.gather(tf.reshape(rows.original_ids, (-1,)), positions)
    return Predictions(positions, labels, tf.cast(is_used, tf.float32))


@named("fill_in")
def fill_in(rows: MaskedRows, logits: tf.Tensor, draws: tf.Tensor) -> tf.Tensor:
    """Replace masked tokens by ones drawn from a model's distributions, int32 (batch, length); no gradient flows.

    Args:
        rows: those over the slots keep their masked tokens as they were.
        logits: (slots, vocabulary), of a slot of `collect_predictions` each; any float type.
        draws: uint32 (batch, length), uniform: a token is the first up to which the probabilities reach its draw.
    """
    num_slots = logits.shape[0]
    totals = tf.cumsum(tf.nn.softmax(tf.cast(tf.stop_gradient(logits), tf.float32)), axis=-1)  # (slots, vocabulary)
    bits = tf.gather(tf.reshape(draws, (-1,)), collect_predictions(rows, num_slots).positions)
    # Exact, above 0 and below 1; the last total is not quite 1.
    uniform = (tf.cast(tf.bitwise.right_shift(bits, tf.constant(9, tf.uint32)), tf.float32) + 0.5) / 2**23
    limits = uniform * totals[:, -1]
    drawn = tf.reduce_sum(tf.cast(totals < limits[:, tf.newaxis], tf.int32), axis=-1)
    is_masked = tf.reshape(rows.is_masked, (-1,))
    slot = tf.cumsum(tf.cast(is_masked, tf.int32)) - 1
    filled = tf.gather(drawn, tf.clip_by_value(slot, 0, num_slots - 1))
    ids = tf.where(is_masked & (slot < num_slots), filled, tf.reshape(rows.original_ids, (-1,)))
    return tf.reshape(ids, rows.original_ids.shape)


def is_special(input_ids: tf.Tensor, special_ids: tuple[int, ...]) -> tf.Tensor:
    return tf.reduce_any(input_ids[..., tf.newaxis] == tf.constant(special_ids, tf.int32), axis=-1)


def _skip_special(ordinary_index: tf.Tensor, special_ids: tuple[int, ...]) -> tf.Tensor:
    """Find the id of the n-th token that is not special, for n from 0."""
    ids = ordinary_index
    for special_id in sorted(special_ids):
        ids += tf.cast(ids >= special_id, tf.int32)
    return ids


# Units that are masked as a whole, words or spans of words: for each token, the first token of its unit. They cover
# every row without gaps, and each is masked or not with the same probability, whatever its size: so the expected
# fraction of masked tokens is that probability. All is arithmetic on whole rows, without a loop over tokens.


def first_tokens_of_words(input_ids: tf.Tensor, is_special: tf.Tensor, word_starts: np.ndarray) -> tf.Tensor:
    """Find for each token the position of the first token of its word, int32 (batch, length).

    A word starts where the table says so, at the start of a row, and at and after a special token. A longer one than
    `MAX_WORD_TOKENS` counts as several words, since in scripts without spaces a word may be a paragraph.

    Args:
        input_ids: int32 (batch, length).
        is_special: bool (batch, length).
        word_starts: bool (vocabulary,), whether a word starts with the token.
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
    """Return where a unit starts in any case: at and after a special token, and at the start of a row."""
    return is_special | tf.pad(is_special[:, :-1], ((0, 0), (1, 0)), constant_values=True)


def _first_tokens(begins: tf.Tensor, max_tokens: int) -> tf.Tensor:
    """Find for each token the position of its unit's first, for units that start at `begins`, cut to `max_tokens`."""
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


class PairRows(NamedTuple):
    """Masked rows, each with a question about its pair of segments."""

    masked: MaskedRows
    labels: tf.Tensor  # int32 (batch,), the right answer, 0 or 1
    weights: tf.Tensor  # float32 (batch,), of its loss relative to that of a masked token; 0 without question


def token_types(input_ids: tf.Tensor, sep_id: int, pad_id: int) -> tf.Tensor:
    """Return the segment of each token, int32 (batch, length): 1 after the first [SEP]; before, and in padding, 0."""
    num_ended = tf.cumsum(tf.cast(input_ids == sep_id, tf.int32), axis=1, exclusive=True)
    return tf.where(input_ids == pad_id, 0, tf.minimum(num_ended, 1))


@named("swap")
def swap_some(input_ids: tf.Tensor, row_keys: tf.Tensor, sep_id: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Swap the segments of half of the rows; which depends on the key of each alone.

    Args:
        input_ids: int32 (batch, length), of rows with two [SEP]; results for others must not be used.
        row_keys: uint32 (batch, KEY_WORDS).
        sep_id: of [SEP].

    Returns:
        The rows, int32 (batch, length), and whether they were swapped, bool (batch,).
    """
    is_swapped = fall_under(draw_bits(fold_in(row_keys, ORDER), ()), 0.5)  # (batch,)
    return tf.where(is_swapped[:, tf.newaxis], swapped(input_ids, sep_id), input_ids), is_swapped


def swapped(input_ids: tf.Tensor, sep_id: int) -> tf.Tensor:
    """Turn `[CLS] A [SEP] B [SEP]` into `[CLS] B [SEP] A [SEP]`, whatever follows: int32 (batch, length)."""
    places = tf.range(input_ids.shape[1])
    is_sep = input_ids == sep_id
    first = tf.argmax(is_sep, axis=1, output_type=tf.int32)[:, tf.newaxis]  # (batch, 1), the earliest one
    last = tf.reduce_max(tf.where(is_sep, places, 0), axis=1, keepdims=True)
    middle = last - first  # the new place of the [SEP] between them
    source = tf.where(places < middle, places + first, tf.where(places == middle, first, places - middle))
    source = tf.where((places == 0) | (places >= last), places, source)
    return tf.gather(input_ids, source, axis=1, batch_dims=1)


@named("pair_loss")
def pair_losses(logits: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Compute cross-entropy in nats, and whether the larger logit is right, both float32 (batch,).

    Args:
        logits: (batch, 2), any float type; the loss is computed in float32.
        labels: int32 (batch,), 0 or 1.
    """
    logits = tf.cast(logits, tf.float32)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    is_right = tf.cast(logits[:, 1] > logits[:, 0], tf.int32) == labels
    return losses, tf.cast(is_right, tf.float32)
