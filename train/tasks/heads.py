"""Heads of networks: over the masked positions only, with its loss; and parts that a custom task puts on a network.

That of a masked language model (a projection onto the vocabulary) costs as much as several encoder layers, and the loss
reads it at the masked positions alone.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

from mlm_common.errors import InputError
from train.layers.cpu_functions import cross_entropy_and_correct, runs_unfused
from train.model import legacy
from train.model.architectures import DELTA, OWN_HEAD
from train.model.networks import Network
from train.runtime.named_scopes import custom_gradient, named

# Added to the logits of padding in the vocabulary: e to it is 0, and 0 times it is 0, as of infinity it would not be.
NEVER = -1e30
# As in `train.layers.tpu_functions`, which only a run on a TPU imports.
NUM_ONES = 8


def predict_at(
    network: Any, inputs: dict[str, tf.Tensor], positions: tf.Tensor, *, training: bool
) -> tuple[Any, tf.Tensor]:
    """Let a network predict at chosen positions only.

    Args:
        inputs: of the network.
        positions: int32 (num_predictions,) into the rows laid end to end; a position may occur more than once.

    Returns:
        The outputs of the network, the first of which are the logits, (1, num_predictions, vocabulary), and its
        encoder's last states of all tokens, (batch, length, hidden).
    """
    if isinstance(network, Network):
        outputs = network(inputs, predict_at=positions, training=training)
        return outputs, outputs.last_hidden_state
    with legacy.predicting_at(positions) as states:
        outputs = network(inputs, training=training)
    return outputs, states[-1]


# Cross-entropy and accuracy as sums, so that batches and replicas add up exactly.


@named("loss")
def masked_lm_loss(
    logits: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor, *, vocabulary_size: int | None = None
) -> dict[str, tf.Tensor]:
    """Add up cross-entropy, correct predictions and number of masked tokens over the slots in use.

    Args:
        logits: (…, vocabulary), any float type; the loss is computed in float32.
        labels: int32 (…).
        weights: float32 (…), 1 where a slot is used, else 0.
        vocabulary_size: ids from here on cannot be predicted and get no gradient; by default there are none.

    Returns:
        Float32 scalars: `loss` (nats), `num_correct`, `num_masked`.
    """
    # Of the logits as they are: in float32, they would be kept for this alone.
    label_logits = tf.stop_gradient(tf.cast(tf.gather(logits, labels, batch_dims=labels.shape.rank), tf.float32))
    logits = _without_padding(tf.cast(logits, tf.float32), vocabulary_size)
    if runs_unfused():
        losses, correct = cross_entropy_and_correct(logits, labels)
    else:
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


class CustomHead(tf_keras.layers.Layer):
    """Layers one after the other."""

    def __init__(self, layers: Sequence[tf_keras.layers.Layer]):
        super().__init__(name=OWN_HEAD)
        self.layers = list(layers)

    def call(self, states: tf.Tensor, training: bool = False) -> tf.Tensor:  # noqa: ARG002  (Keras passes it)
        for layer in self.layers:
            states = layer(states)
        return states


class Delta(tf_keras.layers.Layer):
    """Zeros at first, to be added to a weight of the network where it is used; the export has their sum."""

    def __init__(self, weight: tf.Variable, network_name: str):
        super().__init__(name=DELTA)
        self.of_name = weight.name.removeprefix(f"{network_name}/").removesuffix(":0")
        self.of_shape = weight.shape

    def build(self, _: Any) -> None:
        self.value = self.add_weight(name=self.of_name, shape=self.of_shape, initializer="zeros")

    def call(self, ids: tf.Tensor) -> tf.Tensor:
        """Look up rows of the delta of an embedding: (…, width)."""
        return tf.gather(self.value, ids)


def mean_state(states: tf.Tensor, attended: tf.Tensor) -> tf.Tensor:
    """Compute the mean of the states of a row's tokens, float32 (rows, hidden).

    Args:
        states: (rows, length, hidden).
        attended: (rows, length), 0 at padding.
    """
    weights = tf.cast(attended, tf.float32)[..., tf.newaxis]
    totals = tf.reduce_sum(tf.cast(states, tf.float32) * weights, axis=1)
    return totals / tf.maximum(tf.reduce_sum(weights, axis=1), 1)


def put_head(
    network: Any,
    make_layers: Callable[[], Sequence[tf_keras.layers.Layer]],
    run: Callable[[dict[str, tf.Tensor]], tf.Tensor],
) -> Any:
    """Put a head on a network, as `network.custom_head`; `run` calls both on rows, which makes the head's weights."""
    ids = tf.cast(network.dummy_inputs["input_ids"], tf.int32)
    rows = {"input_ids": ids, "attention_mask": tf.ones_like(ids), "token_type_ids": tf.zeros_like(ids)}
    return put_part(network, OWN_HEAD, lambda: CustomHead(make_layers()), lambda: run(rows))


def put_part(network: Any, name: str, make: Callable[[], Any], run: Callable[[], Any]) -> Any:
    """Put a part on a network, which is trained and saved with it; return the network.

    Args:
        name: of the part and its attribute in the network. A `custom_head` is exported under its name; a part for
            training only and a delta are not (`train.model.architectures`).
        make: makes the part, a layer or network of that name.
        run: calls the part on any rows, which makes its weights.

    Raises:
        InputError: weights that would not be found again by their names.
    """
    if not network.built:
        network(network.dummy_inputs, training=False)
    # Keras numbers the names of layers, and another network of the task must have the same ones.
    tf_keras.backend.reset_uids()
    setattr(network, name, make())
    prefix = f"{network.name}/"
    with tf.name_scope(network.name):
        run()
    names = [weight.name for weight in getattr(network, name).weights]
    wrong = [one for one in names if not one.startswith(f"{prefix}{name}/") or names.count(one) > 1]
    if wrong:
        raise InputError(
            "The layers of a head must be single ones, no models as tf_keras.Sequential makes them, and differ in "
            f"their names, so that all weights have different names; one is called {wrong[0]}."
        )
    return network
