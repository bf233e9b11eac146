"""Masks drawn in-graph: a pure function of a seed, the same bits on every device and inside and outside XLA."""

from typing import NamedTuple

import tensorflow as tf

from train.masking_rule import MaskingRule

# Named, since "auto_select" differs between devices.
RANDOM_ALGORITHM = "philox"


class MaskedBatch(NamedTuple):
    """Rows with tokens hidden, and what is to be predicted where. `weights` is 0 at slots that are not used."""

    input_ids: tf.Tensor  # int32 (batch, length)
    positions: tf.Tensor  # int32 (batch, num_predictions)
    labels: tf.Tensor  # int32 (batch, num_predictions)
    weights: tf.Tensor  # float32 (batch, num_predictions)


def mask_rows(
    input_ids: tf.Tensor, seed: tf.Tensor, rule: MaskingRule, *, num_global_rows: int, first_row: int | tf.Tensor
) -> MaskedBatch:
    """Return the masked form of rows `first_row` and following of a batch of `num_global_rows`.

    The bits are drawn for the whole global batch and cut, so that a row's masks do not depend on the number of
    replicas.

    Args:
        input_ids: int32 (batch, length), static shape.
        seed: int32 (2,); the same one gives the same masks.
        rule: rates and special ids.
        num_global_rows: rows of the global batch.
        first_row: where this batch begins in it.
    """
    batch, length = input_ids.shape
    seeds = tf.random.split(seed, 2, alg=RANDOM_ALGORITHM)

    def draw(draw_seed: tf.Tensor, minval: int | None, maxval: int | None, dtype: tf.DType) -> tf.Tensor:
        bits = tf.random.stateless_uniform(
            (num_global_rows, length), draw_seed, minval=minval, maxval=maxval, dtype=dtype, alg=RANDOM_ALGORITHM
        )
        return tf.slice(bits, (first_row, 0), (batch, length))

    num_ordinary_tokens = rule.vocabulary_size - len(rule.special_ids)
    selection = draw(seeds[0], None, None, tf.uint32)
    replacement = draw(seeds[1], 0, num_ordinary_tokens, tf.int32)
    return _apply(input_ids, selection, _skip_special(replacement, rule.special_ids), rule)


def mask_row_by_content(input_ids: tf.Tensor, rule: MaskingRule) -> MaskedBatch:
    """Return one row, int32 (length,), masked as a function of its own tokens: (length,) and (num_predictions,).

    Evaluation uses it: whatever the order, batch size or number of replicas, a row has the same masks.
    """
    fingerprint = tf.fingerprint(input_ids[tf.newaxis])  # uint8 (1, 8), FarmHash64
    seed = tf.bitcast(tf.reshape(fingerprint, (2, 4)), tf.int32)  # (2,)
    masked = mask_rows(input_ids[tf.newaxis], seed, rule, num_global_rows=1, first_row=0)
    return MaskedBatch(*(tensor[0] for tensor in masked))


def _apply(input_ids: tf.Tensor, selection: tf.Tensor, replacement: tf.Tensor, rule: MaskingRule) -> MaskedBatch:
    """Hide the selected tokens: one draw of 32 bits both selects a token and says what becomes of it."""
    length = input_ids.shape[1]
    num_predictions = rule.num_predictions(length)
    selected = _falls_under(selection, rule.mlm_probability) & ~is_special(input_ids, rule.special_ids)
    rank = tf.cumsum(tf.cast(selected, tf.int32), axis=1, exclusive=True)  # (batch, length)
    selected &= rank < num_predictions

    masked_share = rule.mlm_probability * rule.mask_token_rate
    replaced_share = masked_share + rule.mlm_probability * rule.random_token_rate
    hidden = tf.where(_falls_under(selection, replaced_share), replacement, input_ids)
    hidden = tf.where(_falls_under(selection, masked_share), rule.mask_token_id, hidden)

    # Comparing ranks with slots instead of sorting: a sort is slow on TPU.
    in_slot = selected[:, tf.newaxis, :] & (rank[:, tf.newaxis, :] == tf.range(num_predictions)[:, tf.newaxis])
    positions = tf.reduce_sum(tf.where(in_slot, tf.range(length), 0), axis=2)  # (batch, num_predictions)
    num_selected = tf.reduce_sum(tf.cast(selected, tf.int32), axis=1, keepdims=True)
    return MaskedBatch(
        input_ids=tf.where(selected, hidden, input_ids),
        positions=positions,
        labels=tf.gather(input_ids, positions, batch_dims=1),
        weights=tf.cast(tf.range(num_predictions) < num_selected, tf.float32),
    )


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
