"""Output of commands on the terminal: log lines, progress, readable numbers, and the next command to run."""

import argparse
import io
import logging
import math
import os.path
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mlm_common.cli import PROJECT_FOLDER

if TYPE_CHECKING:
    from tqdm import tqdm

logger = logging.getLogger(__name__)

VERBOSE_FLAG = "--verbose"
OUR_PACKAGES = ("mlm_common", "tokenizer_training", "tfrecord_prep", "train", "finetuning", "benchmarks", "__main__")
# Libraries whose warnings are hidden. TensorFlow warns about its API and the speed of callbacks, which a user cannot
# change. huggingface_hub warns about failures that it retries; if all retries fail, we report the error.
QUIET_LIBRARIES = {"absl": logging.ERROR, "tensorflow": logging.ERROR, "huggingface_hub": logging.ERROR}
# The variables that set the log levels of TensorFlow's and gRPC's C++ code, which reads them when it is imported.
VERBOSE_VARIABLES = {"TF_CPP_MIN_LOG_LEVEL": "0", "GRPC_VERBOSITY": "INFO", "TRANSFORMERS_NO_ADVISORY_WARNINGS": ""}
SECONDS_BETWEEN_LINES = 10.0


def add_verbose_flag(parser: argparse.ArgumentParser) -> None:
    """Add the flag that every command accepts; `set_up_console` reads it."""
    parser.add_argument(
        VERBOSE_FLAG, action="store_true", help="Also show the messages of libraries, and where each line comes from."
    )


def set_up_console(arguments: Sequence[str]) -> None:
    """Set up logging to standard error.

    Without `--verbose`, all messages of this project are shown, but only warnings and errors of other packages. With
    `--verbose`, everything is shown. If logging is already set up, as in a test, its handlers are kept.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # file names may not be UTF-8
    handler = logging.StreamHandler()
    if VERBOSE_FLAG in arguments:
        os.environ.update(VERBOSE_VARIABLES)
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    else:
        handler.setFormatter(_PlainFormatter())
        handler.addFilter(_is_for_users)
        for library, level in QUIET_LIBRARIES.items():
            logging.getLogger(library).setLevel(level)
        # The variable has an effect only if it is set before huggingface_hub is imported.
        os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    logging.basicConfig(level=logging.INFO, handlers=[handler])


class _PlainFormatter(logging.Formatter):
    """Adds a prefix to warnings and errors only."""

    def format(self, record: logging.LogRecord) -> str:
        prefix = "error: " if record.levelno >= logging.ERROR else "warning: "
        return (prefix if record.levelno >= logging.WARNING else "") + super().format(record)


def _is_for_users(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.WARNING or record.name.partition(".")[0] in OUR_PACKAGES


class LoggedProgress:
    """Logs the progress every ten seconds. The class has the interface of a tqdm bar.

    Attributes:
        total: number of units to process; None if unknown.
        n: number of units processed so far.
    """

    def __init__(self, phase: str, unit: str, total: int | None, shorten: Callable[[float], str]) -> None:
        self._phase = phase
        self._unit = unit
        self._shorten = shorten  # 8373348 -> "8.37M"
        self._line_seconds = time.monotonic()
        # The speed is measured from the first update on, because a program may be compiled before it.
        self._first_seconds = self._first_n = 0.0
        self.total = total
        self.n: float = 0

    def update(self, n: float = 1) -> None:
        now = time.monotonic()
        if not self.n:
            self._first_seconds, self._first_n = now, n
        self.n += n
        if now - self._line_seconds < SECONDS_BETWEEN_LINES or self.n == self.total:
            return
        self._line_seconds = now
        if not self.total or not self.n:
            logger.info("%s: %s%s so far.", self._phase, self._shorten(self.n), self._unit)
            return
        left = ""
        if self.n > self._first_n:
            seconds_left = (now - self._first_seconds) / (self.n - self._first_n) * (self.total - self.n)
            left = f", {max(seconds_left, 0):.0f} s left"
        logger.info("%s: %.0f%%%s.", self._phase, 100 * self.n / self.total, left)


@contextmanager
def progress_bar(phase: str, unit: str, total: int | None = None) -> Iterator["tqdm | LoggedProgress"]:
    """Yield a progress bar on a terminal, and otherwise an object with the same interface that logs the progress.

    Args:
        phase: title.
        unit: name of the unit, with a leading space unless the name is a symbol such as B.
        total: number of units to process; None if unknown.
    """
    from tqdm import tqdm

    with tqdm(desc=phase, total=total, unit=unit, unit_scale=True, disable=None, dynamic_ncols=True) as bar:
        if not bar.disable:
            yield bar
            return
    logger.info("%s.", phase)
    yield LoggedProgress(phase, unit, total, tqdm.format_sizeof)


def no_progress(*_: int) -> None:
    """Do nothing. This function can be passed where a function that shows progress is expected."""


def short_number(number: float) -> str:
    """Format a number with two or three digits and a unit: 950, 1.7 M, 88 M, 2.1 B."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= 0.9995 * size:
            digits = f"{number / size:.1f}".removesuffix(".0") if number < 9.95 * size else f"{number / size:.0f}"
            return f"{digits} {unit}"
    return f"{number:.0f}"


def two_digits(number: float) -> str:
    """Format a rough estimate with two significant digits: 150,000, 74, 7.4, 0.00074."""
    rounded = float(f"{number:.2g}")
    places = 1 - math.floor(math.log10(rounded)) if rounded > 0 else 0
    return f"{rounded:,.{max(0, places)}f}"


def about(seconds: float) -> str:
    """Describe a duration in words, such as `about 9 hours`."""
    for unit_seconds, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= 0.95 * unit_seconds:
            count = seconds / unit_seconds
            number = f"{count:.0f}" if count >= 9.95 or round(count, 1) == round(count) else f"{count:.1f}"
            return f"about {number} {unit}{'' if number == '1' else 's'}"
    return "less than a minute"


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "es" if noun.endswith("batch") else "s")


def clock_time(seconds: float) -> str:
    """Format a duration as on a clock: `0:55`, `3:20:00`, `2.1 d`."""
    if seconds >= 86400:
        return f"{seconds / 86400:.1f} d"
    minutes, full_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{full_seconds:02}" if hours else f"{minutes}:{full_seconds:02}"


def next_step(script: str, arguments: Sequence[str]) -> str:
    """Return the line that names the next command: a script such as `train/run_mlm.py`, and its arguments."""
    path = PROJECT_FOLDER / script
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"next: {shlex.join(['python', str(shown), *arguments])}"


def folder_beside(folder: str, name: str) -> str:
    """Return the path of the folder `name` next to another folder, local or `gs://`."""
    return os.path.join(os.path.dirname(folder.rstrip("/")), name)  # noqa: PTH118, PTH120 (gs:// paths)
