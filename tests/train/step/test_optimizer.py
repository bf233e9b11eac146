"""AdamW, StableAdamW and LAMB against NumPy; what does not decay; gradients that are not finite."""

import re

import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.arrays import assert_all_close, assert_all_equal
from tests.fixtures.tiny_models import each_architecture, tiny_model
from tests.fixtures.tiny_steps import two_cpus
from train.config.learning import OptimizationConfig
from train.step import optimizer as optimizer_module
from train.step.optimizer import (
    OPTIMIZERS,
    build_optimizer,
    clipping_factor,
    global_norm,
    layer_rate_factors,
)

NAMES = ("layer/dense/kernel", "layer/dense/bias", "layer/LayerNorm/gamma")
NUM_MATRICES = (1, 0, 0)  # for Muon, which test_muon.py has the numbers of
RATE, DECAY, BETA1, BETA2, EPSILON = 0.01, 0.1, 0.9, 0.98, 1e-6


def build(name, variables, rate_factors=(), **config):
    settings = {"learning_rate": RATE, "weight_decay_rate": DECAY, "schedule": "constant", **config}
    config = OptimizationConfig(optimizer=name, **settings)
    per_variable = {"rate_factors": rate_factors, "num_matrices": NUM_MATRICES}
    optimizer = build_optimizer(config, **per_variable, num_steps=10, num_warmup_steps=0)
    optimizer.build(variables)
    return optimizer


def new_variables(scale=1.0):
    random = np.random.default_rng(0)
    return [tf.Variable(scale * random.normal(size=(3, 4)), name=name, dtype=tf.float32) for name in NAMES]


def gradients_of(step):
    random = np.random.default_rng(step + 1)
    return [tf.constant(random.normal(size=(3, 4)), tf.float32) for _ in NAMES]


def apply(optimizer, variables, gradients, is_finite=True, factor=1.0):
    optimizer.apply_scaled(gradients, variables, factor=tf.constant(factor), is_finite=tf.constant(is_finite))


def adamw_reference(weight, change, decay, rate, **_):
    return weight - rate * decay * weight - rate * change


def stable_adamw_reference(weight, change, decay, rate, gradient, second, **_):
    rms = np.sqrt(np.mean(gradient**2 / np.maximum(second, EPSILON**2)))
    return weight - rate / max(1, rms) * (decay * weight + change)


def lamb_reference(weight, change, decay, rate, *, decays, **_):
    change = change + decay * weight
    ratio = np.linalg.norm(weight) / np.linalg.norm(change) if decays and weight.any() else 1.0
    return weight - rate * ratio * change


REFERENCES = {"adamw": adamw_reference, "stable_adamw": stable_adamw_reference, "lamb": lamb_reference}


@pytest.mark.parametrize(
    ("scale", "factors", "decay"), [(1.0, (), DECAY), (0.0, (), DECAY), (1.0, (0.5, 0.9, 0.81), DECAY), (1.0, (), 0.0)]
)
@pytest.mark.parametrize("name", REFERENCES)
def test_updates_are_those_of_the_paper(name, scale, factors, decay):
    """Of weights that decay and others, with factors of the learning rate, which are those of layers, and a spike."""
    variables = new_variables(scale)
    expected = [variable.numpy().astype(np.float64) for variable in variables]
    moments = [(np.zeros((3, 4)), np.zeros((3, 4))) for _ in NAMES]
    optimizer = build(name, variables, factors, weight_decay_rate=decay)
    for step in range(4):
        gradients = [gradient * (1 if step < 3 else 50) for gradient in gradients_of(step)]
        apply(optimizer, variables, gradients)
        for index, gradient in enumerate(tensor.numpy() for tensor in gradients):
            first, second = moments[index]
            first = BETA1 * first + (1 - BETA1) * gradient
            second = BETA2 * second + (1 - BETA2) * gradient**2
            moments[index] = first, second
            corrections = 1 - BETA1 ** (step + 1), 1 - BETA2 ** (step + 1)
            # AdamW is tf_keras', whose epsilon is added before the second moment is corrected.
            epsilon = EPSILON / np.sqrt(corrections[1]) if name == "adamw" else EPSILON
            corrected = second / corrections[1]
            change = (first / corrections[0]) / (np.sqrt(corrected) + epsilon)
            inputs = {"rate": RATE * (factors or (1, 1, 1))[index], "gradient": gradient, "second": corrected}
            expected[index] = REFERENCES[name](
                expected[index], change, decay * (index == 0), decays=index == 0, **inputs
            )
    assert_all_close(variables, expected, rtol=2e-5, atol=1e-6)
    assert int(optimizer.iterations) == 4


@pytest.mark.parametrize("is_unfused", [False, True])
def test_adamw_has_the_numbers_of_tf_keras(is_unfused, monkeypatch):
    """Exactly as it is written out; TensorFlow's kernel rounds 1 - beta otherwise."""
    monkeypatch.setattr(optimizer_module, "runs_unfused", lambda: is_unfused)
    variables, expected = new_variables(), new_variables()
    optimizer = build("adamw", variables)
    reference = tf_keras.optimizers.AdamW(
        RATE, weight_decay=DECAY, beta_1=BETA1, beta_2=BETA2, epsilon=EPSILON, jit_compile=False
    )
    reference.exclude_from_weight_decay(var_names=["bias", "LayerNorm"])
    for step in range(3):
        apply(optimizer, variables, gradients_of(step))
        reference.apply_gradients(zip(gradients_of(step), expected, strict=True))
    tolerance = 3e-6 if is_unfused else 0
    assert_all_close(variables, expected, rtol=tolerance, atol=tolerance)
    assert_all_close(optimizer.variables[1:], reference.variables[1:], rtol=tolerance)


@pytest.mark.parametrize("name", each_architecture("deberta-v2 as v3"))
def test_matrices_decay_and_biases_and_layer_norms_do_not(name):
    model = tiny_model(name)
    optimizer = build("lamb", model.trainable_variables)
    # MPNet's relative positions add a bias to the scores, looked up in a table.
    decays = [
        len(variable.shape) > 1 and "relative_attention_bias" not in variable.name
        for variable in model.trainable_variables
    ]
    assert sum(decays) >= 10
    assert [optimizer.decays(variable) for variable in model.trainable_variables] == decays
    assert_rates_fall_with_the_layers(name, model)


def assert_rates_fall_with_the_layers(name, model):
    num_layers = 1 if name == "albert" else 2  # ALBERT's are one, used twice
    factors = layer_rate_factors(model, 0.5)
    assert set(factors) == {0.5**power for power in range(num_layers + 2)}
    for variable, factor in zip(model.trainable_variables, factors, strict=True):
        _, _, path = variable.name.partition(f"/{model.base_model_prefix}/")
        number = re.search(r"(?:layers?|groups)_\._(\d+)/", path)
        if number:
            assert factor == 0.5 ** (num_layers - int(number[1]))
        elif path.startswith("embeddings/"):
            assert factor == 0.5 ** (num_layers + 1)
        elif not path or "pooler" in path:
            assert factor == 1


def test_on_every_replica_the_same_variables_decay():
    with two_cpus().scope():
        variables = tiny_model("roberta-prelayernorm").trainable_variables
    optimizer = build("adamw", variables)
    for variable in variables:
        assert [optimizer.decays(value) for value in variable.values] == [len(variable.shape) > 1] * 2


@pytest.mark.parametrize(("name", "jit_compile"), [("adamw", False), *((name, True) for name in OPTIMIZERS)])
def test_nothing_changes_from_the_first_bad_step_on(name, jit_compile):
    variables = new_variables()
    optimizer = build(name, variables)
    step = tf.function(
        lambda gradients, factor, is_finite: optimizer.apply_scaled(
            gradients, variables, factor=factor, is_finite=is_finite
        ),
        jit_compile=jit_compile,
    )
    step(gradients_of(0), tf.constant(1.0), tf.constant(True))
    assert not optimizer.is_stopped
    state = [variable.numpy() for variable in (*variables, *optimizer.variables)]
    bad = [tf.constant([[np.nan, np.inf, -np.inf, 1.0]] * 3), *gradients_of(1)[1:]]
    step(bad, tf.constant(np.nan, tf.float32), tf.constant(False))
    assert optimizer.is_stopped
    step(gradients_of(2), tf.constant(1.0), tf.constant(True))
    assert optimizer.is_stopped
    assert_all_equal((*variables, *optimizer.variables), state)
    assert int(optimizer.iterations) == 1
    optimizer.resume()
    step(gradients_of(2), tf.constant(1.0), tf.constant(True))
    expected = new_variables()
    without_bad_step = build(name, expected)
    for seed in (0, 2):
        apply(without_bad_step, expected, gradients_of(seed))
    resumed_state = (*variables, *optimizer.variables)
    assert_all_close(resumed_state, (*expected, *without_bad_step.variables), rtol=2e-5, atol=1e-6)


def test_a_factor_scales_the_gradients():
    variables, expected = new_variables(), new_variables()
    apply(build("lamb", variables), variables, gradients_of(0), factor=0.25)
    apply(build("lamb", expected), expected, [0.25 * gradient for gradient in gradients_of(0)])
    assert_all_equal(variables, expected)


@given(st.lists(st.sampled_from([(), (3,), (2, 3), (3, 2), (0, 4)]), min_size=1, max_size=8))
def test_the_norm_is_that_of_all_gradients_together(shapes):
    random = np.random.default_rng(len(shapes))
    gradients = [random.normal(size=shape).astype(np.float32) for shape in shapes]
    expected = np.linalg.norm(np.concatenate([gradient.ravel() for gradient in gradients]).astype(np.float64))
    tensors = [tf.constant(gradient) for gradient in gradients]
    np.testing.assert_allclose(global_norm(tensors), expected, rtol=1e-6)
    for bad in (np.inf, np.nan):
        assert not np.isfinite(global_norm([*tensors, tf.constant([1.0, bad, 1.0])]))


def test_clipping_factors():
    norms = tf.constant([0.0, 0.5, 1.0, 4.0])
    assert clipping_factor(norms, 1.0).numpy().tolist() == [1.0, 1.0, 1.0, 0.25]
    assert clipping_factor(norms, 0.0).numpy().tolist() == [1.0] * 4
