"""The record of a run: lines of figures that are kept in memory, and written to files in the background."""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

from mlm_common.background import LatestItemWorker, seconds_to_end
from mlm_common.errors import InputError, RunFailedError, error_summary
from mlm_common.retry import retry_call
from train.metrics.log_files import ROLLBACK, Line, Lines, LossCurve, MetricsFile, TensorBoardFiles
from train.runtime.run_folder import RunFolder

logger = logging.getLogger(__name__)

Unwritten = Sequence[dict[str, Any]]

# Figures of a line that are measured on the clock; all others are the same however often a run was stopped.
CLOCK_FIGURES = ("step_seconds", "tokens_per_second", "input_wait_share", "mfu")
# Before each further try to write, once the run has come to its end; before that the next write makes up for all.
END_RETRY_SECONDS = (0.5, 1.0)
# Errors of a disk or of Cloud Storage. Any other is a programming error, for which a retry is useless.
STORAGE_ERRORS = (OSError, InputError, RunFailedError)


class _NotWrittenError(Exception):
    """A file that is not up to date."""


class MetricsLog:
    """Lines of `metrics.jsonl`, {"step": …, "split": …, figures …}, for TensorBoard and for the plot of the loss.

    One thread writes them, so that no other waits for a disk or a bucket. Each write carries all that is missing, so it
    makes up for one that failed; after an unexpected error, which is no storage error, a file is not written any more.
    To be used as a context around the training, whose end waits for the thread and sums up what failed. Only the chief
    of several workers writes.

    Args:
        folder: of the run.
        draw_lines: makes the plot of the loss, a PNG file.
        is_chief: whether this worker writes.
    """

    def __init__(
        self,
        folder: RunFolder,
        draw_lines: Callable[[Lines], bytes],
        *,
        is_chief: bool = True,
    ):
        self.is_chief = is_chief
        self.lines: list[Line] = []
        self._file = MetricsFile(folder.files)
        self._tensorboard = TensorBoardFiles(folder.tensorboard)
        self._curve = LossCurve(folder.files, draw_lines)
        self._lines_to_draw: Lines | None = None
        self._worker: LatestItemWorker[tuple[Lines, Lines | None]] = LatestItemWorker(self._write)
        self._failed: set[str] = set()
        self._given_up: dict[str, str] = {}  # files that are not written any more, and the error
        self._num_failures = 0
        self._is_ending = False

    @property
    def tensorboard_folder(self) -> str:
        """The local folder of event files, which are copied to the run's folder."""
        return self._tensorboard.local_folder

    def __enter__(self) -> "MetricsLog":
        self._is_ending = False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_ending = True
        self.flush()
        is_done = self._worker.wait(seconds_to_end(kind))
        self._worker.drop_waiting()  # what cannot be written now is left to the next start
        if self._failed or not is_done:
            logger.warning(
                "the log is not complete: %s not up to date (%d lines of %d are missing); the next start of this run "
                "makes up for that",
                *(", ".join(sorted(self._failed)) or self._file, len(self.lines) - self.num_written, len(self.lines)),
            )
        elif self._num_failures:
            logger.warning("writes of the log that failed: %d; all were made up for", self._num_failures)
        for name, summary in self._given_up.items():
            logger.warning("%s is not complete, because of an unexpected error: %s", name, summary)

    @property
    def num_written(self) -> int:
        """The number of the first lines that are in the files for sure."""
        return min(self._file.num_written(self.lines), self._tensorboard.num_written(self.lines))

    def restore(
        self, step: int, num_rollbacks: int = 0, *, num_written: int | None = None, unwritten: Unwritten = ()
    ) -> None:
        """Take up the lines of an earlier process up to `step`.

        Args:
            step: steps made.
            num_rollbacks: rollbacks before this step; lines of later ones are dropped.
            num_written: lines that were in the files for sure when the state of this step was saved; None where that
                is not known.
            unwritten: the lines after them, at that time.
        """
        there = self._file.read()
        num_written = len(there) if num_written is None else min(num_written, len(there))
        self.lines = _completed(there, num_written, unwritten)
        self.rewind_to(step, num_rollbacks)
        self._tensorboard.begin(self.lines[:num_written], step)
        self.flush()

    def rewind_to(self, step: int, num_rollbacks: int = 0) -> None:
        """Drop the lines of steps after `step`, which will be repeated, and of all rollbacks but the first ones."""
        rollbacks = [line for line in self.lines if line["split"] == ROLLBACK][:num_rollbacks]
        self.lines = [
            line
            for line in self.lines
            if (line["step"] <= step if line["split"] != ROLLBACK else any(line is one for one in rollbacks))
        ]

    def find(self, step: int, split: str) -> dict[str, Any] | None:
        """Find the line of that step and split, None without one."""
        return next((line for line in self.lines if (line["step"], line["split"]) == (step, split)), None)

    def add(self, step: int, split: str, figures: dict[str, Any]) -> None:
        """Take one line; it is written by the next `flush`."""
        self.lines.append(Line({"step": step, "split": split, **figures}))

    def flush(self) -> None:
        """Have the thread write the lines; does not wait for it."""
        if self.is_chief:
            self._worker.submit((tuple(self.lines), self._lines_to_draw))

    def draw(self) -> None:
        """Have the thread draw the loss so far; does not wait for it."""
        self._lines_to_draw = tuple(self.lines)
        self.flush()

    def _write(self, item: tuple[Lines, Lines | None]) -> None:
        """Bring all files up to date; what fails is left to the next write."""
        with suppress(_NotWrittenError):
            retry_call(
                lambda: self._write_once(*item),
                END_RETRY_SECONDS if self._is_ending else (),
                lambda error: isinstance(error, _NotWrittenError),
                stop_event=self._worker.newer_waits,
            )

    def _write_once(self, lines: Lines, lines_to_draw: Lines | None) -> None:
        for file in (self._file, self._tensorboard, self._curve):
            name = str(file)
            content = lines_to_draw if file is self._curve else lines
            if content is None or name in self._given_up:
                continue
            try:
                file.update(content)
            except STORAGE_ERRORS as error:
                self._num_failures += 1
                if name not in self._failed:
                    logger.warning("%s could not be written, which is tried again; training goes on: %s", name, error)
                self._failed.add(name)
            except Exception as error:
                self._failed.discard(name)
                self._given_up[name] = error_summary(error)
                logger.warning(
                    "%s is not written any more, after an unexpected error; training continues: %s",
                    *(name, self._given_up[name]),
                )
            else:
                if name in self._failed:
                    self._failed.remove(name)
                    logger.info("%s is up to date again", name)
        if self._failed:
            raise _NotWrittenError


def read_metrics(folder: RunFolder, num_written: int | None = None, unwritten: Unwritten = ()) -> list[Line]:
    """Read the lines of the `metrics.jsonl` of a run, completed by those that a checkpoint carries."""
    return _completed(MetricsFile(folder.files).read(), num_written, unwritten)


def _completed(there: list[Line], num_written: int | None, unwritten: Unwritten) -> list[Line]:
    """Put the lines that were not written at one time after those that were, unless they are there."""
    if not unwritten or there[num_written:][: len(unwritten)] == list(unwritten):
        return there
    return there[:num_written] + [Line(line) for line in unwritten]
