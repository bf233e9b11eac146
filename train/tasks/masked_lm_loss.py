"""Cross-entropy and accuracy of masked tokens as sums, so that batches and replicas add up exactly."""

import numpy as np
import tensorflow as tf

from train.runtime.named_scopes import named

# Added to the logits of padding in the vocabulary: e to it is 0, and 0 times it is 0, as of infinity it would not be.
NEVER = -1e30


@named("loss")
def masked_lm_loss(
    logits: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor, *, vocabulary_size: int | None = None
) -> dict[str, tf.Tensor]:
    """Add up cross-entropy, correct predictions and number of masked tokens over the slots in use.

    Args:
        logits: (num_predictions, vocabulary), any float type; the loss is computed in float32.
        labels: int32 (num_predictions,).
        weights: float32 (num_predictions,), 1 where a slot is used, else 0.
        vocabulary_size: ids from here on cannot be predicted and get no gradient; by default there are none.

    Returns:
        Float32 scalars: `loss` (nats), `num_correct`, `num_masked`.
    """
    logits = _without_padding(tf.cast(logits, tf.float32), vocabulary_size)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)  # (num_predictions,)
    correct = tf.cast(tf.argmax(logits, axis=-1, output_type=tf.int32) == labels, tf.float32)
    return {
        "loss": tf.reduce_sum(losses * weights),
        "num_correct": tf.reduce_sum(correct * weights),
        "num_masked": tf.reduce_sum(weights),
    }


def _without_padding(logits: tf.Tensor, vocabulary_size: int | None) -> tf.Tensor:
    """Give ids from `vocabulary_size` on the probability 0; logits of the same shape.

    XLA computes the sum within the softmax, where a slice would be a copy of all logits.
    """
    padded_size = logits.shape[-1]
    if vocabulary_size in (None, padded_size):
        return logits
    return logits + tf.constant(np.where(np.arange(padded_size) < vocabulary_size, 0, NEVER), tf.float32)
