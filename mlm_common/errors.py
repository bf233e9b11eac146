"""Exit statuses, the exceptions that map to them, and retries after transient errors."""

import signal
import threading
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_PERMANENT = 3
EXIT_STOPPED = 75  # EX_TEMPFAIL of sysexits.h: a shutdown request; the same command resumes
EXIT_INTERRUPTED = 128 + signal.SIGINT  # the status that shells report for a process ended by SIGINT
# A retry makes no sense after these statuses: the command succeeded, would fail again, or was ended by a person.
FINAL_STATUSES = frozenset({0, EXIT_BAD_INPUT, EXIT_PERMANENT, EXIT_INTERRUPTED})
# The meaning of each status, for the documentation.
MEANINGS = {
    0: "The command finished.",
    EXIT_FAILED: "The command failed, but a retry may succeed: a TPU was lost, a server did not answer, or it crashed.",
    EXIT_BAD_INPUT: "Bad input. The message says what is wrong, what was received, and how to fix it.",
    EXIT_PERMANENT: (
        "The command failed and would fail again: training diverged, writing is forbidden, or an input file is damaged."
    ),
    EXIT_STOPPED: "A shutdown was requested. Run the same command again; it continues from what is saved.",
    EXIT_INTERRUPTED: "Ctrl-C was pressed. Run the same command again; it continues from what is saved.",
}


class InputError(ValueError):
    """Bad input. The message says what is wrong, what was received, and how to fix it.

    The command prints the message on one line and ends.
    """

    exit_status = EXIT_BAD_INPUT


class RunFailedError(RuntimeError):
    """The run failed, but a retry may succeed. The message says what happened, what is kept, and how to resume."""

    exit_status = EXIT_FAILED


class PermanentError(RunFailedError):
    """The run failed, and the same command would fail again until a person changes something."""

    exit_status = EXIT_PERMANENT


def error_summary(error: BaseException) -> str:
    """Summarize an unexpected error on one line: its type, its message, and the line of code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return " ".join(f"{type(error).__name__}: {error}{place}".split())


Result = TypeVar("Result")


def growing_delays(first_seconds: float, num_delays: int) -> tuple[float, ...]:
    return tuple(first_seconds * 2.0**number for number in range(num_delays))


def retry_call(
    function: Callable[[], Result],
    delays_seconds: Iterable[float],
    is_transient: Callable[[Exception], bool],
    *,
    on_failure: Callable[[Exception, float], None] = lambda _error, _wait_seconds: None,
    least_wait_seconds: Callable[[Exception], float] = lambda _error: 0.0,
    stop_event: threading.Event | None = None,
) -> Result:
    """Call the function until it succeeds, and raise the last error if all retries fail.

    `google.api_core.retry` is not enough: it has no event that ends its waits and no maximum number of attempts, and it
    does not support `Retry-After`.

    Args:
        function: the function to call.
        delays_seconds: wait before each retry; the number of waits is the maximum number of retries.
        is_transient: returns whether to retry after an error. Other errors are raised at once.
        on_failure: called with the error and the wait in seconds before the next attempt.
        least_wait_seconds: returns the shortest wait that an error allows.
        stop_event: if set by another thread, ends the current wait and the retries.
    """
    stop_event = stop_event or threading.Event()
    for delay_seconds in delays_seconds:
        try:
            return function()
        except Exception as error:
            if not is_transient(error):
                raise
            wait_seconds = max(delay_seconds, least_wait_seconds(error))
            on_failure(error, wait_seconds)
            if stop_event.wait(wait_seconds):
                raise
    return function()
