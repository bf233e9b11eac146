"""Files in a local folder or in Google Cloud Storage (`gs://bucket/name`), read and written the same way.

`open_folder` returns a `Folder` (see `folder.py`), which is a `LocalFolder` or a `GcsFolder`. `reading.py` finds files
by name or glob, and reads them from any byte on. A missing local path causes a one-line error that names the most
similar existing path. Such a path is never looked up on the Hub.
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
    "open_folder", "output_file", "read_file", "short_path",
]  # fmt: skip


_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # two or more letters, because a single letter is a drive in Windows


def is_gcs(path: str) -> bool:
    """Return whether the path is in Cloud Storage.

    Raises:
        InputError: the path is neither local nor `gs://`, or starts with `~/`.
    """
    if not path.startswith(GCS_PREFIX) and _SCHEME.match(path):
        raise InputError(f"A path must be local or gs://BUCKET/NAME; received {path!r}.")
    if path.startswith("~/"):
        raise InputError(
            f"The ~ of {path} was not expanded: shells do not expand it in quotes or after =, nor in a file. Write the "
            "path in full."
        )
    return path.startswith(GCS_PREFIX)


def open_folder(path: str) -> Folder:
    """Return an object for a folder, which need not exist.

    Args:
        path: a local path or `gs://BUCKET/NAME`.

    Raises:
        InputError: the path is malformed.
    """
    if not is_gcs(path):
        return LocalFolder(path)
    from mlm_common.storage.gcs import GcsFolder  # imported here, because it imports Google's packages

    return GcsFolder(path)


def folder_and_name(path: str) -> tuple[Folder, str]:
    """Return the folder of the file at `path`, and the name of the file."""
    folder, name = os.path.split(path)
    if is_gcs(path) and (not name or len(folder) < len(GCS_PREFIX)):
        raise InputError(f"The path of a file in Cloud Storage must be gs://BUCKET/NAME; received {path!r}.")
    return open_folder(folder), name


def output_file(path: str, flag: str) -> tuple[Folder, str]:
    """Check that a file can be written to `path`, and return its folder and its name.

    Raises:
        InputError: the folder cannot be written to, or `path` is a folder, a pipe or a device, which a new file would
            replace: a superuser who writes to /dev/stdout would lose it.
    """
    folder, name = folder_and_name(path)
    folder.check_writable()
    if not name or (folder.is_local and Path(path).is_dir()):
        raise InputError(f"{flag} must name a file; {path} is a folder.")
    if folder.is_local and Path(path).exists() and (path.startswith("/dev/") or not Path(path).is_file()):
        raise InputError(f"{flag} must name a file; {path} is a pipe or device, which cannot be replaced.")
    return folder, name


def read_file(path: str) -> bytes:
    """Read a file, local or `gs://`."""
    folder, name = folder_and_name(path)
    return folder.read_bytes(name)


@contextmanager
def local_or_hub(name_or_path: str, *, without: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield a name that transformers can load: a local copy of a `gs://` folder, or the local path or Hub id itself.

    Args:
        name_or_path: a local path, a `gs://` folder or a Hub id.
        without: files of a `gs://` folder whose names have these endings are not copied.
    """
    folder = open_folder(name_or_path)
    if folder.is_local:
        yield name_or_path
    else:
        names = [name for name in folder.list_files() if not name.endswith(without)] if without else None
        with folder.local_copy(names) as copy:
            yield copy


def looks_local(name: str) -> bool:
    """Return whether a name must be a local path rather than an id on the Hub or a `gs://` path.

    Ids on the Hub are NAME or USER/NAME. So a name is a path if it starts with `/`, `.` or `~`, has more than one
    slash, is in an existing folder, or exists.
    """
    if is_gcs(name):
        return False
    path = Path(name)
    is_in_folder = len(path.parts) > 1 and path.parent.is_dir()
    return name.startswith(("/", ".", "~")) or len(path.parts) > 2 or is_in_folder or path.exists()


def check_folder_or_hub(name: str, flag: str | None = None) -> None:
    """Check that a name that must be a local folder exists. Ids on the Hub and `gs://` paths are not checked.

    Raises:
        InputError: the folder does not exist; the message starts with `flag`.
    """
    if looks_local(name):
        check_folder(name, flag)


def check_folder(path: str, flag: str | None = None) -> None:
    """Check that a local folder exists. `gs://` paths are not checked.

    Raises:
        InputError: the folder does not exist; the message starts with `flag`.
    """
    if not is_gcs(path) and not os.path.isdir(path):  # noqa: PTH112 (pathlib's is_dir raises if a parent is unreadable)
        raise missing(path, flag, "folder")


def check_file(path: str, flag: str | None = None) -> None:
    """Check that a local file exists. `gs://` paths are not checked.

    Raises:
        InputError: the file does not exist; the message starts with `flag`.
    """
    if not is_gcs(path) and not os.path.isfile(path):  # noqa: PTH113 (pathlib's is_file raises for unreadable parents)
        raise missing(path, flag, "file")


def missing(path: str, flag: str | None = None, kind: Literal["folder", "file"] = "folder") -> InputError:
    """Make the error for a path without a folder or file of this kind; it names the most similar existing path."""
    start = f"{flag}: there" if flag else "There"
    try:
        Path(path).stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    # A parent folder cannot be entered, or the name is too long or has a zero byte.
    except (OSError, ValueError) as error:
        return InputError(f"{flag + ': ' if flag else ''}{path!r} cannot be read: {getattr(error, 'strerror', error)}.")
    else:
        actual = "folder" if Path(path).is_dir() else "file" if Path(path).is_file() else "pipe or device"
        return InputError(f"{start} is no {kind} {path}: it is a {actual}.")
    return InputError(f"{start} is no {kind} {path}{did_you_mean(path) or '.'}")


def did_you_mean(path: str) -> str:
    """Return "; did you mean …?" with the most similar existing path, or an empty string if there is none.

    Each part of the path that does not exist is replaced by the most similar name in the same folder.
    """
    nearest = Path()
    for part in Path(path).parts:
        if not Path(nearest, part).exists():
            is_listed = nearest.is_dir() and os.access(nearest, os.R_OK)
            names = sorted(child.name for child in nearest.iterdir()) if is_listed else []
            similar = difflib.get_close_matches(part, names, n=1)
            if not similar or is_gcs(path):
                return ""
            part = similar[0]
        nearest = Path(nearest, part)
    return f"; did you mean {nearest}?"


def short_path(path: str) -> str:
    """Shorten an absolute path inside the working directory to a relative path. Return other paths unchanged."""
    return os.path.relpath(path) if path.startswith(f"{Path.cwd()}/") else path
