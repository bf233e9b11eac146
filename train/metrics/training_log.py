"""The figures of training, step by step: read from the device, checked and logged, with the progress bar."""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mlm_common.errors import PermanentError
from train.metrics.log import MetricsLog
from train.metrics.log_files import TRAIN, VALIDATION
from train.metrics.progress import Pace, TrainingBar
from train.runtime.plan import Plan
from train.step.train_step import PretrainingModel

# Lines of training whose median a loss is compared with.
NUM_LOSSES_BEFORE = 5


class TrainingDivergedError(PermanentError):
    """Loss or gradients are not finite, or the loss has risen too far.

    Args:
        message: human-readable.
        reason: `nonfinite` or `spike`.
        step: the last step to blame.
        good_step: the last one that is above suspicion.
    """

    def __init__(self, message: str, *, reason: str, step: int, good_step: int):
        super().__init__(message)
        self.reason, self.step, self.good_step = reason, step, good_step


class Throughput:
    """A clock over training alone, and the rates of intervals of steps.

    Args:
        plan: of the run.
        full_speed_step_seconds: what a step would take if all replicas computed at their peak; None where that is
            not known.
    """

    def __init__(self, plan: Plan, full_speed_step_seconds: float | None):
        self._plan = plan
        self._full_speed_step_seconds = full_speed_step_seconds
        self._since_seconds = time.perf_counter()
        self._excluded_seconds = 0.0

    @contextmanager
    def clock_stopped(self) -> Iterator[None]:
        """Within it, time does not count as training time."""
        started_seconds = time.perf_counter()
        yield
        self._excluded_seconds += time.perf_counter() - started_seconds

    def figures(self, num_steps: int, wait_seconds: float) -> dict[str, float]:
        """Compute the rates of the `num_steps` steps since the last call, in which so long was waited for input."""
        now_seconds = time.perf_counter()
        seconds = now_seconds - self._since_seconds - self._excluded_seconds
        self._since_seconds, self._excluded_seconds = now_seconds, 0.0
        step_seconds = seconds / num_steps
        figures = {
            "step_seconds": round(step_seconds, 6),
            "tokens_per_second": round(self._plan.batch_tokens / step_seconds, 1),
            "input_wait_share": round(min(1.0, wait_seconds / seconds), 4),
        }
        if self._full_speed_step_seconds is not None:
            figures["mfu"] = round(self._full_speed_step_seconds / step_seconds, 4)
        return figures


class TrainingLog:
    """Reads the figures of an interval of steps from the device and writes them, with the progress bar.

    Args:
        start_step: step that this process starts after.
        logged_step: the last one before it with a line in the log.
        num_eval_rows: rows to evaluate on.
        advice: see `TrainingBar`.
    """

    def __init__(
        self,
        model: PretrainingModel,
        log: MetricsLog,
        plan: Plan,
        *,
        start_step: int,
        logged_step: int,
        num_skipped_rows: int,
        take_wait_seconds: Callable[[], float],
        throughput: Throughput,
        max_loss_rise: float | None = None,
        num_eval_rows: int = 0,
        advice: str = "",
    ):
        self.logged_step = logged_step
        self._model = model
        self._log = log
        self._plan = plan
        self._start_step = start_step
        self._num_skipped_rows = num_skipped_rows
        self._take_wait_seconds = take_wait_seconds
        self._throughput = throughput
        self._max_loss_rise = max_loss_rise
        self._phase = {"phase": len(plan.before) + 1} if plan.num_phases > 1 else {}
        self._pace = Pace(plan, start_step, num_eval_rows)
        self._bar = TrainingBar(plan, self._pace, start_step, is_chief=log.is_chief, advice=advice)

    def advance(self, step: int) -> None:
        """Move the progress bar to `step`, without waiting for the device."""
        self._pace.advance(step)
        self._bar.advance(step)

    @contextmanager
    def clock_stopped(self, *, is_evaluation: bool = False) -> Iterator[None]:
        """Within it, time does not count as training time."""
        if is_evaluation:
            self._bar.show("evaluating …")
        started_seconds = time.perf_counter()
        with self._throughput.clock_stopped():
            yield
        self._pace.exclude(time.perf_counter() - started_seconds, is_evaluation=is_evaluation)

    def check_finite(self) -> None:
        """Check that all steps so far were made.

        Raises:
            TrainingDivergedError: loss or gradient of one were not finite; it and those after it were not made.
        """
        optimizer = self._model.optimizer
        if not optimizer.is_stopped:
            return
        step = int(optimizer.iterations.numpy()) + 1
        means = ", ".join(f"{metric.name} {float(metric.result()):g}" for metric in self._model.metrics)
        raise TrainingDivergedError(
            f"Loss and gradients must stay finite; those of step {step:,} were not ({means}, over the steps since "
            f"{self.logged_step:,}). That step was not made, and nothing was saved after it. Start a new run with a "
            "lower --learning-rate or a longer warmup, or resume with --on-nonfinite skip.",
            reason="nonfinite",
            step=step,
            good_step=step - 1,
        )

    def _check_rise(self, step: int, loss: float) -> None:
        """Check that the loss of an interval is not far above those of the last ones.

        Raises:
            TrainingDivergedError: it is.
        """
        first_step = self._plan.first_step  # rows and masks of another phase have another loss
        lines = (line for line in self._log.lines if line["split"] == TRAIN and line["step"] > first_step)
        losses = [line["loss"] for line in lines][-NUM_LOSSES_BEFORE:]
        if self._max_loss_rise is None or len(losses) < NUM_LOSSES_BEFORE:
            return
        before = statistics.median(losses)
        if loss > before + self._max_loss_rise:
            raise TrainingDivergedError(
                f"The loss must not rise by more than --max-loss-rise {self._max_loss_rise:g} nats; that of the steps "
                f"{self.logged_step + 1:,} to {step:,} is {loss:.4f}, after {before:.4f} (median of "
                f"{NUM_LOSSES_BEFORE} lines). Start a new run with a lower --learning-rate or a longer warmup, or "
                "resume with --on-nonfinite skip.",
                reason="spike",
                step=step,
                good_step=self.logged_step,
            )

    def write_train(self, step: int) -> None:
        """Write the means over the steps since the last call.

        Raises:
            TrainingDivergedError: a step was not finite, or the loss rose too far.
        """
        self.check_finite()
        figures = {metric.name: float(metric.result()) for metric in self._model.metrics}
        self._check_rise(step, figures["loss"])
        self._model.reset_means()
        figures |= self._model.task.derived_figures(figures)
        figures["learning_rate"] = float(self._model.optimizer.learning_rate.numpy())
        figures["epoch"] = round(self._plan.row_after(step, self._num_skipped_rows) / self._plan.num_rows, 4)
        wait_seconds = self._take_wait_seconds()
        # Of the steps since the last line, those before the start are not on this clock.
        figures |= self._throughput.figures(step - max(self.logged_step, self._start_step), wait_seconds)
        self._log.add(step, TRAIN, figures | self._phase)
        self._log.flush()
        self._bar.log(step, figures["loss"])
        self.logged_step = step

    def write_evaluation(self, step: int, figures: dict[str, float]) -> None:
        """Write the figures of one evaluation, and draw the loss so far."""
        self._log.add(step, VALIDATION, figures | self._phase)
        self._log.flush()
        self._log.draw()
        self._bar.write_evaluation(step, self._model.task.summarize(figures))

    def close(self) -> None:
        self._bar.close()
