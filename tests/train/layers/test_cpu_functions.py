"""Products in bfloat16 without XLA: rounded products, and sums that keep their terms."""

from collections.abc import Iterator

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from train import has_bfloat16_instructions
from train.layers.cpu_functions import multiply_in_bfloat16, runs_unfused

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
def test_products_are_rounded_and_sums_are_not() -> None:
    exact, found = gradients(False), gradients(True)
    differences = [float(tf.norm(one - other) / tf.norm(other)) for one, other in zip(found, exact, strict=True)]
    assert min(differences) > 1e-5
    assert max(differences) < 0.01  # a sum in bfloat16 of as many terms loses most of them
    assert {one.dtype for one in found} == {tf.float32}


def test_only_what_xla_compiles_is_fused() -> None:
    found = []

    def note() -> tf.Tensor:
        found.append(runs_unfused())
        return tf.constant(0)

    note()
    tf.function(note)()
    tf.function(note, jit_compile=True)()
    assert found == [True, True, False]
