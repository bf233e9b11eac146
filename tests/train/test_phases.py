"""Runs of several phases: what each leaves, and phases that were changed before a resume."""

import signal
import weakref

import pytest

from mlm_common.errors import EXIT_PERMANENT
from tests.fixtures.killable_runs import KillableRuns
from tests.fixtures.results import read_json
from tests.fixtures.same_run import assert_same_run, logged
from tests.fixtures.tiny_phases import phases_flags, phases_with
from train.export import main as export
from train.loop.trainer import Trainer
from train.run_mlm import main

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs():
    with KillableRuns(num_devices=1) as runs:
        yield runs


def test_each_phase_has_its_rows_batch_masks_and_rate(phases_run):
    lines = logged(phases_run, "train")
    assert [(line["step"], line["phase"]) for line in lines] == [(3, 1), (5, 1), (6, 2), (9, 2), (12, 3), (14, 3)]
    # Those of the second phase go on where the first ended; the third has other shards.
    assert [round(line["epoch"] * rows) for line, rows in zip(lines, [130] * 4 + [66] * 2, strict=True)] == [
        24, 40, 56, 104, 24, 40,
    ]  # fmt: skip
    assert [line["learning_rate"] for line in lines[:4]] == pytest.approx([2e-3] * 4)
    assert lines[-1]["learning_rate"] < 1e-4
    record = read_json(phases_run / "run.json")
    assert [phase["plan"]["num_steps"] for phase in record["phases"]] == [5, 9, 14]
    card = (phases_run / "export" / "README.md").read_text(encoding="utf-8")
    assert f"| tokens seen | {5 * 8 * 16 + 4 * 16 * 16 + 5 * 8 * 32:,}, padding included |" in card
    assert "| 2 | 9 | 16 tokens | 16 rows | token, 30% of the tokens" in card
    assert "in texts of at most 32 tokens" in card


def test_a_phase_that_lies_ahead_may_change(runs, phases_run, phase_shards, tmp_path):
    """Killed in the second phase, whose end was another one, as was what follows."""
    first, second, third = phases_with()
    before = [first, second | {"max_steps": 7}, third | {"learning_rate": 1e-5, "max_steps": 1}, third]
    flags = phases_flags(phase_shards, tmp_path / "run", before)
    assert runs.run_and_signal(flags, "train", 8, signal.SIGTERM, 0.0) != 0
    assert runs.run(phases_flags(phase_shards, tmp_path / "run")) == 0
    assert_same_run(tmp_path / "run", phases_run)


@pytest.mark.usefixtures("one_device")
def test_a_divergence_leads_back_within_its_phase(phase_shards, tmp_path, monkeypatch):
    """Though no multiple of the second phase's interval lies between, and one of the first phase's before it.

    The model of the first phase is gone when the second is built, as two of them might not fit the memory of a device.
    """
    gone = []

    def release(trainer):
        variables = [*trainer.model.network.variables, *trainer.model.optimizer.variables]
        references = [weakref.ref(variable) for variable in variables]
        del variables
        released(trainer)
        gone.append([reference() is None for reference in references])

    released = Trainer.release
    monkeypatch.setattr(Trainer, "release", release)
    diverging = {"learning_rate": 1e38, "max_grad_norm": 0, "save_steps": 4, "eval_steps": 100}
    phases = phases_with(1, **diverging)[:2]
    extra_flags = ("--on-nonfinite", "skip", "--max-rollbacks", "2", "--log-steps", "1")
    assert main(phases_flags(phase_shards, tmp_path / "run", phases, *extra_flags)) == EXIT_PERMANENT
    assert all(gone[0])
    rollbacks = logged(tmp_path / "run", "rollback")
    assert [(line["step"], line["to_step"], line["num_skipped_rows"]) for line in rollbacks] == [(7, 5, 32)] * 2
    assert (tmp_path / "run" / "checkpoints" / "step-00000004.json").exists()


def test_a_checkpoint_of_an_earlier_phase_is_exported_as_it_was(phases_run, tmp_path):
    checkpoint = phases_run / "checkpoints" / "step-00000004"
    assert export([str(checkpoint), str(tmp_path / "export")]) == 0
    card = (tmp_path / "export" / "README.md").read_text(encoding="utf-8")
    assert f"| tokens seen | {4 * 8 * 16:,}, padding included |" in card
    assert "step 4 of 14" in card
