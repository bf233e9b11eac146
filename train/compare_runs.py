"""Compare runs: a table of their progress, and a plot of their losses over tokens and time."""

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
from mlm_common.storage import folder_and_name
from train.metrics.log import TRAIN, VALIDATION
from train.metrics.run_curves import ACCURACY, RunCurves, draw_runs, percentage, read_runs, short_name
from train.runtime.run_folder import RunFolder
from train.tasks.task import SOURCE_LOSS

logger = logging.getLogger(__name__)

FORMATS = (".png", ".svg")
NOT_KNOWN = "-"
MAX_NAME_IN_TABLE = 22
TITLES = ("run", "steps", "tokens", "tokens/s", "hours", "train", "valid", "best", "gain")
LEGEND = """train, valid, best: training loss, last and best validation loss ({unit})
gain: how far the last evaluation is below the frequency baseline of the run's validation rows"""

BITS = "bits_per_byte"
BITS_LEGEND = """
bits/byte: of words of the validation rows (--score-words); compares across tokenizers, on the same text"""


@dataclass(frozen=True)
class CompareConfig:
    """Which runs are compared."""

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
    runs = read_runs(config.runs)
    for path, run in zip(config.runs, runs, strict=True):
        with RunFolder(path).guarded_record():  # whatever the table and the plot look up
            _ = (
                _figures(run),
                run.model,
                run.num_steps,
                run.mask_note,
                [value_of(run) for value_of in COMPARED.values()],
            )
    print(comparison_table(runs))
    if any(run.sources for run in runs):
        print(f"\n{source_table(runs)}")
    what, of_groups = group_comparable(runs)
    for text in filter(None, (of_groups, describe_mask_rates(runs))):
        logger.warning("%s", text)
    if config.picture is not None:
        note = f"Different {what}: compare each run with its baseline, not with the others." if what else ""
        folder, name = folder_and_name(config.picture)
        folder.write_bytes(name, draw_runs(runs, note, PurePath(name).suffix[1:]))


def comparison_table(runs: Sequence[RunCurves]) -> str:
    metrics = {run.metric.title for run in runs}
    titles = (*TITLES, metrics.pop() if len(metrics) == 1 else "score")
    rows = [titles, *map(_figures, runs)]
    bits = [next((one[BITS] for one in reversed(run.of_split(VALIDATION)) if BITS in one), None) for run in runs]
    legend = LEGEND
    if any(one is not None for one in bits):
        cells = ("bits/byte", *(NOT_KNOWN if one is None else f"{one:.3f}" for one in bits))
        rows = [(*row, cell) for row, cell in zip(rows, cells, strict=True)]
        legend += BITS_LEGEND
    unit = " or ".join(dict.fromkeys(run.card.loss_unit for run in runs))
    return "\n".join([*_aligned(rows), "", legend.format(unit=unit)])


def source_table(runs: Sequence[RunCurves]) -> str:
    rows = []
    for source in dict.fromkeys(source for run in runs for source in run.sources):
        losses = [(run.of_split(VALIDATION) or [{}])[-1].get(f"{SOURCE_LOSS}{source}") for run in runs]
        rows.append((source, *(NOT_KNOWN if loss is None else f"{loss:.4f}" for loss in losses)))
    return "\n".join(_aligned([("source", *(short_name(run.name, MAX_NAME_IN_TABLE) for run in runs)), *rows]))


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.rjust(width) if index else cell.ljust(width) for index, (cell, width) in enumerate(cells))
        for cells in (list(zip(row, widths, strict=True)) for row in rows)
    ]


def group_comparable(runs: Sequence[RunCurves]) -> tuple[str, str]:
    """Say in what evaluations differ, and which validation losses compare, by groups; nothing where all do."""
    groups: list[list[RunCurves]] = []
    for run in (one for one in runs if one.of_split(VALIDATION)):
        group = next((group for group in groups if not _differing(group[0], run)), None)
        if group is None:
            groups.append(group := [])
        group.append(run)
    if len(groups) < 2:
        return "", ""
    differing = {name for group in groups for name in _differing(groups[0][0], group[0])}
    what = " and ".join(", ".join(name for name in COMPARED if name in differing).rsplit(", ", 1))
    names = (", ".join(run.name for run in group) for group in groups)
    listed = "; ".join(f"group {number}: {of_group}" for number, of_group in enumerate(names, 1))
    return what, f"these runs have different {what}: their losses do not compare ({listed})"


def describe_mask_rates(runs: Sequence[RunCurves]) -> str:
    """Say which training losses do not compare, since other percentages are masked; nothing where all do."""
    groups: dict[str, list[str]] = {}
    for run in runs:
        if run.mask_rates:
            groups.setdefault(", then ".join(map(percentage, run.mask_rates)), []).append(run.name)
    if len(groups) < 2:
        return ""
    listed = "; ".join(f"{rates}: {', '.join(names)}" for rates, names in groups.items())
    return f"these runs mask different percentages in training: their training losses do not compare ({listed})"


def _eval_rows(run: RunCurves) -> Any:
    """Look up what identifies the rows to evaluate on: shards with checksums, or a data set, or a hash of the rows."""
    eval_data, fingerprint = run.record["eval_data"] or {}, run.record.get("fingerprint", {})
    if eval_data.get("dataset_name") and run.is_finetuned:  # the same examples, whatever the tokenizer
        limit = run.record["settings"]["data"].get("max_eval_samples")
        return {**eval_data, "totals": None, "max_eval_samples": limit}
    names = ("eval_shards", "eval_rows")
    last_phase = f"phase {len(run.record.get('phases') or [run.record])}: "
    values = [fingerprint.get(f"{last_phase}{name}", fingerprint.get(name)) for name in names]
    return next((value for value in values if value is not None), None)


def _tokenizer(run: RunCurves) -> Any:
    return None if run.is_finetuned else ((run.record["eval_data"] or {}).get("tokenizer") or {}).get("sha256")


# What must be the same for the validation losses of two runs to compare. The masks follow from rows and tokenizer.
COMPARED: dict[str, Callable[[RunCurves], Any]] = {
    "tasks": lambda run: run.card.task_name,
    "validation rows": _eval_rows,
    "tokenizers": _tokenizer,
}


def _differing(one: RunCurves, other: RunCurves) -> list[str]:
    """Name what of `COMPARED` differs; of a record that was on the Hub, hashes are compared."""
    pairs = {name: (value_of(one), value_of(other)) for name, value_of in COMPARED.items()}
    return [name for name, (value, others) in pairs.items() if not (is_same(value, others) or is_same(others, value))]


def _figures(run: RunCurves) -> tuple[str, ...]:
    train, validation = run.of_split(TRAIN), run.of_split(VALIDATION)
    step = run.lines[-1]["step"]
    rate, entropy = run.tokens_per_second, run.unigram_entropy_nats
    last = validation[-1] if validation else {}
    score = last.get(run.metric.name)
    shown_score = NOT_KNOWN
    if score is not None:
        shown_score = f"{score:.1%}".replace("%", " %") if run.metric.name == ACCURACY.name else f"{score:.4g}"
    return (
        short_name(run.name, MAX_NAME_IN_TABLE),
        f"{step:,}",
        short_number(run.tokens_after(step)),
        short_number(rate) if rate else NOT_KNOWN,
        f"{run.training_seconds(step) / 3600:.2f}",
        f"{train[-1]['loss']:.4f}" if train else NOT_KNOWN,
        f"{last['loss']:.4f}" if last else NOT_KNOWN,
        f"{min(line['loss'] for line in validation):.4f}" if validation else NOT_KNOWN,
        f"{entropy - last['loss']:.4f}" if last and entropy is not None else NOT_KNOWN,
        shown_score,
    )


if __name__ == "__main__":
    run_as_script(main)
