"""The record of a run: `metrics.jsonl`, TensorBoard, and the picture of the loss."""

import json
import math
import tempfile
from pathlib import Path
from typing import Any

from tokenizer_training import storage
from tokenizer_training.picture import new_figure
from train.output_folder import LOSS_CURVE_NAME, METRICS_NAME, TENSORBOARD_FOLDER


class MetricsLog:
    """Lines of `metrics.jsonl`, {"step": …, "split": "train" | "validation", figures …}, also sent to TensorBoard.

    A run that resumes at a step drops the lines after it, so that none is there twice. Only the chief of several
    workers writes.
    """

    def __init__(self, output_dir: str, start_step: int, unigram_entropy_nats: float | None, *, is_chief: bool = True):
        import tensorflow as tf

        self.is_chief = is_chief
        self.path = storage.join(output_dir, METRICS_NAME)
        self.curve_path = storage.join(output_dir, LOSS_CURVE_NAME)
        self.unigram_entropy_nats = unigram_entropy_nats
        earlier = read_metrics(self.path) if start_step and storage.exists(self.path) else []
        self.lines = [line for line in earlier if line["step"] <= start_step]
        folder = storage.join(output_dir, TENSORBOARD_FOLDER)
        self._summary_writer = tf.summary.create_file_writer(folder) if is_chief else tf.summary.create_noop_writer()

    def add(self, step: int, split: str, figures: dict[str, float]) -> None:
        """Take one line; it is written by the next `flush`."""
        import tensorflow as tf

        self.lines.append({"step": step, "split": split, **figures})
        with self._summary_writer.as_default():
            for name, value in figures.items():
                tf.summary.scalar(f"{split}/{name}", value, step=step)

    def flush(self) -> None:
        """Write all lines so far, atomically."""
        if not self.is_chief:
            return
        storage.write_text(self.path, "".join(json.dumps(line) + "\n" for line in self.lines))
        self._summary_writer.flush()

    def draw(self) -> None:
        """Write the picture of the loss so far."""
        if not self.is_chief:
            return
        with tempfile.TemporaryDirectory() as folder:
            picture = Path(folder) / LOSS_CURVE_NAME
            draw_loss_curve(self.lines, picture, self.unigram_entropy_nats)
            storage.write_bytes(self.curve_path, picture.read_bytes())


def read_metrics(path: str) -> list[dict[str, Any]]:
    """Return the lines of a `metrics.jsonl`, local or gs://."""
    return [json.loads(line) for line in storage.read_text(path).splitlines()]


def perplexity(loss: float) -> float:
    """Return e to the loss (nats), infinite where that does not fit a float."""
    return math.exp(loss) if loss < 700 else math.inf


def draw_loss_curve(lines: list[dict[str, Any]], picture: Path, unigram_entropy_nats: float | None) -> None:
    """Draw training and validation loss over steps, and the loss of the best guess from frequencies alone."""
    with new_figure(figsize=(8, 4.5)) as figure:
        axes = figure.subplots()
        for split, marker in (("train", ""), ("validation", "o")):
            points = [(line["step"], line["loss"]) for line in lines if line["split"] == split]
            if points:
                axes.plot(*zip(*points, strict=True), marker=marker, label=f"{split} loss")
        if unigram_entropy_nats:
            axes.axhline(
                unigram_entropy_nats, linestyle=":", color="gray", label="unigram entropy (token frequencies only)"
            )
        axes.set(xlabel="step", ylabel="nats per masked token", title="Masked language model")
        axes.legend()
        axes.grid(alpha=0.3)
        figure.savefig(picture, dpi=120)
