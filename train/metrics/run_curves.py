"""Runs as curves: the loss of each over the tokens it has seen and the time it has trained."""

import io
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from mlm_common.errors import InputError
from mlm_common.figures import new_figure
from mlm_common.storage import open_folder
from train.metrics.log import read_metrics
from train.metrics.log_files import TRAIN, VALIDATION
from train.runtime.plan import batch_tokens, tokens_after
from train.runtime.run_folder import METRICS_NAME, read_run_record

PICTURE_INCHES = (11, 4)
PICTURE_DOTS_PER_INCH = 100
NOT_KNOWN = "-"


@dataclass(frozen=True)
class RunCurves:
    """What a run has recorded so far.

    record: its `run.json`. lines: its `metrics.jsonl`, by step.
    """

    name: str
    record: dict[str, Any]
    lines: Sequence[dict[str, Any]]

    @property
    def step_tokens(self) -> int:
        """Tokens of a step, padding included."""
        return batch_tokens(self.record["plan"])

    @property
    def unigram_entropy_nats(self) -> float | None:
        """The best loss of a guess from the frequencies of the validation rows; None if there are none."""
        return (self.record["eval_data"] or {}).get("unigram_entropy_nats")

    @property
    def tokens_per_second(self) -> float | None:
        """The median over the lines of training; None before there is one."""
        rates = [line["tokens_per_second"] for line in self.of_split(TRAIN) if "tokens_per_second" in line]
        return statistics.median(rates) if rates else None

    def tokens_after(self, step: int) -> int:
        """Count the tokens of the steps up to `step`, padding included."""
        return tokens_after(self.record["plan"], step)

    def of_split(self, split: str) -> list[dict[str, Any]]:
        """Select the lines of training or of validation."""
        return [line for line in self.lines if line["split"] == split]

    def training_seconds(self, step: int) -> float:
        """Add up the time that the steps up to `step` took, as far as it was measured; evaluations are not in it."""
        lines = [{"step": 0}, *self.of_split(TRAIN)]
        return sum(
            max(0, min(step, line["step"]) - before["step"]) * line.get("step_seconds", 0.0)
            for before, line in pairwise(lines)
        )


def read_runs(folders: Sequence[str]) -> list[RunCurves]:
    """Read the runs in these output folders, each named by what tells its folder from the others.

    Raises:
        InputError: there is no run with a line of metrics in one of them.
    """
    for folder in folders:
        files = open_folder(folder)
        if not files.exists(METRICS_NAME) or not files.read_text(METRICS_NAME).strip():
            raise InputError(f"--runs must name output folders of run_mlm.py; {folder} has no {METRICS_NAME} yet.")
    return [
        RunCurves(name, read_run_record(folder), read_metrics(folder))
        for name, folder in zip(_short_names(folders), folders, strict=True)
    ]


def comparison_table(runs: Sequence[RunCurves]) -> str:
    """Write a line of figures for each run; losses are nats per masked token, of the last evaluation and the best."""
    titles = ("run", "steps", "tokens/step", "tokens", "tokens/s", "hours", "train", "validation", "best", "accuracy")
    rows = [titles, *map(_figures, runs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) if index else cell.ljust(width) for index, (cell, width) in enumerate(cells))
        for cells in (list(zip(row, widths, strict=True)) for row in rows)
    )


def draw_runs(runs: Sequence[RunCurves]) -> bytes:
    """Draw a PNG image: the loss of each run, training as a line and validation as dots, over tokens and over time.

    Dotted lines are the losses of a guess from the token frequencies alone.
    """
    with new_figure(figsize=PICTURE_INCHES, dpi=PICTURE_DOTS_PER_INCH) as figure:
        from matplotlib.ticker import EngFormatter

        over_tokens, over_time = figure.subplots(1, 2, sharey=True)
        for index, run in enumerate(runs):
            for split, style in ((TRAIN, {"alpha": 0.6}), (VALIDATION, {"marker": "o", "label": run.name})):
                lines = run.of_split(split)
                losses = [line["loss"] for line in lines]
                settings: dict[str, Any] = {"color": f"C{index % 10}", **style}
                over_tokens.plot([run.tokens_after(line["step"]) for line in lines], losses, **settings)
                over_time.plot([run.training_seconds(line["step"]) / 3600 for line in lines], losses, **settings)
        for axes, what in ((over_tokens, "tokens seen"), (over_time, "hours of training")):
            for entropy in {run.unigram_entropy_nats for run in runs} - {None}:
                axes.axhline(entropy, linestyle=":", color="gray")
            axes.set(xlabel=what)
            axes.grid(alpha=0.3)
        over_tokens.set(ylabel="nats per masked token")
        over_tokens.xaxis.set_major_formatter(EngFormatter())
        over_tokens.legend()
        image = io.BytesIO()
        figure.savefig(image, format="png")
    return image.getvalue()


def _figures(run: RunCurves) -> tuple[str, ...]:
    train, validation = run.of_split(TRAIN), run.of_split(VALIDATION)
    step = run.lines[-1]["step"]
    rate = run.tokens_per_second
    accuracy = validation[-1].get("masked_accuracy") if validation else None
    return (
        run.name,
        f"{step:,}",
        f"{run.step_tokens:,}",
        f"{run.tokens_after(step):,}",
        f"{rate:,.0f}" if rate else NOT_KNOWN,
        f"{run.training_seconds(step) / 3600:.2f}",
        f"{train[-1]['loss']:.4f}" if train else NOT_KNOWN,
        f"{validation[-1]['loss']:.4f}" if validation else NOT_KNOWN,
        f"{min(line['loss'] for line in validation):.4f}" if validation else NOT_KNOWN,
        NOT_KNOWN if accuracy is None else f"{accuracy:.1%}",
    )


def _short_names(folders: Sequence[str]) -> list[str]:
    """Cut from the folders the part of the path that all share."""
    paths = [folder.rstrip("/").split("/") for folder in folders]
    num_shared = 0
    while all(len(path) > num_shared + 1 and path[num_shared] == paths[0][num_shared] for path in paths):
        num_shared += 1
    return ["/".join(path[num_shared:]) for path in paths]
