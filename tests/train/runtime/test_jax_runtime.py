"""The runtime of JAX on CPU devices, beside TensorFlow's."""

import gc
import re
import shutil
import sys
from collections import Counter

import jax
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from tests.fixtures.arrays import assert_same_arrays
from tests.fixtures.jax_devices import devices_of_jax, run_on_jax
from tests.fixtures.results import read_json
from tests.fixtures.same_run import assert_alike, assert_same_run, logged
from tests.fixtures.tiny_models import PAD, VOCABULARY, tiny_model
from tests.fixtures.tiny_run import forget_checkpoint, run_flags
from tests.fixtures.tiny_steps import (
    BAD_STEP,
    MAX_GRAD_NORM,
    NO_DROPOUT,
    RULE,
    BadOnOneReplica,
    compiled_model,
    token_rows,
)
from train.checkpoints.manager import TrainingState
from train.run_mlm import main
from train.runtime import jax_programs
from train.runtime.jax_programs import compile_program, host_copy, parsed, place, set_up_jax, sharding_over, values_of
from train.runtime.jax_runtime import JaxRuntime
from train.runtime.lowering import lower
from train.runtime.machines import Cluster
from train.step import sharding
from train.step.sharding import Sharding
from train.step.train_step import PretrainingModel
from train.tasks.masked_lm import MaskedLanguageModeling


def jax_model(num_devices, model_type=PretrainingModel, divided=False, **settings):
    """Make the model of `tiny_steps.build` on so many devices."""
    with devices_of_jax(num_devices) as devices:
        runtime = JaxRuntime(Cluster(), devices)
    task = MaskedLanguageModeling(RULE, PAD)
    settings = {"max_grad_norm": MAX_GRAD_NORM, "runtime": runtime, "model_type": model_type, **settings}
    settings["sharding"] = Sharding(num_devices, by_xla=True) if divided else None
    network = tiny_model("roberta", num_hidden_layers=1, **NO_DROPOUT)
    return compiled_model(network, task, **settings)


def train(model, num_steps=3):
    """Fit it to the same rows; return the means over the steps."""
    rows = token_rows()
    num_rows = len(rows) // model.runtime.num_replicas

    def batches(context):
        del context
        return tf.data.Dataset.from_tensor_slices({"input_ids": rows}).batch(num_rows).repeat()

    model.fit(model.runtime.distribute(batches), steps_per_epoch=num_steps, verbose=0)
    model.runtime.pull(model.figures)
    return {metric.name: float(metric.result()) for metric in model.metrics}


def without_means(model):
    """Read weights and moments, whose size lets an absolute tolerance hold for all."""
    return {name: array for name, array in TrainingState(model).read().items() if not name.startswith("metrics/")}


@pytest.fixture
def num_compiled():
    """Count the programs since then that JAX compiled, as it did not find them."""
    events: Counter[str] = Counter()
    jax.monitoring.register_event_listener(lambda event, **_: events.update([event.rpartition("/")[2]]))

    def count():
        assert events["cache_hits"]
        return events["compile_requests_use_cache"] - events["cache_hits"]

    return count


@pytest.fixture(scope="module")
def trained_on_eight():
    """A model after three steps on eight devices, its weights before, and its figures and values then."""
    model = jax_model(8, BadOnOneReplica)
    before = [variable.numpy() for variable in model.network.variables]
    return model, before, train(model, BAD_STEP), without_means(model)


@pytest.fixture(scope="module")
def trained_on_one():
    """A model after three steps on one device, its figures and values then."""
    model = jax_model(1)
    return model, train(model, BAD_STEP), without_means(model)


def test_eight_replicas_make_the_steps_of_one(trained_on_eight, trained_on_one):
    (*_, figures, values), (_, figures_of_one, values_of_one) = trained_on_eight, trained_on_one
    assert figures == pytest.approx(figures_of_one, rel=1e-5)
    assert_same_arrays(values, values_of_one, atol=2e-5)


def test_long_masks_keep_their_values_in_any_jax():
    """TensorFlow's text packs truth values as JAX's parser did before 0.11, and writes a constant for each use."""
    mask = np.random.default_rng(0).random((63, 61)) < 0.5

    def chosen(rows):
        return tf.where(mask, rows, 0.0), tf.where(mask, 0.0, rows)

    lowered = lower(chosen, (tf.TensorSpec(mask.shape),), 1)
    assert not re.search(r'dense<"0x[^>]*> : tensor<[^>]*xi1>', lowered.stablehlo)
    rows = np.arange(mask.size, dtype=np.float32).reshape(mask.shape)
    with devices_of_jax(1) as devices:
        program = compile_program(lowered.stablehlo, devices)
        results = program.execute([place([rows], sharding_over(devices))])
    copies = [host_copy(values_of(result)[0]) for result in results]
    np.testing.assert_array_equal(copies, [np.where(mask, rows, 0), np.where(mask, 0, rows)])
    assert lowered.stablehlo.count("63x61xi8>") > 2  # twice the constant, and its conversion
    with parsed(lowered.stablehlo) as module:
        assert str(module).count('dense<"0x') == 1


@pytest.mark.slow
def test_twenty_steps_are_those_of_tensorflow(shards, tmp_path):
    """Muon updates matrices in its own way, and all else as AdamW does."""
    flags = ("--dropout", "0.1", "--max-steps", "20", "--log-steps", "1", "--eval-steps", "10", "--optimizer", "muon")
    assert main(run_flags(shards, tmp_path / "expected", *flags)) == 0
    run_on_jax(main, run_flags(shards, tmp_path / "run", *flags))
    assert_alike(tmp_path / "run", tmp_path / "expected", 1e-5)


@pytest.mark.slow
def test_a_run_is_on_all_its_devices(jax_run):
    record = read_json(jax_run / "run.json")
    assert record["settings"]["hardware"]["runtime"] == "jax"
    assert record["plan"]["num_replicas"] == 2
    losses = [line["loss"] for line in logged(jax_run)]
    assert max(losses) < np.log(VOCABULARY)
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_a_run_that_resumes_ends_as_if_it_had_not_stopped(jax_run, shards, tmp_path, num_compiled):
    """In another folder; its programs are found in JAX's cache."""
    shutil.copytree(jax_run, tmp_path / "run")
    forget_checkpoint(tmp_path / "run", 6)
    run_on_jax(main, run_flags(shards, tmp_path / "run", "--dropout", "0.1"))
    assert_same_run(tmp_path / "run", jax_run)
    assert num_compiled() == 0
    record = read_json(jax_run / "run.json")
    assert record["settings"]["hardware"]["runtime"] == "jax"
    assert record["plan"]["num_replicas"] == 2


@pytest.mark.slow
def test_a_run_continues_on_the_other_runtime_with_a_note(jax_run, shards, tmp_path, capsys):
    """Where its figures are the same: dropout, masks, order, validation."""
    shutil.copytree(jax_run, tmp_path / "run")
    forget_checkpoint(tmp_path / "run", 6)
    assert main(run_flags(shards, tmp_path / "run", "--dropout", "0.1")) == 0
    printed = capsys.readouterr().out
    assert "resuming at step 3 of 6" in printed
    assert "--runtime jax -> tensorflow" in printed
    assert "results may differ in the last bits from an uninterrupted run" in printed
    assert_alike(tmp_path / "run", jax_run, 1e-5)


def test_a_gradient_that_is_not_finite_on_one_replica_stops_all(trained_on_eight):
    model, *_, values = trained_on_eight
    train(model, 2)
    assert model.optimizer.is_stopped
    assert_same_arrays(without_means(model), values)


@pytest.mark.slow
def test_a_divided_optimizer_makes_the_same_steps_and_is_saved_whole(monkeypatch):
    """Muon divides its matrices, and all else as AdamW does."""
    monkeypatch.setattr(sharding, "MIN_SHARDED_SIZE", 512)
    whole, divided = (jax_model(2, divided=is_divided, optimizer="muon") for is_divided in (False, True))
    assert train(divided) == pytest.approx(train(whole), rel=1e-5)
    saved = TrainingState(divided).read()
    assert_same_arrays(without_means(divided), without_means(whole), atol=2e-5)
    resumed = jax_model(2, divided=True, optimizer="muon")
    TrainingState(resumed).write(saved)
    assert_same_arrays(TrainingState(resumed).read(), saved)
    assert train(resumed) == train(divided)
    assert_same_arrays(TrainingState(resumed).read(), TrainingState(divided).read())


def test_tensorflow_keeps_no_second_copy_and_has_the_values_where_they_are_read(trained_on_eight):
    model, before, *_ = trained_on_eight
    variables = model.network.variables

    def num_values():
        return sum(int(tf.size(variable.read_value())) for variable in variables)

    assert num_values() == len(variables)
    with model.runtime.on_host(variables):
        read = [variable.numpy() for variable in variables]
        assert [array.shape for array in read] == [array.shape for array in before]
        assert any(not np.array_equal(array, old) for array, old in zip(read, before, strict=True))
    assert num_values() == len(variables)


def test_a_model_that_was_released_has_no_weights():
    model = jax_model(1)
    state = TrainingState(model)
    state.write(state.read())
    model.runtime.release()
    with pytest.raises(Exception, match=r"shape|size"):
        model.network({"input_ids": tf.constant(token_rows())})


def test_a_function_may_capture_tensors_and_return_any_structure():
    with devices_of_jax(2) as devices:
        runtime = JaxRuntime(Cluster(), devices)
    table, total = tf.constant(np.arange(1000, dtype=np.int32) ** 2), tf.Variable(np.zeros(2, np.int32))

    def look_up(batch):
        replica = tf.distribute.get_replica_context()
        squares = tf.gather(table, batch["index"])
        total.assign_add(replica.all_reduce(tf.distribute.ReduceOp.SUM, squares))
        return {"squares": (squares, batch["index"] + 1), "sum": total.read_value()}

    function = runtime.on_replicas(look_up, jit_compile=True)
    for num_calls in (1, 2):
        results = function({"index": np.array([[3, 999], [5, 7]])})
        assert [np.asarray(array).tolist() for array in results["squares"][0]] == [[9, 999**2], [25, 49]]
        assert [np.asarray(array).tolist() for array in results["squares"][1]] == [[4, 1000], [6, 8]]
        expected = [num_calls * (9 + 25), num_calls * (999**2 + 49)]
        assert [np.asarray(array).tolist() for array in results["sum"]] == [expected, expected]
    assert runtime.read([total])[0].tolist() == expected
    runtime.write([total], [np.array([1, 2])])
    assert [np.asarray(array).tolist() for array in values_of(runtime.replicas_of(total))] == [[1, 2], [1, 2]]
    runtime.pull([total])
    assert total.numpy().tolist() == [1, 2]
    total.assign([5, 6])
    runtime.push([total])
    assert runtime.read([total])[0].tolist() == [5, 6]


def test_what_a_checkpoint_holds_is_not_changed_by_the_next_step(trained_on_one):
    model, *_ = trained_on_one
    saved = TrainingState(model).read()
    copies = {name: array.copy() for name, array in saved.items()}
    train(model)
    assert_same_arrays(saved, copies)
    assert any(not np.array_equal(array, saved[name]) for name, array in TrainingState(model).read().items())


def test_a_variable_on_a_device_has_memory_of_its_own():
    """JAX takes an array that is aligned for its own; a step would then copy it."""
    with devices_of_jax(1) as devices:
        runtime = JaxRuntime(Cluster(), devices)
    buffer = np.zeros(4096 + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    array, total = buffer[start : start + 4096].view(np.float32), tf.Variable(np.zeros(1024, np.float32))

    def address():
        return values_of(runtime.replicas_of(total))[0].unsafe_buffer_pointer()

    runtime.write([total], [array])
    before = address()
    assert before != array.ctypes.data
    runtime.on_replicas(total.assign_add)(np.ones((1, 1024), np.float32))
    assert address() == before
    assert runtime.read([total])[0].tolist() == [1.0] * 1024
    assert not array.any()


def test_no_copy_stays_with_a_value_that_was_read():
    """Of 4-bit integers JAX makes one on a CPU, too, as of everything on other devices."""
    with devices_of_jax(1) as devices:
        placed = place([np.arange(4).astype(ml_dtypes.int4)], sharding_over(devices))
    (value,) = values_of(placed)
    assert host_copy(value).tolist() == [0, 1, 2, 3]
    assert value._npy_value is None
    np.asarray(value)
    assert value._npy_value is not None


def test_a_variable_that_may_be_cast_and_is_only_assigned_is_captured():
    with devices_of_jax(1) as devices:
        runtime = JaxRuntime(Cluster(), devices)
    tf_keras.mixed_precision.set_global_policy("mixed_bfloat16")
    layer = tf_keras.layers.Layer()
    last, total, zero = (layer.add_weight(name, (2,), initializer="zeros") for name in ("last", "total", "zero"))

    def assign(batch):
        last.assign(batch)
        total.assign_add(batch)
        return batch + zero.read_value()

    function = runtime.on_replicas(assign)
    for number in (1, 2):
        function(np.full((1, 2), number, np.float32))
    assert [array.tolist() for array in runtime.read([last, total])] == [[2, 2], [3, 3]]


def test_the_graph_of_a_program_is_forgotten():
    """Of one with a gradient of its own, too, which TensorFlow registers for good."""

    @tf.custom_gradient
    def double(value):
        return 2 * value, lambda gradient: 2 * gradient * tf.ones_like(value)

    weight = tf.Variable(np.ones(2, np.float32))

    def step(batch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(double(weight * batch))
        return tape.gradient(loss, weight)

    with devices_of_jax(1) as devices:
        function = JaxRuntime(Cluster(), devices).on_replicas(step)
    before = count_graphs()
    (gradient,) = function(np.full((1, 2), 3, np.float32))
    assert np.asarray(gradient).tolist() == [6, 6]
    assert count_graphs() == before


def count_graphs():
    gc.collect()
    return sum(isinstance(instance, tf.Graph) for instance in gc.get_objects())


def test_a_step_makes_no_python_call_for_each_variable():
    with devices_of_jax(2) as devices:
        runtime = JaxRuntime(Cluster(), devices)
    variables = [tf.Variable(np.float32(number)) for number in range(300)]

    def add(batch):
        for variable in variables:
            variable.assign_add(batch)
        return batch

    function, batch = runtime.on_replicas(add, jit_compile=True), np.ones(2, np.float32)
    for _ in range(2):
        function(batch)
    calls = []
    sys.setprofile(lambda _, event, argument: calls.append(argument) if event == "call" else None)
    try:
        function(batch)
    finally:
        sys.setprofile(None)
    assert len(calls) < 300
    assert runtime.read(variables[-1:]) == [299 + 3]


@pytest.mark.parametrize("has_accelerator", [False, True])
def test_libtpu_looks_for_a_tpu_only_where_there_may_be_one(has_accelerator, monkeypatch):
    updates = {}
    monkeypatch.setattr(jax.config, "update", updates.__setitem__)
    monkeypatch.setattr(jax_programs, "has_accelerator", lambda: has_accelerator)
    monkeypatch.setattr(jax_programs, "find_spec", lambda name: name)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    set_up_jax()
    assert updates.get("jax_platforms") == (None if has_accelerator else "cpu")
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    updates.clear()
    set_up_jax()
    assert "jax_platforms" not in updates
