"""The project's one way to repeat what failed for a passing reason: a wait before each further try."""

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

Result = TypeVar("Result")


def growing_delays(first_seconds: float, num_delays: int) -> tuple[float, ...]:
    """Compute waits of which each is twice the one before."""
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
    """Call the function until it succeeds, once more than there are delays, and return its result.

    What google.api_core.retry lacks is an end to its waits, a number of tries, and an answer's `Retry-After`.

    Args:
        function: may be called again after a failure.
        delays_seconds: before each further try.
        is_transient: asked of an error, whether to try again; others are raised at once.
        on_failure: told of an error, and of the wait before the next try.
        least_wait_seconds: what an error asks to wait at least.
        stop_event: ends a wait, and with it the tries: the error is raised.

    Raises:
        Exception: the last error of the function.
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
