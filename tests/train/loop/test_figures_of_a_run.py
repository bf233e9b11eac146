"""Which evaluation a run returns as its result."""

from pathlib import Path
from unittest.mock import MagicMock

import pytest

from train.checkpoints.resume import ResumePoint
from train.config.learning import OptimizationConfig
from train.config.settings import RunConfig
from train.loop import fitting
from train.metrics.log import VALIDATION, MetricsLog
from train.runtime.plan import make_plan
from train.runtime.run_folder import RunFolder


@pytest.mark.parametrize(("num_steps", "expected"), [(3, {"loss": 2.5}), (6, None)])
def test_only_an_evaluation_after_the_last_step_is_the_result(
    num_steps: int, expected: dict[str, float] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A phase resumes after step 3, where the phase before it was evaluated, and evaluates nothing itself."""
    monkeypatch.setattr(fitting, "distribute_batches", MagicMock())
    trainer = MagicMock(evaluate=None, can_roll_back=False, start=ResumePoint(step=3))
    trainer.log = MetricsLog(RunFolder(tmp_path), lambda _: b"")
    trainer.log.add(3, VALIDATION, {"loss": 2.5, "phase": 1})
    run = trainer.phase.config.run = RunConfig()
    trainer.phase.inputs.num_eval_rows = 0
    optimization = OptimizationConfig(max_steps=num_steps)
    trainer.plan = make_plan(optimization, run, num_rows=64, max_length=16, num_replicas=1)
    trainer.phase.config.hardware.max_steps_per_execution = 1
    assert fitting.fit(trainer) == expected
    assert trainer.model.fit.called == (num_steps > 3)
