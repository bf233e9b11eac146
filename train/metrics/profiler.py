"""A trace of some updates for TensorBoard's profiler."""

import logging
from typing import Any

import tensorflow as tf
import tf_keras

logger = logging.getLogger(__name__)


class Profile(tf_keras.callbacks.Callback):
    """Traces host and device from after update `steps[0]` to after update `steps[1]`.

    Args:
        folder: local or gs://; the trace is written to `plugins/profile/` in it, where TensorBoard looks for it.
        steps: updates of the whole run; a run that goes on from between them is not traced. None traces nothing.
        start_step: updates made before `fit`.
    """

    # Without it Keras reads the logs of every launch from the device.
    _supports_tf_logs = True

    def __init__(self, folder: str, steps: tuple[int, int] | None, *, start_step: int):
        super().__init__()
        self._folder = folder
        self._first_step = steps[0] if steps else None
        self._last_step = steps[1] if steps else None
        self._start_step = start_step
        self._is_tracing = False

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002
        """Begin before the first update, if asked to."""
        self._begin_at(self._start_step)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
        """Begin or end where a launch ended."""
        step = self._start_step + batch + 1
        self._begin_at(step)
        if step == self._last_step:
            self.close()

    def close(self) -> None:
        """End a trace that is under way, and write it."""
        if self._is_tracing:
            self._is_tracing = False
            self.model.optimizer.iterations.numpy()  # waits for the device, whose last updates belong to the trace
            tf.profiler.experimental.stop()
            logger.info(
                "profile of the updates after %s, up to %s: %s", self._first_step, self._last_step, self._folder
            )

    def _begin_at(self, step: int) -> None:
        if step == self._first_step:
            self._is_tracing = True
            tf.profiler.experimental.start(self._folder)
