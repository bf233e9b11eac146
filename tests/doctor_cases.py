"""What the tests of the doctor share: packages that seem installed, modules in the place of real ones, findings."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tokenizer_training.command_line import parse_arguments
from train.config import SUBJECTS, TrainingConfig
from train.doctor_checks.findings import Check, Finding
from train.presets import preset_settings

PROJECT = Path(__file__).parent.parent


def install(folder: Path, name: str, version: str, *lines: str) -> None:
    """Write what pip leaves of a package for those who ask for its version."""
    information = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    information.mkdir(parents=True)
    text = "\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines])
    (information / "METADATA").write_text(text + "\n")


WORKING = {
    "tensorflow/__init__.py": "__version__ = '2.21.0'",
    "tf_keras/__init__.py": "",
    "transformers/__init__.py": "from transformers import utils",
    "transformers/utils.py": "is_tf_available = lambda: True",
    "transformers/modeling_tf_utils.py": "",
}


def modules(folder: Path, monkeypatch: pytest.MonkeyPatch, **changed: str | None) -> None:
    """Put modules before those installed; `changed` are the programs of some of them, None where one is missing."""
    for name, program in (WORKING | {key.replace("__", "/", 1) + ".py": text for key, text in changed.items()}).items():
        if program is not None:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(program)
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{PROJECT}")


def config_of(*flags: str) -> TrainingConfig:
    return TrainingConfig(*parse_arguments(SUBJECTS, flags, "", preset_settings))


def found(function: Any, *arguments: Any) -> list[Finding]:
    """Return what the doctor prints of a check: errors that it raises are findings."""
    return list(Check("x", lambda: function(*arguments)).findings())


def only_error(findings: Iterable[Finding]) -> str:
    (error,) = (one for one in findings if one.status == "error")
    return " ".join(str(error).split())
