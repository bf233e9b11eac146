"""How fast a run is, by a clock that the tests move, and its progress bar."""

import io
import logging
import re
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from train.config.learning import OptimizationConfig
from train.config.settings import RunConfig
from train.metrics.progress import Pace, TrainingBar, about, clock_time
from train.runtime.plan import make_plan


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def pace_of(start_step: int = 0, num_eval_rows: int = 0) -> Pace:
    """100 steps of 32 rows of 128 tokens, with an evaluation after each 10."""
    optimization = OptimizationConfig(per_replica_batch_size=32, max_steps=100)
    plan = make_plan(optimization, RunConfig(eval_steps=10), num_rows=1000, max_length=128, num_replicas=1)
    return Pace(plan, start_step, num_eval_rows)


def test_the_first_step_is_not_timed(clock: list[float]) -> None:
    pace = pace_of()
    clock[0] += 60  # it compiles
    pace.advance(1)
    assert (pace.tokens_per_second, pace.seconds_left) == (None, None)
    clock[0] += 2
    pace.advance(5)
    assert pace.tokens_per_second == 2 * 32 * 128
    assert pace.seconds_left == 95 * 0.5


def test_evaluations_are_left_out_of_the_speed_and_counted_in_the_time_left(clock: list[float]) -> None:
    pace = pace_of(start_step=50, num_eval_rows=96)
    pace.advance(51)
    clock[0] += 9
    pace.advance(60)
    assert pace.seconds_left == 40 + 4 * 1.0  # each as long as a step, as long as none was measured
    clock[0] += 30
    pace.exclude(30.0, is_evaluation=True)
    clock[0] += 10
    pace.advance(70)
    assert pace.tokens_per_second == 32 * 128
    assert pace.seconds_left == 30 + 3 * 30
    pace.advance(100)
    assert pace.seconds_left == 0


def test_an_estimate_needs_two_steps_and_five_seconds(clock: list[float]) -> None:
    pace = pace_of()
    pace.advance(1)
    for step, seconds, is_measured in ((2, 20, False), (3, 1, True)):
        clock[0] += seconds
        pace.advance(step)
        assert pace.is_measured == is_measured
    quick = pace_of()
    quick.advance(1)
    clock[0] += 1
    quick.advance(50)
    assert not quick.is_measured


@pytest.mark.parametrize(
    ("seconds", "words", "digits"),
    [
        (5, "less than a minute", "0:05"),
        (60, "about 1 minute", "1:00"),
        (90, "about 1.5 minutes", "1:30"),
        (3600, "about 1 hour", "1:00:00"),
        (9 * 3600, "about 9 hours", "9:00:00"),
        (2.08 * 86400, "about 2.1 days", "2.1 d"),
        (20.4 * 86400, "about 20 days", "20.4 d"),
    ],
)
def test_times_in_words_and_digits(seconds: float, words: str, digits: str) -> None:
    assert about(seconds) == words
    assert clock_time(seconds) == digits


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def fake_pace(speed: float | None = None, seconds: float | None = None, *, is_measured: bool = False) -> Any:
    return SimpleNamespace(tokens_per_second=speed, seconds_left=seconds, is_measured=is_measured)


def bar_of(num_steps: int, pace: Any, start_step: int = 0, **more: Any) -> TrainingBar:
    plan: Any = SimpleNamespace(num_steps=num_steps)
    return TrainingBar(plan, pace, start_step, **{"is_chief": True, **more})


def terminal_in(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Replace standard error; not in a fixture, after whose set-up pytest replaces it again."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    return terminal


def shown(terminal: Terminal) -> list[str]:
    """All states of the bar, in their order."""
    return [text.strip() for text in re.split(r"[\r\n]", terminal.getvalue()) if "train" in text]


def test_a_bar_moves_each_step_and_says_what_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_in(monkeypatch)
    pace = fake_pace()
    bar = bar_of(142, pace)
    assert shown(terminal)[-1] == "train   0% |          | 0/142  compiling the first step …"
    bar.log(87, 1.523)
    pace.tokens_per_second, pace.seconds_left = 10_249.0, 55.0
    bar.advance(88)
    bar.show("evaluating …")
    assert shown(terminal)[-1].endswith("| 88/142  evaluating …")
    bar.close()
    assert re.fullmatch(r"train  62% \|██████.   \| 88/142  loss 1\.52  10\.2 k tok/s  0:55 left", shown(terminal)[-1])


def test_a_resumed_bar_starts_where_the_run_does(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_in(monkeypatch)
    bar = bar_of(300, fake_pace(), start_step=180)
    assert "60% |██████    | 180/300  compiling" in shown(terminal)[-1]
    bar.advance(181)
    bar.close()
    assert "181/300" in shown(terminal)[-1]


def test_the_longest_bar_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_in(monkeypatch)
    bar = bar_of(1_000_000, fake_pace(999_999.0, 99.9 * 86400), start_step=999_998)
    bar.log(999_999, 10.25)
    bar.close()
    assert "loss 10.25" in shown(terminal)[-1]
    assert all(len(text) <= 80 for text in shown(terminal))


def test_without_a_terminal_there_are_lines(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        bar = bar_of(1100, fake_pace(584_000.0, 200.0))
        bar.advance(21)
        bar.log(22, 6.853)
        bar.write_evaluation(22, "loss 5.92  accuracy 14.5 %")
        bar.write_evaluation(1100, "loss 3.41  accuracy 40.0 %")
        bar.close()
    assert caplog.messages == ["Compiling the first step …", "step 22 of 1,100  loss 6.85  584 k tok/s  3:20 left"]
    printed, errors = capsys.readouterr()
    assert printed.splitlines() == [
        "step 22  validation loss 5.92  accuracy 14.5 %  (3:20 left)",
        "step 1,100  validation loss 3.41  accuracy 40.0 %",
    ]
    assert "\r" not in printed + errors


def test_how_long_it_takes_is_said_once_and_with_advice_if_that_is_hours(capsys: pytest.CaptureFixture[str]) -> None:
    pace = fake_pace(100.0, 9 * 3600.0)
    bar = bar_of(1100, pace, advice="--preset tiny-cpu is made for CPUs")
    bar.advance(1)
    assert capsys.readouterr().out == ""
    pace.is_measured = True
    bar.advance(2)
    bar.advance(3)
    assert capsys.readouterr().out == "about 9 hours to go; --preset tiny-cpu is made for CPUs\n"
    bar = bar_of(1100, fake_pace(100.0, 120.0, is_measured=True), advice="--preset tiny-cpu is made for CPUs")
    bar.advance(3)
    assert capsys.readouterr().out == "about 2 minutes to go\n"


def test_other_workers_show_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    terminal = terminal_in(monkeypatch)
    bar = bar_of(9, fake_pace(1.0, 1.0, is_measured=True), is_chief=False)
    bar.advance(1)
    bar.log(1, 2.0)
    bar.write_evaluation(1, "loss 2.00")
    bar.close()
    assert (terminal.getvalue(), capsys.readouterr().out) == ("", "")
