"""Files in a local folder or in Google Cloud Storage (`gs://bucket/name`), read and written the same way.

`open_folder` returns a `Folder` (see `folder.py`): a `LocalFolder` or a `GcsFolder`. `reading.py` finds files by name
or glob, and reads them from any byte. A missing local path is one line with the nearest match, and never a request to
the Hub.
"""

import difflib
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from mlm_common.errors import InputError
from mlm_common.storage.folder import (
    GCS_PREFIX,
    PARTIAL_SUFFIX,
    PROBE_PREFIX,
    CloudStorageError,
    Folder,
    LocalFolder,
    NewFile,
)

__all__ = [
    "PARTIAL_SUFFIX", "PROBE_PREFIX", "CloudStorageError", "Folder", "NewFile", "check_file", "check_folder",
    "check_folder_or_hub", "did_you_mean", "folder_and_name", "is_gcs", "local_or_hub", "looks_local", "missing",
    "open_folder", "read_file", "short_path",
]  # fmt: skip


_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # at least two letters: one is a drive of Windows


def is_gcs(path: str) -> bool:
    """Return whether the path is in Cloud Storage; an InputError if it is neither local nor `gs://`."""
    if not path.startswith(GCS_PREFIX) and _SCHEME.match(path):
        raise InputError(f"A path must be local or gs://BUCKET/NAME; received {path!r}.")
    if path.startswith("~/"):
        raise InputError(
            f"The ~ of {path} was not expanded, as in quotes, after = or in a file. Write the path in full."
        )
    return path.startswith(GCS_PREFIX)


def open_folder(path: str) -> Folder:
    """Open a folder, which need not exist; its path is a local one or `gs://BUCKET/NAME`, else an InputError."""
    if not is_gcs(path):
        return LocalFolder(path)
    from mlm_common.storage.gcs import GcsFolder  # Google's packages, for these paths alone

    return GcsFolder(path)


def folder_and_name(path: str) -> tuple[Folder, str]:
    """Open the folder of the file at `path`, and split off the file's name."""
    folder, name = os.path.split(path)
    if is_gcs(path) and (not name or len(folder) < len(GCS_PREFIX)):
        raise InputError(f"The path of a file in Cloud Storage must be gs://BUCKET/NAME; received {path!r}.")
    return open_folder(folder), name


def read_file(path: str) -> bytes:
    folder, name = folder_and_name(path)
    return folder.read_bytes(name)


@contextmanager
def local_or_hub(name_or_path: str, *, without: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield what transformers can load: a local copy of a `gs://` folder; a local path or a Hub id as it is.

    Files whose names have one of the endings `without` are not copied.
    """
    folder = open_folder(name_or_path)
    if folder.is_local:
        yield name_or_path
    else:
        names = [name for name in folder.list_files() if not name.endswith(without)] if without else None
        with folder.local_copy(names) as copy:
            yield copy


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
    """Check as `check_folder` a name that looks like a local folder; ids on the Hub and `gs://` paths pass."""
    if looks_local(name):
        check_folder(name, flag)


def check_folder(path: str, flag: str | None = None) -> None:
    """Check that a local folder exists; a `gs://` path passes."""
    if not is_gcs(path) and not os.path.isdir(path):  # noqa: PTH112 (that of pathlib raises if a parent is unreadable)
        raise missing(path, flag, "folder")


def check_file(path: str, flag: str | None = None) -> None:
    if not is_gcs(path) and not os.path.isfile(path):  # noqa: PTH113 (that of pathlib raises if a parent is unreadable)
        raise missing(path, flag, "file")


def missing(path: str, flag: str | None = None, kind: Literal["folder", "file"] = "folder") -> InputError:
    """Make the error for a path without such a folder or file, with the nearest one that exists."""
    start = f"{flag}: there" if flag else "There"
    try:
        Path(path).stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    # A parent that cannot be entered, a name that is too long or has a zero byte.
    except (OSError, ValueError) as error:
        return InputError(f"{flag + ': ' if flag else ''}{path!r} cannot be read: {getattr(error, 'strerror', error)}.")
    else:
        found = "folder" if Path(path).is_dir() else "file" if Path(path).is_file() else "pipe or device"
        return InputError(f"{start} is no {kind} {path}: it is a {found}.")
    return InputError(f"{start} is no {kind} {path}{did_you_mean(path) or '.'}")


def did_you_mean(path: str) -> str:
    """Write the end of a sentence about a missing path: the existing one with the nearest name, or nothing.

    Each part of the path that does not exist is replaced by the most similar name beside it.
    """
    found = Path()
    for part in Path(path).parts:
        if not Path(found, part).exists():
            is_listed = found.is_dir() and os.access(found, os.R_OK)
            names = sorted(one.name for one in found.iterdir()) if is_listed else []
            similar = difflib.get_close_matches(part, names, n=1)
            if not similar or is_gcs(path):
                return ""
            part = similar[0]
        found = Path(found, part)
    return f"; did you mean {found}?"


def short_path(path: str) -> str:
    """Write an absolute path in the working directory as it would be typed there."""
    return os.path.relpath(path) if path.startswith(f"{Path.cwd()}/") else path
