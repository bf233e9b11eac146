"""Presets: short YAML files with a model's configuration, training settings that suit the model, and facts about it.

`--preset list` prints a table of all presets; `python -m train.config.presets` prints the same table as Markdown.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mlm_common.cli.settings import nearest_name
from mlm_common.errors import InputError

# Default number of rows per replica, unless a preset or a flag sets it.
DEFAULT_BATCH_ROWS = 8
PRESETS_FOLDER = Path(__file__).resolve().parent / "presets"
HEADER = ("preset", "parameters", "made for", "batch", "note")
FOOTNOTE = """Batch: rows per step x tokens per row that the settings are made for. Parameters: with a vocabulary of
32,000; the tiny presets with 4,096. Modelled: by the TPU's compiler, not measured."""


@dataclass(frozen=True)
class About:
    """Facts about a preset, which have no effect on training.

    Attributes:
        made_for: hardware that the settings are made for.
        row_length: tokens per row that the settings are made for.
        vocab_size: size of the vocabulary with which the model has `parameters` parameters.
        parameters: number of parameters.
        note: shown in the table of presets.
        replicas: number of replicas that the global batch is made for; None if the preset does not fix the global
            batch.
    """

    made_for: str
    row_length: int
    vocab_size: int
    parameters: int
    note: str
    replicas: int | None = None


def preset_names() -> list[str]:
    return sorted(path.stem for path in PRESETS_FOLDER.glob("*.yaml"))


def presets_by_size() -> list[str]:
    return sorted(preset_names(), key=lambda name: (about_preset(name).parameters // 10**6, name))


def read_preset(name: str) -> dict[str, Any]:
    """Read a preset: its `model` (as in a config.json), `settings` ({field name: value}) and `about` (see `About`)."""
    if name not in preset_names():
        nearest = nearest_name(name, preset_names())
        hint = f"did you mean {nearest}? " if nearest else ""
        raise InputError(f"--preset: there is no preset {name}; {hint}--preset list shows all.")
    return {"settings": {}} | _content(name)


@functools.cache
def _content(name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((PRESETS_FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    return content


def about_preset(name: str) -> About:
    return About(**read_preset(name)["about"])


def names_set_by_presets() -> list[str]:
    return sorted({setting for name in preset_names() for setting in read_preset(name)["settings"]})


def preset_rows() -> list[tuple[str, ...]]:
    table: list[tuple[str, ...]] = []
    for name in presets_by_size():
        about, settings = about_preset(name), read_preset(name)["settings"]
        millions = about.parameters / 1e6
        parameters = f"{millions:.1f} M" if millions < 10 else f"{millions:.0f} M"
        rows = settings.get("per_replica_batch_size", DEFAULT_BATCH_ROWS)
        rows *= settings.get("gradient_accumulation_steps", 1) * (about.replicas or 1)
        batch = f"{rows:,} x {about.row_length:,}" + ("" if about.replicas else " per replica")
        table.append((name, parameters, about.made_for, batch, about.note))
    return table


def preset_table() -> str:
    rows = [HEADER, *preset_rows()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join([*lines, "", FOOTNOTE])


def preset_markdown() -> str:
    rows = [HEADER, ("---",) * len(HEADER), *((f"`{name}`", *facts) for name, *facts in preset_rows())]
    return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), "", FOOTNOTE])


if __name__ == "__main__":
    print(preset_markdown())
