"""The results of a run as files, under the names that transformers' scripts give them."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from mlm_common.storage import open_folder


def write_results(output_dir: str, parts: Mapping[str, Mapping[str, Any]]) -> None:
    """Write `train_results.json` and `eval_results.json`, and what is in them and more as `all_results.json`.

    Args:
        output_dir: of the run.
        parts: {"train", "eval" or "predict": {name: figure}}, whose names begin with the part's in the files.
    """
    folder = open_folder(output_dir)
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


def write_predictions(output_dir: str, name: str, predictions: Iterable[str]) -> None:
    """Write `predict_results_{name}.txt`: a line `index<TAB>prediction` for each row, in their order."""
    lines = [f"{index}\t{prediction}\n" for index, prediction in enumerate(predictions)]
    open_folder(output_dir).write_text(f"predict_results_{name}.txt", "index\tprediction\n" + "".join(lines))


def _as_text(figures: Mapping[str, Any]) -> str:
    return json.dumps(figures, indent=4, sort_keys=True) + "\n"
