"""The progress bar of a training run, and what stands in its place where the output is not a terminal: lines."""

import logging
from typing import Any

from tqdm import tqdm

from train.runtime.pace import Pace, about, clock_time
from train.runtime.plan import Plan
from train.tasks.task import shown_loss

logger = logging.getLogger(__name__)

BAR = "train {percentage:3.0f}% |{bar:10}| {n}/{total}{state}"
COMPILING = "compiling the first step …"


class _Bar(tqdm):
    """A bar with its state, text that follows the number of steps; of at most 80 columns."""

    state = ""

    @property
    def format_dict(self) -> dict[str, Any]:
        """What the bar is formatted with."""
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
