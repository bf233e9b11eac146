"""TensorFlow versions of the activation functions that occur in transformers' configurations."""

from collections.abc import Callable

import tensorflow as tf


def gelu_10(states: tf.Tensor) -> tf.Tensor:
    """Compute GELU, clipped to ±10 (Wu et al. 2020, arXiv:2004.09602)."""
    return tf.clip_by_value(tf.nn.gelu(states), -10, 10)


def gelu_fast(states: tf.Tensor) -> tf.Tensor:
    """Approximate GELU by tanh, with √(2/π) rounded to ten digits, for models that were trained with this rounding."""
    return 0.5 * states * (1 + tf.tanh(states * 0.7978845608 * (1 + 0.044715 * states * states)))


def gelu_new(states: tf.Tensor) -> tf.Tensor:
    """Approximate GELU by tanh (Hendrycks and Gimpel 2016, arXiv:1606.08415)."""
    return tf.nn.gelu(states, approximate=True)


def mish(states: tf.Tensor) -> tf.Tensor:
    """Compute x · tanh(softplus(x)) (Misra 2019, arXiv:1908.08681)."""
    return states * tf.tanh(tf.math.softplus(states))


def quick_gelu(states: tf.Tensor) -> tf.Tensor:
    """Approximate GELU by a sigmoid (Hendrycks and Gimpel 2016, arXiv:1606.08415)."""
    return states * tf.sigmoid(1.702 * states)


# {value of the settings `hidden_act`, `hidden_activation` and `classifier_activation`: function}.
ACTIVATION_FUNCTIONS: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "gelu": tf.nn.gelu,
    "gelu_10": gelu_10,
    "gelu_fast": gelu_fast,
    "gelu_new": gelu_new,
    "mish": mish,
    "quick_gelu": quick_gelu,
    "relu": tf.nn.relu,
    "sigmoid": tf.sigmoid,
    "silu": tf.nn.silu,
    "swish": tf.nn.silu,
    "tanh": tf.tanh,
}
