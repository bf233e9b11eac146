"""The log of a run: lines of numbers, written in the background to `metrics.jsonl`, TensorBoard's files and a plot.

Each update of a file receives all lines and writes the lines that were added since the last successful update. So a
failed update loses nothing.
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
# Version in the first record of an event file; without it TensorBoard ignores the start of a session.
EVENTS_VERSION = "brain.Event:2"
TRAIN, VALIDATION = TENSORBOARD_SPLITS
ROLLBACK = "rollback"
# Errors of a disk or of Cloud Storage, whose messages are sufficient. For other errors, the place in the code is shown
# as well.
STORAGE_ERRORS = (OSError, InputError, RunFailedError)


class Line(dict[str, Any]):
    """A line of `metrics.jsonl`: {"step": …, "split": …, metrics …}.

    Attributes:
        seconds: time of creation, in seconds since 1970.
    """

    def __init__(self, content: dict[str, Any]):
        super().__init__(content)
        self.seconds = time.time()


Lines = Sequence[Line]
Unwritten = Sequence[dict[str, Any]]


class Follower(LatestItemWorker[Callable[[], None]]):
    """A thread that updates a file or a tracker with the log, so that training never waits for a disk or a server.

    Each update receives all lines, so it also writes the lines that a failed update did not write. Only the first of
    several failures in a row is logged as a warning.

    Attributes:
        target: the file or tracker.
        has_failed: whether the last update failed.
        num_failures: number of updates that failed.
    """

    def __init__(self, target: Any):
        super().__init__(self._try)
        self.target = target
        self.has_failed = False
        self.num_failures = 0

    def _try(self, update: Callable[[], None]) -> None:
        self.last_update = update
        try:
            update()
        except Exception as error:
            if not self.has_failed:
                reason = error if isinstance(error, STORAGE_ERRORS) else error_summary(error)
                message = "%s could not be updated; training continues, and the update is tried again: %s"
                logger.warning(message, self.target, reason)
            self.has_failed = True
            self.num_failures += 1
        else:
            if self.has_failed:
                logger.info("%s is up to date again", self.target)
            self.has_failed = False


class MetricsLog(contextlib.AbstractContextManager["MetricsLog"]):
    """The lines of a run, kept in memory. Each file and tracker is updated by a separate thread.

    Use the log as a context around the training: its exit waits for the threads and reports the updates that failed.
    If there are several workers, only the chief writes.
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
        self._line_followers = [Follower(self._file), Follower(self._tensorboard), *self._trackers]
        self._curve = Follower(LossCurve(folder.files, draw_lines))

    @property
    def tensorboard_folder(self) -> str:
        """The local folder of the event files, from which they are copied to the run's folder."""
        return self._tensorboard.local_folder

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.flush()
        self._submit(self._trackers, is_complete=kind is None)
        followers = [*self._line_followers, self._curve]
        idle = wait_for(followers, seconds_to_end(kind))
        failed = [follower for follower in idle if follower.has_failed]
        for follower in failed:  # there will be no later update, so try the last one again
            follower.submit(follower.last_update)
        wait_for(failed, seconds_to_end(kind))
        outdated = [follower for follower in followers if follower.has_failed or follower not in idle]
        for follower in outdated:
            follower.drop_waiting()  # the next start of the run writes the lines that cannot be written now
        if outdated:
            targets = ", ".join(str(follower.target) for follower in outdated)
            logger.warning(
                "the log is incomplete; not up to date: %s (%d of %d lines are in the files); the next start of this "
                "run writes the missing lines",
                *(targets, self.num_written, len(self.lines)),
            )
        elif num_failures := sum(follower.num_failures for follower in followers):
            logger.warning("failed writes of the log: %d; the missing lines have been written since", num_failures)

    def wait(self) -> None:
        """Wait until everything submitted so far is written or has failed."""
        wait_for([*self._line_followers, self._curve], END_SECONDS)

    @property
    def num_written(self) -> int:
        """Number of lines, from the first one, that are known to be in the files."""
        return min(num_shared(self.lines, self._file.written), num_shared(self.lines, self._tensorboard.written))

    def restore(
        self, step: int, num_rollbacks: int = 0, *, num_written: int | None = None, unwritten: Unwritten = ()
    ) -> None:
        """Read the lines of an earlier process, and keep only the lines up to `step`.

        Args:
            step: the step of the checkpoint from which the run resumes.
            num_rollbacks: number of rollbacks, from the first one, whose lines are kept.
            num_written: number of lines known to be in the files when the checkpoint was saved; None if unknown.
            unwritten: the lines that were not yet written, which the checkpoint contains.
        """
        lines = self._file.read()
        num_written = len(lines) if num_written is None else min(num_written, len(lines))
        self.lines = _completed(lines, num_written, unwritten)
        self.rewind_to(step, num_rollbacks)
        self._tensorboard.begin(self.lines[:num_written], step)
        self.flush()

    def rewind_to(self, step: int, num_rollbacks: int = 0) -> None:
        """Keep the lines of steps up to `step` and of the first `num_rollbacks` rollbacks. Later steps are repeated."""
        rollbacks = [line for line in self.lines if line["split"] == ROLLBACK][:num_rollbacks]
        self.lines = [
            line
            for line in self.lines
            if (line["step"] <= step if line["split"] != ROLLBACK else any(line is kept for kept in rollbacks))
        ]

    def find(self, step: int, split: str) -> dict[str, Any] | None:
        return next((line for line in self.lines if (line["step"], line["split"]) == (step, split)), None)

    def add(self, step: int, split: str, figures: dict[str, Any]) -> None:
        self.lines.append(Line({"step": step, "split": split, **figures}))

    def flush(self) -> None:
        self._submit(self._line_followers)

    def draw(self) -> None:
        self._submit([self._curve])

    def _submit(self, followers: Sequence[Follower], **options: Any) -> None:
        if self.is_chief:
            for follower in followers:
                follower.submit(functools.partial(follower.target.update, tuple(self.lines), **options))


def wait_for(followers: Sequence[Follower], seconds: float) -> list[Follower]:
    """Wait up to `seconds` for all followers together; return the followers that have finished."""
    end_seconds = time.monotonic() + seconds
    return [follower for follower in followers if follower.wait(end_seconds - time.monotonic())]


def read_metrics(folder: RunFolder, num_written: int | None = None, unwritten: Unwritten = ()) -> list[Line]:
    """Read the lines of a run's `metrics.jsonl`, and add the unwritten lines that a checkpoint contains."""
    return _completed(MetricsFile(folder.files).read(), num_written, unwritten)


def _completed(lines: list[Line], num_written: int | None, unwritten: Unwritten) -> list[Line]:
    """Insert a checkpoint's unwritten lines after the first `num_written` lines, unless the file has them by now."""
    if not unwritten or lines[num_written:][: len(unwritten)] == list(unwritten):
        return lines
    return lines[:num_written] + [Line(line) for line in unwritten]


def num_shared(lines: Lines, others: Lines) -> int:
    """Count the lines at the start of both lists that are the same objects."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], zip(lines, others, strict=False)))


class MetricsFile:
    """The file `metrics.jsonl`.

    Attributes:
        written: the lines that are known to be in the file.
    """

    def __init__(self, folder: Folder):
        self.written: Lines = ()
        self._folder = folder
        self._is_whole = True  # whether the file has exactly the lines `written`
        self._damaged: bytes | None = None  # content of a file with an unreadable line

    def __str__(self) -> str:
        return self._folder.path_of(METRICS_NAME)

    def read(self) -> list[Line]:
        """Read the lines before the first damaged line.

        A last line that a killed process left incomplete is dropped silently.
        """
        with guarded_read(str(self), "the log of a run"):
            content = self._folder.read_bytes(METRICS_NAME) if self._folder.exists(METRICS_NAME) else b""
        text = content[: content.rfind(b"\n") + 1]
        lines = [_parse(line) for line in text.splitlines()]
        if None in lines:
            self._damaged = content
            logger.warning("%s: line %d is damaged; only the lines before it are used", self, lines.index(None) + 1)
        self.written = [Line(line) for line in takewhile(bool, lines) if line]
        self._is_whole = text == content and self._damaged is None
        return list(self.written)

    def update(self, lines: Lines) -> None:
        """Append the missing lines, or rewrite the file if it contains other lines."""
        num_written = num_shared(lines, self.written)
        is_to_append = self._is_whole and num_written == len(self.written)
        if is_to_append and num_written == len(lines):
            return
        self._is_whole = False  # it stays False until the write has succeeded
        if self._damaged is not None:  # keep the damaged file under a new name
            names = map(DAMAGED_METRICS_NAME.format, count(1))
            name = next(name for name in names if not self._folder.exists(name))
            self._folder.write_bytes(name, self._damaged)
            self._damaged = None
            logger.warning("the damaged file was kept as %s", self._folder.path_of(name))
        if is_to_append:
            # A killed process leaves at most an incomplete line at the end, which the next start drops.
            self._folder.append_text(METRICS_NAME, as_text(lines[num_written:]), before=as_text(lines[:num_written]))
        else:
            self._folder.write_text(METRICS_NAME, as_text(lines))
        self.written, self._is_whole = lines, True


class TensorBoardFiles:
    """Event files, one folder per split, so that TensorBoard shows training and validation in one chart.

    For a run in Cloud Storage, the files are written locally and then uploaded.

    Attributes:
        written: the lines whose points are known to be in the files.
        local_folder: the local folder of the event files.
    """

    def __init__(self, folder: Folder):
        self.written: Lines = ()
        self._folder = folder
        self._staging = contextlib.ExitStack()
        # Other parts of the program, such as the profiler, also write files for TensorBoard to this folder.
        self.local_folder = self._staging.enter_context(folder.staging())
        self._splits = {
            split: EventFiles(folder.subfolder(split), Path(self.local_folder, split)) for split in TENSORBOARD_SPLITS
        }
        self._uploaded_bytes: dict[Path, int] = {}

    def __str__(self) -> str:
        return str(self._folder)

    def begin(self, lines: Lines, step: int) -> None:
        """Record that earlier processes wrote these lines, and possibly points of steps after `step`.

        If the files were deleted, all lines are written to new files.
        """
        if not any(files.names() for files in self._splits.values()):
            lines = ()
        self.written = lines
        for split, files in self._splits.items():
            files.begin(_of_split(lines, split), step)

    def update(self, lines: Lines) -> None:
        for split, files in self._splits.items():
            files.update(_of_split(lines, split))
        if not self._folder.is_local:
            # Upload one file after the other, because the process cannot end while a pool of threads is busy.
            for name in finished_files(Path(self.local_folder)):
                path = Path(self.local_folder, name)
                num_bytes = path.stat().st_size
                if self._uploaded_bytes.get(name) != num_bytes:
                    self._folder.upload_file(str(path), name.as_posix())
                    self._uploaded_bytes[name] = num_bytes
        self.written = lines


class EventFiles:
    """The event files of one split: one for this process, and one more after each failure.

    If points are rewritten, a record tells TensorBoard to drop the earlier points, whichever process wrote them.

    Args:
        folder: the folder in which TensorBoard finds the files.
        local_folder: the folder in which this class writes them.
    """

    def __init__(self, folder: Folder, local_folder: Path):
        self._folder, self._local_folder = folder, local_folder
        self._writer: Any = None
        self._added: Lines = ()
        self._doubtful_step: int | None = None  # points from this step on may or may not be in the files

    def names(self) -> set[str]:
        names = {*self._folder.list_files(), *(path.name for path in self._local_folder.glob("*"))}
        return {name for name in names if name.startswith(EVENTS_PREFIX)}

    def begin(self, lines: Lines, step: int) -> None:
        self._added, self._doubtful_step = lines, step + 1

    def update(self, lines: Lines) -> None:
        try:
            self._add(lines)
        except BaseException:
            if self._writer is not None:  # the next update opens a new file
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
        must_drop = bool(stale) or self._doubtful_step is not None
        steps = [self._doubtful_step, *(line["step"] for line in (*stale, *new))]
        self._doubtful_step = min((step for step in steps if step is not None), default=None)
        if must_drop:
            # TensorBoard ignores the first start of a session that it reads, so the first process writes a start as
            # well.
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
        """Open an event file that TensorBoard reads after all other files.

        TensorBoard reads files in order of their names, so the name starts with a timestamp later than every other
        file's timestamp. The names from TensorBoard's writer would not work: it numbers files that were created in
        the same second, but `.10` sorts before `.9`, and a clock that is behind gives an earlier timestamp.
        """
        from tensorboard.summary.writer.record_writer import RecordWriter

        matches = [re.match(rf"{re.escape(EVENTS_PREFIX)}(\d+)", name) for name in self.names()]
        second = max([int(time.time()), *(int(match[1]) + 1 for match in matches if match)])
        self._local_folder.mkdir(parents=True, exist_ok=True)
        path = self._local_folder / f"{EVENTS_PREFIX}{second:010d}.{platform.node()}.{os.getpid()}.0"
        return RecordWriter(path.open("xb"))


@dataclass
class LossCurve:
    """The plot of the loss.

    Attributes:
        folder: the run's folder.
        draw: returns the plot of lines as PNG.
        drawn: the lines that were drawn last.
    """

    folder: Folder
    draw: Callable[[Lines], bytes]
    drawn: Lines | None = None

    def __str__(self) -> str:
        return self.folder.path_of(LOSS_CURVE_NAME)

    def update(self, lines: Lines) -> None:
        """Draw the lines if they have changed since they were last drawn."""
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
        values = (value for name, value in line.items() if name != "split")
        is_line = "loss" in line and all(isinstance(value, int | float) for value in values)
    return line if is_line else None
