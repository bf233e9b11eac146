"""Parts put on a network that its class does not have: a head, a network for training only, a delta of a weight."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
import tf_keras

from mlm_common.errors import InputError
from train.model.architectures import DELTA, OWN_HEAD


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
    """Zeros at first, to be added to a weight of the network where it is used; the export has their sum.

    Args:
        weight: of the network.
        network_name: of the network.
    """

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
    """Put a head on a network, as `network.custom_head`; see `put_part`.

    Args:
        run: calls the network with its head on rows, which makes the head's weights.
    """
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
