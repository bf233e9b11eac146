"""Prepare rows in-graph: draw masks, and swap the two segments of a row. Also compute the loss of pairs of segments.

For each pair, a model predicts whether the segments belong together (BERT) or are in the right order (ALBERT). All
results depend only on the keys and content of the rows, and are the same on every device, with and without XLA.
"""

from typing import NamedTuple

import numpy as np
import tensorflow as tf

from train.layers.random_bits import KEY_WORDS, draw_bits, fall_under, fold_in, to_integers
from train.runtime.named_scopes import named
from train.tasks.masking_rule import MAX_SPAN_TOKENS, MAX_WORD_TOKENS, SLOT_MULTIPLE, MaskingRule


class MaskedRows(NamedTuple):
    """Rows in which some tokens are hidden from the model, which has to predict them."""

    original_ids: tf.Tensor  # int32 (batch, length)
    input_ids: tf.Tensor  # int32 (batch, length), the tokens that the model sees
    is_masked: tf.Tensor  # bool (batch, length), whether the model must predict the token


class Predictions(NamedTuple):
    """The masked tokens of a batch, in a fixed number of slots."""

    positions: tf.Tensor  # int32 (num_predictions,), indices into the concatenated rows
    labels: tf.Tensor  # int32 (num_predictions,), ids of the masked tokens
    weights: tf.Tensor  # float32 (num_predictions,), 1 if the slot is used, else 0


# Numbers of a row's random streams: for the row's masks, and for the order of its segments.
CHOICE, REPLACEMENT, SPAN, FATE = range(4)
ORDER = 16

# Distribution of the lengths of spans, in words. It is the same as in SpanBERT (Joshi et al. 2019, section 3.1), with a
# mean of 3.8.
SPAN_CONTINUES = 0.8
MAX_SPAN_WORDS = 10


@named("masks")
def mask_rows(input_ids: tf.Tensor, row_keys: tf.Tensor, rule: MaskingRule) -> MaskedRows:
    """Mask rows. The masks of a row depend only on its key and its tokens.

    A single draw of 32 bits per token selects the token and decides how it is replaced. Words and spans are selected by
    the draw of their first token. In a whole word, each token is replaced independently, as in BERT's whole-word
    models. In a span, all tokens are replaced in the same way, as in SpanBERT (Joshi et al. 2019, section 3.1).

    Args:
        input_ids: int32 (batch, length), with a static shape.
        row_keys: random keys of the rows, uint32 (batch, KEY_WORDS).
        rule: which tokens are masked, and how.
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
    """Mask a row, int32 (length,), depending only on its tokens.

    Evaluation masks like this, so that a row has the same masks for any order, batch size and number of replicas.
    """
    masked = mask_rows(input_ids[tf.newaxis], key_of_content(input_ids), rule)
    return MaskedRows(*(tensor[0] for tensor in masked))


def key_of_content(input_ids: tf.Tensor) -> tf.Tensor:
    """Return the random key of a row, int32 (length,), computed from its tokens: uint32 (1, KEY_WORDS)."""
    fingerprint = tf.fingerprint(input_ids[tf.newaxis])  # uint8 (1, 8), FarmHash64
    return tf.bitcast(tf.reshape(fingerprint, (1, KEY_WORDS, 4)), tf.uint32)


@named("masks")
def collect_predictions(rows: MaskedRows, num_predictions: int | tf.Tensor) -> Predictions:
    """Return positions and ids of the masked tokens. Masked tokens after the first `num_predictions` are ignored."""
    rank = tf.cumsum(tf.cast(tf.reshape(rows.is_masked, (-1,)), tf.int32))  # (batch * length,)
    # The n-th masked token is at the first position with rank n. XLA compiles this to comparisons, not to a sort.
    positions = tf.searchsorted(rank, tf.range(1, num_predictions + 1))
    is_used = tf.range(num_predictions) < rank[-1]
    positions = tf.where(is_used, positions, 0)
    labels = tf.gather(tf.reshape(rows.original_ids, (-1,)), positions)
    return Predictions(positions, labels, tf.cast(is_used, tf.float32))


def num_needed_slots(is_masked: tf.Tensor, max_slots: int) -> tf.Tensor:
    """Return a multiple of SLOT_MULTIPLE that is enough for the masked tokens, or `max_slots` if that is less.

    Args:
        is_masked: bool (batch, length).
        max_slots: the number of slots that XLA would compute.
    """
    num_masked = tf.reduce_sum(tf.cast(is_masked, tf.int32))
    return tf.clip_by_value(-(-num_masked // SLOT_MULTIPLE) * SLOT_MULTIPLE, min(SLOT_MULTIPLE, max_slots), max_slots)


@named("fill_in")
def fill_in(rows: MaskedRows, logits: tf.Tensor, draws: tf.Tensor) -> tf.Tensor:
    """Replace masked tokens with tokens sampled from a model's predictions, int32 (batch, length), without gradient.

    Args:
        rows: masked rows. Masked tokens without a slot keep their original ids.
        logits: (slots, vocabulary), for the slots of `collect_predictions`; any float type.
        draws: uniform random bits, uint32 (batch, length). The sampled token is the first token whose cumulative
            probability reaches the draw.
    """
    num_slots = logits.shape[0] or tf.shape(logits)[0]
    totals = tf.cumsum(tf.nn.softmax(tf.cast(tf.stop_gradient(logits), tf.float32)), axis=-1)  # (slots, vocabulary)
    bits = tf.gather(tf.reshape(draws, (-1,)), collect_predictions(rows, num_slots).positions)
    # The draws become exact numbers above 0 and below 1. They are multiplied by the last cumulative probability,
    # because rounding makes it differ from 1.
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
    """Return the id of the n-th ordinary token, counted from 0, given n (`ordinary_index`)."""
    ids = ordinary_index
    for special_id in sorted(special_ids):
        ids += tf.cast(ids >= special_id, tf.int32)
    return ids


# The following functions find units (words, or spans of words) that are masked as a whole: for each token, the first
# token of its unit. Units cover a row without gaps, and each unit is masked with the same probability, whatever its
# size. So the expected fraction of masked tokens equals this probability. All functions process whole rows, without a
# loop over tokens.


def first_tokens_of_words(input_ids: tf.Tensor, is_special: tf.Tensor, word_starts: np.ndarray) -> tf.Tensor:
    """Return, for each token, the position of the first token of its word, int32 (batch, length).

    A word starts at tokens in the table, at the start of a row, and at and after a special token. A word longer than
    `MAX_WORD_TOKENS` is divided, because in scripts without spaces a word may be a paragraph.

    Args:
        input_ids: int32 (batch, length).
        is_special: whether tokens are special, bool (batch, length).
        word_starts: whether a word starts with the token, bool (vocabulary,).
    """
    # The table is not a constant of booleans, because the TPU compiler cannot read such constants from TensorFlow.
    starts = tf.gather(tf.constant(word_starts, tf.int8), input_ids) > 0
    return _first_tokens(starts | _forced_starts(is_special), MAX_WORD_TOKENS)


def first_tokens_of_spans(words: tf.Tensor, is_special: tf.Tensor, row_keys: tf.Tensor) -> tf.Tensor:
    """Return, for each token, the position of the first token of its span, int32 (batch, length).

    Each row is divided into spans of whole words with random lengths. A span ends early at a special token, and after
    `MAX_SPAN_TOKENS` tokens.

    Args:
        words: result of `first_tokens_of_words`.
        is_special: whether tokens are special, bool (batch, length).
        row_keys: random keys for the lengths, uint32 (batch, KEY_WORDS).
    """
    length = words.shape[1]
    # No row has more spans than tokens.
    ends = tf.cumsum(span_lengths(draw_bits(row_keys, (length,))), axis=1)
    word = tf.cumsum(tf.cast(words == tf.range(length), tf.int32), axis=1) - 1  # index in the row, (batch, length)
    span = tf.searchsorted(ends, word, side="right")  # number of spans that have ended
    starts = span != tf.pad(span[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    return _first_tokens(starts | _forced_starts(is_special), MAX_SPAN_TOKENS)


def span_lengths(bits: tf.Tensor) -> tf.Tensor:
    """Return random lengths, int32 of the shape of `bits`, with a geometric distribution truncated at 10.

    Integers are compared, because floats drawn from bits differ between devices.

    Args:
        bits: uniform random bits, uint32.
    """
    longest = SPAN_CONTINUES**MAX_SPAN_WORDS
    exceeds = [(SPAN_CONTINUES**length - longest) / (1 - longest) for length in range(1, MAX_SPAN_WORDS)]
    thresholds = tf.constant([round(probability * 2**32) for probability in exceeds], tf.uint32)
    return 1 + tf.reduce_sum(tf.cast(bits[..., tf.newaxis] < thresholds, tf.int32), axis=-1)


def _forced_starts(is_special: tf.Tensor) -> tf.Tensor:
    """Return where a unit must start: at and after a special token, and at the start of a row."""
    return is_special | tf.pad(is_special[:, :-1], ((0, 0), (1, 0)), constant_values=True)


def _first_tokens(starts: tf.Tensor, max_tokens: int) -> tf.Tensor:
    """Return, for each token, the position of its unit's first token. Units are divided every `max_tokens` tokens.

    Args:
        starts: where units start, bool (batch, length).
        max_tokens: maximum number of tokens of a unit.
    """
    positions = tf.range(starts.shape[1])
    first = _latest(starts)
    return first + (positions - first) // max_tokens * max_tokens


def _latest(starts: tf.Tensor) -> tf.Tensor:
    """Return the latest start at or before each token, int32 (batch, length). `starts` must be true at position 0."""
    length = starts.shape[1]
    latest = tf.where(starts, tf.range(length), 0)
    reach = 1
    while reach < length:  # XLA has no running maximum, so each pass doubles the range
        latest = tf.maximum(latest, tf.pad(latest[:, :-reach], ((0, 0), (reach, 0))))
        reach *= 2
    return latest


class PairRows(NamedTuple):
    """Masked rows, each with a question about its two segments."""

    masked: MaskedRows
    labels: tf.Tensor  # int32 (batch,), the right answer, 0 or 1
    weights: tf.Tensor  # float32 (batch,), weight relative to a masked token's loss; 0 if the row has no question


def token_types(input_ids: tf.Tensor, sep_id: int, pad_id: int) -> tf.Tensor:
    """Return the segment of each token, int32 (batch, length): 1 after the first [SEP], 0 before it and in padding."""
    num_ended = tf.cumsum(tf.cast(input_ids == sep_id, tf.int32), axis=1, exclusive=True)
    return tf.where(input_ids == pad_id, 0, tf.minimum(num_ended, 1))


@named("swap")
def swap_some(input_ids: tf.Tensor, row_keys: tf.Tensor, sep_id: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Swap the segments of half of the rows. Whether a row is swapped depends only on its key.

    Args:
        input_ids: rows with two [SEP], int32 (batch, length). Results for other rows are meaningless.
        row_keys: random keys of the rows, uint32 (batch, KEY_WORDS).
        sep_id: id of [SEP].

    Returns:
        The rows, int32 (batch, length), and whether they were swapped, bool (batch,).
    """
    is_swapped = fall_under(draw_bits(fold_in(row_keys, ORDER), ()), 0.5)  # (batch,)
    return tf.where(is_swapped[:, tf.newaxis], swapped(input_ids, sep_id), input_ids), is_swapped


def swapped(input_ids: tf.Tensor, sep_id: int) -> tf.Tensor:
    """Turn `[CLS] A [SEP] B [SEP] …` into `[CLS] B [SEP] A [SEP] …`, int32 (batch, length)."""
    places = tf.range(input_ids.shape[1])
    is_sep = input_ids == sep_id
    first = tf.argmax(is_sep, axis=1, output_type=tf.int32)[:, tf.newaxis]  # place of the first [SEP], (batch, 1)
    last = tf.reduce_max(tf.where(is_sep, places, 0), axis=1, keepdims=True)
    middle = last - first  # new place of the first [SEP]
    source = tf.where(places < middle, places + first, tf.where(places == middle, first, places - middle))
    source = tf.where((places == 0) | (places >= last), places, source)
    return tf.gather(input_ids, source, axis=1, batch_dims=1)


@named("pair_loss")
def pair_losses(logits: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return the cross-entropy in nats, and 1 if the larger logit is the label's, else 0; both float32 (batch,).

    Args:
        logits: (batch, 2), any float type; the loss is computed in float32.
        labels: int32 (batch,), 0 or 1.
    """
    logits = tf.cast(logits, tf.float32)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    is_right = tf.cast(logits[:, 1] > logits[:, 0], tf.int32) == labels
    return losses, tf.cast(is_right, tf.float32)
