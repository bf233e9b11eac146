"""Hooks called between steps. They also bound how many steps one call to the device may run.

An execution, in Keras's word, is one call from Python, which makes several steps. None goes past a step at which a hook
is due, nor takes longer than what may be in flight, if a step does not.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
import tf_keras

from train.runtime.preemption import InFlight

logger = logging.getLogger(__name__)

# Under which a train function returns the seconds that it waited for input.
WAIT_NAME = "input_wait_seconds"


@dataclass(frozen=True)
class Hook:
    """An action, called with the number of steps made so far.

    every_steps: it is due at the multiples, and after the last step of the run.
    at_steps: it is due at these steps.

    Without both it is called after each execution, wherever that ends.
    """

    action: Callable[[int], None]
    every_steps: int | None = None
    at_steps: Collection[int] | None = None

    def is_due(self, step: int, num_steps: int) -> bool:
        """Return whether to act after `step`, where an execution of a run of `num_steps` ended."""
        if self.every_steps is not None:
            return step % self.every_steps == 0 or step == num_steps
        return self.at_steps is None or step in self.at_steps

    def next_steps(self, step: int) -> Iterable[int]:
        """List the steps after `step` that no execution may go past."""
        if self.every_steps is not None:
            return (step - step % self.every_steps + self.every_steps,)
        return (at for at in self.at_steps or () if at > step)


class StepsPerExecution(tf_keras.callbacks.Callback):
    """Calls the hooks that are due, in their order, and sets the length of the next execution.

    Steps are counted on the host, since reading the number from the device would wait for it.

    Args:
        hooks: of the run.
        in_flight: bounds the steps queued on the device.
        start_step: steps made before `fit`.
        num_steps: steps of the whole run.
        max_steps: steps of the longest execution.
    """

    # Without it Keras reads the logs of every execution from the device.
    _supports_tf_logs = True

    def __init__(self, hooks: Iterable[Hook], in_flight: InFlight, *, start_step: int, num_steps: int, max_steps: int):
        super().__init__()
        self._hooks = tuple(hooks)
        self._in_flight = in_flight
        self._start_step = self._step = start_step
        self._num_steps = num_steps
        self._max_steps = max_steps
        self._waits: list[tf.Tensor] = []

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002
        self._set_length()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Act where an execution ended, and set the length of the next."""
        before, self._step = self._step, self._start_step + batch + 1
        self._waits.append(logs[WAIT_NAME])
        has_waited = self._in_flight.add(self._step - before)
        for hook in self._hooks:
            if hook.is_due(self._step, self._num_steps):
                hook.action(self._step)
        if has_waited:  # else the device has worked meanwhile
            self._in_flight.start_clock()
        self._set_length()

    def length_after(self, step: int) -> int:
        """Count the steps of the execution that begins after `step`; at least 1."""
        ends = (end for hook in self._hooks for end in hook.next_steps(step))
        longest = min(self._max_steps, self._in_flight.num_allowed)
        return min(step + longest, self._num_steps, *ends) - step or 1

    def take_wait_seconds(self) -> float:
        """Sum the seconds that the executions since the last call waited for input; waits for the device."""
        seconds = sum(float(wait) for wait in self._waits)
        self._waits.clear()
        return seconds

    def _set_length(self) -> None:
        if self._max_steps > 1:
            self.model._steps_per_execution.assign(self.length_after(self._step))


class Profile:
    """A trace of host and device for TensorBoard's profiler, from after step `steps[0]` to after step `steps[1]`.

    Args:
        folder: a local one, since a bucket may be slow; the trace goes to `plugins/profile/`, where TensorBoard looks
            for it. One that cannot be written is a warning.
        steps: of the whole run; a run that resumes between them is not traced. None traces nothing.
        wait_for_device: waits until the device has finished the queued steps.
    """

    def __init__(self, folder: str, steps: tuple[int, int] | None, wait_for_device: Callable[[], object]):
        self._folder = folder
        self._steps = steps
        self._wait_for_device = wait_for_device
        self._is_tracing = False

    def begin_or_end(self, step: int) -> None:
        if self._steps and step == self._steps[0]:
            with self._warning():
                tf.profiler.experimental.start(self._folder)
                self._is_tracing = True
        elif self._steps and step == self._steps[1]:
            self.close()

    def close(self) -> None:
        if self._steps and self._is_tracing:
            self._is_tracing = False
            self._wait_for_device()  # its last steps belong to the trace
            with self._warning():
                tf.profiler.experimental.stop()
                logger.info("profiled the steps after %d, up to %d", *self._steps)

    @contextmanager
    def _warning(self) -> Iterator[None]:
        try:
            yield
        except (tf.errors.OpError, OSError) as error:
            logger.warning("no profile is written; training goes on: %s", error)
