"""What to type next: the last line of a command."""

import os.path
import shlex
from collections.abc import Sequence
from pathlib import Path

PROJECT_FOLDER = Path(__file__).resolve().parents[2]


def next_step(script: str, arguments: Sequence[str]) -> str:
    """Write the line that says how to run a script of this project (`train/run_mlm.py`) with these arguments."""
    path = PROJECT_FOLDER / script
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"next: {shlex.join(['python', str(shown), *arguments])}"


def folder_beside(folder: str, name: str) -> str:
    """Return the path of the folder `name` beside another one, local or `gs://`."""
    return os.path.join(os.path.dirname(folder.rstrip("/")), name)  # noqa: PTH118, PTH120 (gs:// paths)


def short_path(path: str) -> str:
    """Write an absolute path in the working directory as it would be typed there."""
    return os.path.relpath(path) if path.startswith(f"{Path.cwd()}/") else path
