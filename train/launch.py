"""A launch: one call from Python that makes several updates, and says how long it waited for input."""

from collections.abc import Callable, Iterable
from typing import Any

import tensorflow as tf
import tf_keras

WAIT_NAME = "input_wait_seconds"


def build_launch(model: tf_keras.Model) -> Callable[[Any], dict[str, tf.Tensor]]:
    """Return what `fit` calls with an iterator of global batches: it runs `model.train_step` on all replicas.

    As tf_keras' own `Model.make_train_function`, with a clock around the iterator. The answer holds, under `WAIT_NAME`,
    the seconds in which the host had no batch to hand out, float64. On a TPU the updates handed out before may still be
    computed in that time, so it is at least the time in which the device had nothing to do.
    """
    strategy = model.distribute_strategy
    train_step = model.train_step
    if model.jit_compile:
        train_step = tf.function(train_step, jit_compile=True, reduce_retracing=True)

    def update(iterator: Any) -> tf.Tensor:
        asked_seconds = tf.timestamp()
        with tf.control_dependencies([asked_seconds]):
            batch = next(iterator)
        with tf.control_dependencies(tf.nest.flatten(batch, expand_composites=True)):
            answered_seconds = tf.timestamp()
        strategy.run(train_step, args=(batch,))
        return answered_seconds - asked_seconds

    # tf_keras' variable: its `fit` counts by it, and reads it anew for each launch.
    num_steps = model._steps_per_execution

    def launch(iterator: Any) -> dict[str, tf.Tensor]:
        wait_seconds = tf.constant(0.0, tf.float64)
        for _ in tf.range(num_steps):
            wait_seconds += update(iterator)
        return {WAIT_NAME: wait_seconds}

    def launch_one(iterator: Any) -> dict[str, tf.Tensor]:
        return {WAIT_NAME: update(iterator)}

    return tf.function(launch if num_steps.numpy() > 1 else launch_one, reduce_retracing=True)


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
