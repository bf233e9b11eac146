"""A head that no class of transformers has, put on an encoder: a pooled state, then layers of Keras."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
import tf_keras

from finetuning.data.inputs import ATTENTION_MASK, INPUT_IDS, TOKEN_TYPES
from mlm_common.errors import InputError
from train.model.architectures import OWN_HEAD


class CustomHead(tf_keras.layers.Layer):
    """Layers one after the other."""

    def __init__(self, layers: Sequence[tf_keras.layers.Layer]):
        super().__init__(name=OWN_HEAD)
        self.layers = list(layers)

    def call(self, states: tf.Tensor, training: bool = False) -> tf.Tensor:  # noqa: ARG002  (Keras hands it on)
        for layer in self.layers:
            states = layer(states)
        return states


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
    """Put a head on a network, as a part of it that is trained, saved and exported with it; return the network.

    Args:
        run: calls the network with its head on rows, which makes the head's weights.

    Raises:
        InputError: weights that would not be found again by their names.
    """
    if not network.built:
        network(network.dummy_inputs, training=False)
    # Keras numbers the names of layers, and another network of the task must have the same ones.
    tf_keras.backend.reset_uids()
    network.custom_head = CustomHead(make_layers())
    prefix, ids = f"{network.name}/", tf.cast(network.dummy_inputs[INPUT_IDS], tf.int32)
    with tf.name_scope(network.name):
        run({INPUT_IDS: ids, ATTENTION_MASK: tf.ones_like(ids), TOKEN_TYPES: tf.zeros_like(ids)})
    names = [weight.name for weight in network.custom_head.weights]
    wrong = [name for name in names if not name.startswith(f"{prefix}{OWN_HEAD}/") or names.count(name) > 1]
    if wrong:
        raise InputError(
            "The layers of a head must be single ones, no models as tf_keras.Sequential makes them, and differ in "
            f"their names, so that all weights have different names; one is called {wrong[0]}."
        )
    return network
