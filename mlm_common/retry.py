"""Retry after transient errors, with a wait before each further try."""

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

Result = TypeVar("Result")


def growing_delays(first_seconds: float, num_delays: int) -> tuple[float, ...]:
    """Return waits, each twice the one before."""
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
    """Call the function until it succeeds, at most once more than there are delays, and return its result.

    google.api_core.retry has no event that ends its waits, no number of tries, and no `Retry-After`.

    Args:
        function: may be called again after a failure.
        delays_seconds: before each further try.
        is_transient: returns whether to retry after an error; other errors are raised at once.
        on_failure: called with the error and the wait before the next try.
        least_wait_seconds: returns the shortest wait that an error asks for.
        stop_event: ends a wait and the retries; the error is raised.

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
