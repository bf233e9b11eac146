"""Progress bars: phase, rate and estimate, shown where standard error is a terminal; a log line where it is not."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tqdm import tqdm

logger = logging.getLogger(__name__)


@contextmanager
def progress_bar(phase: str, unit: str, total: int | None = None) -> Iterator["tqdm"]:
    """Give the bar of a phase that counts `unit`s, up to `total` of them where that is known."""
    from tqdm import tqdm

    logger.info("%s.", phase)
    with tqdm(desc=phase, total=total, unit=unit, unit_scale=True, disable=None) as bar:
        yield bar


def no_progress(*_: int) -> None:
    """Take the place of a function that shows progress."""
