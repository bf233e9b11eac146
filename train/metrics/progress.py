"""How fast a run is and how long it still takes, measured or estimated; and the progress bar that shows it."""

import logging
import os
import time
from typing import Any

from tqdm import tqdm

from train.runtime.plan import Plan
from train.tasks.task import shown_loss

# About a second of work is queued on a device: an estimate is made once that hardly matters.
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


logger = logging.getLogger(__name__)

BAR = "train {percentage:3.0f}% |{bar:10}| {n}/{total}{state}"
COMPILING = "compiling the first step …"


class _Bar(tqdm):
    """A bar with its state, text that follows the number of steps; of at most 80 columns."""

    state = ""

    @property
    def format_dict(self) -> dict[str, Any]:
        return {**super().format_dict, "state": self.state and f"  {self.state}"}


class TrainingBar:
    """Shows step, loss, tokens per second and time left; never waits for the device.

    Args:
        plan: of the run or phase.
        pace: of this process.
        start_step: step that this process starts after.
        is_chief: whether this worker shows anything.
        advice: follows the first estimate of a run that takes hours.
    """

    def __init__(self, plan: Plan, pace: Pace, start_step: int, *, is_chief: bool, advice: str = ""):
        self._plan = plan
        self._pace = pace
        self._is_chief = is_chief
        self._advice = advice
        self._loss: float | None = None  # of the newest line of the log
        self._is_estimated = False
        self._bar = _Bar(
            total=plan.num_steps, initial=start_step, bar_format=BAR, disable=None if is_chief else True, leave=True
        )
        if start_step < plan.num_steps:
            self.show(COMPILING)
            if is_chief and self._bar.disable:
                logger.info("Compiling the first step …")

    def show(self, doing: str) -> None:
        """Show what takes long instead of a step."""
        self._bar.state = doing
        self._bar.refresh()

    def advance(self, step: int) -> None:
        """Move to `step`, and once that can be told, say how long the rest takes."""
        self._bar.state = self._state()
        self._bar.update(step - self._bar.n)
        if not self._is_estimated and self._pace.is_measured:
            self._is_estimated = True
            self._say_how_long()

    def log(self, step: int, loss: float) -> None:
        """Show the loss of a line of the log; where there is no bar, as a line."""
        self._loss = loss
        self._bar.state = self._state()
        self._bar.refresh()
        if self._is_chief and self._bar.disable:
            logger.info("step %s of %s  %s", f"{step:,}", f"{self._plan.num_steps:,}", self._state())

    def write_evaluation(self, step: int, summary: str) -> None:
        """Write the figures of an evaluation above the bar."""
        seconds = self._pace.seconds_left if step < self._plan.num_steps else None
        left = f"  ({clock_time(seconds)} left)" if seconds is not None else ""
        self._write(f"step {step:,}  validation {summary}{left}")

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.state = self._state()
        self._bar.close()

    def _write(self, text: str) -> None:
        if not self._is_chief:
            return
        if self._bar.disable:
            print(text, flush=True)
        else:
            self._bar.write(text)

    def _state(self) -> str:
        """Write loss, speed and time left, as far as they are known."""
        speed, seconds = self._pace.tokens_per_second, self._pace.seconds_left
        parts = [
            f"loss {shown_loss(self._loss)}" if self._loss is not None else "",
            f"{_thousands(speed)} tok/s" if speed is not None else "",
            f"{clock_time(seconds)} left" if seconds is not None else "",
        ]
        return "  ".join(part for part in parts if part)

    def _say_how_long(self) -> None:
        seconds = self._pace.seconds_left
        assert seconds is not None
        advice = f"; {self._advice}" if self._advice and seconds >= 3600 else ""
        self._write(f"{about(seconds)} to go{advice}")


def _thousands(number: float) -> str:
    """Write a number in four characters or so: `850`, `10.2 k`, `584 k`, `1.2 M`."""
    for unit_size, unit in ((1e6, " M"), (1e3, " k")):
        if number >= unit_size:
            return f"{number / unit_size:.1f}{unit}" if number < 100 * unit_size else f"{number / unit_size:.0f}{unit}"
    return f"{number:.0f}"
