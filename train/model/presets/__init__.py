"""Presets: short YAML files in this folder, each a model configuration and the settings that train it well."""

from pathlib import Path
from typing import Any

import yaml

from mlm_common.errors import InputError

PRESETS_FOLDER = Path(__file__).resolve().parent


def preset_names() -> list[str]:
    """List the names that `--preset` takes."""
    return sorted(path.stem for path in PRESETS_FOLDER.glob("*.yaml"))


def preset_settings(name: str) -> dict[str, Any]:
    """Read the flags that the preset sets: {field name: value}.

    Raises:
        InputError: there is no such preset.
    """
    return _read(name).get("settings") or {}


def preset_model(name: str) -> dict[str, Any]:
    """Read the preset's model configuration, as in a config.json: `model_type` and sizes.

    Raises:
        InputError: there is no such preset.
    """
    return dict(_read(name)["model"])


def _read(name: str) -> dict[str, Any]:
    if name not in preset_names():
        raise InputError(f"--preset must be one of {', '.join(preset_names())}; received {name}.")
    return yaml.safe_load((PRESETS_FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
