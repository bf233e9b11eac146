"""What happens between updates, at intervals of steps: figures are logged, the model is evaluated and saved."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tf_keras
from tqdm import tqdm

from tokenizer_training.command_line import RunFailedError
from train.evaluation import Evaluation
from train.metrics_log import MetricsLog, perplexity
from train.plan import Plan
from train.pretraining_model import PretrainingModel


class TrainingDivergedError(RunFailedError):
    """Loss or gradients are not finite any more."""


class EverySteps(tf_keras.callbacks.Callback):
    """Calls `action(step)` every `interval_steps` updates of the whole run, and after its last one.

    The step is counted on the host, since reading it from the device would wait for the update.
    """

    # Without it Keras reads the logs of every update from the device.
    _supports_tf_logs = True

    def __init__(self, interval_steps: int, action: Callable[[int], None], *, start_step: int, num_steps: int):
        super().__init__()
        self.interval_steps = interval_steps
        self.action = action
        self.start_step = start_step
        self.num_steps = num_steps
        self.previous_step = start_step

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Act if the updates of this launch reached a multiple of the interval, or the end."""
        step = self.start_step + batch + 1
        if step // self.interval_steps > self.previous_step // self.interval_steps or step == self.num_steps:
            self.action(step)
        self.previous_step = step


class TrainingLog:
    """Reads the figures of an interval of updates from the device and writes them, with the progress bar."""

    def __init__(self, model: PretrainingModel, log: MetricsLog, plan: Plan, start_step: int):
        self._model = model
        self._log = log
        self._plan = plan
        self._previous_step = start_step
        self._excluded_seconds = 0.0
        self._since_seconds = time.perf_counter()
        self._bar = tqdm(
            total=plan.num_steps, initial=start_step, unit="step", desc="training", disable=not log.is_chief
        )

    @contextmanager
    def clock_stopped(self) -> Iterator[None]:
        """Within it, time does not count as training time."""
        started_seconds = time.perf_counter()
        yield
        self._excluded_seconds += time.perf_counter() - started_seconds

    def read_finite(self, step: int) -> dict[str, float]:
        """Return the means over the updates since the last call of `write_train`.

        Raises:
            TrainingDivergedError: the loss or a gradient is not finite.
        """
        figures = {metric.name: float(metric.result()) for metric in self._model.metrics}
        if not all(math.isfinite(value) for value in figures.values()):
            raise TrainingDivergedError(
                f"Loss and gradients must stay finite; between steps {self._previous_step} and {step} they did not: "
                f"{figures}. Give the command again with a lower --learning-rate or more --warmup-steps."
            )
        return figures

    def write_train(self, step: int) -> None:
        """Write the means over the updates since the last call.

        Raises:
            TrainingDivergedError: the loss or a gradient is not finite.
        """
        figures = self.read_finite(step)
        self._model.reset_metrics()
        num_tokens = (step - self._previous_step) * self._plan.global_batch_rows * self._plan.max_length
        figures["perplexity"] = perplexity(figures["loss"])
        figures["learning_rate"] = float(self._model.optimizer.learning_rate.numpy())
        figures["epoch"] = round(step * self._plan.global_batch_rows / self._plan.num_rows, 4)
        figures["tokens_per_second"] = round(num_tokens / self._training_seconds(), 1)
        self._log.add(step, "train", figures)
        self._log.flush()
        self._bar.update(step - self._previous_step)
        self._bar.set_postfix(loss=f"{figures['loss']:.3f}", accuracy=f"{figures['masked_accuracy']:.3f}")
        self._previous_step = step

    def write_evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Write the figures of one evaluation, and draw the loss so far."""
        figures = {
            "loss": evaluation.loss,
            "perplexity": evaluation.perplexity,
            "masked_accuracy": evaluation.masked_accuracy,
            "num_masked_tokens": evaluation.num_masked,
        }
        self._log.add(step, "validation", figures)
        self._log.flush()
        self._log.draw()
        if self._log.is_chief:
            self._bar.write(
                f"step {step:,}: validation loss {evaluation.loss:.4f}, perplexity {evaluation.perplexity:.1f}, "
                f"masked accuracy {evaluation.masked_accuracy:.4f}"
            )

    def close(self) -> None:
        """Close the progress bar."""
        self._bar.close()

    def _training_seconds(self) -> float:
        now_seconds = time.perf_counter()
        seconds = now_seconds - self._since_seconds - self._excluded_seconds
        self._since_seconds, self._excluded_seconds = now_seconds, 0.0
        return seconds
