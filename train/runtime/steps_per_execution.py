"""A launch: one call from Python that makes several updates, and says how long it waited for input."""

from collections.abc import Iterable
from typing import Any

import tensorflow as tf
import tf_keras

from train.train_step import WAIT_NAME


class Launches(tf_keras.callbacks.Callback):
    """Sets the length of each launch, so that none goes past a step at which something is to be done.

    To be the first of the callbacks.

    Args:
        intervals_steps: something is done at the multiples of each.
        marks: steps at which something is done besides.
        start_step: updates made before `fit`.
        num_steps: updates of the whole run.
        max_steps: updates of the longest launch.
    """

    # Without it Keras reads the logs of every launch from the device.
    _supports_tf_logs = True

    def __init__(
        self, intervals_steps: Iterable[int], marks: Iterable[int], *, start_step: int, num_steps: int, max_steps: int
    ):
        super().__init__()
        self._intervals_steps = tuple(intervals_steps)
        self._marks = (*marks, num_steps)
        self._start_step = start_step
        self._max_steps = max_steps
        self._waits: list[tf.Tensor] = []

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002
        """Set the length of the first launch."""
        self._set_length(self._start_step)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Take the launch's wait, and set the length of the next."""
        self._waits.append(logs[WAIT_NAME])
        self._set_length(self._start_step + batch + 1)

    def length_after(self, step: int) -> int:
        """Return the updates of the launch that begins after update `step`; at least 1."""
        to_intervals = (interval - step % interval for interval in self._intervals_steps)
        to_marks = (mark - step for mark in self._marks if mark > step)
        return min(self._max_steps, *to_intervals, *to_marks)

    def take_wait_seconds(self) -> float:
        """Return the seconds that the launches since the last call waited for input; waits for the device."""
        seconds = sum(float(wait) for wait in self._waits)
        self._waits.clear()
        return seconds

    def _set_length(self, step: int) -> None:
        if self._max_steps > 1:
            self.model._steps_per_execution.assign(self.length_after(step))
