"""The head over the masked positions only, for any architecture, and its loss.

The head (a projection onto the vocabulary) costs as much as several encoder layers, and the loss reads it at the masked
positions alone. Gathering the encoder's output before the head leaves transformers' code for both untouched.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from train.runtime.named_scopes import custom_gradient, named

# Added to the logits of padding in the vocabulary: e to it is 0, and 0 times it is 0, as of infinity it would not be.
NEVER = -1e30
# As in `train.layers.tpu_functions`, which only a run on a TPU imports.
NUM_ONES = 8
# One set of positions per thread: MirroredStrategy traces each replica in its own thread.
_traced = threading.local()


@contextmanager
def predicting_at(positions: tf.Tensor) -> Iterator[list[tf.Tensor]]:
    """A context in which models prepared by `gather_before_head` give logits at `positions` only, in their order.

    Args:
        positions: int32 (num_predictions,) into the rows of the batch laid end to end; a position may occur more
            than once. The logits are (1, num_predictions, vocabulary) instead of (batch, length, vocabulary): one
            list for the batch needs fewer spare slots than one for each row.

    Applies to the calls made by this thread, and to one model: the positions are those of its batch. What it yields
    has, after the call, the encoder's last states of all tokens, (batch, length, hidden).
    """
    previous = getattr(_traced, "positions", None), getattr(_traced, "states", None)
    _traced.positions, _traced.states = positions, []
    try:
        yield _traced.states
    finally:
        _traced.positions, _traced.states = previous


def gather_before_head(model: Any) -> None:
    """Let `predicting_at` decide where `model` (any TF…ForMaskedLM of transformers) computes its head.

    Outside that context the model computes what it did before. Preparing a model twice changes nothing.
    """
    encoder = getattr(model, model.base_model_prefix)
    if getattr(encoder.call, "gathers_before_head", False):
        return
    encode = encoder.call

    @functools.wraps(encode)
    def encode_and_gather(*args: Any, **kwargs: Any) -> Any:
        outputs = encode(*args, **kwargs)
        positions = getattr(_traced, "positions", None)
        if positions is None:
            return outputs
        _traced.states.append(outputs[0])
        return _gathered(outputs, positions)

    encode_and_gather.gathers_before_head = True  # type: ignore[attr-defined]
    encoder.call = encode_and_gather


def _gathered(outputs: Any, positions: tf.Tensor) -> Any:
    """Gather the last hidden state, always the first of the encoder's outputs, at `positions`."""
    rows = outputs[0]  # (batch, length, hidden)
    hidden = tf.gather(tf.reshape(rows, (-1, rows.shape[-1])), positions)[tf.newaxis]  # (1, num_predictions, hidden)
    if isinstance(outputs, tuple):
        return (hidden, *outputs[1:])
    return type(outputs)(**{**outputs, "last_hidden_state": hidden})


# Cross-entropy and accuracy as sums, so that batches and replicas add up exactly.


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
    # Of the logits as they are: in float32, they would be kept for this alone.
    label_logits = tf.stop_gradient(tf.cast(tf.gather(logits, labels, batch_dims=labels.shape.rank), tf.float32))
    logits = _without_padding(tf.cast(logits, tf.float32), vocabulary_size)
    losses = _cross_entropy(logits, labels, label_logits)  # (num_predictions,)
    correct = _is_first_largest(logits, labels, label_logits)  # (num_predictions,)
    return {
        "loss": tf.reduce_sum(losses * weights),
        "num_correct": tf.reduce_sum(correct * weights),
        "num_masked": tf.reduce_sum(weights),
    }


def _cross_entropy(logits: tf.Tensor, labels: tf.Tensor, label_logits: tf.Tensor) -> tf.Tensor:
    """Compute nats, float32 (num_predictions,), as `sparse_softmax_cross_entropy_with_logits` does.

    That one reads all logits a second time to find those of the labels.
    """

    @custom_gradient
    def compute(logits: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        log_total = tf.reduce_logsumexp(logits, axis=-1)

        def gradient(by_losses: tf.Tensor) -> tf.Tensor:
            probabilities = tf.exp(logits - log_total[..., tf.newaxis])
            return (probabilities - tf.cast(_is_label(logits, labels), tf.float32)) * by_losses[..., tf.newaxis]

        return log_total - label_logits, gradient

    return compute(logits)


def _is_first_largest(logits: tf.Tensor, labels: tf.Tensor, label_logits: tf.Tensor) -> tf.Tensor:
    """Return, as float32 0 or 1 (num_predictions,), where `argmax` of the logits is the label.

    A TPU counts by a product the logits that are larger, or equal and before it, in a sixth of the time of an `argmax`.
    """
    is_before = tf.range(logits.shape[-1]) < labels[..., tf.newaxis]
    limits = label_logits[..., tf.newaxis]
    beats_label = (logits > limits) | ((logits == limits) & is_before)
    # XLA may compare logits that it has not rounded to bfloat16 with the label's, which it has.
    beats_label &= ~_is_label(logits, labels)
    num_better = tf.matmul(tf.cast(beats_label, tf.float32), tf.ones((logits.shape[-1], NUM_ONES)))[..., 0]
    return tf.cast(num_better == 0, tf.float32)


def _is_label(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    return tf.range(logits.shape[-1]) == labels[..., tf.newaxis]


def _without_padding(logits: tf.Tensor, vocabulary_size: int | None) -> tf.Tensor:
    """Give ids from `vocabulary_size` on the probability 0; logits of the same shape.

    XLA computes the sum within the softmax, where a slice would be a copy of all logits.
    """
    padded_size = logits.shape[-1]
    if vocabulary_size in (None, padded_size):
        return logits
    return logits + tf.constant(np.where(np.arange(padded_size) < vocabulary_size, 0, NEVER), tf.float32)
