import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.fixtures.arrays import assert_all_close
from tests.fixtures.tiny_models import CONFIGS, SAME_CODE, VOCABULARY, each_architecture, one_layer_model, padded_batch
from train.model.architectures import ARCHITECTURES
from train.tasks.heads import predict_at

# (num_predictions,), into three rows of 12 laid end to end; none is padding.
POSITIONS = np.array([1, 3, 3, 11, 12, 17, 33, 24, 0], np.int32)
# Of ours ModernBERT, which differs most from those that other tests compile; all that transformers computes.
UNLIKE_OTHERS = [
    name
    for name, config in CONFIGS.items()
    if name == "modernbert" or not (ARCHITECTURES[config["model_type"]].is_ours or name in SAME_CODE)
]


def logits_at(full_logits: tf.Tensor, positions: tf.Tensor) -> tf.Tensor:
    rows = tf.reshape(full_logits, (-1, full_logits.shape[-1]))
    return tf.gather(rows, positions)[tf.newaxis]  # (1, num_predictions, vocabulary)


def logits_and_gradients(model: tf_keras.Model, inputs: dict, gather: bool) -> tuple:
    with tf.GradientTape() as tape:
        if gather:
            logits = logits_at(model(inputs, training=False).logits, POSITIONS)
        else:
            logits = predict_at(model, inputs, POSITIONS, training=False)[0].logits
        loss = tf.reduce_sum(tf.nn.log_softmax(logits)[..., 7])
    gradients = tape.gradient(loss, model.trainable_variables, unconnected_gradients="zero")
    return logits, [tf.convert_to_tensor(gradient) for gradient in gradients]


@pytest.mark.parametrize(
    "name",
    [
        *each_architecture("deberta-v2 as v3", "convbert with groups", "roberta compiled"),
        *(pytest.param(f"{name} compiled", marks=pytest.mark.slow) for name in ("deberta-v2 as v3", "mobilebert")),
    ],
)
def test_the_gathered_head_equals_the_full_head(name):
    """Also under XLA, for heads that are built unlike each other."""
    name, is_compiled, _ = name.partition(" compiled")
    model = one_layer_model(name)
    inputs, _ = padded_batch(model)
    full_logits = model(inputs).logits
    expected_logits, expected_gradients = logits_and_gradients(model, inputs, gather=True)

    @tf.autograph.experimental.do_not_convert
    def compute():
        return logits_and_gradients(model, inputs, gather=False)

    logits, gradients = tf.function(compute, jit_compile=True)() if is_compiled else compute()
    assert logits.shape == (1, len(POSITIONS), VOCABULARY)
    np.testing.assert_allclose(logits, expected_logits, atol=1e-5)
    assert_all_close(gradients, expected_gradients, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(model(inputs).logits, full_logits)


@pytest.mark.parametrize("name", ["roberta", "albert"])
def test_it_drops_out_in_training_alone(name):
    """RoBERTa has our layers, ALBERT those of transformers."""
    model = one_layer_model(name, hidden_dropout_prob=0.5)
    inputs, _ = padded_batch(model)
    logits = [predict_at(model, inputs, POSITIONS, training=step < 2)[0].logits.numpy() for step in range(4)]
    assert (logits[0] != logits[1]).any()
    np.testing.assert_array_equal(logits[2], logits[3])


@pytest.mark.slow
@pytest.mark.parametrize("name", UNLIKE_OTHERS)
def test_it_trains_in_mixed_bfloat16_under_xla(name):
    tf_keras.mixed_precision.set_global_policy("mixed_bfloat16")
    model = one_layer_model(name)
    tf_keras.mixed_precision.set_global_policy("float32")
    inputs, _ = padded_batch(model)

    @tf.function(jit_compile=True)
    @tf.autograph.experimental.do_not_convert
    def step():
        with tf.GradientTape() as tape:
            outputs, _ = predict_at(model, inputs, POSITIONS, training=True)
            logits = tf.cast(outputs.logits, tf.float32)
            loss = -tf.reduce_mean(tf.nn.log_softmax(logits)[..., 7])
        gradients = tape.gradient(loss, model.trainable_variables, unconnected_gradients="zero")
        return loss, tf.linalg.global_norm(gradients)

    loss, gradient_norm = step()
    assert np.isfinite(loss)
    assert 0 < gradient_norm < np.inf
    assert {variable.dtype for variable in model.trainable_variables} == {tf.float32}
