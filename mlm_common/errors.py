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
EXIT_INTERRUPTED = 128 + signal.SIGINT  # as shells say it
# The same command would end in the same way, or was ended by a person.
FINAL_STATUSES = frozenset({0, EXIT_BAD_INPUT, EXIT_PERMANENT, EXIT_INTERRUPTED})
# What the documentation says of each.
MEANINGS = {
    0: "The command has finished.",
    EXIT_FAILED: "It failed, and another try may succeed: a lost TPU, a server that does not answer, a crash.",
    EXIT_BAD_INPUT: "Bad input. The line says what is wrong, what was received, and how to fix it.",
    EXIT_PERMANENT: "It would fail again: the training diverged, writing is forbidden, an input file is damaged.",
    EXIT_STOPPED: "It was asked to stop, and everything is saved. Run the same command again to continue.",
    EXIT_INTERRUPTED: "Ctrl-C. Run the same command again to continue.",
}


class InputError(ValueError):
    """Bad input: the message says what is wrong, what was received, and how to fix it.

    It ends the command with that line.
    """

    exit_status = EXIT_BAD_INPUT


class RunFailedError(RuntimeError):
    """The run failed: the message says what happened, what is kept, and how to resume.

    A retry may succeed.
    """

    exit_status = EXIT_FAILED


class PermanentError(RunFailedError):
    """The run failed, and the same command would fail again until a person changes something."""

    exit_status = EXIT_PERMANENT


def error_summary(error: BaseException) -> str:
    """Summarize an unexpected error in one line: its type, its message, and the line of code that raised it."""
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
    """Call the function until it succeeds, at most once more than there are delays; the last error is raised.

    google.api_core.retry has no event that ends its waits, no number of tries, and no `Retry-After`.

    Args:
        delays_seconds: before each further try.
        is_transient: returns whether to retry after an error; other errors are raised at once.
        on_failure: called with the error and the wait before the next try.
        least_wait_seconds: returns the shortest wait that an error asks for.
        stop_event: ends a wait and the retries.
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
