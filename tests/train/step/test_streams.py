"""A step and an evaluation that are divided into parallel streams, against the same without streams."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from mlm_common.errors import InputError
from mlm_common.workers import num_cores
from tests.fixtures.arrays import assert_all_equal
from tests.fixtures.plans import config_of, plan_of
from tests.fixtures.results import read_json
from tests.fixtures.same_run import assert_alike, assert_same_run
from tests.fixtures.tiny_models import PAD, tiny_config, tiny_model
from tests.fixtures.tiny_run import forget_checkpoint, run_flags
from tests.fixtures.tiny_steps import (
    RULE,
    batch_of,
    build,
    compiled_model,
    gradients_of,
    one_cpu,
    token_rows,
    train,
    weights,
)
from train import has_accelerator
from train.loop.run import Run, describe_hardware
from train.model.computation import (
    MAX_STREAM_PARAMETERS,
    Computation,
    Parameters,
    count_streams,
    describe_computation,
    may_use_streams,
)
from train.step.train_step import divided_rows
from train.tasks.masked_lm import MaskedLanguageModeling

PROJECT = Path(__file__).parents[3]


class WithRowValues(MaskedLanguageModeling):
    """The task with a value for each row in its sums."""

    def sums(self, network, rows, *, training):
        return super().sums(network, rows, training=training) | {"second_ids": rows.original_ids[:, 1]}


@pytest.mark.parametrize(("num_streams", "num_micro_batches"), [(2, 1), (3, 1), (9, 1), (3, 2)])
def test_a_step_in_streams_is_the_same_step(num_streams, num_micro_batches):
    rows = token_rows()
    whole, divided = build(one_cpu()), build(one_cpu(), num_streams=num_streams, num_micro_batches=num_micro_batches)
    assert train(divided, rows) == pytest.approx(train(whole, rows), rel=1e-4)
    np.testing.assert_allclose(weights(divided), weights(whole), atol=2e-5)


def test_rows_drop_out_the_same_in_streams():
    batch, gradients = batch_of(token_rows()), []
    for settings in ({}, {"num_streams": 3}, {"seed": 4}):
        with one_cpu().scope():
            network = tiny_model("roberta", num_hidden_layers=1, hidden_dropout_prob=0.3)
            model = compiled_model(network, MaskedLanguageModeling(RULE, PAD), **settings)
        gradients.append(gradients_of(model, batch))
    np.testing.assert_allclose(gradients[1], gradients[0], atol=1e-6)
    assert np.abs(gradients[2] - gradients[0]).max() > 1e-3


def test_an_evaluation_in_streams_gives_the_same_sums_and_the_values_in_the_order_of_rows():
    sums = []
    for num_streams in (1, 3):
        with one_cpu().scope():
            network = tiny_model("roberta", num_hidden_layers=1)
            model = compiled_model(network, WithRowValues(RULE, PAD), num_streams=num_streams)
        rows = model.prepare_batch(batch_of(token_rows()), 0)
        sums.append({name: value.numpy() for name, value in model.evaluation_step(rows).items()})
    values = [each.pop("second_ids") for each in sums]
    assert_all_equal(values, 2 * [token_rows()[:, 1]])
    assert sums[1] == pytest.approx(sums[0], rel=1e-5)


@given(num_rows=st.integers(1, 40), data=st.data())
def test_streams_have_all_rows_in_order_and_nearly_equal_numbers(num_rows, data):
    num_parts = data.draw(st.integers(1, 50))
    rows = {"ids": tf.reshape(tf.range(2 * num_rows), (num_rows, 2)), "keys": (tf.range(num_rows),)}
    parts = divided_rows(rows, num_parts)
    sizes = [len(part["ids"]) for part in parts]
    assert len(parts) == min(num_parts, num_rows)
    assert min(sizes) > 0
    assert max(sizes) - min(sizes) <= 1
    assert_all_equal([tf.concat([part["ids"] for part in parts], 0)], [rows["ids"]])
    assert_all_equal([tf.concat([part["keys"][0] for part in parts], 0)], [rows["keys"][0]])


@pytest.mark.parametrize(
    ("flags", "cores", "num_streams"),
    [
        ((), 1, 1),
        ((), 2, 2),
        ((), 4, 4),
        ((), 5, 1),  # 2,048 tokens
        (("--gradient-accumulation-steps", "2"), 4, 4),
        (("--per-replica-batch-size", "8"), 2, 1),
        (("--per-replica-batch-size", "1"), 2, 1),
    ],
)
def test_streams_have_enough_tokens(flags, cores, num_streams):
    config = config_of("--preset", "tiny-roberta-cpu", "--max-steps", 10, *flags)
    plan = plan_of(config, num_rows=10**6, max_length=64)
    assert count_streams(tiny_config("roberta"), plan, "TFAutoModelForMaskedLM", cores) == num_streams


@pytest.mark.parametrize("parameters", [None, Parameters(MAX_STREAM_PARAMETERS + 1, 0)])
def test_large_and_unknown_models_are_not_divided(parameters, monkeypatch):
    monkeypatch.setattr("train.model.computation.count_parameters", lambda *_: parameters)
    plan = plan_of(config_of("--preset", "tiny-roberta-cpu", "--max-steps", 10), num_rows=10**6, max_length=64)
    assert count_streams(tiny_config("roberta"), plan, "TFAutoModelForMaskedLM", 2) == 1


def test_only_tensorflow_without_xla_on_a_cpu_uses_streams(monkeypatch):
    for name in ("TF_CONFIG", "TF_NUM_INTEROP_THREADS", "TF_NUM_INTRAOP_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("train.model.computation.multiplies_in_bfloat16", lambda: False)

    def may(*flags):
        return may_use_streams(config_of("--runtime", "tensorflow", *flags).hardware)

    assert may()
    assert may("--jit-compile", "false")
    for flags in (("--jit-compile", "true"), ("--bfloat16",), ("--tpu-layers", "on"), ("--tpu-name", "local")):
        assert not may(*flags)
    assert not may("--runtime", "jax")
    monkeypatch.setattr("train.model.computation.multiplies_in_bfloat16", lambda: True)
    assert may("--bfloat16")
    for name in ("TF_CONFIG", "TF_NUM_INTEROP_THREADS", "TF_NUM_INTRAOP_THREADS"):
        with monkeypatch.context() as context:
            context.setenv(name, "2")
            assert not may()


@pytest.mark.parametrize(
    ("record", "has_plans", "couples_rows", "num_streams"),
    [
        (None, True, False, 2),
        (None, True, True, 1),
        (None, False, False, 1),
        ({"num_streams": 5}, True, False, 5),
        ({}, True, False, 1),  # the record of an older version
        ("TPU", True, False, 1),
    ],
)
def test_a_run_keeps_its_number_of_streams(record, has_plans, couples_rows, num_streams, monkeypatch, tmp_path):
    monkeypatch.setattr("train.loop.run.has_cpu_alone", lambda: True)
    monkeypatch.setattr("train.loop.run.num_cores", lambda: 2)
    monkeypatch.setattr("train.loop.run.may_use_streams", lambda _: True)
    config = config_of("--preset", "tiny-roberta-cpu", "--max-steps", 10, "--output-dir", tmp_path)
    task = SimpleNamespace(couples_rows=couples_rows, model_class="TFAutoModelForMaskedLM")
    phase: Any = SimpleNamespace(config=config, task=task, model_config=tiny_config("roberta"), name="")
    run = Run((phase,), plans=(plan_of(config, num_rows=10**6, max_length=64),) if has_plans else ())
    content = None
    if record is not None:
        hardware = "TPU v3-8" if record == "TPU" else describe_hardware(config.hardware, 1)
        content = {"hardware": hardware, "computation": {} if record == "TPU" else record}
    run.__dict__["recorded"] = SimpleNamespace(content=content, was_started_by_current_supervisor=False)
    assert run.with_streams().num_streams == num_streams


def test_a_damaged_number_of_streams_is_an_error_that_names_the_file(monkeypatch, tmp_path):
    monkeypatch.setattr("train.loop.run.may_use_streams", lambda _: True)
    config = config_of("--preset", "tiny-roberta-cpu", "--max-steps", 10, "--output-dir", tmp_path)
    phase: Any = SimpleNamespace(config=config)
    run = Run((phase,), plans=(plan_of(config),))
    content = {"hardware": describe_hardware(config.hardware, 1), "computation": {"num_streams": "two"}}
    run.__dict__["recorded"] = SimpleNamespace(content=content, was_started_by_current_supervisor=False)
    with pytest.raises(InputError, match=r"run\.json"):
        run.with_streams()


def test_streams_are_named_where_the_computation_is_described():
    described = describe_computation(dataclasses.asdict(Computation(False, False, num_streams=2)), on_tpu=False)
    assert described == "without XLA, reference layers, 2 parallel streams"


THREADS_OF_STREAMS = """
import os
import train
train.load_tensorflow()
from train.config.hardware import HardwareConfig
from train.runtime.machines import Cluster
from train.runtime.strategy import COMPUTING_THREAD, THREADS, connect, pin_streams, share_cores
num_cores, extra = len(os.sched_getaffinity(0)), EXTRA
share_cores(num_cores + extra)
connect(HardwareConfig(no_tpu=True), Cluster())
pin_streams(num_cores + extra)
names = {int(folder.name): (folder / "comm").read_text().strip() for folder in THREADS.glob("*")}
cores = [sorted(os.sched_getaffinity(thread)) for thread, name in names.items() if name == COMPUTING_THREAD]
print(sorted(cores) == [[core] for core in sorted(os.sched_getaffinity(0))])
"""


@pytest.mark.slow
@pytest.mark.skipif(has_accelerator() or not hasattr(os, "sched_getaffinity"), reason="for Linux with only a CPU")
@pytest.mark.skipif(num_cores() == 1, reason="a single core has no streams")
@pytest.mark.parametrize(("extra", "are_pinned"), [(0, True), (1, False)])
def test_each_stream_has_its_core_if_there_is_one_for_each(extra, are_pinned):
    command = [sys.executable, "-c", THREADS_OF_STREAMS.replace("EXTRA", str(extra))]
    done = subprocess.run(command, cwd=PROJECT, check=True, capture_output=True, encoding="utf-8")
    assert done.stdout == f"{are_pinned}\n"


@pytest.mark.slow
@pytest.mark.skipif(has_accelerator(), reason="for a machine with only a CPU")
def test_a_run_in_streams_resumes_bit_for_bit(shards: Path, tmp_path: Path):
    """Against the same run with TensorFlow's own threads, the weights differ only by rounding."""

    def trained(folder: Path, *flags: str, **environment: str) -> Path:
        command = [sys.executable, "train/run_mlm.py", *run_flags(shards, folder, "--no-tpu", *flags)]
        subprocess.run(command, cwd=PROJECT, env=os.environ | environment, check=True, capture_output=True)
        return folder

    batch = ("--per-replica-batch-size", str(32 * num_cores()))
    whole, stopped = (trained(tmp_path / name, *batch) for name in ("whole", "stopped"))
    forget_checkpoint(stopped, 6)
    trained(stopped, *batch, "--resume", "must")
    alone = trained(tmp_path / "alone", *batch, TF_NUM_INTRAOP_THREADS="1")
    numbers = [read_json(run / "run.json")["computation"]["num_streams"] for run in (whole, stopped, alone)]
    assert numbers == [num_cores(), num_cores(), 1]
    assert_same_run(stopped, whole)
    assert_alike(whole, alone)
