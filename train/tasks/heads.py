"""The masked-LM head at the masked positions only, its loss, and parts that a custom task adds to a network.

The head of a masked language model (a projection onto the vocabulary) costs as much as several encoder layers, and the
loss needs it only at the masked positions.
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

# Added to the logits of padding in the vocabulary, so that exp(logit) is 0. This number is finite, because 0 * -inf
# would be NaN.
NEVER = -1e30
# The same as in `train.layers.tpu_functions`, which only a run on a TPU imports.
NUM_ONES = 8


def predict_at(
    network: Any, inputs: dict[str, tf.Tensor], positions: tf.Tensor, *, training: bool
) -> tuple[Any, tf.Tensor]:
    """Run a network, with its masked-LM head only at the given positions.

    Args:
        network: the network.
        inputs: inputs of the network.
        positions: indices into the concatenated rows, int32 (num_predictions,). A position may occur more than once.
        training: whether dropout is active.

    Returns:
        The outputs of the network, whose first element is the logits, (1, num_predictions, vocabulary); and the
        encoder's last hidden states of all tokens, (batch, length, hidden).
    """
    if isinstance(network, Network):
        outputs = network(inputs, predict_at=positions, training=training)
        return outputs, outputs.last_hidden_state
    with legacy.predicting_at(positions) as states:
        outputs = network(inputs, training=training)
    return outputs, states[-1]


# Cross-entropy and accuracy are computed as sums, which can be added up exactly over batches and replicas.


@named("loss")
def masked_lm_loss(
    logits: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor, *, vocabulary_size: int | None = None
) -> dict[str, tf.Tensor]:
    """Add up cross-entropy, correct predictions and number of masked tokens over all used slots.

    Args:
        logits: (…, vocabulary), any float type; the loss is computed in float32.
        labels: ids of the masked tokens, int32 (…).
        weights: 1 if a slot is used, else 0, float32 (…).
        vocabulary_size: ids from this id on are padding. These ids cannot be predicted and get no gradient. Default:
            the vocabulary has no padding.

    Returns:
        Float32 scalars: `loss` (nats), `num_correct`, `num_masked`.
    """
    # Read the labels' logits before the cast, so that reading them does not keep the float32 logits in memory.
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
    """Compute the values of `sparse_softmax_cross_entropy_with_logits`, in nats, float32 (num_predictions,).

    TensorFlow's function reads all logits a second time to find the logits of the labels.
    """

    @custom_gradient
    def compute(logits: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        log_total = tf.reduce_logsumexp(logits, axis=-1)

        def gradient(loss_gradients: tf.Tensor) -> tf.Tensor:
            probabilities = tf.exp(logits - log_total[..., tf.newaxis])
            return (probabilities - tf.cast(_is_label(logits, labels), tf.float32)) * loss_gradients[..., tf.newaxis]

        return log_total - label_logits, gradient

    return compute(logits)


def _is_first_largest(logits: tf.Tensor, labels: tf.Tensor, label_logits: tf.Tensor) -> tf.Tensor:
    """Return whether the `argmax` of the logits is the label, as 0 or 1, float32 (num_predictions,).

    A matrix product counts the logits that are larger than the label's logit, or equal and at a lower index. On a TPU
    this takes a sixth of the time of `argmax`.
    """
    is_before = tf.range(logits.shape[-1]) < labels[..., tf.newaxis]
    limits = label_logits[..., tf.newaxis]
    beats_label = (logits > limits) | ((logits == limits) & is_before)
    # XLA may compare unrounded logits with the label's logit, which is rounded to bfloat16.
    beats_label &= ~_is_label(logits, labels)
    num_better = tf.matmul(tf.cast(beats_label, tf.float32), tf.ones((logits.shape[-1], NUM_ONES)))[..., 0]
    return tf.cast(num_better == 0, tf.float32)


def _is_label(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    return tf.range(logits.shape[-1]) == labels[..., tf.newaxis]


def _without_padding(logits: tf.Tensor, vocabulary_size: int | None) -> tf.Tensor:
    """Return logits of the same shape in which ids from `vocabulary_size` on have probability 0.

    XLA fuses this addition with the softmax. A slice would copy all logits instead.
    """
    padded_size = logits.shape[-1]
    if vocabulary_size in (None, padded_size):
        return logits
    return logits + tf.constant(np.where(np.arange(padded_size) < vocabulary_size, 0, NEVER), tf.float32)


class CustomHead(tf_keras.layers.Layer):
    """Layers that are applied one after another."""

    def __init__(self, layers: Sequence[tf_keras.layers.Layer]):
        super().__init__(name=OWN_HEAD)
        self.layers = list(layers)

    def call(self, states: tf.Tensor, training: bool = False) -> tf.Tensor:  # noqa: ARG002  (Keras passes it)
        for layer in self.layers:
            states = layer(states)
        return states


class Delta(tf_keras.layers.Layer):
    """A trainable difference from a weight of the network, initially 0. The export contains the sum of both."""

    def __init__(self, weight: tf.Variable, network_name: str):
        super().__init__(name=DELTA)
        self.of_name = weight.name.removeprefix(f"{network_name}/").removesuffix(":0")
        self.of_shape = weight.shape

    def build(self, _: Any) -> None:
        self.value = self.add_weight(name=self.of_name, shape=self.of_shape, initializer="zeros")

    def call(self, ids: tf.Tensor) -> tf.Tensor:
        """Look up the difference's rows for these ids, if the weight is an embedding: (…, width)."""
        return tf.gather(self.value, ids)


def mean_state(states: tf.Tensor, attended: tf.Tensor) -> tf.Tensor:
    """Return the mean hidden state of each row's tokens, float32 (rows, hidden).

    Args:
        states: hidden states, (rows, length, hidden).
        attended: 0 at padding, (rows, length).
    """
    weights = tf.cast(attended, tf.float32)[..., tf.newaxis]
    totals = tf.reduce_sum(tf.cast(states, tf.float32) * weights, axis=1)
    return totals / tf.maximum(tf.reduce_sum(weights, axis=1), 1)


def put_head(
    network: Any,
    make_layers: Callable[[], Sequence[tf_keras.layers.Layer]],
    run: Callable[[dict[str, tf.Tensor]], tf.Tensor],
) -> Any:
    """Add a head to a network, as `network.custom_head`.

    Args:
        network: the network.
        make_layers: returns the layers of the head.
        run: calls the network and the head with rows, which creates the head's weights.
    """
    ids = tf.cast(network.dummy_inputs["input_ids"], tf.int32)
    rows = {"input_ids": ids, "attention_mask": tf.ones_like(ids), "token_type_ids": tf.zeros_like(ids)}
    return put_part(network, OWN_HEAD, lambda: CustomHead(make_layers()), lambda: run(rows))


def put_part(network: Any, name: str, make: Callable[[], Any], run: Callable[[], Any]) -> Any:
    """Add a part that is trained and saved with a network; return the network.

    Args:
        network: the network.
        name: name of the part, and of its attribute in the network. A `custom_head` is exported under this name; a part
            for training only and a delta are not exported (see `train.model.architectures`).
        make: returns the part, a layer or network with this name.
        run: calls the part with any rows, which creates the part's weights.

    Raises:
        InputError: the names of the weights are not unique or not stable.
    """
    if not network.built:
        network(network.dummy_inputs, training=False)
    # Keras numbers the names of layers. Restart the numbers, so that names are the same in every network of the task.
    tf_keras.backend.reset_uids()
    setattr(network, name, make())
    prefix = f"{network.name}/"
    with tf.name_scope(network.name):
        run()
    names = [weight.name for weight in getattr(network, name).weights]
    wrong = [
        weight_name
        for weight_name in names
        if not weight_name.startswith(f"{prefix}{name}/") or names.count(weight_name) > 1
    ]
    if wrong:
        raise InputError(
            "The layers of a head must be single layers, not models such as tf_keras.Sequential, and must have "
            f"different names, so that all weights have different names; the weight {wrong[0]} breaks this rule."
        )
    return network
