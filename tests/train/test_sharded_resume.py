"""Runs whose optimizer is divided among two devices: stopped, and resumed on one device, and divided again."""

import logging
import signal

import pytest

from mlm_common.errors import EXIT_STOPPED
from tests.fixtures.killable_runs import KillableRuns
from tests.fixtures.results import read_json
from tests.fixtures.same_run import timeless_lines
from tests.fixtures.tiny_run import run_flags
from tests.fixtures.tiny_steps import two_cpus
from train.run_mlm import main

# Two kernels just large enough to be divided.
MODEL = "num_hidden_layers=1,hidden_size=128,num_attention_heads=2,intermediate_size=512,hidden_dropout_prob=0.1"
# Muon divides its matrices, and all else as AdamW does.
FLAGS = [
    *("--optimizer", "muon"),
    *("--config-overrides", MODEL, "--per-replica-batch-size", "2", "--global-batch-size", "8", "--max-steps", "12"),
    *("--log-steps", "3", "--eval-steps", "6", "--save-steps", "2"),
]
SHARDED = "--shard-optimizer"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs():
    with KillableRuns() as runs:
        yield runs


@pytest.fixture(scope="module")
def whole_run(runs, shards, tmp_path_factory):
    """The folder of a run that nothing happened to."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert runs.run(run_flags(shards, folder, *FLAGS, SHARDED)) == 0
    return folder


def test_off_and_on_with_other_numbers_of_replicas(runs, whole_run, shards, tmp_path):
    flags = run_flags(shards, tmp_path / "run", *FLAGS)
    for num_devices, sharded in ((2, (SHARDED,)), (1, ())):
        assert runs.on(num_devices).run_and_signal([*flags, *sharded], "train", 3, signal.SIGTERM, 0.0) == EXIT_STOPPED
    assert runs.run([*flags, SHARDED]) == 0
    for line, expected in zip(timeless_lines(tmp_path / "run"), timeless_lines(whole_run), strict=True):
        assert line.pop("split") == expected.pop("split")
        assert line == pytest.approx(expected, rel=1e-3)


@pytest.mark.usefixtures("cpu_as_tpu")
def test_a_run_on_devices_that_cannot_do_it_trains_without(shards, tmp_path, monkeypatch, caplog):
    strategy = two_cpus()
    monkeypatch.setattr("train.runtime.strategy.connect", lambda *_: strategy)
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5e-2")
    # A CPU has no sum over replicas with XLA.
    monkeypatch.setattr("train.runtime.strategy.compiles_with_xla", lambda *_: False)
    on_tpu = (*FLAGS, SHARDED, "--tpu-name", "local", "--tpu-layers", "off", "--max-steps", "3")
    with caplog.at_level(logging.INFO):
        assert main(run_flags(shards, tmp_path / "run", *on_tpu, "--max-steps", "3")) == 0
    assert "The run trains WITHOUT --shard-optimizer: a sharded step does not compile here: " in caplog.text
    record = read_json(tmp_path / "run" / "run.json")
    assert record["computation"]["shard_optimizer"] is False
