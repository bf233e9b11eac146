"""Check local paths: a missing one is one line with the nearest match, and never a request to the Hub."""

import difflib
import glob
import os
from pathlib import Path
from typing import Literal

from mlm_common.errors import InputError
from mlm_common.storage import is_gcs

Kind = Literal["folder", "file"]


def looks_local(name: str) -> bool:
    """Return whether a name can only be a local path, not an id on the Hub or a `gs://` path.

    Ids on the Hub are NAME or USER/NAME. So a name that starts with `/`, `.` or `~` is a path, as is one with more than
    one slash, one in an existing folder, or one that exists.
    """
    if is_gcs(name):
        return False
    path = Path(name)
    is_in_folder = len(path.parts) > 1 and path.parent.is_dir()
    return name.startswith(("/", ".", "~")) or len(path.parts) > 2 or is_in_folder or path.exists()


def check_folder_or_hub(name: str, flag: str | None = None) -> None:
    """Check that a name that looks like a local folder is one; ids on the Hub and `gs://` paths pass.

    Raises:
        InputError: as `check_folder`.
    """
    if looks_local(name):
        check_folder(name, flag)


def check_folder(path: str, flag: str | None = None) -> None:
    """Check that a local folder exists; a `gs://` path passes.

    Raises:
        InputError: it does not exist, or is a file; names `flag` and the nearest folder that exists.
    """
    if not is_gcs(path) and not Path(path).is_dir():
        raise missing(path, flag, "folder")


def check_file(path: str, flag: str | None = None) -> None:
    """Check that a local file exists; a `gs://` path passes.

    Raises:
        InputError: it does not exist, or is a folder; names `flag` and the nearest file that exists.
    """
    if not is_gcs(path) and not Path(path).is_file():
        raise missing(path, flag, "file")


def missing(path: str, flag: str | None = None, kind: Kind = "folder") -> InputError:
    """Make the error for a path without such a folder or file, with the nearest one that exists."""
    start = f"{flag}: there" if flag else "There"
    if Path(path).exists():
        return InputError(f"{start} is no {kind} {path}: it is a {'file' if kind == 'folder' else 'folder'}.")
    return InputError(f"{start} is no {kind} {path}{did_you_mean(path, kind) or '.'}")


def did_you_mean(path: str, kind: Kind) -> str:
    """Write the end of a sentence about a missing path or glob: the nearest one that exists, or nothing."""
    nearest = nearest_path(path, kind)
    return f"; did you mean {nearest}?" if nearest else ""


def nearest_path(path: str, kind: Kind) -> str | None:
    """Return the existing folder or file, or the glob with matches, whose name is nearest to that of a missing one.

    Each part of the path that does not exist is replaced by the most similar name beside it.
    """
    if is_gcs(path):
        return None
    parts = Path(path).parts
    found = Path()
    for index, part in enumerate(parts):
        if glob.has_magic(part):
            pattern = Path(found, *parts[index:])
            return str(pattern) if glob.glob(str(pattern)) else None  # noqa: PTH207
        is_last = index == len(parts) - 1
        if Path(found, part).exists():
            found = Path(found, part)
            continue
        similar = difflib.get_close_matches(part, _names_in(found, kind if is_last else "folder"), n=1)
        if not similar:
            return None
        found = Path(found, similar[0])
    return str(found)


def _names_in(folder: Path, kind: Kind) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir() == (kind == "folder"))
    except OSError:
        return []


def short_path(path: str) -> str:
    """Write an absolute path in the working directory as it would be typed there."""
    return os.path.relpath(path) if path.startswith(f"{Path.cwd()}/") else path
