"""How far a split is: a bar where standard error is a terminal, a line in the log now and then where it is not."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tqdm import tqdm

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 30.0


class SplitProgress:
    """Bytes of the corpus done, of `total_bytes` where that is known; rates and estimates are those of this run."""

    def __init__(self, split_name: str, total_bytes: int | None, bar: "tqdm | None") -> None:
        self._split_name = split_name
        self._total_bytes = total_bytes
        self._bar = bar
        self._started_seconds = self._line_seconds = time.monotonic()
        self._num_bytes_before = 0
        self._num_bytes = 0
        self._num_tokens = 0

    def skip(self, num_bytes: int) -> None:
        """Count what an earlier run has done."""
        self._num_bytes_before += num_bytes
        if self._bar is not None:
            self._bar.initial += num_bytes
            self._bar.update(num_bytes)

    def add(self, num_bytes: int, num_tokens: int) -> None:
        """Count what this run has done."""
        self._num_bytes += num_bytes
        self._num_tokens += num_tokens
        if self._bar is not None:
            self._bar.set_postfix_str(self._tokens_per_second(), refresh=False)
            self._bar.update(num_bytes)
        elif time.monotonic() - self._line_seconds >= SECONDS_BETWEEN_LINES:
            self._line_seconds = time.monotonic()
            self.log_line()

    def log_line(self) -> None:
        """Log how far the split is."""
        logger.info("%s: %s, %s%s", self._split_name, self._share(), self._tokens_per_second(), self._estimate())

    def _share(self) -> str:
        num_bytes = self._num_bytes_before + self._num_bytes
        if self._total_bytes:
            return f"{100 * num_bytes / self._total_bytes:.0f} % of {self._total_bytes / 1e6:,.1f} MB"
        return f"{num_bytes / 1e6:,.1f} MB"

    def _tokens_per_second(self) -> str:
        return f"{self._num_tokens / self._seconds():,.0f} tokens/s"

    def _estimate(self) -> str:
        num_bytes_left = (self._total_bytes or 0) - self._num_bytes_before - self._num_bytes
        if num_bytes_left <= 0 or not self._num_bytes:
            return ""
        return f", {num_bytes_left / self._num_bytes * self._seconds() / 60:,.1f} minutes left"

    def _seconds(self) -> float:
        return max(time.monotonic() - self._started_seconds, 1e-3)


@contextmanager
def split_progress(split_name: str, total_bytes: int | None) -> Iterator[SplitProgress]:
    """Give the progress of a split, shown from now on until the end."""
    from tqdm import tqdm

    # Without smoothing the rate is a mean, so that what was skipped has no part in it.
    with tqdm(desc=split_name, total=total_bytes, unit="B", unit_scale=True, smoothing=0, disable=None) as bar:
        progress = SplitProgress(split_name, total_bytes, None if bar.disable else bar)
        yield progress
    if bar.disable:
        progress.log_line()
