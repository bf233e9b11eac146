"""How fast a run is and how long it still takes: measured from its steps, or estimated before the first."""

import os
import time

from train.runtime.plan import Plan

# What is handed to a device ahead of time is a second of work: an estimate is made once that hardly matters.
MIN_MEASURED_STEPS = 2
MIN_MEASURED_SECONDS = 5.0
# What a step of training reaches on one CPU with AVX2; of some twice that.
CPU_FLOPS_PER_SECOND = 5e10


class Pace:
    """A clock over the steps of this process after its first, for which the program is compiled; and over evaluations.

    Args:
        plan: of the run or phase.
        start_step: step that this process starts after.
        num_eval_rows: rows to evaluate on.
    """

    def __init__(self, plan: Plan, start_step: int, num_eval_rows: int):
        self._plan = plan
        self._step = start_step
        self._num_steps = 0
        self._seconds = 0.0
        self._evaluation_steps = plan.evaluation_cost(num_eval_rows)
        self._evaluation_seconds: float | None = None  # of the last one
        self._since_seconds: float | None = None

    def advance(self, step: int) -> None:
        """Note that training has come to `step`."""
        now_seconds = time.perf_counter()
        if self._since_seconds is not None:
            self._num_steps += step - self._step
            self._seconds += now_seconds - self._since_seconds
        self._step, self._since_seconds = step, now_seconds

    def exclude(self, seconds: float, *, is_evaluation: bool) -> None:
        """Leave out time that passed since the last `advance` without a step of training."""
        if self._since_seconds is not None:
            self._since_seconds += seconds
        if is_evaluation:
            self._evaluation_seconds = seconds

    @property
    def is_measured(self) -> bool:
        """Whether enough steps were timed for an estimate."""
        return self._num_steps >= MIN_MEASURED_STEPS and self._seconds >= MIN_MEASURED_SECONDS

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens trained on per second, padding included; None before a step was timed."""
        return self._plan.batch_tokens * self._num_steps / self._seconds if self._seconds else None

    @property
    def seconds_left(self) -> float | None:
        """Time that the rest of the run takes, its evaluations included; None before a step was timed."""
        if not self._seconds:
            return None
        step_seconds = self._seconds / self._num_steps
        evaluation_seconds = self._evaluation_seconds
        if evaluation_seconds is None:
            evaluation_seconds = self._evaluation_steps * step_seconds
        num_evaluations = self._plan.num_evaluations_after(self._step) if self._evaluation_steps else 0
        return (self._plan.num_steps - self._step) * step_seconds + num_evaluations * evaluation_seconds


def cpu_seconds(flops: float) -> float:
    """Estimate how long the CPUs that this process may use take for the floating-point operations of a run."""
    num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return flops / (CPU_FLOPS_PER_SECOND * num_cpus)


def about(seconds: float) -> str:
    """Write a time in words, as in `about 9 hours`."""
    for unit_seconds, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= 0.95 * unit_seconds:
            count = seconds / unit_seconds
            number = f"{count:.0f}" if count >= 9.95 or round(count, 1) == round(count) else f"{count:.1f}"
            return f"about {number} {unit}{'' if number == '1' else 's'}"
    return "less than a minute"


def clock_time(seconds: float) -> str:
    """Write a time as a progress bar does: `0:55`, `3:20:00`, `2.1 d`."""
    if seconds >= 86400:
        return f"{seconds / 86400:.1f} d"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
