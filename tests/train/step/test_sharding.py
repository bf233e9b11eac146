"""The optimizer divided among replicas: the same losses, weights and checkpoints as without."""

import numpy as np
import pytest

from tests.fixtures.replicas import Case, execute, lower, values_of
from tests.fixtures.tiny_models import PAD, tiny_model
from tests.fixtures.tiny_steps import (
    BAD_STEP,
    MAX_GRAD_NORM,
    RULE,
    BadOnOneReplica,
    build,
    compiled_model,
    one_cpu,
    token_rows,
    train,
    two_cpus,
)
from train.checkpoints.manager import TrainingState
from train.checks.preflight.hlo_costs import collective_bytes
from train.step import sharding
from train.step.sharding import Sharding
from train.tasks.masked_lm import MaskedLanguageModeling
from train.tasks.pair_pretraining import NextSentencePrediction

SEP = 2
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


def built(name, optimizer, is_sharded, num_micro_batches=1):
    task = MaskedLanguageModeling(RULE, PAD)
    if name == "bert":
        network = tiny_model("bert", "TFAutoModelForPreTraining", **DROPOUT)
        task = NextSentencePrediction(RULE, PAD, SEP)
    elif name == "modernbert":
        network = tiny_model("modernbert", local_attention=2, attention_dropout=0.1)
    else:
        network = tiny_model(name, **DROPOUT)
    return compiled_model(
        network,
        task,
        optimizer=optimizer,
        sharding=Sharding(8, by_xla=True) if is_sharded else None,
        max_grad_norm=MAX_GRAD_NORM,
        learning_rate=2e-3,
        num_micro_batches=num_micro_batches,
        model_type=BadOnOneReplica,
    )


def batch(name, seed):
    rows = {"input_ids": token_rows(16, seed)}
    if name == "bert":
        rows["input_ids"][:, [5, -1]] = SEP
        rows["next_sentence_label"] = np.arange(16, dtype=np.int32) % 2
    return rows


def put_together(shards, shape):
    """Make one array of those of all replicas, (replicas, …), which are all alike or shards of it."""
    if shards.shape[1:] == shape:
        np.testing.assert_array_equal(shards, shards[:1].repeat(len(shards), axis=0))
        return shards[0]
    (axis,) = (axis for axis, size in enumerate(shape) if shards.shape[1 + axis] != size)
    return np.concatenate(list(shards), axis)


def check_eight_replicas(name, optimizer, num_steps, num_micro_batches=1):
    """Train with and without sharding, as the replicas of a slice do; return the state after each sharded step."""
    cases = []
    for is_sharded in (False, True):
        model = built(name, optimizer, is_sharded, num_micro_batches)
        program = lower(model, model.train_step, batch(name, 0), 8)
        assert ("stablehlo.reduce_scatter" in program.stablehlo) == is_sharded
        if is_sharded:
            check_collectives(model, program.stablehlo)
        cases.append(Case([program], values_of(model), [(0, batch(name, seed)) for seed in range(num_steps)]))
    whole, sharded = execute(cases)
    for one, other in zip(whole, sharded, strict=True):
        np.testing.assert_allclose(other.outputs[0], one.outputs[0], rtol=1e-6)
        for variable, value in one.state.items():
            found = put_together(other.state[variable], value.shape[1:])
            np.testing.assert_allclose(found, value[0], rtol=1e-5, atol=1e-5, err_msg=variable)
    return [result.state for result in sharded]


def check_collectives(model, stablehlo):
    """Check the bytes that the preflight counts."""
    sizes = {True: 0, False: 0}
    for variable in model.network.trainable_variables:
        sizes[model.optimizer.sharded_axis(variable) is not None] += 4 * variable.shape.num_elements()
    counted = collective_bytes(stablehlo)
    assert counted["reduce_scatter"] == counted["all_gather"] == sizes[True]
    assert 0 < counted["all_reduce"] - sizes[False] < 1000  # loss and norms


def test_eight_replicas_of_a_slice_train_the_same_until_one_is_bad():
    """Clipping and accumulation take part; then a gradient that is not finite stops all."""
    states = check_eight_replicas("roberta", "adamw", BAD_STEP + 1, num_micro_batches=2)
    before, after = states[BAD_STEP - 1 :]
    assert before["grad_norm/total:0"][0] > MAX_GRAD_NORM * BAD_STEP
    assert np.all(before["going"] == 1)
    assert np.all(after["going"] == 0)
    for name in before.keys() - {"going", "rate"}:
        if "/total" not in name and "/count" not in name:
            np.testing.assert_array_equal(after[name], before[name], err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["roberta", "bert", "modernbert"])
@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_eight_replicas_of_a_slice_train_the_same(name, optimizer, monkeypatch):
    monkeypatch.setattr(BadOnOneReplica, "bad_step", -1)
    check_eight_replicas(name, optimizer, num_steps=20)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "lamb"])
def test_two_devices_train_and_resume_the_same_with_and_without(optimizer):
    def model_on(strategy, is_sharded):
        divided = Sharding(strategy.num_replicas_in_sync, by_xla=False) if is_sharded else None
        return build(strategy, optimizer=optimizer, sharding=divided)

    rows = token_rows(num_rows=32)
    whole, divided = (model_on(two_cpus(), is_sharded) for is_sharded in (False, True))
    figures = train(whole, rows)
    assert figures["grad_norm"] > MAX_GRAD_NORM
    assert train(divided, rows) == pytest.approx(figures, rel=1e-6)
    saved, expected = TrainingState(divided).read(), TrainingState(whole).read()
    assert saved.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(saved[name], value, atol=1e-5, err_msg=name)

    train(divided, rows, num_steps=2)
    after = TrainingState(divided).read()
    # On, off, and on one device.
    for strategy, is_sharded in ((two_cpus(), True), (two_cpus(), False), (one_cpu(), True)):
        resumed = model_on(strategy, is_sharded)
        TrainingState(resumed).write(saved)
        again = TrainingState(resumed).read()
        assert all(np.array_equal(again[name], value) for name, value in saved.items())
        train(resumed, rows, num_steps=2)
        end = TrainingState(resumed).read()
        is_same = strategy.num_replicas_in_sync == 2 and is_sharded
        for name, value in after.items():
            np.testing.assert_allclose(end[name], value, rtol=0, atol=0 if is_same else 2e-5, err_msg=name)
