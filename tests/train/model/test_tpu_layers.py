import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.fixtures.arrays import assert_all_close, assert_same_arrays, logits_and_gradients
from tests.fixtures.tiny_models import padded_batch, tiny_model
from train.layers.random_bits import dropping_out_by, key_dropout, row_keys
from train.layers.tpu_functions import dense, dense_of_heads, gelu, heads, layer_norm, normalized_products, scaled
from train.layers.tpu_layers import rotated
from train.model.build import use_tpu_layers
from train.publishing.pytorch_format import pytorch_weights


def compiled(function):
    return tf.function(tf.autograph.experimental.do_not_convert(function), jit_compile=True)


@pytest.mark.parametrize("name", ["roberta", pytest.param("roberta-prelayernorm", marks=pytest.mark.slow)])
def test_logits_gradients_and_export_equal_the_reference(name):
    model = tiny_model(name, num_hidden_layers=1)
    inputs, attended = padded_batch(model)
    expected, expected_gradients = logits_and_gradients(model, inputs, attended)
    variables = [(variable.name, variable.shape) for variable in model.variables]
    exported = pytorch_weights(model)

    use_tpu_layers(model)
    logits, gradients = logits_and_gradients(model, inputs, attended, jit_compile=True)

    np.testing.assert_allclose(logits, expected, atol=2e-5)
    assert_all_close(gradients, expected_gradients, rtol=1e-4, atol=4e-6)
    assert [(variable.name, variable.shape) for variable in model.variables] == variables
    assert_same_arrays(pytorch_weights(model), exported)


@pytest.mark.slow
def test_bfloat16_is_as_exact_as_in_the_reference_layers():
    name = "modernbert without biases"
    model = tiny_model(name, num_hidden_layers=2)
    inputs, attended = padded_batch(model)
    exact, exact_gradients = logits_and_gradients(model, inputs, attended)
    tf_keras.mixed_precision.set_global_policy("mixed_bfloat16")
    model = tiny_model(name, num_hidden_layers=2)
    tf_keras.mixed_precision.set_global_policy("float32")
    reference, of_reference = logits_and_gradients(model, inputs, attended)
    use_tpu_layers(model)
    logits, gradients = logits_and_gradients(model, inputs, attended, jit_compile=True)
    assert np.abs(logits - exact).mean() < 1.2 * np.abs(reference - exact).mean()
    assert all(gradient.dtype == np.float32 for gradient in gradients)
    errors, reference_errors = (
        np.sqrt(
            sum(np.square(gradient - exact).sum() for gradient, exact in zip(computed, exact_gradients, strict=True))
        )
        for computed in (gradients, of_reference)
    )
    assert errors < 1.2 * reference_errors


def test_dropout_is_that_of_the_reference_layers():
    model = tiny_model("roberta", num_hidden_layers=1, hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.0)
    inputs, attended = padded_batch(model)
    key_dropout(model)

    @compiled
    def logits():
        with dropping_out_by(row_keys((1, 2), 3)):
            return model(inputs, training=True).logits * tf.cast(attended, tf.float32)[..., tf.newaxis]

    expected = logits.python_function()
    use_tpu_layers(model)
    np.testing.assert_allclose(logits(), expected, atol=2e-5)


def test_layer_norm_and_dense_are_the_plain_ones():
    """In bfloat16; the layers above have them in float32."""

    def plain_layer_norm(values, gamma, beta):
        mean, variance = tf.nn.moments(values, -1, keepdims=True)
        return tf.nn.batch_normalization(values, mean, variance, beta, gamma, 1e-5)

    def own_layer_norm(values, gamma, beta):
        return layer_norm(values, tf.cast(gamma, tf.float32), tf.cast(beta, tf.float32), 1e-5)

    def plain_dense(values, kernel, bias):
        return values @ kernel + bias

    inputs = tf.random.stateless_normal((4, 16, 128), (1, 0), mean=1)
    gamma, beta, kernel = (
        tf.random.stateless_normal(shape, (3, seed)) for seed, shape in enumerate(((128,), (128,), (128, 128)))
    )
    for exact, own, *weights in (
        (plain_layer_norm, own_layer_norm, gamma, beta),
        (plain_dense, dense, kernel, beta),
    ):
        expected, outputs = exact_and_own(exact, own, tf.bfloat16, inputs, *weights)
        assert_near(outputs, expected, 1e-2)


def exact_and_own(exact, own, dtype, *arguments):
    """Compute results and gradients by `exact` in float32 without XLA, and by `own` in `dtype` with it."""

    def results(function, dtype):
        inputs = [tf.cast(argument, dtype) for argument in arguments]
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            output = function(*inputs)
        by_output = tf.cast(np.random.default_rng(9).normal(size=output.shape), output.dtype)
        return output, *tape.gradient(output, inputs, by_output)

    arguments = tuple(tf.cast(tf.cast(argument, dtype), tf.float32) for argument in arguments)
    return results(exact, tf.float32), compiled(lambda: results(own, dtype))()


def assert_near(outputs, expected, tolerance):
    for output, value in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(tf.cast(output, tf.float32), value, atol=tolerance * np.abs(value).max())


@pytest.mark.parametrize(("dtype", "tolerance"), [(tf.float32, 1e-6), (tf.bfloat16, 5e-3)])
def test_gelu_is_the_exact_one(dtype, tolerance):
    values = tf.constant(np.concatenate([np.linspace(-12, 12, 2001), [0.0, -100.0, 100.0]]), tf.float32)
    expected, outputs = exact_and_own(tf_keras.activations.gelu, gelu, dtype, values)
    assert_near(outputs, expected, tolerance)


def test_projections_to_heads_and_from_them_are_plain_products():
    shapes = ((4, 16, 128), (128, 2, 64), (2, 64), (2, 64, 128), (128,))
    arguments = [tf.random.stateless_normal(shape, (4, seed)) for seed, shape in enumerate(shapes)]

    def exact(inputs, kernel, bias, other_kernel, other_bias):
        projected = tf.einsum("bld,dnh->blnh", inputs, kernel) + bias
        return tf.einsum("blnh,nhe->ble", projected, other_kernel) + other_bias

    def own(inputs, kernel, bias, other_kernel, other_bias):
        return dense_of_heads(heads(inputs, kernel, bias), other_kernel, other_bias)

    expected, outputs = exact_and_own(exact, own, tf.float32, *arguments)
    assert_near(outputs, expected, 1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(tf.float32, 1e-5), (tf.bfloat16, 2e-2)])
def test_products_of_normalized_inputs_are_the_plain_ones(dtype, tolerance):
    inputs = tf.random.stateless_normal((4, 16, 128), (5, 0), mean=0.5, stddev=2)
    gamma = tf.random.stateless_normal((128,), (5, 1)) * tf.cast(tf.range(128) % 4 > 0, tf.float32)
    kernel, *of_heads = (
        tf.random.stateless_normal(shape, (6, seed)) for seed, shape in enumerate([(128, 96)] + 3 * [(128, 2, 64)])
    )

    def exact(inputs, gamma, kernel, *of_heads):
        mean, variance = tf.nn.moments(inputs, -1, keepdims=True)
        states = tf.nn.batch_normalization(inputs, mean, variance, None, gamma, 1e-5)
        query, *others = (tf.einsum("bld,dnh->bnhl", states, head_kernel) for head_kernel in of_heads)
        return states @ kernel, rotated(query, 100.0), *others

    def own(inputs, gamma, kernel, *of_heads):
        gamma = tf.cast(gamma, tf.float32)
        (halves,), scale = normalized_products(inputs, gamma, 1e-5, [kernel], "bld,de->ble", num_parts=2)
        (query, *others), of_tokens = normalized_products(inputs, gamma, 1e-5, of_heads, "bld,dnh->bnhl")
        return *scaled(scale, *tf.split(halves, 2, axis=-1)), *scaled(of_tokens, rotated(query, 100.0), *others)

    def joined(function):
        return lambda *arguments: tf.concat(
            [tf.reshape(output, (4, 16, -1)) for output in function(*arguments)], axis=-1
        )

    expected, outputs = exact_and_own(joined(exact), joined(own), dtype, inputs, gamma, kernel, *of_heads)
    assert_near(outputs, expected, tolerance)


def test_the_pooler_is_computed_as_before():
    model = tiny_model("bert", "TFAutoModelForPreTraining", num_hidden_layers=1)
    inputs, _ = padded_batch(model)
    expected = model(inputs).seq_relationship_logits
    use_tpu_layers(model)
    logits = compiled(lambda: model(inputs).seq_relationship_logits)()
    np.testing.assert_allclose(logits, expected, atol=2e-5)
