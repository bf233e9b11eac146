"""The log of a run: lines of figures, written in the background to `metrics.jsonl`, TensorBoard's files and a plot.

Each file is brought up to date with all lines, whatever was missing before; it is known to have what its last update
that succeeded has left there. So nothing is lost by one that failed.
"""

import contextlib
import functools
import json
import logging
import os
import platform
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlm_common.errors import InputError, RunFailedError, error_summary
from mlm_common.storage import Folder
from mlm_common.storage.folder import finished_files
from mlm_common.storage.guard import guarded_read
from mlm_common.workers import END_SECONDS, LatestItemWorker, seconds_to_end
from train.runtime.run_folder import DAMAGED_METRICS_NAME, LOSS_CURVE_NAME, METRICS_NAME, TENSORBOARD_SPLITS, RunFolder

if TYPE_CHECKING:
    from train.metrics.trackers import Tracker

logger = logging.getLogger(__name__)

EVENTS_PREFIX = "events.out.tfevents."
# What the first record of an event file says; without it TensorBoard ignores the start of a session.
EVENTS_VERSION = "brain.Event:2"
TRAIN, VALIDATION = TENSORBOARD_SPLITS
ROLLBACK = "rollback"
# Errors of a disk or of Cloud Storage, whose messages say all; of any other the place is shown, too.
STORAGE_ERRORS = (OSError, InputError, RunFailedError)


class Line(dict[str, Any]):
    """A line of `metrics.jsonl`, {"step": …, "split": …, figures …}; `seconds` is when it was made."""

    def __init__(self, content: dict[str, Any]):
        super().__init__(content)
        self.seconds = time.time()


Lines = Sequence[Line]
Unwritten = Sequence[dict[str, Any]]


class Follower(LatestItemWorker[Callable[[], None]]):
    """Updates a file or a tracker with the log, in a thread, so that training waits for no disk or server.

    Each update carries all lines, so it makes up for one that failed. Of failures in a row, the first is a warning.
    """

    def __init__(self, place: Any):
        super().__init__(self._try)
        self.place = place
        self.has_failed = False  # the last update
        self.num_failures = 0

    def _try(self, update: Callable[[], None]) -> None:
        self.last_update = update
        try:
            update()
        except Exception as error:
            if not self.has_failed:
                reason = error if isinstance(error, STORAGE_ERRORS) else error_summary(error)
                logger.warning(
                    "%s could not be updated; training continues, and it is tried again: %s", self.place, reason
                )
            self.has_failed = True
            self.num_failures += 1
        else:
            if self.has_failed:
                logger.info("%s is up to date again", self.place)
            self.has_failed = False


class MetricsLog(contextlib.AbstractContextManager["MetricsLog"]):
    """Lines of a run, kept in memory; files and trackers follow them, each in a thread.

    To be used as a context around the training, whose end waits for the threads and sums up what failed. Only the chief
    of several workers writes.
    """

    def __init__(
        self,
        folder: RunFolder,
        draw_lines: Callable[[Lines], bytes],
        *,
        is_chief: bool = True,
        trackers: Sequence["Tracker"] = (),
    ):
        self.is_chief = is_chief
        self.lines: list[Line] = []
        self._file = MetricsFile(folder.files)
        self._tensorboard = TensorBoardFiles(folder.tensorboard)
        self._trackers = [Follower(tracker) for tracker in trackers]
        self._of_lines = [Follower(self._file), Follower(self._tensorboard), *self._trackers]
        self._curve = Follower(LossCurve(folder.files, draw_lines))

    @property
    def tensorboard_folder(self) -> str:
        """The local folder of event files, which are copied to the run's folder."""
        return self._tensorboard.local_folder

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.flush()
        self._submit(self._trackers, is_complete=kind is None)
        followers = [*self._of_lines, self._curve]
        idle = wait_for(followers, seconds_to_end(kind))
        failed = [one for one in idle if one.has_failed]
        for follower in failed:  # no later update makes up for the last one
            follower.submit(follower.last_update)
        wait_for(failed, seconds_to_end(kind))
        behind = [one for one in followers if one.has_failed or one not in idle]
        for follower in behind:
            follower.drop_waiting()  # what cannot be written now is left to the next start
        if behind:
            logger.warning(
                "the log is not complete: %s not up to date (%d of %d lines are in the files); the next start of this "
                "run writes what is missing",
                *(", ".join(str(one.place) for one in behind), self.num_written, len(self.lines)),
            )
        elif num_failures := sum(one.num_failures for one in followers):
            logger.warning("writes of the log that failed: %d; no line is missing now", num_failures)

    def wait(self) -> None:
        """Wait until all that was submitted so far is written, or has failed."""
        wait_for([*self._of_lines, self._curve], END_SECONDS)

    @property
    def num_written(self) -> int:
        """The number of the first lines that are in the files for sure."""
        return min(num_shared(self.lines, self._file.there), num_shared(self.lines, self._tensorboard.there))

    def restore(
        self, step: int, num_rollbacks: int = 0, *, num_written: int | None = None, unwritten: Unwritten = ()
    ) -> None:
        """Take up the lines of an earlier process up to `step`, and of its first `num_rollbacks` rollbacks.

        When the state of this step was saved, `num_written` lines were in the files for sure (None: not known), and
        the `unwritten` ones came after them.
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
        return next((line for line in self.lines if (line["step"], line["split"]) == (step, split)), None)

    def add(self, step: int, split: str, figures: dict[str, Any]) -> None:
        self.lines.append(Line({"step": step, "split": split, **figures}))

    def flush(self) -> None:
        self._submit(self._of_lines)

    def draw(self) -> None:
        self._submit([self._curve])

    def _submit(self, followers: Sequence[Follower], **options: Any) -> None:
        if self.is_chief:
            for follower in followers:
                follower.submit(functools.partial(follower.place.update, tuple(self.lines), **options))


def wait_for(followers: Sequence[Follower], seconds: float) -> list[Follower]:
    """Wait for all of them together; return those for which nothing is left to do."""
    end_seconds = time.monotonic() + seconds
    return [one for one in followers if one.wait(end_seconds - time.monotonic())]


def read_metrics(folder: RunFolder, num_written: int | None = None, unwritten: Unwritten = ()) -> list[Line]:
    """Read the lines of the `metrics.jsonl` of a run, completed by those that a checkpoint carries."""
    return _completed(MetricsFile(folder.files).read(), num_written, unwritten)


def _completed(there: list[Line], num_written: int | None, unwritten: Unwritten) -> list[Line]:
    """Put the lines that were not written at one time after those that were, unless they are there."""
    if not unwritten or there[num_written:][: len(unwritten)] == list(unwritten):
        return there
    return there[:num_written] + [Line(line) for line in unwritten]


def num_shared(lines: Lines, others: Lines) -> int:
    """Count the lines with which both begin, the same objects."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], zip(lines, others, strict=False)))


class MetricsFile:
    """`metrics.jsonl`; `there` are the lines that are in it for sure."""

    def __init__(self, folder: Folder):
        self.there: Lines = ()
        self._folder = folder
        self._is_whole = True
        self._damaged: bytes | None = None  # content of a file with an unreadable line

    def __str__(self) -> str:
        return self._folder.path_of(METRICS_NAME)

    def read(self) -> list[Line]:
        """Read the lines before the first damaged one; a last line that a kill left in part is dropped silently."""
        with guarded_read(str(self), "the log of a run"):
            content = self._folder.read_bytes(METRICS_NAME) if self._folder.exists(METRICS_NAME) else b""
        text = content[: content.rfind(b"\n") + 1]
        lines = [_parse(line) for line in text.splitlines()]
        if None in lines:
            self._damaged = content
            logger.warning("%s: line %d is damaged; only the lines before it are used", self, lines.index(None) + 1)
        self.there = [Line(line) for line in takewhile(bool, lines) if line]
        self._is_whole = text == content and self._damaged is None
        return list(self.there)

    def update(self, lines: Lines) -> None:
        """Write the lines that are missing; all of them, where others are there."""
        num_there = num_shared(lines, self.there)
        is_to_append = self._is_whole and num_there == len(self.there)
        if is_to_append and num_there == len(lines):
            return
        self._is_whole = False  # until it is known what has become of it
        if self._damaged is not None:  # keep it under a new name
            names = map(DAMAGED_METRICS_NAME.format, count(1))
            name = next(name for name in names if not self._folder.exists(name))
            self._folder.write_bytes(name, self._damaged)
            self._damaged = None
            logger.warning("the damaged file was kept as %s", self._folder.path_of(name))
        if is_to_append:
            # A kill leaves at most a part of a line at the end, which the next start drops.
            self._folder.append_text(METRICS_NAME, as_text(lines[num_there:]), before=as_text(lines[:num_there]))
        else:
            self._folder.write_text(METRICS_NAME, as_text(lines))
        self.there, self._is_whole = lines, True


class TensorBoardFiles:
    """Event files in a folder for each split, so that TensorBoard shows training and validation in one chart.

    For Cloud Storage they are local ones, which are uploaded. `there` are the lines whose points are there for sure.
    """

    def __init__(self, folder: Folder):
        self.there: Lines = ()
        self._folder = folder
        self._staging = contextlib.ExitStack()
        # Other programs may put files there, too, for TensorBoard.
        self.local_folder = self._staging.enter_context(folder.staging())
        self._splits = {
            split: EventFiles(folder.subfolder(split), Path(self.local_folder, split)) for split in TENSORBOARD_SPLITS
        }
        self._uploaded_bytes: dict[Path, int] = {}

    def __str__(self) -> str:
        return str(self._folder)

    def begin(self, lines: Lines, step: int) -> None:
        """Take note of what earlier processes have left: these lines, and whatever came after `step`.

        Where the files were deleted, the new ones get all lines.
        """
        if not any(files.names() for files in self._splits.values()):
            lines = ()
        self.there = lines
        for split, files in self._splits.items():
            files.begin(_of_split(lines, split), step)

    def update(self, lines: Lines) -> None:
        for split, files in self._splits.items():
            files.update(_of_split(lines, split))
        if not self._folder.is_local:
            # One after the other: the end of the process waits for pools of threads.
            for name in finished_files(Path(self.local_folder)):
                path = Path(self.local_folder, name)
                num_bytes = path.stat().st_size
                if self._uploaded_bytes.get(name) != num_bytes:
                    self._folder.upload_file(str(path), name.as_posix())
                    self._uploaded_bytes[name] = num_bytes
        self.there = lines


class EventFiles:
    """An event file of this process, and another after each failure, with the points of the lines of one split.

    Where points are rewritten, TensorBoard is told to drop the earlier ones, of this process and of others. It finds
    the files in `folder`; they are written in `local_folder`.
    """

    def __init__(self, folder: Folder, local_folder: Path):
        self._folder, self._local_folder = folder, local_folder
        self._writer: Any = None
        self._added: Lines = ()
        self._doubtful_step: int | None = None  # points from it on may be there, or not

    def names(self) -> set[str]:
        names = {*self._folder.list_files(), *(path.name for path in self._local_folder.glob("*"))}
        return {name for name in names if name.startswith(EVENTS_PREFIX)}

    def begin(self, lines: Lines, step: int) -> None:
        self._added, self._doubtful_step = lines, step + 1

    def update(self, lines: Lines) -> None:
        try:
            self._add(lines)
        except BaseException:
            if self._writer is not None:  # the next update opens another file
                with contextlib.suppress(OSError):
                    self._writer.close()
            self._writer = None
            raise

    def _add(self, lines: Lines) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.plugins.scalar.summary import scalar_pb

        if not lines and not self._added and not self.names():
            return  # a split without lines has no folder
        num_added = num_shared(lines, self._added)
        new, stale = lines[num_added:], self._added[num_added:]
        is_to_forget = bool(stale) or self._doubtful_step is not None
        steps = [self._doubtful_step, *(line["step"] for line in (*stale, *new))]
        self._doubtful_step = min((step for step in steps if step is not None), default=None)
        if is_to_forget:
            # TensorBoard heeds all starts but the first, so that one of the first process counts, too.
            self._write(time.time(), self._doubtful_step, session_log=SessionLog(status=SessionLog.START))
            new = [line for line in lines if line["step"] >= self._doubtful_step]
        for line in new:
            for name, value in line.items():
                if name not in ("step", "split"):
                    self._write(line.seconds, line["step"], summary=scalar_pb(name, value))
        if self._writer is not None:
            self._writer.flush()
        self._added, self._doubtful_step = lines, None

    def _write(self, seconds: float, step: int | None, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        if self._writer is None:
            self._writer = self._new_writer()
            self._writer.write(Event(wall_time=seconds, file_version=EVENTS_VERSION).SerializeToString())
        self._writer.write(Event(wall_time=seconds, step=step, **content).SerializeToString())

    def _new_writer(self) -> Any:
        """Open an event file that TensorBoard, which reads files in the order of their names, reads after all others.

        A name begins with a second that no other has. TensorBoard's writer counts the files of a second, and `.10`
        sorts before `.9`; a clock that is behind would give an earlier second.
        """
        from tensorboard.summary.writer.record_writer import RecordWriter

        matches = [re.match(rf"{re.escape(EVENTS_PREFIX)}(\d+)", name) for name in self.names()]
        second = max([int(time.time()), *(int(match[1]) + 1 for match in matches if match)])
        self._local_folder.mkdir(parents=True, exist_ok=True)
        path = self._local_folder / f"{EVENTS_PREFIX}{second:010d}.{platform.node()}.{os.getpid()}.0"
        return RecordWriter(path.open("xb"))


@dataclass
class LossCurve:
    """The plot of the loss in a folder, whose content `draw` makes."""

    folder: Folder
    draw: Callable[[Lines], bytes]
    drawn: Lines | None = None

    def __str__(self) -> str:
        return self.folder.path_of(LOSS_CURVE_NAME)

    def update(self, lines: Lines) -> None:
        """Draw the lines, unless they are the ones that were drawn last."""
        if lines != self.drawn:
            self.folder.write_bytes(LOSS_CURVE_NAME, self.draw(lines))
            self.drawn = lines


def _of_split(lines: Lines, split: str) -> Lines:
    return tuple(line for line in lines if line["split"] == split)


def as_text(lines: Lines) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)


def _parse(text: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    is_line = isinstance(line, dict) and isinstance(line.get("step"), int) and isinstance(line.get("split"), str)
    if is_line and line["split"] in TENSORBOARD_SPLITS:
        figures = (value for name, value in line.items() if name != "split")
        is_line = "loss" in line and all(isinstance(value, int | float) for value in figures)
    return line if is_line else None
