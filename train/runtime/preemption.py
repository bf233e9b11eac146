"""Requests to stop: SIGTERM, the notice of a cloud machine's maintenance, the end of the supervising process.

Notices: https://cloud.google.com/compute/docs/metadata/getting-live-migration-notice and, for Spot machines,
https://cloud.google.com/compute/docs/instances/create-use-preemptible#detecting_if_a_vm_was_preempted.
"""

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator

from mlm_common.errors import EXIT_STOPPED, RunFailedError
from train.runtime import heartbeat
from train.runtime.tpu import METADATA_HOST_VARIABLE, read_metadata

logger = logging.getLogger(__name__)

# Value -> what it is when nothing is to come.
NOTICES = {"instance/maintenance-event": "NONE", "instance/preempted": "FALSE"}
POLL_SECONDS = 5.0
STOP_CHECK_STEPS = 10


class RunStoppedError(RunFailedError):
    """The run was asked to stop, has saved, and resumes when the same command is given again."""

    exit_status = EXIT_STOPPED


class StopRequest:
    """Whether the run is to stop at the end of an execution.

    Args:
        agree: tells whether any worker's argument is true, the same on all workers; None for one worker.
    """

    def __init__(self, agree: Callable[[bool], bool] | None = None):
        self.reason: str | None = None
        self._agree = agree
        # Several workers ask each other at the multiples of it; one worker itself after each execution.
        self.interval_steps = None if agree is None else STOP_CHECK_STEPS

    def make(self, reason: str) -> None:
        """Ask for a stop; the first reason counts."""
        if self.reason is None:
            self.reason = reason

    @property
    def is_made(self) -> bool:
        """Whether this process was asked to stop."""
        if heartbeat.is_supervisor_lost():
            self.make("the supervising process ended")
        return self.reason is not None

    @property
    def may_interrupt(self) -> bool:
        """Whether to stop even within an evaluation; several workers cannot, which must stop at the same place."""
        return self._agree is None and self.is_made

    def is_due(self, step: int) -> bool:
        """Tell whether all workers are to stop after `step`."""
        if self._agree is None:
            return self.is_made
        return step % STOP_CHECK_STEPS == 0 and self._agree(self.is_made)

    def meet(self) -> None:
        """Wait until all workers have called this."""
        if self._agree is not None:
            self._agree(False)


@contextlib.contextmanager
def listening(request: StopRequest, *, on_cloud_machine: bool) -> Iterator[None]:
    """Listen, within it, to what asks this process to stop, and make the request.

    Args:
        request: that is made.
        on_cloud_machine: whether the metadata server is there to be asked. It is asked, too, where the environment
            names its address.
    """
    ended = threading.Event()
    if on_cloud_machine or os.environ.get(METADATA_HOST_VARIABLE):
        threading.Thread(target=_watch_metadata, args=(request, ended), daemon=True).start()
    in_main_thread = threading.current_thread() is threading.main_thread()  # the only one that may handle signals
    if in_main_thread:
        before = signal.signal(signal.SIGTERM, lambda *_: request.make("received SIGTERM"))
    try:
        yield
    finally:
        ended.set()
        if in_main_thread:
            signal.signal(signal.SIGTERM, before)


def _watch_metadata(request: StopRequest, ended: threading.Event) -> None:
    """Make the request when a notice appears; one that stands already does not count, or no run could ever resume."""
    seen = {name: read_metadata(name) or quiet for name, quiet in NOTICES.items()}
    while not ended.wait(POLL_SECONDS):
        for name, quiet in NOTICES.items():
            value = read_metadata(name)
            if value is not None and value not in (quiet, seen[name]):
                request.make(f"the machine's {name} is {value}")
            seen[name] = value or seen[name]
