"""The results of a run as files, under the names that transformers' scripts give them."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mlm_common.storage import Folder
from train.metrics.log import TRAIN

if TYPE_CHECKING:
    from train.loop.trainer import Trainer

# The file with the predictions of the validation part, without its ending.
EVAL_NAME = "eval_predictions"


def write_results(folder: Folder, parts: Mapping[str, Mapping[str, Any]]) -> None:
    """Write `train_results.json` and `eval_results.json`, and what is in them and more as `all_results.json`.

    Args:
        folder: of the run.
        parts: {"train", "eval" or "predict": {name: figure}}, whose names begin with the part's in the files.
    """
    named = {
        part: {name if name == "epoch" else f"{part}_{name}": figure for name, figure in figures.items()}
        for part, figures in parts.items()
    }
    for part in ("train", "eval"):
        if named.get(part):
            folder.write_text(f"{part}_results.json", _as_text(named[part]))
    folder.write_text(
        "all_results.json", _as_text({name: one for part in named.values() for name, one in part.items()})
    )


def train_results(trainer: "Trainer", step: int) -> dict[str, Any]:
    """Collect the figures of the training up to `step`: examples, passes, and the loss of the last line of the log."""
    losses = [line["loss"] for line in trainer.log.lines if line["split"] == TRAIN and line["step"] <= step]
    epoch = round(trainer.plan.row_after(step) / trainer.plan.num_rows, 4)
    return {"samples": trainer.phase.inputs.num_rows, "epoch": epoch} | ({"loss": losses[-1]} if losses else {})


def named(figures: Mapping[str, float]) -> dict[str, Any]:
    """Give figures the names that they have in the files."""
    named: dict[str, Any] = {"samples" if name == "num_rows" else name: value for name, value in figures.items()}
    return named | ({"is_degenerate": bool(named["is_degenerate"])} if "is_degenerate" in named else {})


def shown_score(value: float) -> str:
    """Write a score with four decimals, or four significant digits where it is so small that these would say little."""
    return f"{value:.4f}" if value == 0 or abs(value) >= 0.001 else f"{value:.4g}"


def _as_text(figures: Mapping[str, Any]) -> str:
    return json.dumps(figures, indent=4, sort_keys=True) + "\n"
