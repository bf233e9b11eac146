"""The clock of training, which the tests move, its progress bar, and what ends a run that diverges."""

import dataclasses
import io
import logging
import re
import sys
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fixtures.plans import config_of, make_plan, phase_of, plan_of
from tests.fixtures.tiny_models import tiny_config
from train.config.learning import OptimizationConfig
from train.config.settings import HardwareConfig, RunConfig
from train.loop.phase import make_plans
from train.metrics.training_log import Clock, TrainingBar, TrainingDivergedError, TrainingLog
from train.model.computation import full_speed_step_seconds, step_flops
from train.runtime.machines import ACCELERATOR_TYPE_VARIABLE, CHIPS


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def clock_of(start_step: int = 0, num_eval_rows: int = 0, full_speed: float | None = None) -> Clock:
    """100 steps of 32 rows of 128 tokens, with an evaluation after each 10."""
    optimization = OptimizationConfig(per_replica_batch_size=32, max_steps=100)
    plan = make_plan(optimization, RunConfig(eval_steps=10), num_rows=1000, max_length=128, num_replicas=1)
    return Clock(plan, start_step, num_eval_rows, full_speed)


def test_the_first_step_is_not_timed(clock):
    timed = clock_of()
    clock[0] += 60  # it compiles
    timed.advance(1)
    assert (timed.tokens_per_second, timed.seconds_left) == (None, None)
    clock[0] += 2
    timed.advance(5)
    assert timed.tokens_per_second == 2 * 32 * 128
    assert timed.seconds_left == 95 * 0.5


def test_evaluations_count_in_the_time_left_not_in_the_speed(clock):
    timed = clock_of(start_step=50, num_eval_rows=96)
    timed.advance(51)
    clock[0] += 9
    timed.advance(60)
    assert timed.seconds_left == 40 + 4 * 1.0  # each as long as a step, as long as none was measured
    with timed.stopped(is_evaluation=True):
        clock[0] += 30
    clock[0] += 10
    timed.advance(70)
    assert timed.tokens_per_second == 32 * 128
    assert timed.seconds_left == 30 + 3 * 30
    timed.advance(100)
    assert timed.seconds_left == 0


def test_rates_are_over_training_alone(clock):
    timed = clock_of(full_speed=0.1)
    clock[0] += 3
    with timed.stopped():
        clock[0] += 10
    clock[0] += 1
    assert timed.figures(num_steps=8, wait_seconds=1.0) == {
        "step_seconds": 0.5,
        "tokens_per_second": 2 * 32 * 128,
        "input_wait_share": 0.25,
        "mfu": 0.2,
    }
    clock[0] += 2
    figures = timed.figures(num_steps=2, wait_seconds=0.0)
    assert (figures["step_seconds"], figures["input_wait_share"], figures["mfu"]) == (1.0, 0.0, 0.1)
    without = clock_of()
    clock[0] += 1
    assert "mfu" not in without.figures(num_steps=1, wait_seconds=0.0)


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def fake_clock(speed: float | None = None, seconds: float | None = None) -> Any:
    return SimpleNamespace(tokens_per_second=speed, seconds_left=seconds)


def bar_of(num_steps: int, clock: Any, start_step: int = 0) -> TrainingBar:
    plan: Any = SimpleNamespace(num_steps=num_steps)
    return TrainingBar(plan, clock, start_step, is_chief=True)


def terminal_in(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Replace standard error; not in a fixture, after whose set-up pytest replaces it again."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    return terminal


def shown(terminal: Terminal) -> list[str]:
    """All states of the bar, in their order."""
    return [text.strip() for text in re.split(r"[\r\n]", terminal.getvalue()) if "train" in text]


def test_a_bar_moves_each_step_and_says_what_it_knows(monkeypatch):
    terminal = terminal_in(monkeypatch)
    timed = fake_clock()
    bar = bar_of(142, timed)
    assert shown(terminal)[-1] == "train   0% |          | 0/142  compiling the first step …"
    bar.log(87, 1.523)
    timed.tokens_per_second, timed.seconds_left = 10_249.0, 55.0
    bar.advance(88)
    bar.show("evaluating …")
    assert shown(terminal)[-1].endswith("| 88/142  evaluating …")
    bar.close()
    assert re.fullmatch(r"train  62% \|██████.   \| 88/142  loss 1\.52  10 k tok/s  0:55 left", shown(terminal)[-1])


def test_a_resumed_bar_starts_with_the_run_and_fits_80_columns(monkeypatch):
    terminal = terminal_in(monkeypatch)
    bar = bar_of(1_000_000, fake_clock(999_999.0, 99.9 * 86400), start_step=600_000)
    assert "60% |██████    | 600000/1000000  compiling" in shown(terminal)[-1]
    bar.log(600_001, 10.25)
    bar.close()
    assert "loss 10.25" in shown(terminal)[-1]
    assert all(len(text) <= 80 for text in shown(terminal))


def test_without_a_terminal_there_are_lines(capsys, caplog):
    with caplog.at_level(logging.INFO):
        bar = bar_of(1100, fake_clock(584_000.0, 200.0))
        bar.advance(21)
        bar.log(22, 6.853)
        bar.write_evaluation(22, "loss 5.92  accuracy 14.5%")
        bar.write_evaluation(1100, "loss 3.41  accuracy 40.0%")
        bar.close()
    assert caplog.messages == ["Compiling the first step …", "step 22 of 1,100  loss 6.85  584 k tok/s  3:20 left"]
    printed, errors = capsys.readouterr()
    assert printed.splitlines() == [
        "step 22  validation loss 5.92  accuracy 14.5%  (3:20 left)",
        "step 1,100  validation loss 3.41  accuracy 40.0%",
    ]
    assert "\r" not in printed + errors


def config_with(**hardware):
    config = config_of("--per-replica-batch-size", 4, "--gradient-accumulation-steps", 3, "--max-steps", 10)
    return dataclasses.replace(config, hardware=HardwareConfig(**hardware))


@pytest.mark.parametrize(
    ("tpu_name", "accelerator_type", "model", "is_known"),
    [
        ("local", "v3-8", "roberta", True),
        (None, "v3-8", "roberta", False),
        ("mine", "v3-8", "roberta", False),
        ("local", "v9-8", "roberta", False),
        ("local", "v3-8", "convbert", False),
    ],
)
def test_full_speed_is_that_of_all_replicas_where_it_is_known(monkeypatch, tpu_name, accelerator_type, model, is_known):
    monkeypatch.setenv(ACCELERATOR_TYPE_VARIABLE, accelerator_type)
    config, model = config_with(tpu_name=tpu_name), tiny_config(model)
    seconds = full_speed_step_seconds(config, model, plan_of(config, num_replicas=8), num_predictions=10)
    if is_known:
        flops = step_flops(model, num_rows=96, length=16, num_predictions=24 * 10)
        assert seconds == pytest.approx(flops / 8 / CHIPS["v3"].peak_flops_per_second)
    else:
        assert seconds is None


def test_losses_rise_within_a_phase():
    config = config_with()
    lines = [{"step": step, "split": "train", "loss": 1.0} for step in range(1, 6)]
    phase = phase_of(dataclasses.replace(config.optimization, max_steps=5), config.run, 1000, 16)
    first, second = make_plans([phase, phase], 8)
    for plan, is_refused in ((first, True), (second, False)):
        written = SimpleNamespace(lines=lines, is_chief=False)
        about = {"start_step": 5, "logged_step": 5, "num_skipped_rows": 0, "max_loss_rise": 1.0}
        log = TrainingLog(None, written, plan, **about, take_wait_seconds=lambda: 0.0)
        with pytest.raises(TrainingDivergedError) if is_refused else nullcontext():
            log._check_rise(6, 9.0)
