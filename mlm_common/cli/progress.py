"""Progress of a phase: a bar where standard error is a terminal, a log line every ten seconds where it is not."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tqdm import tqdm

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LINES = 10.0


class LoggedProgress:
    """Count `n` of `total` units, and log how far that is every ten seconds, as a tqdm bar would show it."""

    def __init__(self, phase: str, unit: str, total: int | None) -> None:
        self._phase = phase
        self._unit = unit
        self._started_seconds = self._line_seconds = time.monotonic()
        self.total = total
        self.n: float = 0

    def update(self, n: float = 1) -> None:
        """Count more units."""
        self.n += n
        now = time.monotonic()
        if now - self._line_seconds < SECONDS_BETWEEN_LINES or self.n == self.total:
            return
        self._line_seconds = now
        if not self.total or not self.n:
            logger.info("%s: %s%s so far.", self._phase, f"{self.n:,.0f}", self._unit)
            return
        seconds_left = (now - self._started_seconds) / self.n * (self.total - self.n)
        logger.info("%s: %.0f %%, %.0f s left.", self._phase, 100 * self.n / self.total, max(seconds_left, 0))


@contextmanager
def progress_bar(phase: str, unit: str, total: int | None = None) -> Iterator["tqdm | LoggedProgress"]:
    """Give the progress of a phase that counts `unit`s, up to `total` of them where that is known."""
    from tqdm import tqdm

    with tqdm(desc=phase, total=total, unit=unit, unit_scale=True, disable=None, dynamic_ncols=True) as bar:
        if not bar.disable:
            yield bar
            return
    logger.info("%s.", phase)
    yield LoggedProgress(phase, unit, total)


def no_progress(*_: int) -> None:
    """Take the place of a function that shows progress."""
