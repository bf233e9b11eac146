"""The optimizer divided among replicas: the same losses, weights and checkpoints as without."""

import numpy as np
import pytest
import tensorflow as tf

from tests.fixtures.arrays import assert_all_close, assert_same_arrays
from tests.fixtures.replicas import Case, execute, lower, put_together, values_of
from tests.fixtures.tiny_models import PAD, tiny_model
from tests.fixtures.tiny_steps import MAX_GRAD_NORM, RULE, build, compiled_model, one_cpu, token_rows, train, two_cpus
from train.checkpoints.manager import TrainingState
from train.config.learning import OptimizationConfig
from train.step import sharding
from train.step.optimizer import build_optimizer, clipping_factor, global_norm, global_norm_by_shards
from train.step.sharding import Sharding
from train.tasks.masked_lm import MaskedLanguageModeling

DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "num_hidden_layers": 1}


@pytest.fixture(autouse=True)
def _small_variables_are_divided(monkeypatch):
    monkeypatch.setattr(sharding, "MIN_SHARDED_SIZE", 512)


def test_which_variables_are_divided():
    eight = Sharding(8, by_xla=True)
    assert [eight.axis(shape) for shape in ((64, 8), (63, 16), (3, 7, 40))] == [0, 1, 2]
    assert [eight.axis(shape) for shape in ((511,), (63, 15), ())] == [None] * 3
    assert eight.shard_shape((63, 16)) == [63, 2]
    assert Sharding(1, by_xla=True).axis((64, 8)) is None


# {name: (shape, number of matrices side by side that Muon updates)}. Sharded along the first axis; along the second,
# where two matrices meet in a shard; along the second, with a single matrix; two variables that AdamW updates, of which
# the last is not sharded.
VARIABLES = {
    "layer/fused/kernel": ((6, 12), 2),
    "layer/odd/kernel": ((5, 18), 3),
    "layer/wide/kernel": ((3, 8), 1),
    "embeddings/weight": ((6, 4), 0),
    "layer/bias": ((6,), 0),
}


@pytest.mark.parametrize("name", ["stable_adamw", "lamb", "muon"])
def test_two_replicas_update_shards_as_one_updates_whole_variables(name, monkeypatch):
    """The replicas have different gradients, and the sum is clipped. `test_replicas.py` has steps of AdamW."""
    monkeypatch.setattr(sharding, "MIN_SHARDED_SIZE", 24)
    random, strategy = np.random.default_rng(0), two_cpus()
    start = [random.normal(size=shape).astype(np.float32) for shape, _ in VARIABLES.values()]
    gradients_by_step = [
        [random.normal(size=(2, *value.shape)).astype(np.float32) for value in start] for _ in range(2)
    ]
    config = OptimizationConfig(optimizer=name, learning_rate=0.1, weight_decay_rate=0.1, schedule="constant")
    num_matrices = [number for _, number in VARIABLES.values()]

    def trained(divided):
        with strategy.scope():
            variables = [tf.Variable(value, name=name) for name, value in zip(VARIABLES, start, strict=True)]
            optimizer = build_optimizer(config, divided, num_matrices=num_matrices, num_steps=9, num_warmup_steps=0)
            optimizer.build(variables)

        def step(gradients_by_replica):
            gradients = [tf.gather(gradient, sharding.replica_index()) for gradient in gradients_by_replica]
            if divided:
                gradients = list(map(divided.sum_gradient, gradients))
                norm = global_norm_by_shards(gradients, variables, divided)
            else:
                gradients = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, gradients)
                norm = global_norm(gradients)
            optimizer.apply_scaled(gradients, variables, factor=clipping_factor(norm, 1.0), is_finite=tf.constant(True))
            return norm

        norms = [strategy.experimental_local_results(strategy.run(step, (each,))) for each in gradients_by_step]
        return np.array(norms), [value.numpy() for variable in variables for value in variable.values]

    expected_norms, expected = trained(None)
    norms, values = trained(Sharding(2, by_xla=False))
    assert expected_norms.min() > 1
    np.testing.assert_allclose(norms, expected_norms, rtol=1e-6)
    assert_all_close(values, expected, rtol=1e-5, atol=1e-5)


def built(optimizer, is_sharded):
    settings = {"optimizer": optimizer, "max_grad_norm": MAX_GRAD_NORM, "learning_rate": 2e-3}
    settings["sharding"] = Sharding(8, by_xla=True) if is_sharded else None
    return compiled_model(tiny_model("roberta", **DROPOUT), MaskedLanguageModeling(RULE, PAD), **settings)


def batch(seed):
    return {"input_ids": token_rows(16, seed)}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["lamb", "muon"])
def test_eight_replicas_of_a_slice_train_the_same(optimizer):
    """`test_replicas.py` has steps of AdamW, with accumulation and a gradient that is not finite."""
    cases = []
    for is_sharded in (False, True):
        model = built(optimizer, is_sharded)
        program = lower(model, model.train_step, batch(0), 8)
        assert ("stablehlo.reduce_scatter" in program.stablehlo) == is_sharded
        cases.append(Case([program], values_of(model), [(0, batch(seed)) for seed in range(8)]))
    for unsharded, sharded in zip(*execute(cases), strict=True):
        np.testing.assert_allclose(sharded.outputs[0], unsharded.outputs[0], rtol=1e-6)
        whole = {variable: value[0] for variable, value in unsharded.state.items()}
        for variable, copies in put_together(sharded.state, whole).items():
            np.testing.assert_array_equal(copies, copies[:1].repeat(len(copies), axis=0), err_msg=variable)
            np.testing.assert_allclose(copies[0], whole[variable], rtol=1e-5, atol=1e-5, err_msg=variable)


@pytest.mark.slow
def test_two_devices_train_and_resume_the_same_with_and_without():
    """Muon divides its matrices, and all else as AdamW does."""

    def model_on(strategy, is_sharded):
        divided = Sharding(strategy.num_replicas_in_sync, by_xla=False) if is_sharded else None
        return build(strategy, optimizer="muon", sharding=divided)

    rows = token_rows(num_rows=32)
    whole, divided = (model_on(two_cpus(), is_sharded) for is_sharded in (False, True))
    figures = train(whole, rows)
    assert figures["grad_norm"] > MAX_GRAD_NORM
    assert train(divided, rows) == pytest.approx(figures, rel=1e-6)
    saved, expected = TrainingState(divided).read(), TrainingState(whole).read()
    assert_same_arrays(saved, expected, rtol=1e-7, atol=1e-5)

    train(divided, rows, num_steps=2)
    after = TrainingState(divided).read()
    # On, off, and on one device. A model that has other weights is restored to those that were saved.
    for resumed, tolerance in (
        (divided, {"atol": 0}),
        (whole, {"atol": 2e-5, "rtol": 1e-6}),
        (model_on(one_cpu(), True), {"atol": 2e-5, "rtol": 1e-6}),
    ):
        TrainingState(resumed).write(saved)
        assert_same_arrays(TrainingState(resumed).read(), saved)
        train(resumed, rows, num_steps=2)
        assert_same_arrays(TrainingState(resumed).read(), after, **tolerance)
