"""Shutdown requests: SIGTERM, Ctrl-C, a cloud machine's notice of maintenance, the end of the supervising process.

Notices: https://cloud.google.com/compute/docs/metadata/getting-live-migration-notice and, for Spot machines,
https://cloud.google.com/compute/docs/instances/create-use-preemptible#detecting_if_a_vm_was_preempted.
"""

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from mlm_common.errors import EXIT_STOPPED, RunFailedError
from train.runtime import supervisor
from train.runtime.machines import METADATA_HOST_VARIABLE, read_metadata

logger = logging.getLogger(__name__)

# {name of a metadata value: the value if no maintenance or preemption is due}.
NOTICES = {"instance/maintenance-event": "NONE", "instance/preempted": "FALSE"}
POLL_SECONDS = 1.0
IN_FLIGHT_SECONDS = 1.0


CTRL_C = "Ctrl-C"
STOPPING = b"\nStopping after this step, with a checkpoint. Press Ctrl-C again to end at once without saving.\n"


class RunStoppedError(RunFailedError):
    """The run was asked to stop and has saved a checkpoint. Running the same command again continues the run."""

    exit_status = EXIT_STOPPED


class StopRequest:
    """A request to shut down, made by this process or another worker.

    Args:
        max_over_workers: returns the maximum of each value over all workers, once all have called it. None if there is
            only one worker.
    """

    def __init__(self, max_over_workers: Callable[[Sequence[float]], Sequence[float]] | None = None):
        self.reason: str | None = None
        self._max_over_workers = max_over_workers
        self._was_made_anywhere = False
        self._is_save_due = self._was_save_due_anywhere = False

    def make(self, reason: str) -> None:
        """Request a shutdown. Only the first reason is kept."""
        if self.reason is None:
            self.reason = reason

    @property
    def in_words(self) -> str:
        """The reason in parentheses, to append to `Stopped`. Empty after Ctrl-C, because the user knows the reason."""
        return "" if self.reason == CTRL_C else f" ({self.reason or 'on another worker'})"

    def check(self) -> bool:
        """Return whether this process has a request. If the supervisor is gone, make a request first."""
        if supervisor.is_lost():
            self.make("the supervising process ended")
        return self.reason is not None

    def is_agreed(self) -> bool:
        """Return whether all workers should stop: immediately with one worker, else as of the last `compare`."""
        return self.check() if self._max_over_workers is None else self._was_made_anywhere

    def take_agreement_to_save(self, is_due: bool) -> bool:
        """Return whether all workers should save, and reset the agreement.

        A single worker saves if `is_due`. Several workers save if they agreed to at the last `compare`.
        """
        if self._max_over_workers is None:
            return is_due
        is_agreed, self._was_save_due_anywhere = self._was_save_due_anywhere, False
        self._is_save_due = is_due and not is_agreed
        return is_agreed

    def compare(self, seconds: float = 0.0) -> float:
        """Agree with the other workers on stopping and saving. Wait for them.

        Returns:
            The maximum of `seconds` over all workers.
        """
        if self._max_over_workers is not None:
            states = self._max_over_workers([float(self.check()), float(self._is_save_due), seconds])
            self._was_made_anywhere, self._was_save_due_anywhere = states[0] > 0, states[1] > 0
            seconds = states[2]
        return seconds


class InFlight:
    """Limits the work queued on the device to about a second, or to one piece if a piece takes longer.

    A host runs ahead of its TPU or GPU, and a checkpoint waits for everything that is queued. So the host waits for the
    device about once per second. The pieces of work (steps, or batches of an evaluation) are timed from one wait to the
    next. All workers queue the same number of pieces, which depends on the slowest worker.

    Args:
        wait: waits for the device.
        stop: compares times between workers at each wait.

    Attributes:
        num_allowed: number of pieces that may still be queued before the next wait.
    """

    def __init__(self, wait: Callable[[], object], stop: StopRequest):
        self.num_allowed = 1
        self._wait, self._stop = wait, stop
        self._num_queued = 0
        self._is_compiled = False  # the first piece includes compiling, so it is not timed
        self.start_clock()

    def start_clock(self) -> None:
        self._since_seconds = time.perf_counter()

    def add(self, num_pieces: int) -> bool:
        """Count queued pieces, and wait for the device if no more are allowed. Return whether it waited."""
        self._num_queued += num_pieces
        self.num_allowed -= num_pieces
        if self.num_allowed > 0:
            return False
        self._wait()
        seconds = self._stop.compare((time.perf_counter() - self._since_seconds) / self._num_queued)
        self.num_allowed = max(1, int(IN_FLIGHT_SECONDS / seconds)) if self._is_compiled else 1
        self._is_compiled, self._num_queued = True, 0
        self.start_clock()
        return True


@contextlib.contextmanager
def listening(request: StopRequest, *, on_cloud_machine: bool) -> Iterator[None]:
    """During the context, make `request` when a signal or a notice asks this process to stop.

    A second Ctrl-C kills the process, even during a call that compiles for minutes. The metadata server is polled on a
    cloud machine, or if the environment sets its address.
    """
    ended = threading.Event()
    if on_cloud_machine or os.environ.get(METADATA_HOST_VARIABLE):
        threading.Thread(target=_watch_metadata, args=(request, ended), daemon=True).start()
    in_main_thread = threading.current_thread() is threading.main_thread()  # only the main thread may handle signals
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        request.make(CTRL_C)
        os.write(2, STOPPING)  # `print` might fail if it interrupts another `print`

    if in_main_thread:
        signal.signal(signal.SIGTERM, lambda *_: request.make("received SIGTERM"))
        if before[signal.SIGINT] != signal.SIG_IGN:  # a command in the background may ignore SIGINT
            signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        ended.set()
        if in_main_thread:
            for number, handler in before.items():
                signal.signal(number, handler)


def _watch_metadata(request: StopRequest, ended: threading.Event) -> None:
    """Make the request when a new notice appears. Existing notices do not count; otherwise, no run could resume."""
    seen = {name: read_metadata(name) or quiet for name, quiet in NOTICES.items()}
    while not ended.wait(POLL_SECONDS):
        for name, quiet in NOTICES.items():
            value = read_metadata(name)
            if value is not None and value not in (quiet, seen[name]):
                request.make(f"the machine's {name} is {value}")
            seen[name] = value or seen[name]
