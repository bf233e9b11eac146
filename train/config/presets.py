"""Presets: short YAML files, each a model's configuration, the settings that train it well, and facts about it.

`--preset list` prints them as a table; `python -m train.config.presets` prints it as Markdown.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mlm_common.cli.settings import nearest_name
from mlm_common.errors import InputError

# Rows per replica where neither a preset nor a flag says otherwise.
DEFAULT_BATCH_ROWS = 8
PRESETS_FOLDER = Path(__file__).resolve().parents[1] / "model" / "presets"
HEADER = ("preset", "parameters", "made for", "batch", "note")
FOOTNOTE = """Batch: rows per step x tokens per row that the settings are made for. Parameters: with a vocabulary of
32,000; the tiny presets with 4,096. Modelled: by the TPU's compiler, not measured."""


@dataclass(frozen=True)
class About:
    """Facts about a preset, which train nothing.

    made_for: the hardware that its settings suit.
    row_length: tokens per row that they suit.
    vocab_size: at which the model has `parameters`.
    replicas: for which its global batch is meant; None where it leaves the batch open.
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
    """Read a preset: its `model`, as in a config.json, its `settings`, {field name: value}, and what is `about` it."""
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
    rows = [HEADER, ("---",) * len(HEADER), *((f"`{name}`", *more) for name, *more in preset_rows())]
    return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), "", FOOTNOTE])


if __name__ == "__main__":
    print(preset_markdown())
