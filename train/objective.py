"""The MLM objective: cross-entropy and accuracy as sums, so that batches and replicas add up exactly."""

from typing import NamedTuple

import tensorflow as tf


class MaskedSums(NamedTuple):
    """Float32 scalars over the masked tokens of a batch."""

    loss: tf.Tensor  # cross-entropy, nats
    num_correct: tf.Tensor
    num_masked: tf.Tensor


def masked_sums(logits: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor) -> MaskedSums:
    """Return loss, correct predictions and number of masked tokens, each summed over the slots in use.

    Args:
        logits: (num_predictions, vocabulary), any float type; the loss is computed in float32.
        labels: int32 (num_predictions,).
        weights: float32 (num_predictions,), 1 where a slot is used, else 0.
    """
    logits = tf.cast(logits, tf.float32)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)  # (num_predictions,)
    correct = tf.cast(tf.argmax(logits, axis=-1, output_type=tf.int32) == labels, tf.float32)
    return MaskedSums(
        loss=tf.reduce_sum(losses * weights),
        num_correct=tf.reduce_sum(correct * weights),
        num_masked=tf.reduce_sum(weights),
    )
