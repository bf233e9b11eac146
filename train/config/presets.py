"""Presets: short YAML files, each a model's configuration, the settings that train it well, and facts about it."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mlm_common.cli.settings import nearest_name
from mlm_common.errors import InputError

PRESETS_FOLDER = Path(__file__).resolve().parents[1] / "model" / "presets"


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
    """List the presets, those with the fewest parameters first."""
    return sorted(preset_names(), key=lambda name: (about_preset(name).parameters // 10**6, name))


def read_preset(name: str) -> dict[str, Any]:
    """Read a preset: its `model`, as in a config.json, its `settings`, {field name: value}, and what is `about` it.

    Raises:
        InputError: there is no such preset.
    """
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


def preset_settings(name: str) -> dict[str, Any]:
    """Read the flags that a preset sets, {field name: value}.

    Raises:
        InputError: there is no such preset.
    """
    settings: dict[str, Any] = read_preset(name)["settings"]
    return settings


def names_set_by_presets() -> list[str]:
    return sorted({setting for name in preset_names() for setting in read_preset(name)["settings"]})
