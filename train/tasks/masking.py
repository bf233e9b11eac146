"""Masks drawn in-graph: a pure function of a seed, the same bits on every device and inside and outside XLA."""

from typing import NamedTuple

import tensorflow as tf

from train.model.random_bits import RANDOM_ALGORITHM, draw_bits, draw_integers
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


@named("masks")
def mask_rows(
    input_ids: tf.Tensor, seed: tf.Tensor, rule: MaskingRule, *, first_row: int | tf.Tensor = 0
) -> MaskedRows:
    """Return rows of a global batch, masked; a row's masks depend on the seed and on its place in the batch alone.

    One draw of 32 bits both selects a token and says what becomes of it. Of a whole word, selected by the bits of its
    first token, each token has a fate of its own, as in BERT's whole-word models; a span's is one for all its tokens,
    as in SpanBERT (Joshi et al. 2019, section 3.1).

    Args:
        input_ids: int32 (batch, length), static shape.
        seed: int32 (2,); the same one gives the same masks.
        rule: what is masked, rates and special ids.
        first_row: where these rows begin in the global batch.
    """
    num_rows, length = input_ids.shape
    place = (num_rows, length, first_row)
    seeds = tf.random.split(seed, 2, alg=RANDOM_ALGORITHM)
    unit_seeds = tf.random.split(seeds[0], 2, alg=RANDOM_ALGORITHM)
    num_ordinary = rule.vocabulary_size - len(rule.special_ids)
    ordinary_index = draw_integers(seeds[1], *place, num_values=num_ordinary)

    special = is_special(input_ids, rule.special_ids)
    choice = draw_bits(seeds[0], *place)
    if rule.masking != "token":
        first_tokens = _first_tokens_of_units(input_ids, special, unit_seeds[0], rule, first_row)
        choice = tf.gather(choice, first_tokens, axis=1, batch_dims=1)
    fate, share = choice, rule.mlm_probability
    if rule.masking == "whole_word":
        fate, share = draw_bits(unit_seeds[1], *place), 1.0

    is_masked = _falls_under(choice, rule.mlm_probability) & ~special
    masked_share = share * rule.mask_token_rate
    replaced_share = masked_share + share * rule.random_token_rate
    hidden = tf.where(_falls_under(fate, replaced_share), _skip_special(ordinary_index, rule.special_ids), input_ids)
    hidden = tf.where(_falls_under(fate, masked_share), rule.mask_token_id, hidden)
    return MaskedRows(input_ids, tf.where(is_masked, hidden, input_ids), is_masked)


def _first_tokens_of_units(
    input_ids: tf.Tensor, special: tf.Tensor, seed: tf.Tensor, rule: MaskingRule, first_row: int | tf.Tensor
) -> tf.Tensor:
    if rule.word_starts is None:
        raise ValueError(f"Masking by {rule.masking} needs the table of word starts.")
    words = first_tokens_of_words(input_ids, special, rule.word_starts)
    return words if rule.masking == "whole_word" else first_tokens_of_spans(words, special, seed, first_row)


def mask_row_by_content(input_ids: tf.Tensor, rule: MaskingRule) -> MaskedRows:
    """Return one row, int32 (length,), masked as a function of its own tokens.

    Evaluation uses it: whatever the order, batch size or number of replicas, a row has the same masks.
    """
    fingerprint = tf.fingerprint(input_ids[tf.newaxis])  # uint8 (1, 8), FarmHash64
    seed = tf.bitcast(tf.reshape(fingerprint, (2, 4)), tf.int32)  # (2,)
    masked = mask_rows(input_ids[tf.newaxis], seed, rule)
    return MaskedRows(*(tensor[0] for tensor in masked))


@named("masks")
def collect_predictions(rows: MaskedRows, num_predictions: int) -> Predictions:
    """Return where the masked tokens are and what they were; those over `num_predictions` are not predicted."""
    rank = tf.cumsum(tf.cast(tf.reshape(rows.is_masked, (-1,)), tf.int32))  # (batch * length,)
    # The n-th masked token stands where the rank first reaches n. XLA makes comparisons of it, where others sort.
    positions = tf.searchsorted(rank, tf.range(1, num_predictions + 1))
    is_used = tf.range(num_predictions) < rank[-1]
    positions = tf.where(is_used, positions, 0)
    labels = tf.gather(tf.reshape(rows.original_ids, (-1,)), positions)
    return Predictions(positions, labels, tf.cast(is_used, tf.float32))


def is_special(input_ids: tf.Tensor, special_ids: tuple[int, ...]) -> tf.Tensor:
    """Return bool, of the shape of `input_ids`: whether a token is one of the special ones."""
    return tf.reduce_any(input_ids[..., tf.newaxis] == tf.constant(special_ids, tf.int32), axis=-1)


def _falls_under(bits: tf.Tensor, probability: float) -> tf.Tensor:
    """Return whether uniform uint32 `bits` fall under `probability`, exactly never at 0 and always at 1.

    Integers are compared, since float draws differ between devices.
    """
    threshold = round(min(max(probability, 0.0), 1.0) * 2**32)
    if threshold == 0:
        return tf.zeros_like(bits, tf.bool)
    return bits <= tf.constant(threshold - 1, tf.uint32)


def _skip_special(ordinary_index: tf.Tensor, special_ids: tuple[int, ...]) -> tf.Tensor:
    """Return the id of the n-th token that is not special, for n from 0."""
    ids = ordinary_index
    for special_id in sorted(special_ids):
        ids += tf.cast(ids >= special_id, tf.int32)
    return ids
