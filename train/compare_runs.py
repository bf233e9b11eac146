r"""Compare runs: a table of their progress, and a plot of their losses over tokens and time.

Examples:
    python train/compare_runs.py --runs work/model work/other-model \
        --picture work/comparison.png
"""

try:
    from mlm_common.cli.command_line import command, log_start, parse_arguments
except ModuleNotFoundError:
    raise SystemExit(
        "error: Activate the environment first: source .venv/bin/activate (python3 install.py makes it)"
    ) from None
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from mlm_common.cli.console import short_number
from mlm_common.cli.process import run_as_script
from mlm_common.cli.settings import flag
from mlm_common.errors import InputError
from mlm_common.hub.redaction import is_same
from mlm_common.storage import output_file
from train.metrics.log import TRAIN, VALIDATION
from train.metrics.run_curves import ACCURACY, RunCurves, draw_runs, percentage, read_runs, short_name
from train.runtime.run_folder import RunFolder
from train.tasks.task import SOURCE_LOSS

logger = logging.getLogger(__name__)

FORMATS = (".png", ".svg")
UNKNOWN = "-"
MAX_NAME_IN_TABLE = 22
TITLES = ("run", "steps", "tokens", "tokens/s", "hours", "train", "valid", "best", "gain")
LEGEND = """train, valid, best: training loss, last and best validation loss ({unit})
gain: frequency baseline of the run's validation rows minus the last validation loss"""

BITS = "bits_per_byte"
BITS_LEGEND = """
bits/byte: of words of the validation rows (--score-words); comparable across tokenizers on the same text"""


@dataclass(frozen=True)
class CompareConfig:
    """The runs to compare."""

    FLAG_GROUP = "Runs"

    runs: list[str] = field(
        metadata={
            "help": "The --output-dir of one or more runs, local or gs://. They may still be training.",
            "metavar": "DIR",
        }
    )
    picture: str | None = flag(None, "Write the plot to this .png or .svg file, local or gs://.", metavar="FILE")

    def __post_init__(self) -> None:
        if self.picture is not None and PurePath(self.picture).suffix not in FORMATS:
            raise InputError(f"--picture must be a PNG or SVG file; received {self.picture}.")


@command
def main(argv: Sequence[str] | None = None) -> None:
    (config,) = parse_arguments((CompareConfig,), argv, __doc__, needed=("runs",))
    log_start(__file__)
    if config.picture is not None:
        folder, name = output_file(config.picture, "--picture")
    runs = read_runs(config.runs)
    for path, run in zip(config.runs, runs, strict=True):
        with RunFolder(path).guarded_record():  # read the data of table and plot now, so that errors name the file
            _ = (
                _table_row(run),
                run.model,
                run.num_steps,
                run.mask_note,
                [value_of(run) for value_of in COMPARED.values()],
            )
    print(comparison_table(runs))
    if any(run.sources for run in runs):
        print(f"\n{source_table(runs)}")
    differences, groups_warning = group_comparable(runs)
    for warning in filter(None, (groups_warning, describe_mask_rates(runs))):
        logger.warning("%s", warning)
    if config.picture is not None:
        note = (
            f"Different {differences}: compare each run with its baseline, not with the others." if differences else ""
        )
        folder.write_bytes(name, draw_runs(runs, note, PurePath(name).suffix[1:]))


def comparison_table(runs: Sequence[RunCurves]) -> str:
    metrics = {run.metric.title for run in runs}
    titles = (*TITLES, metrics.pop() if len(metrics) == 1 else "score")
    rows = [titles, *map(_table_row, runs)]
    scores = [next((line[BITS] for line in reversed(run.of_split(VALIDATION)) if BITS in line), None) for run in runs]
    legend = LEGEND
    if any(score is not None for score in scores):
        cells = ("bits/byte", *(UNKNOWN if score is None else f"{score:.3f}" for score in scores))
        rows = [(*row, cell) for row, cell in zip(rows, cells, strict=True)]
        legend += BITS_LEGEND
    unit = " or ".join(dict.fromkeys(run.card.loss_unit for run in runs))
    return "\n".join([*_aligned(rows), "", legend.format(unit=unit)])


def source_table(runs: Sequence[RunCurves]) -> str:
    rows = []
    for source in dict.fromkeys(source for run in runs for source in run.sources):
        losses = [(run.of_split(VALIDATION) or [{}])[-1].get(f"{SOURCE_LOSS}{source}") for run in runs]
        rows.append((source, *(UNKNOWN if loss is None else f"{loss:.4f}" for loss in losses)))
    return "\n".join(_aligned([("source", *(short_name(run.name, MAX_NAME_IN_TABLE) for run in runs)), *rows]))


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.rjust(width) if index else cell.ljust(width) for index, (cell, width) in enumerate(cells))
        for cells in (list(zip(row, widths, strict=True)) for row in rows)
    ]


def group_comparable(runs: Sequence[RunCurves]) -> tuple[str, str]:
    """Group the evaluated runs so that validation losses are comparable within each group.

    Returns:
        The names of the values that differ between groups, and a warning that lists the groups. Names and warning are
        empty if all runs are comparable.
    """
    groups: list[list[RunCurves]] = []
    for run in (run for run in runs if run.of_split(VALIDATION)):
        group = next((group for group in groups if not _differences(group[0], run)), None)
        if group is None:
            groups.append(group := [])
        group.append(run)
    if len(groups) < 2:
        return "", ""
    names = {name for group in groups for name in _differences(groups[0][0], group[0])}
    differences = " and ".join(", ".join(name for name in COMPARED if name in names).rsplit(", ", 1))
    runs_of_groups = (", ".join(run.name for run in group) for group in groups)
    listed = "; ".join(f"group {number}: {run_names}" for number, run_names in enumerate(runs_of_groups, 1))
    return differences, f"these runs have different {differences}, so their losses are not comparable ({listed})"


def describe_mask_rates(runs: Sequence[RunCurves]) -> str:
    """Return a warning if the runs mask different percentages, so training losses are not comparable; empty if not."""
    groups: dict[str, list[str]] = {}
    for run in runs:
        if run.mask_rates:
            groups.setdefault(", then ".join(map(percentage, run.mask_rates)), []).append(run.name)
    if len(groups) < 2:
        return ""
    listed = "; ".join(f"{rates}: {', '.join(names)}" for rates, names in groups.items())
    return f"these runs mask different percentages in training, so their training losses are not comparable ({listed})"


def _eval_rows(run: RunCurves) -> Any:
    """Return the identity of a run's validation rows: shards with checksums, a data set, or a hash of the rows."""
    eval_data, fingerprint = run.record["eval_data"] or {}, run.record.get("fingerprint", {})
    if eval_data.get("dataset_name") and run.is_finetuned:  # the examples do not depend on the tokenizer
        limit = run.record["settings"]["data"].get("max_eval_samples")
        return {**eval_data, "totals": None, "max_eval_samples": limit}
    names = ("eval_shards", "eval_rows")
    last_phase = f"phase {len(run.record.get('phases') or [run.record])}: "
    values = [fingerprint.get(f"{last_phase}{name}", fingerprint.get(name)) for name in names]
    return next((value for value in values if value is not None), None)


def _tokenizer(run: RunCurves) -> Any:
    return None if run.is_finetuned else ((run.record["eval_data"] or {}).get("tokenizer") or {}).get("sha256")


# The validation losses of two runs are comparable if all of these values are equal. Rows and tokenizer determine the
# masks.
COMPARED: dict[str, Callable[[RunCurves], Any]] = {
    "tasks": lambda run: run.card.task_name,
    "validation rows": _eval_rows,
    "tokenizers": _tokenizer,
}


def _differences(run: RunCurves, other: RunCurves) -> list[str]:
    """Return the names in `COMPARED` whose values differ; a record from the Hub may contain hashes of values."""
    pairs = {name: (value_of(run), value_of(other)) for name, value_of in COMPARED.items()}
    return [name for name, (left, right) in pairs.items() if not (is_same(left, right) or is_same(right, left))]


def _table_row(run: RunCurves) -> tuple[str, ...]:
    train, validation = run.of_split(TRAIN), run.of_split(VALIDATION)
    step = run.lines[-1]["step"]
    rate, entropy = run.tokens_per_second, run.unigram_entropy_nats
    last = validation[-1] if validation else {}
    score = last.get(run.metric.name)
    shown_score = UNKNOWN
    if score is not None:
        shown_score = f"{score:.1%}" if run.metric.name == ACCURACY.name else f"{score:.4g}"
    return (
        short_name(run.name, MAX_NAME_IN_TABLE),
        f"{step:,}",
        short_number(run.tokens_after(step)),
        short_number(rate) if rate else UNKNOWN,
        f"{run.training_seconds(step) / 3600:.2f}",
        f"{train[-1]['loss']:.4f}" if train else UNKNOWN,
        f"{last['loss']:.4f}" if last else UNKNOWN,
        f"{min(line['loss'] for line in validation):.4f}" if validation else UNKNOWN,
        f"{entropy - last['loss']:.4f}" if last and entropy is not None else UNKNOWN,
        shown_score,
    )


if __name__ == "__main__":
    run_as_script(main)
