import threading
import time

import pytest

from mlm_common.errors import retry_call


class Failing:
    """A function that raises its errors one after the other, and then returns the number of calls."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.num_calls = 0

    def __call__(self) -> int:
        self.num_calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return self.num_calls


def is_transient(error: Exception) -> bool:
    return isinstance(error, OSError)


def test_passing_failures_cost_a_wait_and_others_are_raised():
    told: list[tuple[str, float]] = []
    function = Failing(OSError("1"), OSError("2"))
    result = retry_call(
        function,
        (0.01, 0.02),
        is_transient,
        on_failure=lambda error, wait_seconds: told.append((str(error), wait_seconds)),
        least_wait_seconds=lambda error: 0.05 if str(error) == "1" else 0.0,
    )
    assert (result, told) == (3, [("1", 0.05), ("2", 0.02)])
    function = Failing(OSError("1"), ValueError("2"))
    with pytest.raises(ValueError, match="2"):
        retry_call(function, (0.0,) * 5, is_transient)
    assert function.num_calls == 2


def test_the_last_error_is_raised():
    function = Failing(OSError("1"), OSError("2"), OSError("3"))
    with pytest.raises(OSError, match="2"):
        retry_call(function, (0.0,), is_transient)
    assert function.num_calls == 2


def test_a_hurry_ends_the_wait():
    stop_event = threading.Event()
    threading.Timer(0.1, stop_event.set).start()
    started = time.monotonic()
    function = Failing(OSError("1"))
    with pytest.raises(OSError, match="1"):
        retry_call(function, (60.0,), is_transient, stop_event=stop_event)
    assert function.num_calls == 1
    assert time.monotonic() - started < 10
