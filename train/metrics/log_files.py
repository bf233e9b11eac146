"""The files of the log: `metrics.jsonl`, TensorBoard's event files, the picture of the loss.

Each is brought up to date with the lines of the log, whatever was missing before. A file is known to have what its last
update that succeeded has left there; so nothing is lost by one that failed.
"""

import contextlib
import io
import json
import logging
import os
import platform
import re
import time
from collections.abc import Sequence
from itertools import count, pairwise, takewhile
from pathlib import Path
from typing import Any

from mlm_common.figures import new_figure
from mlm_common.storage import Folder
from mlm_common.storage.folder import finished_files
from train.runtime.run_folder import DAMAGED_METRICS_NAME, LOSS_CURVE_NAME, METRICS_NAME

logger = logging.getLogger(__name__)

EVENTS_PREFIX = "events.out.tfevents."
# What the first record of an event file says; without it TensorBoard ignores the start of a session.
EVENTS_VERSION = "brain.Event:2"
TRAIN, VALIDATION, ROLLBACK = "train", "validation", "rollback"


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
    """An event file of this process, and another after each failure; for Cloud Storage local ones, which are uploaded.

    Where points are made again, TensorBoard is told to forget those that are there, of this process and of others.
    """

    def __init__(self, folder: Folder):
        self._folder = folder
        self._staging = contextlib.ExitStack()
        # Other programs may put files there, too, for TensorBoard.
        self.local_folder = self._staging.enter_context(folder.staging())
        self._writer: Any = None
        self._added: Lines = ()
        self._there: Lines = ()
        self._doubtful_step: int | None = None  # points from it on may be there, or not
        self._uploaded_bytes: dict[Path, int] = {}

    def __str__(self) -> str:
        return str(self._folder)

    def begin(self, lines: Lines, step: int) -> None:
        """Take note of what earlier processes have left: these lines, and whatever came after `step`."""
        self._added = self._there = lines
        self._doubtful_step = step + 1

    def num_written(self, lines: Lines) -> int:
        """Count the first lines whose points are there for sure."""
        return num_shared(lines, self._there)

    def update(self, lines: Lines) -> None:
        """Write the points that are missing."""
        try:
            self._add(lines)
        except BaseException:
            self._close()
            raise
        if not self._folder.is_local:
            self._upload()
        self._there = lines

    def _add(self, lines: Lines) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.plugins.scalar.summary import scalar_pb

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
                if line["split"] != ROLLBACK and name not in ("step", "split"):
                    self._write(line.seconds, line["step"], summary=scalar_pb(f"{line['split']}/{name}", value))
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

        A name begins with a second that no other has. TensorBoard's own writer counts the files of a second, and `.10`
        sorts before `.9`; a clock that is behind would give an earlier second.
        """
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder = Path(self.local_folder)
        names = {*self._folder.list_files(), *(path.name for path in folder.glob(f"{EVENTS_PREFIX}*"))}
        seconds = [int(match[1]) for name in names if (match := re.match(rf"{re.escape(EVENTS_PREFIX)}(\d+)", name))]
        second = max([int(time.time()), *(second + 1 for second in seconds)])
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{EVENTS_PREFIX}{second:010d}.{platform.node()}.{os.getpid()}.0"
        return RecordWriter(path.open("xb"))

    def _close(self) -> None:
        """Close the event file, so that the next write opens another one."""
        if self._writer is not None:
            with contextlib.suppress(OSError):
                self._writer.close()
        self._writer = None

    def _upload(self) -> None:
        """Upload the files that have grown, one after the other: the end of the process waits for pools of threads."""
        for name in finished_files(Path(self.local_folder)):
            path = Path(self.local_folder, name)
            num_bytes = path.stat().st_size
            if self._uploaded_bytes.get(name) != num_bytes:
                self._folder.upload_file(str(path), name.as_posix())
                self._uploaded_bytes[name] = num_bytes


class LossCurve:
    """The picture of the loss.

    Args:
        folder: that it is in.
        unigram_entropy_nats: the loss of the best guess from frequencies alone, None where it says nothing.
        title: of the picture.
        loss_unit: beside its axis.
    """

    def __init__(self, folder: Folder, unigram_entropy_nats: float | None, *, title: str, loss_unit: str):
        self._folder = folder
        self._unigram_entropy_nats = unigram_entropy_nats
        self._title, self._loss_unit = title, loss_unit
        self._drawn: Lines | None = None

    def __str__(self) -> str:
        return self._folder.path_of(LOSS_CURVE_NAME)

    def update(self, lines: Lines) -> None:
        """Draw training and validation loss over steps, and the loss of the best guess from frequencies alone."""
        if self._drawn is not None and num_shared(lines, self._drawn) == len(lines) == len(self._drawn):
            return
        with new_figure(figsize=(8, 4.5)) as figure:
            axes = figure.subplots()
            for split, marker in ((TRAIN, ""), (VALIDATION, "o")):
                points = [(line["step"], line["loss"]) for line in lines if line["split"] == split]
                if points:
                    axes.plot(*zip(*points, strict=True), marker=marker, label=f"{split} loss")
            if self._unigram_entropy_nats:
                label = "unigram entropy (token frequencies only)"
                axes.axhline(self._unigram_entropy_nats, linestyle=":", color="gray", label=label)
            for before, line in pairwise(line for line in lines if line["split"] == TRAIN):
                if before.get("phase") != line.get("phase"):
                    axes.axvline(before["step"], linewidth=0.5, color="gray")
            axes.set(xlabel="step", ylabel=self._loss_unit, title=self._title)
            axes.legend()
            axes.grid(alpha=0.3)
            image = io.BytesIO()
            figure.savefig(image, dpi=120, format="png")
        self._folder.write_bytes(LOSS_CURVE_NAME, image.getvalue())
        self._drawn = lines


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
