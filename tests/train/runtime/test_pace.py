"""How fast a run is, by a clock that the tests move."""

import time

import pytest

from train.config.settings import OptimizationConfig, RunConfig
from train.runtime.pace import Pace, about, clock_time
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
