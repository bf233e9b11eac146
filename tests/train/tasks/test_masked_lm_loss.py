import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from train.tasks.masked_lm import masked_lm_loss

NUM_PREDICTIONS, VOCABULARY = 12, 7
DTYPES = (tf.float32, tf.bfloat16)


def sums_and_gradient(logits, labels, weights, vocabulary_size=None):
    with tf.GradientTape() as tape:
        tape.watch(logits)
        sums = masked_lm_loss(logits, labels, weights, vocabulary_size=vocabulary_size)
    return sums, tape.gradient(sums["loss"], logits)


@given(seed=st.integers(0, 2**20), spread=st.sampled_from([0, 1, 3, 60]))
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_library_s_cross_entropy_and_argmax(dtype, seed, spread):
    """Whole numbers, so that many logits are the largest together."""
    random = np.random.default_rng(seed)
    logits = tf.constant(random.integers(-spread, spread + 1, (NUM_PREDICTIONS, VOCABULARY)), dtype)
    labels = tf.constant(random.integers(VOCABULARY, size=NUM_PREDICTIONS), tf.int32)
    weights = tf.constant(random.integers(2, size=NUM_PREDICTIONS), tf.float32)
    exact = tf.cast(logits, tf.float32)
    with tf.GradientTape() as tape:
        tape.watch(exact)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, exact)
        expected = tf.reduce_sum(losses * weights)

    sums, gradient = sums_and_gradient(logits, labels, weights)

    np.testing.assert_allclose(sums["loss"], expected, rtol=1e-5, atol=1e-5)
    assert gradient.dtype == dtype
    tolerance = 1e-5 if dtype == tf.float32 else 4e-3
    np.testing.assert_allclose(tf.cast(gradient, tf.float32), tape.gradient(expected, exact), atol=tolerance)
    is_correct = np.argmax(exact, axis=-1) == labels.numpy()
    assert float(sums["num_correct"]) == (is_correct * weights.numpy()).sum()
    assert float(sums["num_masked"]) == weights.numpy().sum()


@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_of_the_vocabulary_is_not_predicted_or_learned(dtype):
    logits = tf.constant([[1.0, 2.0, 900.0], [2.0, 1.0, 900.0]], dtype)
    sums, gradient = sums_and_gradient(logits, tf.constant([1, 1]), tf.ones(2), vocabulary_size=2)
    np.testing.assert_allclose(sums["loss"], np.log1p(np.exp(-1)) + np.log1p(np.exp(1)), rtol=1e-6)
    assert float(sums["num_correct"]) == 1
    np.testing.assert_array_equal(gradient[:, 2], 0)
