"""Runs on the runtime of JAX that are killed or asked to stop, and resume: against some that were not, bit for bit."""

import random
import signal

import pytest

from mlm_common.errors import EXIT_STOPPED
from tests.fixtures.killable_runs import KillableRuns
from tests.fixtures.same_run import assert_same_run, logged
from tests.fixtures.tiny_phases import PHASES, phases_flags
from tests.fixtures.tiny_run import run_flags
from tests.train.test_resume import SPIKE_FLAGS, bad_rows

pytestmark = pytest.mark.slow

ON_JAX = ("--runtime", "jax")


@pytest.fixture(scope="module")
def runs():
    with KillableRuns() as runs:
        yield runs


def test_phases_are_killed_and_stopped_at_random_moments(runs, phase_shards, tmp_path):
    """Also where a damaged checkpoint leads back to the phase before."""
    assert runs.run(phases_flags(phase_shards, tmp_path / "whole", PHASES, *ON_JAX)) == 0
    flags, draw = phases_flags(phase_shards, tmp_path / "run", PHASES, *ON_JAX), random.Random(0)
    assert runs.run_and_signal(flags, "train", 11, signal.SIGKILL, 0.0) == -signal.SIGKILL
    for path in (tmp_path / "run" / "checkpoints").glob("*.safetensors"):
        if int(path.stem.removeprefix("step-")) >= 9:
            path.write_bytes(b"damaged")
    for number, status in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, EXIT_STOPPED)):
        delay_seconds = draw.uniform(0, 0.1) if number == signal.SIGKILL else 0.0
        assert runs.run_and_signal(flags, "train", 1, number, delay_seconds) == status
    assert runs.run_and_signal(flags, "save", 1, signal.SIGKILL, 0.001) == -signal.SIGKILL
    assert runs.run(flags) == 0
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_a_spike_leads_back_and_on_without_its_rows(runs, shards, tmp_path):
    bad_rows(shards, tmp_path / "shards")
    common_flags = ["--train-dataset", str(tmp_path / "shards"), "--tokenizer", str(shards / "train" / "tokenizer")]
    common_flags += ["--on-nonfinite", "skip", *ON_JAX]
    assert runs.on(1).run(run_flags(shards, tmp_path / "run", *SPIKE_FLAGS, *common_flags)) == 0
    rollbacks = logged(tmp_path / "run", "rollback")
    assert {line["reason"] for line in rollbacks} == {"spike"}
    train = logged(tmp_path / "run", "train")
    assert [line["step"] for line in train] == list(range(1, 31))
    assert max(line["loss"] for line in train[8:]) < 1.5

    killed = run_flags(shards, tmp_path / "killed", *SPIKE_FLAGS, *common_flags)
    num_reports = rollbacks[0]["step"] + 1
    assert runs.on(1).run_and_signal(killed, "train", num_reports, signal.SIGKILL, 0.0) == -signal.SIGKILL
    assert runs.on(1).run(killed) == 0
    assert_same_run(tmp_path / "killed", tmp_path / "run")
