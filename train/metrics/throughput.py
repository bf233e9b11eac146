"""How fast a run goes: step time, tokens a second, share of time spent waiting for input, share of the chips' peak."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from train.runtime.plan import Plan


class Throughput:
    """A clock over training alone, and the rates of intervals of steps.

    Args:
        plan: of the run.
        full_speed_step_seconds: what a step would take if all replicas computed at their peak; None where that is
            not known.
    """

    def __init__(self, plan: Plan, full_speed_step_seconds: float | None):
        self._plan = plan
        self._full_speed_step_seconds = full_speed_step_seconds
        self._since_seconds = time.perf_counter()
        self._excluded_seconds = 0.0

    @contextmanager
    def clock_stopped(self) -> Iterator[None]:
        """Within it, time does not count as training time."""
        started_seconds = time.perf_counter()
        yield
        self._excluded_seconds += time.perf_counter() - started_seconds

    def figures(self, num_steps: int, wait_seconds: float) -> dict[str, float]:
        """Compute the rates of the `num_steps` steps since the last call, in which so long was waited for input."""
        now_seconds = time.perf_counter()
        seconds = now_seconds - self._since_seconds - self._excluded_seconds
        self._since_seconds, self._excluded_seconds = now_seconds, 0.0
        step_seconds = seconds / num_steps
        figures = {
            "step_seconds": round(step_seconds, 6),
            "tokens_per_second": round(self._plan.global_batch_rows * self._plan.max_length / step_seconds, 1),
            "input_wait_share": round(min(1.0, wait_seconds / seconds), 4),
        }
        if self._full_speed_step_seconds is not None:
            figures["mfu"] = round(self._full_speed_step_seconds / step_seconds, 4)
        return figures
