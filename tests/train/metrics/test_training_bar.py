"""The progress bar in a terminal, and the lines in its place."""

import io
import logging
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from train.metrics.training_bar import TrainingBar


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def pace_of(speed: float | None = None, seconds: float | None = None, *, is_measured: bool = False) -> Any:
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
    pace = pace_of()
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
    bar = bar_of(300, pace_of(), start_step=180)
    assert "60% |██████    | 180/300  compiling" in shown(terminal)[-1]
    bar.advance(181)
    bar.close()
    assert "181/300" in shown(terminal)[-1]


def test_the_longest_bar_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = terminal_in(monkeypatch)
    bar = bar_of(1_000_000, pace_of(999_999.0, 99.9 * 86400), start_step=999_998)
    bar.log(999_999, 10.25)
    bar.close()
    assert "loss 10.25" in shown(terminal)[-1]
    assert all(len(text) <= 80 for text in shown(terminal))


def test_without_a_terminal_there_are_lines(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        bar = bar_of(1100, pace_of(584_000.0, 200.0))
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
    pace = pace_of(100.0, 9 * 3600.0)
    bar = bar_of(1100, pace, advice="--preset tiny-cpu is made for CPUs")
    bar.advance(1)
    assert capsys.readouterr().out == ""
    pace.is_measured = True
    bar.advance(2)
    bar.advance(3)
    assert capsys.readouterr().out == "about 9 hours to go; --preset tiny-cpu is made for CPUs\n"
    bar = bar_of(1100, pace_of(100.0, 120.0, is_measured=True), advice="--preset tiny-cpu is made for CPUs")
    bar.advance(3)
    assert capsys.readouterr().out == "about 2 minutes to go\n"


def test_other_workers_show_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    terminal = terminal_in(monkeypatch)
    bar = bar_of(9, pace_of(1.0, 1.0, is_measured=True), is_chief=False)
    bar.advance(1)
    bar.log(1, 2.0)
    bar.write_evaluation(1, "loss 2.00")
    bar.close()
    assert (terminal.getvalue(), capsys.readouterr().out) == ("", "")
