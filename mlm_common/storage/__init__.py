"""Files in a local folder or in Google Cloud Storage (`gs://bucket/name`), read and written the same way.

`open_folder` returns a `Folder` (see `folder.py`): a `LocalFolder` or a `GcsFolder`. `reading.py` finds files by name
or glob, and reads them from any byte.
"""

import os.path
import re
from collections.abc import Iterator
from contextlib import contextmanager

from mlm_common.errors import InputError
from mlm_common.storage.folder import PARTIAL_SUFFIX, PROBE_PREFIX, Folder, NewFile
from mlm_common.storage.gcs import PREFIX, CloudStorageError, GcsFolder
from mlm_common.storage.local import LocalFolder

__all__ = [
    "PARTIAL_SUFFIX",
    "PROBE_PREFIX",
    "CloudStorageError",
    "Folder",
    "NewFile",
    "folder_and_name",
    "is_gcs",
    "local_or_hub",
    "open_folder",
    "read_file",
]


_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # at least two letters: one is a drive of Windows


def is_gcs(path: str) -> bool:
    """Return whether the path is in Cloud Storage.

    Raises:
        InputError: it is neither local nor `gs://`.
    """
    if not path.startswith(PREFIX) and _SCHEME.match(path):
        raise InputError(f"A path must be local or gs://BUCKET/NAME; received {path!r}.")
    return path.startswith(PREFIX)


def open_folder(path: str) -> Folder:
    """Open a folder, which need not exist; its path is a local one or `gs://BUCKET/NAME`, else an InputError."""
    return GcsFolder(path) if is_gcs(path) else LocalFolder(path)


def folder_and_name(path: str) -> tuple[Folder, str]:
    """Open the folder of the file at `path`, and split off the file's name."""
    folder, name = os.path.split(path)
    if is_gcs(path) and (not name or len(folder) < len(PREFIX)):
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
