"""Heartbeats of a training process for its supervisor: a line for each thing that it starts or has done.

The lines are `PHASE STEP`, written to the pipe whose descriptor is in the environment; without it there are none.
"""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

VARIABLE = "RUN_MLM_HEARTBEAT_FD"
# The phase of a report that training came to a step.
TRAIN = "train"

# Between two reports of `kept_up`, and its longest time: an upload of days is a hang.
INTERVAL_SECONDS = 1.0
MAX_KEPT_UP_SECONDS = 6 * 3600.0

_lost = threading.Event()


def report(phase: str, step: int = 0) -> None:
    """Tell that `phase` begins, or that training came to `step`."""
    descriptor = os.environ.get(VARIABLE)
    if not descriptor:
        return
    try:
        os.write(int(descriptor), f"{phase} {step}\n".encode())
    except BrokenPipeError:
        _lost.set()


@contextmanager
def kept_up(phase: str, step: int = 0) -> Iterator[None]:
    """Report `phase` repeatedly within it: for work that may take long and has its own time-outs."""
    ended = threading.Event()
    end_seconds = time.monotonic() + MAX_KEPT_UP_SECONDS

    def keep_up() -> None:
        while not ended.wait(INTERVAL_SECONDS) and time.monotonic() < end_seconds:
            report(phase, step)

    report(phase, step)
    threading.Thread(target=keep_up, name="heartbeat", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def is_supervisor_lost() -> bool:
    """Return whether there was a supervisor, and it has ended."""
    return _lost.is_set()
