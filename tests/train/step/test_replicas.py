"""The lowered steps, executed as the replicas of a slice, against one replica of TensorFlow with the whole batch."""

from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf

from finetuning.data.labels import Labels
from finetuning.tasks.classification import TextClassification
from tests.fixtures.replicas import Case, Program, Result, execute, lower, put_together, values_of, variables_of
from tests.fixtures.tiny_models import PAD, VOCABULARY, tiny_model
from tests.fixtures.tiny_steps import BAD_STEP, RULE, BadOnOneReplica, batch_of, compiled_model, token_rows
from train.checks.preflight.hlo_costs import collective_bytes
from train.model.build import use_tpu_layers
from train.runtime.lowering import ReplicaOfSlice
from train.step import sharding
from train.step.sharding import Sharding
from train.step.train_step import PretrainingModel
from train.tasks.masked_lm import MaskedLanguageModeling
from train.tasks.pair_pretraining import NO_LABEL, SentenceOrderPrediction

SEP = 2
NUM_ROWS, NUM_STEPS = 16, 5
DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
SIZES = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}


class Run(NamedTuple):
    """What one replica of TensorFlow gives at each step, and what replicas give, by their number."""

    expected: list[Result]
    results: dict[int, list[Result]]


class AloneOf(ReplicaOfSlice):
    """One of `num_replicas` replicas of TensorFlow, which sums over no others."""

    def __init__(self, num_replicas: int, index: int):
        super().__init__(num_replicas)
        self._index = index

    @property
    def replica_id_in_sync_group(self) -> tf.Tensor:
        return tf.constant(self._index)

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:  # noqa: ARG002
        return value

    def call(self, function: Any, batch: Any) -> list[np.ndarray]:
        with self:
            return [value.numpy() for value in tf.nest.flatten(function(batch))]


def pairs(seed: int) -> dict[str, np.ndarray]:
    """Make pairs of other lengths in each row, of which a few have no label or are of two documents."""
    rows = token_rows(NUM_ROWS, seed)
    for index, row in enumerate(rows):
        row[12 + index % 4 :] = PAD
        row[[2 + (index + seed) % 8, 11 + index % 4]] = SEP
    labels = np.array([0, 0, 1, 0, 0, NO_LABEL, 0, 0] * 2, np.int32)
    return {"input_ids": rows, "next_sentence_label": labels}


def texts(length: int, seed: int) -> dict[str, np.ndarray]:
    """Make rows of a fine-tuning, the last one of padding."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(3, length + 1, NUM_ROWS)
    rows = draw.integers(5, VOCABULARY, (NUM_ROWS, length), dtype=np.int32)
    mask = (np.arange(length) < lengths[:, np.newaxis]).astype(np.int32)
    index = np.where(np.arange(NUM_ROWS) < NUM_ROWS - 1, np.arange(NUM_ROWS), -1).astype(np.int32)
    label = draw.integers(0, 2, NUM_ROWS, dtype=np.int32)
    return {"input_ids": np.where(mask, rows, PAD), "attention_mask": mask, "index": index, "label": label}


def on_one_replica(model: PretrainingModel, function: Any, batches: list) -> list[Result]:
    """Call the function for each batch, and give the model the values back that it had."""
    before, results = values_of(model), []
    for batch in batches:
        outputs = [value.numpy() for value in tf.nest.flatten(function(tf.nest.map_structure(tf.constant, batch)))]
        results.append(Result(outputs, values_of(model)))
    for name, variable in variables_of(model).items():
        variable.assign(before[name])
    return results


def pair_model(num_shards: int = 1):
    network = tiny_model("bert", "TFAutoModelForPreTraining", num_hidden_layers=1, **DROPOUT, **SIZES)
    settings = {"sharding": Sharding(num_shards, by_xla=True) if num_shards > 1 else None, "max_grad_norm": 0.5}
    return compiled_model(network, SentenceOrderPrediction(RULE, PAD, SEP), model_type=BadOnOneReplica, **settings)


def classification_model():
    labels = Labels("single_label_classification", ("a", "b"))
    task = TextClassification(labels, ("accuracy",), pad_token_id=PAD, token_types=False)
    no_dropout = {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0}
    network = tiny_model("distilbert", "TFAutoModelForSequenceClassification", n_layers=1, **no_dropout)
    return compiled_model(network, task)


def block_model():
    """A ModernBERT with a global layer and a local one, whose rows of 16 are cut into blocks."""
    network = tiny_model("modernbert", local_attention=2, attention_dropout=0.1, **SIZES)
    network.encoder.separates_documents = True
    use_tpu_layers(network)
    return compiled_model(network, MaskedLanguageModeling(RULE, PAD))


class ShardedStep(NamedTuple):
    """The step of `pair_model` with a sharded optimizer and accumulation, for eight replicas.

    divided_bytes: of the variables that are divided, and of all others.
    """

    program: Program
    state: dict[str, np.ndarray]
    divided_bytes: tuple[int, int]


@pytest.fixture(scope="module")
def sharded_step() -> ShardedStep:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "MIN_SHARDED_SIZE", 256)
        model = pair_model(num_shards=8)
        model.num_micro_batches = 2
        sizes = Counter()
        for variable in model.network.trainable_variables:
            sizes[model.optimizer.sharded_axis(variable) is not None] += 4 * variable.shape.num_elements()
        program = lower(model, model.train_step, pairs(0), 8)
        return ShardedStep(program, values_of(model), (sizes[True], sizes[False]))


@pytest.fixture(scope="module")
def runs(sharded_step) -> dict[str, Run]:
    model, batches = pair_model(), [pairs(seed) for seed in range(NUM_STEPS)]
    expected = {"pairs": on_one_replica(model, model.train_step, batches[:BAD_STEP])}
    cases = {("pairs", 8): Case([sharded_step.program], sharded_step.state, [(0, batch) for batch in batches])}

    model, batch = classification_model(), texts(8, 1)
    for name, function in (("texts", model.train_step), ("evaluation", model.evaluation_step)):
        expected[name] = on_one_replica(model, function, [batch])
        cases[name, 8] = Case([lower(model, function, batch, 8)], values_of(model), [(0, batch)])

    model, rows = block_model(), token_rows()
    rows[:, 6] = SEP
    halves = [batch_of(half) for half in np.split(rows, 2)]
    with_blocks = [AloneOf(2, index).call(model.gradient_sums, half) for index, half in enumerate(halves)]
    expected["blocks"] = [Result([sum(parts) for parts in zip(*with_blocks, strict=True)], values_of(model))]
    program = lower(model, model.gradient_sums, batch_of(rows), 2)
    cases["blocks", 2] = Case([program], values_of(model), [(0, batch_of(rows))])

    results = dict(zip(cases, execute(list(cases.values())), strict=True))
    results["pairs", 8] = [
        Result(outputs, put_together(state, expected["pairs"][0].state)) for outputs, state in results["pairs", 8]
    ]
    return {
        name: Run(expected[name], {number: result for (other, number), result in results.items() if other == name})
        for name in expected
    }


def check_alike(result: Result) -> None:
    """Check that all replicas returned the same and have the same variables."""
    for name, values in [*enumerate(result.outputs), *result.state.items()]:
        np.testing.assert_array_equal(values, values[:1].repeat(len(values), axis=0), err_msg=str(name))


def check_equal(result: Result, expected: Result, **tolerance: float) -> None:
    check_alike(result)
    assert result.state.keys() == expected.state.keys()
    for value, other in zip(result.outputs, expected.outputs, strict=True):
        np.testing.assert_allclose(value[0], other, rtol=1e-5, **tolerance)
    for name, value in expected.state.items():
        np.testing.assert_allclose(result.state[name][0], value, rtol=1e-4, atol=2e-5, err_msg=name)


@pytest.mark.slow
def test_replicas_make_the_step_of_one(runs):
    """Masks, dropout, the order of pairs, their sums, clipping and accumulation, with a sharded optimizer."""
    expected, results = runs["pairs"].expected, runs["pairs"].results[8]
    assert expected[0].state["grad_norm/total:0"] > 0.5  # so that clipping takes part
    assert 0 < expected[-1].state["sop_loss/count:0"] < NUM_ROWS * BAD_STEP  # a few are not asked about
    for result, expected_result in zip(results, expected, strict=False):
        check_equal(result, expected_result)


@pytest.mark.slow
def test_a_bad_gradient_on_one_replica_stops_all(runs):
    results = runs["pairs"].results[8]
    before = results[BAD_STEP - 1].state
    assert np.all(before["going"] == 1)
    for result in results[BAD_STEP:]:
        assert np.all(result.state["going"] == 0)
        for name in before.keys() - {"going", "rate"}:
            if "/total" not in name and "/count" not in name:  # the means are told of it
                np.testing.assert_array_equal(result.state[name], before[name], err_msg=name)
    assert len(results) == NUM_STEPS


def test_the_preflight_counts_what_a_sharded_optimizer_sends(sharded_step):
    counted, (divided_bytes, other_bytes) = collective_bytes(sharded_step.program.stablehlo), sharded_step.divided_bytes
    assert counted["reduce_scatter"] == counted["all_gather"] == divided_bytes > other_bytes
    assert 0 < counted["all_reduce"] - other_bytes < 1000  # loss and norms


@pytest.mark.slow
def test_fine_tuning(runs):
    (result,), (expected,) = runs["texts"].results[8], runs["texts"].expected
    check_equal(result, expected)


@pytest.mark.slow
def test_evaluation_adds_up_and_keeps_each_row(runs):
    (result,), (expected,) = runs["evaluation"].results[8], runs["evaluation"].expected
    check_equal(result, expected, atol=1e-6)
    assert (NUM_ROWS, 2) in {value.shape for value in expected.outputs}


@pytest.mark.slow
def test_sums_of_the_layer_check_with_tpu_layers_and_blocks(runs):
    (result,), (expected,) = runs["blocks"].results[2], runs["blocks"].expected
    check_equal(result, expected, atol=1e-5)
