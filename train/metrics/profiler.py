"""A trace of some steps for TensorBoard's profiler."""

import logging
from collections.abc import Callable

import tensorflow as tf

logger = logging.getLogger(__name__)


class Profile:
    """Traces host and device from after step `steps[0]` to after step `steps[1]`.

    Args:
        folder: local or gs://; the trace is written to `plugins/profile/` in it, where TensorBoard looks for it.
        steps: of the whole run; a run that resumes between them is not traced. None traces nothing.
        wait_for_device: waits until the steps handed to the device are made.
    """

    def __init__(self, folder: str, steps: tuple[int, int] | None, wait_for_device: Callable[[], object]):
        self._folder = folder
        self._steps = steps
        self._wait_for_device = wait_for_device
        self._is_tracing = False

    def begin_or_end(self, step: int) -> None:
        """Begin or end the trace, if that is due after `step`."""
        if self._steps and step == self._steps[0]:
            self._is_tracing = True
            tf.profiler.experimental.start(self._folder)
        elif self._steps and step == self._steps[1]:
            self.close()

    def close(self) -> None:
        """End a trace that is under way, and write it."""
        if self._steps and self._is_tracing:
            self._is_tracing = False
            self._wait_for_device()  # its last steps belong to the trace
            tf.profiler.experimental.stop()
            logger.info("profile of the steps after %d, up to %d: %s", *self._steps, self._folder)
