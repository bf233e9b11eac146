"""Masks drawn in-graph: a pure function of keys of the rows, the same on every device and inside and outside XLA."""

from typing import NamedTuple

import tensorflow as tf

from train.model.random_bits import KEY_WORDS, draw_bits, fall_under, fold_in, to_integers
from train.runtime.named_scopes import named
from train.tasks.masking_rule import MaskingRule
from train.tasks.words_and_spans import first_tokens_of_spans, first_tokens_of_words


class MaskedRows(NamedTuple):
    """Rows with some of their tokens hidden from the model, which has to predict them."""

    original_ids: tf.Tensor  # int32 (batch, length)
    input_ids: tf.Tensor  # int32 (batch, length), what the model sees
    is_masked: tf.Tensor  # bool (batch, length), whether the token is to be predicted


class Predictions(NamedTuple):
    """The masked tokens of a batch, in a fixed number of slots; `weights` is 0 at slots that are not used."""

    positions: tf.Tensor  # int32 (num_predictions,), into the rows laid end to end
    labels: tf.Tensor  # int32 (num_predictions,)
    weights: tf.Tensor  # float32 (num_predictions,)


# What is drawn for each row.
CHOICE, REPLACEMENT, SPAN, FATE = range(4)


@named("masks")
def mask_rows(input_ids: tf.Tensor, row_keys: tf.Tensor, rule: MaskingRule) -> MaskedRows:
    """Mask rows; the masks of each depend on its key and tokens alone.

    One draw of 32 bits both selects a token and says what becomes of it. Of a whole word, selected by the bits of its
    first token, each token has a fate of its own, as in BERT's whole-word models; a span's is one for all its tokens,
    as in SpanBERT (Joshi et al. 2019, section 3.1).

    Args:
        input_ids: int32 (batch, length), static shape.
        row_keys: uint32 (batch, KEY_WORDS).
        rule: what is masked, rates and special ids.
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
    """Mask one row, int32 (length,), as a function of its own tokens.

    Evaluation uses it: whatever the order, batch size or number of replicas, a row has the same masks.
    """
    fingerprint = tf.fingerprint(input_ids[tf.newaxis])  # uint8 (1, 8), FarmHash64
    row_keys = tf.bitcast(tf.reshape(fingerprint, (1, KEY_WORDS, 4)), tf.uint32)  # (1, KEY_WORDS)
    masked = mask_rows(input_ids[tf.newaxis], row_keys, rule)
    return MaskedRows(*(tensor[0] for tensor in masked))


@named("masks")
def collect_predictions(rows: MaskedRows, num_predictions: int) -> Predictions:
    """Collect where the masked tokens are and what they were; those over `num_predictions` are not predicted."""
    rank = tf.cumsum(tf.cast(tf.reshape(rows.is_masked, (-1,)), tf.int32))  # (batch * length,)
    # The n-th masked token stands where the rank first reaches n. XLA makes comparisons of it, where others sort.
    positions = tf.searchsorted(rank, tf.range(1, num_predictions + 1))
    is_used = tf.range(num_predictions) < rank[-1]
    positions = tf.where(is_used, positions, 0)
    labels = tf.gather(tf.reshape(rows.original_ids, (-1,)), positions)
    return Predictions(positions, labels, tf.cast(is_used, tf.float32))


def is_special(input_ids: tf.Tensor, special_ids: tuple[int, ...]) -> tf.Tensor:
    """Tell, as bool of the shape of `input_ids`, whether a token is one of the special ones."""
    return tf.reduce_any(input_ids[..., tf.newaxis] == tf.constant(special_ids, tf.int32), axis=-1)


def _skip_special(ordinary_index: tf.Tensor, special_ids: tuple[int, ...]) -> tf.Tensor:
    """Find the id of the n-th token that is not special, for n from 0."""
    ids = ordinary_index
    for special_id in sorted(special_ids):
        ids += tf.cast(ids >= special_id, tf.int32)
    return ids
