"""The interface of a folder of files, which is local or in Google Cloud Storage.

A write is all or nothing and replaces what was there. A missing file is a `FileNotFoundError`. Writing where that is
forbidden is an `InputError`. In Cloud Storage every method raises `InputError` where a person must act (no credentials,
no permission, no such bucket, another program writing the same object), and `CloudStorageError` where Cloud Storage did
not answer for two minutes of repeated tries.
"""

import errno
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, ClassVar, Protocol

PARTIAL_SUFFIX = ".partial"
# Of the names of what `check_writable` writes.
PROBE_PREFIX = "writable-"
# Holds who may write to a folder (see `mlm_common.folder_lock`), and is no part of its content.
OWNER_FOLDER = ".owner"
# The connection pool of Cloud Storage's client holds ten.
NUM_TRANSFERS = 8


class Guard(Protocol):
    """Knows whether this process may write to a folder."""

    def check(self) -> None:
        """Raise where it may not."""


# By the paths of folders.
locks: dict[str, Guard] = {}


def check_locks(path: str) -> None:
    """Check, before a write, that this process may still write to the folders that hold `path`."""
    for folder, guard in list(locks.items()):
        if f"{path}/".startswith(f"{folder}/"):
            guard.check()


@dataclass(frozen=True)
class Folder(ABC):
    """A folder, which need not exist; a `name` in it may lead through subfolders: `train/manifest.json`."""

    path: str
    is_local: ClassVar[bool]

    def __str__(self) -> str:
        return self.path

    def path_of(self, name: str) -> str:
        """Join the folder's path and a name in it."""
        return f"{self.path.rstrip('/')}/{name}" if self.path else name

    def subfolder(self, name: str) -> "Folder":
        """Open a folder in this one."""
        return type(self)(self.path_of(name))

    @abstractmethod
    def exists(self, name: str = "") -> bool:
        """Ask whether a file or folder is there (in Cloud Storage a folder is there while a file is in it)."""

    @abstractmethod
    def list_files(self) -> dict[str, int]:
        """List the files directly in the folder, by name: {name: size in bytes}; none where it is missing.

        What a killed write has left behind is not listed.
        """

    @abstractmethod
    def read_bytes(self, name: str) -> bytes:
        """Read a file."""

    def read_text(self, name: str) -> str:
        """Read a UTF-8 file."""
        return self.read_bytes(name).decode("utf-8")

    @abstractmethod
    def write_bytes(self, name: str, data: bytes) -> None:
        """Write a file, all or nothing, replacing what was there; missing folders are made."""

    def write_text(self, name: str, text: str) -> None:
        """Write a UTF-8 file, all or nothing, replacing what was there; missing folders are made."""
        self.write_bytes(name, text.encode("utf-8"))

    def write_json(self, name: str, record: Any) -> None:
        """Write a UTF-8 file of JSON for people to read, too, as `write_text` does."""
        text = json.dumps(record, indent=2, ensure_ascii=False) + "\n"
        # A file's name that is not UTF-8 has surrogates in Python, for which Python's escape is JSON's.
        self.write_bytes(name, text.encode("utf-8", "backslashreplace"))

    @abstractmethod
    def create_text(self, name: str, text: str) -> None:
        """Write a UTF-8 file that must not be there yet; of several programs that do so at once one alone succeeds.

        A missing local folder is created with the permissions of the folder above it.

        Raises:
            FileExistsError: it is there.
        """

    @abstractmethod
    def replace_text(self, name: str, text: str, *, before: str) -> None:
        """Write a UTF-8 file that must hold `before`, and never make it anew.

        Raises:
            FileNotFoundError: it holds something else, or is not there.
        """

    @abstractmethod
    def append_text(self, name: str, text: str, *, before: str) -> None:
        """Append to a UTF-8 file that holds `before`; a kill may leave the text in part.

        An object, which cannot grow, is written anew.
        """

    @abstractmethod
    def replacing(self, name: str) -> AbstractContextManager[Path]:
        """Give a local path to write to: the file of that name at the end, deleted after an error."""

    @abstractmethod
    def new_file(self) -> "NewFile":
        """Begin a file whose name is known only at its end."""

    @abstractmethod
    def upload_file(self, local_path: str, name: str) -> None:
        """Copy a local file here, all or nothing, replacing what was there.

        Nothing is done where both are the same local file; nothing is sent where the object has the same bytes already.
        """

    def upload_folder(self, local_folder: str, last: str = "") -> None:
        """Copy all files of a local folder here, those of its subfolders too, several at once.

        Args:
            local_folder: where the files are; what a killed write has left behind there is not copied.
            last: name of the files, in whatever subfolder, that are copied once all others are there: a manifest, whose
                presence says that its folder is complete.
        """
        root = Path(local_folder)
        if not root.is_dir():
            raise FileNotFoundError(errno.ENOENT, "no such folder", local_folder)

        def upload(name: Path) -> None:
            self.upload_file(str(root / name), name.as_posix())

        names = finished_files(root)
        for_all(upload, [name for name in names if name.name != last])
        for_all(upload, [name for name in names if name.name == last])

    def publish(self, local_folder: str, last: str) -> None:
        """Write all files of a local folder here, those of its subfolders too; a killed write never seems complete.

        The file `last` is deleted first and written last. A local folder appears in one step, or where it was there
        before, files are written unseen and then moved in; Ctrl-C is put off meanwhile. Other files in it stay.

        Args:
            local_folder: where the files are; what a killed write has left behind there is not copied.
            last: name of the file, directly in the folder, whose presence says that the folder is complete.
        """
        if not Path(local_folder, last).is_file():
            raise FileNotFoundError(errno.ENOENT, "no such file", str(Path(local_folder, last)))
        self._publish(local_folder, last)

    @abstractmethod
    def _publish(self, local_folder: str, last: str) -> None: ...

    @abstractmethod
    def delete_files(self, names: Iterable[str]) -> None:
        """Delete files; one that is not there is passed over."""

    @abstractmethod
    def delete(self) -> None:
        """Delete the folder with all that is in it; one that is not there is passed over."""

    @abstractmethod
    def delete_partial_files(self, prefix: str = "") -> None:
        """Delete what killed writes of names with this prefix left directly in the folder; other programs' too."""

    @abstractmethod
    def check_writable(self) -> None:
        """Check that files can be written and replaced, tried out and leaving nothing behind.

        Raises:
            InputError: they cannot; says why, and what cures it.
        """

    @abstractmethod
    def local_copy(self, names: Iterable[str] | None = None) -> AbstractContextManager[str]:
        """Give a local folder with all files, or those of these names: itself when local, else a passing copy.

        Raises:
            InputError: the folder is missing or, in Cloud Storage, empty.
        """

    @abstractmethod
    def staging(self) -> AbstractContextManager[str]:
        """Give a local folder to put files into, from which `upload_folder` brings them here: itself when local."""


class NewFile(ABC):
    """A file that is written bit by bit and gets its name last; left without `finish`, it is deleted."""

    _file: BinaryIO

    def write(self, data: bytes) -> None:
        """Append to the file."""
        self._file.write(data)

    @abstractmethod
    def finish(self, name: str) -> None:
        """Make it the file of that name, replacing what was there, once all of it is stored."""

    def close(self) -> None:
        """Delete the file where it has no name."""
        self._file.close()

    def __enter__(self) -> "NewFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def finished_files(folder: Path) -> list[Path]:
    """List the files of a local folder and its subfolders, relative to it, sorted.

    What killed writes left is left out, and what tells the folder's owner.
    """
    names = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return [
        name for name in names if not any(part.endswith(PARTIAL_SUFFIX) or part == OWNER_FOLDER for part in name.parts)
    ]


def for_all(function: Callable[[Any], None], items: Iterable[Any]) -> None:
    """Call `function` on all items, several at once; the first failure is raised, and cancels those not begun.

    The `transfer_manager` of google-cloud-storage continues after a failure, and gives all uploads one precondition.
    """
    items = list(items)
    if len(items) == 1:  # without a pool, whose threads the end of the process waits for
        function(items[0])
        return
    with ThreadPoolExecutor(NUM_TRANSFERS) as pool:
        for _ in pool.map(function, items):
            pass
