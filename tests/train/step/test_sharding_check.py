"""What stands between a run on a TPU and a sharded optimizer that makes another step there: each failure, and none."""

import logging

import numpy as np
import pytest
import tensorflow as tf

from tests.fixtures.replicas import Case, execute, lower, values_of
from tests.fixtures.tiny_steps import batch_of, build, token_rows, two_cpus
from train.step import sharding
from train.step.proofs import SHARDED_TOLERANCE, norms_agree, prove_sharding
from train.step.sharding import Sharding


@pytest.fixture(autouse=True)
def _small_variables_are_divided(monkeypatch):
    monkeypatch.setattr(sharding, "MIN_SHARDED_SIZE", 512)


def is_proven():
    """Compare the steps on two devices; check that it leaves everything as it was."""
    strategy = two_cpus()
    model = build(strategy, sharding=Sharding(2, by_xla=False))
    rows = token_rows(num_rows=32)
    batches = tf.data.Dataset.from_tensors(batch_of(rows))
    before = [variable.numpy() for variable in model.network.variables]
    proven = prove_sharding(model, next(iter(strategy.experimental_distribute_dataset(batches))))
    assert all(
        np.array_equal(variable.numpy(), old) for variable, old in zip(model.network.variables, before, strict=True)
    )
    assert not model.optimizer.iterations.numpy()
    return proven


@pytest.mark.slow
def test_the_same_step_is_proven(caplog):
    with caplog.at_level(logging.INFO):
        assert is_proven()
    assert "The optimizer is sharded; on the first rows it takes the same step: gradient norm " in caplog.text
    assert "WARNING" not in caplog.text


@pytest.mark.slow
def test_the_replicas_of_a_slice_find_the_same_step():
    model = build(tf.distribute.get_strategy(), sharding=Sharding(8, by_xla=True))
    rows = batch_of(token_rows(num_rows=16))
    program = lower(model, model.divided_squares, rows, 8)
    ((result,),) = execute([Case([program], values_of(model), [(0, rows)])])
    assert len(result.outputs[0]) == 8
    assert all(map(norms_agree, np.sqrt(result.outputs[0])))


def shifted(function):
    """Make replicas get each other's shards."""
    return lambda self, *arguments: tf.roll(function(self, *arguments), 1, axis=0)


def fail(error):
    def raise_error(*_):
        raise error

    return raise_error


@pytest.mark.parametrize(
    ("method", "change", "reason"),
    [
        *(
            pytest.param(name, shifted, "differs on the first rows: gradient norm ", marks=pytest.mark.slow)
            for name in ("sum_gradient", "gather")
        ),
        ("gather", lambda _: fail(ValueError("no all-gather")), "does not compile here: ValueError: no all-gather"),
    ],
)
def test_another_step_or_none_is_not_used(method, change, reason, caplog, monkeypatch):
    monkeypatch.setattr(Sharding, method, change(getattr(Sharding, method)))
    assert not is_proven()
    assert f"The run trains WITHOUT --shard-optimizer: a sharded step {reason}" in caplog.text


@pytest.mark.slow
def test_a_lost_device_says_nothing_about_the_optimizer(monkeypatch):
    monkeypatch.setattr(Sharding, "gather", fail(tf.errors.UnavailableError(None, None, "Socket closed")))
    with pytest.raises(tf.errors.UnavailableError):
        is_proven()


def test_steps_agree_within_rounding_alone():
    norms = np.array([[2.0, 3.0], [2.0, 3.0], [1e-6, 0.0], [0.0, 0.0]])
    assert norms_agree(norms)
    for index, value in ((1, 3.1), (1, np.nan), (2, 3.1 * SHARDED_TOLERANCE), (2, np.nan), (3, 1e-7), (3, np.nan)):
        changed = norms.copy()
        changed[index, 1] = value
        assert not norms_agree(changed), (index, value)
