"""Which evaluation is the best: saved when it is made, kept, and restored at the end of a run."""

import dataclasses
import logging
import math
from types import SimpleNamespace
from typing import Any

from tests.fixtures.plans import config_of, plan_of
from train.checkpoints.store import CheckpointRecord
from train.loop.trainer import Trainer, rank_of_checkpoint

RECORD = CheckpointRecord(
    9, 400, "ab", plan_of(config_of("--max-steps", "18")), {"run": {"seed": 1}}, {"numpy": "2"}, 9
)


def lines_of(**scores: tuple[float, float]) -> list[dict[str, Any]]:
    """Make lines of the log of {step: (accuracy, loss)}, with one of training after each."""
    lines = []
    for name, (accuracy, loss) in scores.items():
        line = {"step": int(name.removeprefix("step_")), "split": "validation", "loss": loss, "accuracy": accuracy}
        lines += [line, line | {"split": "train", "loss": 0.0}]
    return lines


class Log:
    def __init__(self, lines: list[dict[str, Any]]):
        self.lines = lines

    def find(self, step: int, split: str) -> dict[str, Any] | None:
        return next((line for line in self.lines if (line["step"], line["split"]) == (step, split)), None)


def make_trainer(lines: list[dict[str, Any]], saved: tuple[int, ...] = (), *, exports_best: bool = True) -> Any:
    """Make a trainer whose `restored` collects the steps that are restored."""
    restored: list[int] = []

    def restore_newest(_is_of_run: Any, _use: Any, *, up_to: int, since: int) -> object:
        assert up_to == since
        restored.append(up_to)
        return RECORD

    trainer: Any = Trainer.__new__(Trainer)
    task = SimpleNamespace(score=lambda line: line["accuracy"], summarize=lambda line: f"accuracy {line['accuracy']}")
    trainer.run, trainer.phase = SimpleNamespace(owns=None, exports_best=exports_best), SimpleNamespace(task=task)
    trainer.log, trainer.plan, trainer.restored = Log(lines), SimpleNamespace(num_steps=18), restored
    trainer.checkpoints = SimpleNamespace(steps=lambda: list(saved), restore_newest=restore_newest)
    return trainer


def test_the_best_so_far_is_to_be_saved():
    lines = lines_of(step_2=(0.5, 1.0), step_4=(0.7, 0.9), step_6=(0.7, 0.8), step_8=(0.7, 0.8), step_10=(0.6, 0.1))
    is_saved = [make_trainer(lines[: 2 * count]).is_best_so_far(2 * count) for count in range(1, 6)]
    assert is_saved == [True, True, True, False, False]
    assert not make_trainer(lines[:2], exports_best=False).is_best_so_far(2)


def test_ties_go_to_the_lower_loss_then_to_the_earlier_step_and_a_score_that_is_no_number_is_the_worst():
    of_step = {"step_1": (math.nan, 0.1), "step_2": (0.9, 0.6), "step_4": (0.9, 0.2), "step_6": (0.9, 0.2)}
    lines = lines_of(**of_step, step_18=(0.8, 0.1))
    trainer = make_trainer(lines, (1, 2, 4, 6, 18))
    assert trainer.restore_best() == (4, {"loss": 0.2, "accuracy": 0.9})
    assert trainer.restored == [4]


def test_a_best_evaluation_without_a_checkpoint_is_named(caplog):
    lines = lines_of(step_4=(0.6757, 0.9), step_9=(0.5, 0.9), step_18=(0.5676, 0.9))
    trainer = make_trainer(lines, (9, 18))
    with caplog.at_level(logging.WARNING):
        assert trainer.restore_best()[0] == 18
    (message,) = caplog.messages
    assert "step 4 (score 0.6757), no longer exists" in message
    assert "Using step 18 (score 0.5676)" in message
    assert trainer.restored == []  # the model is that of the last step already
    caplog.clear()
    assert make_trainer(lines, (4, 9, 18)).restore_best()[0] == 4
    assert make_trainer([], (9, 18)).restore_best() == (18, None)
    assert not caplog.messages


def test_checkpoints_are_ranked_by_the_metric_of_this_call():
    """Not by the score that was recorded with another metric, or not at all."""
    task: Any = SimpleNamespace(score=lambda line: -line["loss"])
    log: Any = Log(lines_of(step_4=(0.7, 0.9), step_6=(0.6, 0.8)))
    for step, score, rank in ((4, 0.7, (-0.9, -0.9)), (6, None, (-0.8, -0.8)), (9, 0.3, (0.3, -0.4))):
        record = dataclasses.replace(RECORD, step=step, validation_loss=0.4, validation_score=score)
        assert rank_of_checkpoint(task, log, record) == rank
    assert rank_of_checkpoint(task, log, dataclasses.replace(RECORD, step=9)) is None
