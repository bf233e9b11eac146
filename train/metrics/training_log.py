"""Time training steps, read their metrics from the device, check and log the metrics, and show a progress bar."""

import logging
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tqdm import tqdm

from mlm_common.cli.console import clock_time, short_number
from mlm_common.errors import PermanentError
from train.metrics.log import TRAIN, VALIDATION, MetricsLog
from train.runtime.plan import Plan
from train.tasks.task import shown_loss

if TYPE_CHECKING:
    from train.step.train_step import PretrainingModel

logger = logging.getLogger(__name__)

# A line's loss is compared with the median loss of this number of earlier training lines.
NUM_LOSSES_BEFORE = 5

# Format of the progress bar, at most 80 columns wide. `desc` is loss, speed and time left.
BAR = "train {percentage:3.0f}% |{bar:10}| {n}/{total}  {desc}"
COMPILING = "compiling the first step …"


class TrainingDivergedError(PermanentError):
    """The loss or a gradient is not finite, or the loss has risen too far.

    Attributes:
        reason: `nonfinite` or `spike`.
        step: the last step that may have caused the divergence.
        good_step: the last step that cannot have caused the divergence.
    """

    def __init__(self, message: str, *, reason: str, step: int, good_step: int):
        super().__init__(message)
        self.reason, self.step, self.good_step = reason, step, good_step


class Clock:
    """Times this process: each interval of the log, and all steps except the first, which includes compiling.

    Args:
        plan: the plan of the phase.
        start_step: the step after which this process starts.
        num_eval_rows: number of rows of an evaluation.
        full_speed_step_seconds: time of a step if all replicas computed at peak speed; None if unknown.
    """

    def __init__(
        self, plan: Plan, start_step: int, num_eval_rows: int = 0, full_speed_step_seconds: float | None = None
    ):
        self._plan, self._step = plan, start_step
        self._full_speed_step_seconds = full_speed_step_seconds
        self._interval_start_seconds = time.perf_counter()
        self._advanced_seconds: float | None = None  # time of the last call of `advance`
        self._num_steps = 0  # number of steps that were timed
        self._seconds = 0.0
        self._evaluation_steps = plan.evaluation_cost(num_eval_rows)
        self._evaluation_seconds: float | None = None  # duration of the last evaluation

    def advance(self, step: int) -> None:
        now_seconds = time.perf_counter()
        if self._advanced_seconds is not None:
            self._num_steps += step - self._step
            self._seconds += now_seconds - self._advanced_seconds
        self._step, self._advanced_seconds = step, now_seconds

    @contextmanager
    def stopped(self, *, is_evaluation: bool = False) -> Iterator[None]:
        """Stop the clock during this context."""
        started_seconds = time.perf_counter()
        yield
        seconds = time.perf_counter() - started_seconds
        self._interval_start_seconds += seconds
        if self._advanced_seconds is not None:
            self._advanced_seconds += seconds
        if is_evaluation:
            self._evaluation_seconds = seconds

    def figures(self, num_steps: int, wait_seconds: float) -> dict[str, float]:
        """Return the speed of the steps since the last call.

        Args:
            num_steps: number of steps since the last call.
            wait_seconds: time that these steps spent waiting for input; NaN if it was not measured.
        """
        now_seconds = time.perf_counter()
        seconds = now_seconds - self._interval_start_seconds
        self._interval_start_seconds = now_seconds
        step_seconds = seconds / num_steps
        figures = {
            "step_seconds": round(step_seconds, 6),
            "tokens_per_second": round(self._plan.batch_tokens / step_seconds, 1),
        }
        if not math.isnan(wait_seconds):
            figures["input_wait_share"] = round(min(1.0, wait_seconds / seconds), 4)
        if self._full_speed_step_seconds is not None:
            figures["mfu"] = round(self._full_speed_step_seconds / step_seconds, 4)
        return figures

    @property
    def step_seconds(self) -> float | None:
        """Mean time of a step; None before the first timed step."""
        return self._seconds / self._num_steps if self._seconds else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens trained on per second, including padding; None before the first timed step."""
        return self._plan.batch_tokens * self._num_steps / self._seconds if self._seconds else None

    @property
    def seconds_left(self) -> float | None:
        """Estimated time until the end of the run, including evaluations; None before the first timed step."""
        step_seconds = self.step_seconds
        if step_seconds is None:
            return None
        evaluation_seconds = self._evaluation_seconds
        if evaluation_seconds is None:
            evaluation_seconds = self._evaluation_steps * step_seconds
        num_evaluations = self._plan.num_evaluations_after(self._step) if self._evaluation_steps else 0
        return (self._plan.num_steps - self._step) * step_seconds + num_evaluations * evaluation_seconds


class TrainingBar:
    """Shows step, loss, tokens per second and time left; never waits for the device."""

    def __init__(self, plan: Plan, clock: Clock, start_step: int, *, is_chief: bool):
        self._plan, self._clock, self._is_chief = plan, clock, is_chief
        self._loss: float | None = None  # loss of the newest line of the log
        self._bar = tqdm(
            total=plan.num_steps, initial=start_step, bar_format=BAR, disable=None if is_chief else True, leave=True
        )
        if start_step < plan.num_steps:
            self.show(COMPILING)
            if is_chief and self._bar.disable:
                logger.info("Compiling the first step …")

    def show(self, activity: str) -> None:
        self._bar.set_description_str(activity)

    def advance(self, step: int) -> None:
        self._bar.set_description_str(self._state(), refresh=False)
        self._bar.update(step - self._bar.n)

    def log(self, step: int, loss: float) -> None:
        """Show the loss of a line of the log; print the loss as a line if there is no bar."""
        self._loss = loss
        self.show(self._state())
        if self._is_chief and self._bar.disable:
            logger.info("step %s of %s  %s", f"{step:,}", f"{self._plan.num_steps:,}", self._state())

    def write_evaluation(self, step: int, summary: str) -> None:
        seconds = self._clock.seconds_left if step < self._plan.num_steps else None
        left = f"  ({clock_time(seconds)} left)" if seconds is not None else ""
        self._write(f"step {step:,}  validation {summary}{left}")

    def close(self) -> None:
        self._bar.set_description_str(self._state(), refresh=False)
        self._bar.close()

    def _write(self, text: str) -> None:
        if not self._is_chief:
            return
        if self._bar.disable:
            print(text, flush=True)
        else:
            self._bar.write(text)

    def _state(self) -> str:
        """Return loss, speed and time left; leave out any that are not known yet."""
        speed, seconds = self._clock.tokens_per_second, self._clock.seconds_left
        parts = [
            f"loss {shown_loss(self._loss)}" if self._loss is not None else "",
            f"{short_number(speed)} tok/s" if speed is not None else "",
            f"{clock_time(seconds)} left" if seconds is not None else "",
        ]
        return "  ".join(part for part in parts if part)


@dataclass
class TrainingLog:
    """Reads the metrics of an interval of steps from the device, and writes them to the log and the progress bar.

    Attributes:
        model: the model that is trained.
        log: the log of the run.
        plan: the plan of the phase.
        start_step: the step after which this process starts.
        logged_step: the last step with a training line in the log.
        num_skipped_rows: number of rows skipped since the start of the run.
        take_wait_seconds: returns, and resets, the time spent waiting for input.
        max_loss_rise: rise of the loss, in nats, that counts as a divergence; None for no limit.
        num_eval_rows: number of rows of an evaluation.
        full_speed_step_seconds: time of a step at peak speed; None if unknown.
    """

    model: "PretrainingModel"
    log: MetricsLog
    plan: Plan
    start_step: int
    logged_step: int
    num_skipped_rows: int
    take_wait_seconds: Callable[[], float]
    max_loss_rise: float | None = None
    num_eval_rows: int = 0
    full_speed_step_seconds: float | None = None

    def __post_init__(self) -> None:
        self._phase = {"phase": len(self.plan.before) + 1} if self.plan.num_phases > 1 else {}
        self._clock = Clock(self.plan, self.start_step, self.num_eval_rows, self.full_speed_step_seconds)
        self._bar = TrainingBar(self.plan, self._clock, self.start_step, is_chief=self.log.is_chief)

    def advance(self, step: int) -> None:
        self._clock.advance(step)
        self._bar.advance(step)

    @contextmanager
    def clock_stopped(self, *, is_evaluation: bool = False) -> Iterator[None]:
        if is_evaluation:
            self._bar.show("evaluating …")
        with self._clock.stopped(is_evaluation=is_evaluation):
            yield

    @property
    def step_seconds(self) -> float | None:
        return self._clock.step_seconds

    def check_finite(self) -> None:
        """Raise TrainingDivergedError if the loss or a gradient was not finite; later steps changed no weights."""
        optimizer = self.model.optimizer
        self.model.runtime.pull(self.model.figures)
        if not optimizer.is_stopped:
            return
        step = int(optimizer.iterations.numpy()) + 1
        means = ", ".join(f"{metric.name} {float(metric.result()):g}" for metric in self.model.metrics)
        raise TrainingDivergedError(
            f"The loss or a gradient of step {step:,} is not finite ({means}; means over the steps since "
            f"{self.logged_step:,}). The weights were not updated, and nothing was saved after that. Start a new run "
            "with a lower --learning-rate or a longer warmup, or resume with --on-nonfinite skip.",
            reason="nonfinite",
            step=step,
            good_step=step - 1,
        )

    def _check_rise(self, step: int, loss: float) -> None:
        first_step = self.plan.first_step  # losses of other phases are not comparable: rows and masks differ
        lines = (line for line in self.log.lines if line["split"] == TRAIN and line["step"] > first_step)
        losses = [line["loss"] for line in lines][-NUM_LOSSES_BEFORE:]
        if self.max_loss_rise is None or len(losses) < NUM_LOSSES_BEFORE:
            return
        previous_loss = statistics.median(losses)
        if loss > previous_loss + self.max_loss_rise:
            raise TrainingDivergedError(
                f"The loss rose by more than --max-loss-rise {self.max_loss_rise:g} nats: it is {loss:.4f} in steps "
                f"{self.logged_step + 1:,} to {step:,}, and was {previous_loss:.4f} before (median of "
                f"{NUM_LOSSES_BEFORE} lines). Start a new run with a lower --learning-rate or a longer warmup, or "
                "resume with --on-nonfinite skip.",
                reason="spike",
                step=step,
                good_step=self.logged_step,
            )

    def write_train(self, step: int) -> None:
        """Write the means over the steps since the last call.

        Raises:
            TrainingDivergedError: the loss or a gradient was not finite, or the loss rose by more than allowed.
        """
        self.check_finite()
        figures = {metric.name: float(metric.result()) for metric in self.model.metrics}
        self._check_rise(step, figures["loss"])
        self.model.reset_means()
        figures |= self.model.task.derived_figures(figures)
        figures["learning_rate"] = float(self.model.optimizer.learning_rate.numpy())
        figures["epoch"] = round(self.plan.row_after(step, self.num_skipped_rows) / self.plan.num_rows, 4)
        wait_seconds = self.take_wait_seconds()
        # Since the last line, an earlier process may have taken steps, which the clock did not time.
        figures |= self._clock.figures(step - max(self.logged_step, self.start_step), wait_seconds)
        self.log.add(step, TRAIN, figures | self._phase)
        self.log.flush()
        self._bar.log(step, figures["loss"])
        self.logged_step = step

    def write_evaluation(self, step: int, figures: dict[str, float]) -> None:
        self.log.add(step, VALIDATION, figures | self._phase)
        self.log.flush()
        self.log.draw()
        self._bar.write_evaluation(step, self.model.task.summarize(figures))

    def close(self) -> None:
        self._bar.close()
