"""Rows of two segments, in-graph: where the second starts, their order swapped, and the loss of the answers."""

from typing import NamedTuple

import tensorflow as tf

from train.layers.random_bits import draw_bits, fall_under, fold_in
from train.runtime.named_scopes import named
from train.tasks.masking import MaskedRows

# The random stream of a row for its order; its masks use others (`train.tasks.masking`).
ORDER = 16


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
