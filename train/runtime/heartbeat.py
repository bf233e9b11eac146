"""What a training process tells the one that supervises it: a line for each thing that it begins or has done.

The lines are `PHASE STEP`, written to the pipe whose descriptor is in the environment; without it nothing is told.
"""

import os
import threading

VARIABLE = "RUN_MLM_HEARTBEAT_FD"
# The phase of a report that training came to a step.
TRAIN = "train"

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


def is_supervisor_lost() -> bool:
    """Tell whether there was a supervisor, and it has ended."""
    return _lost.is_set()
