"""The files of the log: `metrics.jsonl`, TensorBoard's event files, the plot of the loss.

Each is brought up to date with the lines of the log, whatever was missing before. A file is known to have what its last
update that succeeded has left there; so nothing is lost by one that failed.
"""

import contextlib
import json
import logging
import os
import platform
import re
import time
from collections.abc import Callable, Sequence
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from mlm_common.storage import Folder
from mlm_common.storage.folder import finished_files
from train.runtime.run_folder import DAMAGED_METRICS_NAME, LOSS_CURVE_NAME, METRICS_NAME, TENSORBOARD_SPLITS

logger = logging.getLogger(__name__)

EVENTS_PREFIX = "events.out.tfevents."
# What the first record of an event file says; without it TensorBoard ignores the start of a session.
EVENTS_VERSION = "brain.Event:2"
TRAIN, VALIDATION = TENSORBOARD_SPLITS
ROLLBACK = "rollback"


class Line(dict[str, Any]):
    """A line of `metrics.jsonl`, {"step": …, "split": …, figures …}; `seconds` is when it was made."""

    def __init__(self, content: dict[str, Any]):
        super().__init__(content)
        self.seconds = time.time()


Lines = Sequence[Line]


def num_shared(lines: Lines, others: Lines) -> int:
    """Count the lines with which both begin, the same objects."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], zip(lines, others, strict=False)))


class MetricsFile:
    """`metrics.jsonl`."""

    def __init__(self, folder: Folder):
        self._folder = folder
        self._there: Lines = ()
        self._is_whole = True
        self._damaged: bytes | None = None  # content of a file with an unreadable line

    def __str__(self) -> str:
        return self._folder.path_of(METRICS_NAME)

    def read(self) -> list[Line]:
        """Read the lines before the first damaged one; a last line that a kill left in part is dropped silently."""
        content = self._folder.read_bytes(METRICS_NAME) if self._folder.exists(METRICS_NAME) else b""
        text = content[: content.rfind(b"\n") + 1]
        lines = [_parse(line) for line in text.splitlines()]
        if None in lines:
            self._damaged = content
            logger.warning("%s: line %d is damaged; only the lines before it are used", self, lines.index(None) + 1)
        self._there = [Line(line) for line in takewhile(bool, lines) if line]
        self._is_whole = text == content and self._damaged is None
        return list(self._there)

    def num_written(self, lines: Lines) -> int:
        """Count the first lines that are there for sure."""
        return num_shared(lines, self._there)

    def update(self, lines: Lines) -> None:
        """Write the lines that are missing; all of them, where others are there."""
        num_there = self.num_written(lines)
        if self._is_whole and num_there == len(lines) == len(self._there):
            return
        is_to_append = self._is_whole and num_there == len(self._there)
        self._is_whole = False  # until it is known what has become of it
        self._keep_damaged()
        if is_to_append:
            # A kill leaves at most a part of a line at the end, which the next start drops.
            self._folder.append_text(METRICS_NAME, as_text(lines[num_there:]), before=as_text(lines[:num_there]))
        else:
            self._folder.write_text(METRICS_NAME, as_text(lines))
        self._there, self._is_whole = lines, True

    def _keep_damaged(self) -> None:
        """Copy the damaged file that is about to be replaced to a new name."""
        if self._damaged is not None:
            names = map(DAMAGED_METRICS_NAME.format, count(1))
            name = next(name for name in names if not self._folder.exists(name))
            self._folder.write_bytes(name, self._damaged)
            self._damaged = None
            logger.warning("the damaged file was kept as %s", self._folder.path_of(name))


class TensorBoardFiles:
    """Event files in a folder for each split, so that TensorBoard shows training and validation in one chart.

    For Cloud Storage they are local ones, which are uploaded.
    """

    def __init__(self, folder: Folder):
        self._folder = folder
        self._staging = contextlib.ExitStack()
        # Other programs may put files there, too, for TensorBoard.
        self.local_folder = self._staging.enter_context(folder.staging())
        self._splits = {
            split: EventFiles(folder.subfolder(split), Path(self.local_folder, split)) for split in TENSORBOARD_SPLITS
        }
        self._there: Lines = ()
        self._uploaded_bytes: dict[Path, int] = {}

    def __str__(self) -> str:
        return str(self._folder)

    def begin(self, lines: Lines, step: int) -> None:
        """Take note of what earlier processes have left: these lines, and whatever came after `step`.

        Where the files were deleted, the new ones get all lines.
        """
        if not any(files.names() for files in self._splits.values()):
            lines = ()
        self._there = lines
        for split, files in self._splits.items():
            files.begin(_of_split(lines, split), step)

    def num_written(self, lines: Lines) -> int:
        """Count the first lines whose points are there for sure."""
        return num_shared(lines, self._there)

    def update(self, lines: Lines) -> None:
        """Write the points that are missing."""
        for split, files in self._splits.items():
            files.update(_of_split(lines, split))
        if not self._folder.is_local:
            self._upload()
        self._there = lines

    def _upload(self) -> None:
        """Upload the files that have grown, one after the other: the end of the process waits for pools of threads."""
        for name in finished_files(Path(self.local_folder)):
            path = Path(self.local_folder, name)
            num_bytes = path.stat().st_size
            if self._uploaded_bytes.get(name) != num_bytes:
                self._folder.upload_file(str(path), name.as_posix())
                self._uploaded_bytes[name] = num_bytes


class EventFiles:
    """An event file of this process, and another after each failure, with the points of the lines of one split.

    Where points are rewritten, TensorBoard is told to drop the earlier ones, of this process and of others.

    Args:
        folder: where TensorBoard finds the files.
        local_folder: where they are written.
    """

    def __init__(self, folder: Folder, local_folder: Path):
        self._folder = folder
        self._local_folder = local_folder
        self._writer: Any = None
        self._added: Lines = ()
        self._doubtful_step: int | None = None  # points from it on may be there, or not

    def names(self) -> set[str]:
        """List the existing event files."""
        names = {*self._folder.list_files(), *(path.name for path in self._local_folder.glob("*"))}
        return {name for name in names if name.startswith(EVENTS_PREFIX)}

    def begin(self, lines: Lines, step: int) -> None:
        """Take note of what earlier processes have left: these lines, and whatever came after `step`."""
        self._added = lines
        self._doubtful_step = step + 1

    def update(self, lines: Lines) -> None:
        try:
            self._add(lines)
        except BaseException:
            self._close()
            raise

    def _add(self, lines: Lines) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.plugins.scalar.summary import scalar_pb

        if not lines and not self._added and not self.names():
            return  # a split without lines has no folder
        num_added = num_shared(lines, self._added)
        new, stale = lines[num_added:], self._added[num_added:]
        is_to_forget = bool(stale) or self._doubtful_step is not None
        doubtful_steps = [] if self._doubtful_step is None else [self._doubtful_step]
        self._doubtful_step = min([*doubtful_steps, *(line["step"] for line in (*stale, *new))], default=None)
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

    def _close(self) -> None:
        """Close the event file, so that the next write opens another one."""
        if self._writer is not None:
            with contextlib.suppress(OSError):
                self._writer.close()
        self._writer = None


class LossCurve:
    """The plot of the loss.

    Args:
        folder: that it is in.
        draw: makes the file's content.
    """

    def __init__(self, folder: Folder, draw: Callable[[Lines], bytes]):
        self._folder = folder
        self._draw = draw
        self._drawn: Lines | None = None

    def __str__(self) -> str:
        return self._folder.path_of(LOSS_CURVE_NAME)

    def update(self, lines: Lines) -> None:
        """Draw the lines, unless they are the ones that were drawn last."""
        if self._drawn is not None and num_shared(lines, self._drawn) == len(lines) == len(self._drawn):
            return
        self._folder.write_bytes(LOSS_CURVE_NAME, self._draw(lines))
        self._drawn = lines


def _of_split(lines: Lines, split: str) -> Lines:
    return tuple(line for line in lines if line["split"] == split)


def as_text(lines: Lines) -> str:
    """Write the lines as they are in the file."""
    return "".join(json.dumps(line) + "\n" for line in lines)


def _parse(text: bytes) -> dict[str, Any] | None:
    """Read a line of the file; None if it is damaged."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    is_line = isinstance(line, dict) and isinstance(line.get("step"), int) and isinstance(line.get("split"), str)
    return line if is_line else None
