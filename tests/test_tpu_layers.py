import numpy as np
import pytest
import tensorflow as tf

from tests.tiny_models import padded_batch, tiny_model
from train.pytorch_export import pytorch_weights
from train.tpu_layers import compute_as_suits_tpu

CHEAP = ("bert", "bert with tanh gelu", "camembert", "electra", "roberta", "roberta-prelayernorm", "xlm-roberta")
KEYS = tf.constant([[1, 2], [3, 4], [5, 6]], tf.uint32)


def attended_logits_and_gradients(model, inputs, attended):
    """Return logits and gradients of the attended positions alone: at the others the model may give anything."""

    @tf.function(jit_compile=True)
    def compute():
        with tf.GradientTape() as tape:
            logits = tf.cast(model(inputs, training=False).logits, tf.float32)
            logits *= tf.cast(attended, tf.float32)[..., tf.newaxis]
            loss = tf.reduce_sum(tf.nn.log_softmax(logits)[..., 7] * tf.cast(attended, tf.float32))
        return logits, tape.gradient(loss, model.trainable_variables, unconnected_gradients="zero")

    logits, gradients = compute()
    return logits.numpy(), [tf.convert_to_tensor(gradient).numpy() for gradient in gradients]


@pytest.mark.parametrize("name", CHEAP)
def test_logits_and_gradients_are_those_of_the_stock_layers(name):
    model = tiny_model(name)
    inputs, attended = padded_batch(model)
    expected, expected_gradients = attended_logits_and_gradients(model, inputs, attended)
    names = [(variable.name, variable.shape) for variable in model.variables]
    exported = pytorch_weights(model)

    assert compute_as_suits_tpu(model)
    logits, gradients = attended_logits_and_gradients(model, inputs, attended)

    np.testing.assert_allclose(logits, expected, atol=2e-5)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-4, atol=1e-4)
    assert [(variable.name, variable.shape) for variable in model.variables] == names
    for weight, array in pytorch_weights(model).items():
        np.testing.assert_array_equal(array, exported[weight])
