"""Without XLA: the functions that take few passes, and products in bfloat16 whose sums keep their terms."""

from collections.abc import Iterator

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.fixtures.arrays import assert_all_close
from train import has_bfloat16_instructions
from train.layers.cpu_functions import cross_entropy_and_correct, multiply_in_bfloat16, runs_unfused, split_dense

needs_instructions = pytest.mark.skipif(not has_bfloat16_instructions(), reason="this CPU does not multiply bfloat16")


@pytest.fixture(autouse=True)
def float32_afterwards() -> Iterator[None]:
    yield
    multiply_in_bfloat16(False)


def gradients(is_in_bfloat16: bool) -> tuple[tf.Tensor, ...]:
    """Compute the gradients of two layers' kernels and biases, summed over 8,192 rows of which each counts alike."""
    random = np.random.default_rng(0)
    inputs = tf.constant(random.normal(size=(8192, 64)), tf.float32)
    layers = [
        tf_keras.layers.Dense(width, activation=activation, kernel_initializer=tf_keras.initializers.GlorotNormal(seed))
        for seed, (width, activation) in enumerate([(128, "gelu"), (32, None)])
    ]
    variables = []

    def step(inputs: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            outputs = layers[1](layers[0](inputs))
            loss = tf.reduce_sum(outputs * (outputs + 3))
        variables[:] = [*layers[0].trainable_variables, *layers[1].trainable_variables]
        return tape.gradient(loss, variables)

    multiply_in_bfloat16(is_in_bfloat16)
    step(inputs[:1])  # makes the variables
    return tf.function(step, autograph=False)(inputs)


@needs_instructions
def test_products_are_rounded_and_sums_are_not():
    exact, rounded = gradients(False), gradients(True)
    differences = [
        float(tf.norm(gradient - other) / tf.norm(other)) for gradient, other in zip(rounded, exact, strict=True)
    ]
    assert min(differences) > 1e-5
    assert max(differences) < 0.01  # a sum in bfloat16 of as many terms loses most of them
    assert {gradient.dtype for gradient in rounded} == {tf.float32}


def test_only_what_xla_compiles_is_fused():
    unfused = []

    def note():
        unfused.append(runs_unfused())
        return tf.constant(0)

    note()
    tf.function(note)()
    tf.function(note, jit_compile=True)()
    assert unfused == [True, True, False]


def test_the_loss_of_labels_whose_probability_underflows_is_finite():
    logits = tf.constant([[0.0, 1000.0, -1000.0], [1000.0, 1000.0, 0.0]])
    with tf.GradientTape() as tape:
        tape.watch(logits)
        losses, correct = cross_entropy_and_correct(logits, tf.constant([2, 1]))
    np.testing.assert_allclose(losses, [2000.0, np.log(2)], rtol=1e-6)
    np.testing.assert_array_equal(correct, [0, 0])  # of equal logits the first counts
    np.testing.assert_allclose(tape.gradient(losses, logits), [[0, 1, -1], [0.5, -0.5, 0]], atol=1e-6)


@pytest.mark.parametrize(("use_bias", "jit_compile"), [(False, True), (True, False)])
def test_a_layer_computed_in_parts_has_its_values_and_gradients(use_bias, jit_compile):
    layer = tf_keras.layers.Dense(12, use_bias=use_bias, bias_initializer="normal")
    inputs = tf.constant(np.random.default_rng(0).normal(size=(2, 5, 8)), tf.float32)
    layer(inputs)

    def of_parts(cut):
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            parts = cut()
            total = tf.add_n([tf.reduce_sum(number * part**2) for number, part in enumerate(parts, 1)])
        return [*parts, *tape.gradient(total, [inputs, *layer.trainable_variables])]

    expected = of_parts(lambda: tf.split(layer(inputs), 3, axis=-1))
    compute = tf.function(lambda: of_parts(lambda: split_dense(layer, inputs, 3)), jit_compile=jit_compile)
    assert_all_close(compute(), expected, rtol=1e-5, atol=1e-5)  # sums in another order
