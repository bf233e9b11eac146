"""A head that no class of transformers has, put on an encoder: layers of Keras, one after the other."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
import tf_keras

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


def put_head(network: Any, make_layers: Callable[[], Sequence[tf_keras.layers.Layer]], run: Callable[[], Any]) -> Any:
    """Put a head on a network, as a part of it that is trained, saved and exported with it; return the network.

    Args:
        run: calls the network with its head on any rows, which makes the head's weights.

    Raises:
        InputError: weights that would not be found again by their names.
    """
    if not network.built:
        network(network.dummy_inputs, training=False)
    # Keras numbers the names of layers, and another network of the task must have the same ones.
    tf_keras.backend.reset_uids()
    network.custom_head = CustomHead(make_layers())
    prefix = f"{network.name}/"
    with tf.name_scope(network.name):
        run()
    names = [weight.name for weight in network.custom_head.weights]
    wrong = [name for name in names if not name.startswith(f"{prefix}{OWN_HEAD}/") or names.count(name) > 1]
    if wrong:
        raise InputError(
            "The layers of a head must be single ones, no models as tf_keras.Sequential makes them, and differ in "
            f"their names, so that all weights have different names; one is called {wrong[0]}."
        )
    return network
