"""The figures of training, step by step: timed, read from the device, checked and logged, with the progress bar."""

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

# Lines of training whose median a loss is compared with.
NUM_LOSSES_BEFORE = 5

# At most 80 columns, with the state as its description.
BAR = "train {percentage:3.0f}% |{bar:10}| {n}/{total}  {desc}"
COMPILING = "compiling the first step …"


class TrainingDivergedError(PermanentError):
    """Loss or gradients are not finite, or the loss has risen too far: `nonfinite` or `spike` is the reason.

    step, good_step: the last step to blame, and the last one that is above suspicion.
    """

    def __init__(self, message: str, *, reason: str, step: int, good_step: int):
        super().__init__(message)
        self.reason, self.step, self.good_step = reason, step, good_step


class Clock:
    """Times the training of this process: each interval of the log, and all steps after the first, which compiles.

    `full_speed_step_seconds` is what a step would take if all replicas computed at their peak; None if not known.
    """

    def __init__(
        self, plan: Plan, start_step: int, num_eval_rows: int = 0, full_speed_step_seconds: float | None = None
    ):
        self._plan, self._step = plan, start_step
        self._full_speed_step_seconds = full_speed_step_seconds
        self._interval_since_seconds = time.perf_counter()
        self._since_seconds: float | None = None  # the last call of `advance`
        self._num_steps = 0  # timed ones, and their time
        self._seconds = 0.0
        self._evaluation_steps = plan.evaluation_cost(num_eval_rows)
        self._evaluation_seconds: float | None = None  # of the last one

    def advance(self, step: int) -> None:
        now_seconds = time.perf_counter()
        if self._since_seconds is not None:
            self._num_steps += step - self._step
            self._seconds += now_seconds - self._since_seconds
        self._step, self._since_seconds = step, now_seconds

    @contextmanager
    def stopped(self, *, is_evaluation: bool = False) -> Iterator[None]:
        started_seconds = time.perf_counter()
        yield
        seconds = time.perf_counter() - started_seconds
        self._interval_since_seconds += seconds
        if self._since_seconds is not None:
            self._since_seconds += seconds
        if is_evaluation:
            self._evaluation_seconds = seconds

    def figures(self, num_steps: int, wait_seconds: float) -> dict[str, float]:
        """Compute the rates of the `num_steps` steps since the last call, in which so long was waited for input.

        Without a clock around the input, `wait_seconds` is NaN, and its share is left out.
        """
        now_seconds = time.perf_counter()
        seconds = now_seconds - self._interval_since_seconds
        self._interval_since_seconds = now_seconds
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
        """Mean time of a step; None before one was timed."""
        return self._seconds / self._num_steps if self._seconds else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens trained on per second, padding included; None before a step was timed."""
        return self._plan.batch_tokens * self._num_steps / self._seconds if self._seconds else None

    @property
    def seconds_left(self) -> float | None:
        """Time that the rest of the run takes, its evaluations included; None before a step was timed."""
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
        self._loss: float | None = None  # of the newest line of the log
        self._bar = tqdm(
            total=plan.num_steps, initial=start_step, bar_format=BAR, disable=None if is_chief else True, leave=True
        )
        if start_step < plan.num_steps:
            self.show(COMPILING)
            if is_chief and self._bar.disable:
                logger.info("Compiling the first step …")

    def show(self, doing: str) -> None:
        self._bar.set_description_str(doing)

    def advance(self, step: int) -> None:
        self._bar.set_description_str(self._state(), refresh=False)
        self._bar.update(step - self._bar.n)

    def log(self, step: int, loss: float) -> None:
        """Show the loss of a line of the log; where there is no bar, as a line."""
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
        """Write loss, speed and time left, as far as they are known."""
        speed, seconds = self._clock.tokens_per_second, self._clock.seconds_left
        parts = [
            f"loss {shown_loss(self._loss)}" if self._loss is not None else "",
            f"{short_number(speed)} tok/s" if speed is not None else "",
            f"{clock_time(seconds)} left" if seconds is not None else "",
        ]
        return "  ".join(part for part in parts if part)


@dataclass
class TrainingLog:
    """Reads the figures of an interval of steps from the device and writes them, with the progress bar.

    start_step, logged_step: step that this process starts after, and the last one before it with a line in the log.
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
        """Raise TrainingDivergedError if loss or gradient of a step were not finite; those from it on were not made."""
        optimizer = self.model.optimizer
        self.model.runtime.pull(self.model.figures)
        if not optimizer.is_stopped:
            return
        step = int(optimizer.iterations.numpy()) + 1
        means = ", ".join(f"{metric.name} {float(metric.result()):g}" for metric in self.model.metrics)
        raise TrainingDivergedError(
            f"Loss and gradients must stay finite; those of step {step:,} were not ({means}, over the steps since "
            f"{self.logged_step:,}). That step was not made, and nothing was saved after it. Start a new run with a "
            "lower --learning-rate or a longer warmup, or resume with --on-nonfinite skip.",
            reason="nonfinite",
            step=step,
            good_step=step - 1,
        )

    def _check_rise(self, step: int, loss: float) -> None:
        first_step = self.plan.first_step  # rows and masks of another phase have another loss
        lines = (line for line in self.log.lines if line["split"] == TRAIN and line["step"] > first_step)
        losses = [line["loss"] for line in lines][-NUM_LOSSES_BEFORE:]
        if self.max_loss_rise is None or len(losses) < NUM_LOSSES_BEFORE:
            return
        before = statistics.median(losses)
        if loss > before + self.max_loss_rise:
            raise TrainingDivergedError(
                f"The loss must not rise by more than --max-loss-rise {self.max_loss_rise:g} nats; that of the steps "
                f"{self.logged_step + 1:,} to {step:,} is {loss:.4f}, after {before:.4f} (median of "
                f"{NUM_LOSSES_BEFORE} lines). Start a new run with a lower --learning-rate or a longer warmup, or "
                "resume with --on-nonfinite skip.",
                reason="spike",
                step=step,
                good_step=self.logged_step,
            )

    def write_train(self, step: int) -> None:
        """Write the means over the steps since the last call; TrainingDivergedError if not finite or risen too far."""
        self.check_finite()
        figures = {metric.name: float(metric.result()) for metric in self.model.metrics}
        self._check_rise(step, figures["loss"])
        self.model.reset_means()
        figures |= self.model.task.derived_figures(figures)
        figures["learning_rate"] = float(self.model.optimizer.learning_rate.numpy())
        figures["epoch"] = round(self.plan.row_after(step, self.num_skipped_rows) / self.plan.num_rows, 4)
        wait_seconds = self.take_wait_seconds()
        # Of the steps since the last line, those before the start are not on this clock.
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
