"""The record of a run: `metrics.jsonl`, TensorBoard, and the picture of the loss."""

import contextlib
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from mlm_common.figures import new_figure
from mlm_common.storage import Folder, open_folder
from train.runtime.run_folder import LOSS_CURVE_NAME, METRICS_NAME, TENSORBOARD_FOLDER

TRAIN, VALIDATION, ROLLBACK = "train", "validation", "rollback"
# Figures of a line that are measured on the clock; all others are the same however often a run was stopped.
CLOCK_FIGURES = ("step_seconds", "tokens_per_second", "input_wait_share", "mfu")


class MetricsLog:
    """Lines of `metrics.jsonl`, {"step": …, "split": …, figures …}, also sent to TensorBoard.

    Only the chief of several workers writes.

    Args:
        output_dir: of the run.
        unigram_entropy_nats: the loss of the best guess from frequencies alone, None where it says nothing.
        title: of the picture.
        loss_unit: beside its axis.
        is_chief: whether this worker writes.
    """

    def __init__(
        self,
        output_dir: str,
        unigram_entropy_nats: float | None,
        *,
        title: str,
        loss_unit: str,
        is_chief: bool = True,
    ):
        self.is_chief = is_chief
        self._folder = open_folder(output_dir)
        self.path = self._folder.path_of(METRICS_NAME)
        self.curve_path = self._folder.path_of(LOSS_CURVE_NAME)
        self._unigram_entropy_nats = unigram_entropy_nats
        self._title, self._loss_unit = title, loss_unit
        self.lines: list[dict[str, Any]] = []
        self._drawn_line: list[dict[str, Any]] | None = None
        self._num_written = 0
        self._tensorboard = TensorBoardFiles(self._folder.subfolder(TENSORBOARD_FOLDER)) if is_chief else None

    def rewind_to(self, step: int, num_rollbacks: int = 0) -> None:
        """Take up the lines that are there, and drop those of steps after `step`, which will be made again.

        Args:
            step: steps made.
            num_rollbacks: rollbacks before this step; lines of later ones are dropped.
        """
        there = self._folder.read_text(METRICS_NAME) if self._folder.exists(METRICS_NAME) else ""
        lines = [json.loads(line) for line in there[: there.rfind("\n") + 1].splitlines()]
        rollbacks = [line for line in lines if line["split"] == ROLLBACK]
        dropped = rollbacks[num_rollbacks:]
        self.lines = [
            line
            for line in lines
            if (line["step"] <= step if line["split"] != ROLLBACK else not any(line is one for one in dropped))
        ]
        self._num_written = len(self.lines)
        if self.is_chief and there != (kept := _as_text(self.lines)):
            self._folder.write_text(METRICS_NAME, kept)
        if self._tensorboard:
            self._tensorboard.start_after(step)

    def find(self, step: int, split: str) -> dict[str, Any] | None:
        """Find the line of that step and split, None without one."""
        return next((line for line in self.lines if (line["step"], line["split"]) == (step, split)), None)

    def add(self, step: int, split: str, figures: dict[str, Any]) -> None:
        """Take one line; it is written by the next `flush`."""
        self.lines.append({"step": step, "split": split, **figures})
        if self._tensorboard and split != ROLLBACK:
            self._tensorboard.add(step, {f"{split}/{name}": value for name, value in figures.items()})

    def flush(self) -> None:
        """Write the lines added since the last call."""
        if not self.is_chief or self._num_written == len(self.lines):
            return
        written, new = self.lines[: self._num_written], self.lines[self._num_written :]
        # A kill leaves at most a part of a line at the end, which the next start drops.
        self._folder.append_text(METRICS_NAME, _as_text(new), before=_as_text(written))
        self._num_written = len(self.lines)
        if self._tensorboard:
            self._tensorboard.flush()

    def draw(self) -> None:
        """Write the picture of the loss so far, unless it was drawn of the same lines before."""
        if not self.is_chief or self._drawn_line == self.lines[-1:]:
            return
        self._drawn_line = self.lines[-1:]
        with tempfile.TemporaryDirectory() as folder:
            picture = Path(folder) / LOSS_CURVE_NAME
            draw_loss_curve(
                self.lines, picture, self._unigram_entropy_nats, title=self._title, loss_unit=self._loss_unit
            )
            self._folder.write_bytes(LOSS_CURVE_NAME, picture.read_bytes())


class TensorBoardFiles:
    """An event file of this process, made with its first event; for Cloud Storage a local one, uploaded by `flush`."""

    def __init__(self, folder: Folder):
        self._folder = folder
        self._writer: Any = None
        self._staging = contextlib.ExitStack()
        self._local_folder = self._staging.enter_context(folder.staging())

    def start_after(self, step: int) -> None:
        """Have TensorBoard leave out what was written of steps after `step` by processes that started before.

        It takes note of all starts but the first, so that one counts too.
        """
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._add(step + 1, session_log=SessionLog(status=SessionLog.START))

    def add(self, step: int, figures: dict[str, float]) -> None:
        """Add figures by their tags."""
        from tensorboard.plugins.scalar.summary import scalar_pb

        for tag, value in figures.items():
            self._add(step, summary=scalar_pb(tag, value))

    def flush(self) -> None:
        """Write what was added."""
        if self._writer is None:
            return
        self._writer.flush()
        self._folder.upload_folder(self._local_folder)

    def _add(self, step: int, **content: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if self._writer is None:
            self._writer = EventFileWriter(self._local_folder)
        self._writer.add_event(Event(wall_time=time.time(), step=step, **content))


def read_metrics(run_folder: str) -> list[dict[str, Any]]:
    """Read the lines of the `metrics.jsonl` of a run, local or gs://."""
    return [json.loads(line) for line in open_folder(run_folder).read_text(METRICS_NAME).splitlines()]


def draw_loss_curve(
    lines: list[dict[str, Any]], picture: Path, unigram_entropy_nats: float | None, *, title: str, loss_unit: str
) -> None:
    """Draw training and validation loss over steps, and the loss of the best guess from frequencies alone."""
    with new_figure(figsize=(8, 4.5)) as figure:
        axes = figure.subplots()
        for split, marker in ((TRAIN, ""), (VALIDATION, "o")):
            points = [(line["step"], line["loss"]) for line in lines if line["split"] == split]
            if points:
                axes.plot(*zip(*points, strict=True), marker=marker, label=f"{split} loss")
        if unigram_entropy_nats:
            axes.axhline(
                unigram_entropy_nats, linestyle=":", color="gray", label="unigram entropy (token frequencies only)"
            )
        axes.set(xlabel="step", ylabel=loss_unit, title=title)
        axes.legend()
        axes.grid(alpha=0.3)
        figure.savefig(picture, dpi=120)


def _as_text(lines: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(line) + "\n" for line in lines)
