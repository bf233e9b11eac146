"""The interface of a folder of files, which may be local or in Google Cloud Storage, and the local implementation.

A write is all or nothing, and replaces an existing file. A local file is written under another name in the same folder
and then renamed.

A missing file raises `FileNotFoundError`, and writing without permission raises `InputError`. In Cloud Storage every
method raises `InputError` if the user must act (no credentials, no permission, no such bucket, another program writes
the same object), and `CloudStorageError` if Cloud Storage did not answer during two minutes of retries.
"""

import errno
import json
import os
import re
import shutil
import stat
import tempfile
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

from mlm_common.errors import InputError, RunFailedError

GCS_PREFIX = "gs://"
BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
PARTIAL_SUFFIX = ".partial"
# Prefix of the files that `check_writable` writes.
PROBE_PREFIX = "writable-"
# Subfolder that records who may write to a folder (see `mlm_common.folder_lock`). The subfolder is not part of the
# folder's content.
OWNER_FOLDER = ".owner"
# The connection pool of Cloud Storage's client has ten connections.
NUM_TRANSFERS = 8
# Error numbers that mean missing permission.
REFUSALS = (errno.EACCES, errno.EPERM, errno.EROFS)


class CloudStorageError(RunFailedError):
    """Cloud Storage did not answer during two minutes of retries, or bytes were changed during the transfer."""


# {path of a folder: the `FolderLock` that this process holds on it}.
locks: dict[str, Any] = {}


def bucket_and_name(path: str) -> tuple[str, str]:
    """Split `gs://bucket/name` into bucket and name. The name is empty if the path is a bucket.

    Raises:
        InputError: the path is malformed.
    """
    bucket, _, name = path.removeprefix(GCS_PREFIX).partition("/")
    if not path.startswith(GCS_PREFIX) or not BUCKET.fullmatch(bucket) or name.startswith("/") or "//" in name:
        raise InputError(f"A Cloud Storage path must be gs://BUCKET/NAME, with no empty part; received {path!r}.")
    return bucket, name


def check_locks(path: str) -> None:
    """Check before a write that this process still holds its locks on the folders that contain `path`."""
    for folder, lock in list(locks.items()):
        if f"{path}/".startswith(f"{folder}/"):
            lock.check()


@dataclass(frozen=True)
class Folder(ABC):
    """A folder, which need not exist. The `name` of a file may contain subfolders, as in `train/manifest.json`."""

    path: str
    is_local: ClassVar[bool]

    def __str__(self) -> str:
        return self.path

    def path_of(self, name: str) -> str:
        return f"{self.path.rstrip('/')}/{name}" if self.path else name

    def subfolder(self, name: str) -> "Folder":
        return type(self)(self.path_of(name))

    @abstractmethod
    def exists(self, name: str = "") -> bool:
        """Return whether a file or folder exists. In Cloud Storage a folder exists as long as it contains a file."""

    @abstractmethod
    def list_files(self) -> dict[str, int]:
        """Return {name: size in bytes} of the files directly in the folder; empty if the folder is missing.

        Leftovers of killed writes are not listed.
        """

    @abstractmethod
    def read_bytes(self, name: str) -> bytes:
        """Read a file.

        Raises:
            FileNotFoundError: there is no such file.
        """

    def read_text(self, name: str) -> str:
        return self.read_bytes(name).decode("utf-8")

    @abstractmethod
    def write_bytes(self, name: str, data: bytes) -> None:
        """Write a file, all or nothing. Missing folders are created."""

    def write_text(self, name: str, text: str) -> None:
        self.write_bytes(name, text.encode("utf-8"))

    def write_json(self, name: str, record: Any) -> None:
        text = json.dumps(record, indent=2, ensure_ascii=False) + "\n"
        # Python represents file names that are not UTF-8 with surrogates. `backslashreplace` escapes these as in JSON.
        self.write_bytes(name, text.encode("utf-8", "backslashreplace"))

    @abstractmethod
    def create_text(self, name: str, text: str) -> None:
        """Create a UTF-8 file. If several programs create it at the same time, only one succeeds.

        A missing local folder is created with the permissions of its parent.

        Raises:
            FileExistsError: the file exists.
        """

    @abstractmethod
    def replace_text(self, name: str, text: str, *, before: str) -> None:
        """Replace the text of a UTF-8 file if it still equals `before`.

        Raises:
            FileNotFoundError: the file does not exist, or its text is not `before`.
        """

    @abstractmethod
    def append_text(self, name: str, text: str, *, before: str) -> None:
        """Append to a UTF-8 file whose text is `before`.

        If the process is killed, it may leave only a part of `text`. In Cloud Storage, where objects cannot grow, the
        object is rewritten.
        """

    @abstractmethod
    def replacing(self, name: str) -> AbstractContextManager[Path]:
        """Yield a local path to write to. The file there gets this name at the end, or is deleted after an error."""

    @abstractmethod
    def new_file(self) -> "NewFile":
        """Open a file for writing that gets its name only when it is complete."""

    @abstractmethod
    def upload_file(self, local_path: str, name: str) -> None:
        """Copy a local file to this folder, all or nothing.

        Does nothing if both are the same local file, or if the object in Cloud Storage already has the same bytes.
        """

    def upload_folder(self, local_folder: str, last: str = "") -> None:
        """Copy all files of a local folder and its subfolders to this folder, several at a time.

        Args:
            local_folder: folder to copy. Leftovers of killed writes are not copied.
            last: name of files, in any subfolder, to copy after all others, such as a manifest that marks its folder as
                complete.
        """
        root = Path(local_folder)
        if not root.is_dir():
            raise FileNotFoundError(errno.ENOENT, "no such folder", local_folder)

        def upload(name: Path) -> None:
            self.upload_file(str(root / name), name.as_posix())

        names = finished_files(root)
        for_all(upload, [name for name in names if name.name != last])
        for_all(upload, [name for name in names if name.name == last])

    @abstractmethod
    def delete_files(self, names: Iterable[str]) -> None:
        """Delete the files with these names. Missing files are ignored."""

    @abstractmethod
    def delete(self) -> None:
        """Delete the folder with all its content, if it exists."""

    @abstractmethod
    def delete_partial_files(self, prefix: str = "") -> None:
        """Delete the partial files with this prefix, directly in the folder, that killed writes of any program left."""

    @abstractmethod
    def check_writable(self) -> None:
        """Check that files can be written and replaced. The check writes a test file and deletes it again.

        Raises:
            InputError: the folder is not writable.
        """

    @abstractmethod
    def local_copy(self, names: Iterable[str] | None = None) -> AbstractContextManager[str]:
        """Yield a local folder that contains the files with these names, or all files.

        A local folder is yielded itself. For a folder in Cloud Storage, a temporary copy is yielded.

        Raises:
            InputError: the folder is missing or, in Cloud Storage, empty.
        """

    @abstractmethod
    def staging(self) -> AbstractContextManager[str]:
        """Yield a local folder for files to be uploaded with `upload_folder`. A local folder is yielded itself."""


class NewFile(AbstractContextManager["NewFile"]):
    """A file that is written in parts and gets its name when it is complete. Without `finish` it is deleted."""

    _file: BinaryIO

    def write(self, data: bytes) -> None:
        self._file.write(data)

    @abstractmethod
    def finish(self, name: str) -> None:
        """Store the whole file and give it its name."""

    def close(self) -> None:
        """Close the file, and delete it if it has no name."""
        self._file.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def finished_files(folder: Path) -> list[Path]:
    """Return the files of a local folder and its subfolders, relative to it, sorted.

    Leftovers of killed writes and the files of the lock are left out.
    """
    names = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return [
        name for name in names if not any(part.endswith(PARTIAL_SUFFIX) or part == OWNER_FOLDER for part in name.parts)
    ]


def for_all(function: Callable[[Any], None], items: Iterable[Any]) -> None:
    """Call `function` on all items, several at a time. After an error, start no more calls, and raise the error.

    The `transfer_manager` of google-cloud-storage is unsuitable: it continues after a failure, and gives all uploads
    the same precondition.
    """
    items = list(items)
    if len(items) == 1:  # without a pool, whose threads would delay the end of the process
        function(items[0])
        return
    with ThreadPoolExecutor(NUM_TRANSFERS) as pool:
        for _ in pool.map(function, items):
            pass


class LocalFolder(Folder):
    """A folder on this machine."""

    is_local = True

    def exists(self, name: str = "") -> bool:
        return self._path(name).exists()

    def list_files(self) -> dict[str, int]:
        folder = Path(self.path)
        files = (path for path in sorted(folder.iterdir()) if path.is_file()) if folder.is_dir() else ()
        return {path.name: path.stat().st_size for path in files if not path.name.endswith(PARTIAL_SUFFIX)}

    def read_bytes(self, name: str) -> bytes:
        return self._path(name).read_bytes()

    def write_bytes(self, name: str, data: bytes) -> None:
        with self.replacing(name) as partial:
            partial.write_bytes(data)

    def create_text(self, name: str, text: str) -> None:
        path = self._path(name)
        with explained_refusals(self.path):
            path.parent.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                path.parent.mkdir()
                # Without the sticky bit, anyone who may write to the folder may also delete other users' files.
                path.parent.chmod(stat.S_IMODE(path.parent.parent.stat().st_mode) & ~stat.S_ISVTX)
            with path.open("x", encoding="utf-8") as file:
                file.write(text)

    def replace_text(self, name: str, text: str, *, before: str) -> None:
        # Written in place, because renaming a new file would bring back a file that was deleted in the meantime.
        with self._path(name).open("r+", encoding="utf-8") as file:
            if file.read() != before:
                raise FileNotFoundError(errno.ENOENT, "the file was changed", self.path_of(name))
            file.seek(0)
            file.write(text)
            file.truncate()

    def append_text(self, name: str, text: str, *, before: str) -> None:  # noqa: ARG002
        check_locks(self.path)
        path = self._path(name)
        with explained_refusals(self.path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())

    @contextmanager
    def replacing(self, name: str) -> Iterator[Path]:
        check_locks(self.path)
        final = self._path(name)
        partial = final.with_name(f".{final.name}.{uuid.uuid4().hex}{PARTIAL_SUFFIX}")
        with explained_refusals(self.path):
            final.parent.mkdir(parents=True, exist_ok=True)
            try:
                yield partial
                with partial.open("rb+") as written:
                    os.fsync(written.fileno())
                check_locks(self.path)
                partial.replace(final)
            finally:
                partial.unlink(missing_ok=True)

    def new_file(self) -> NewFile:
        with explained_refusals(self.path):
            return _NewLocalFile(self.path)

    def upload_file(self, local_path: str, name: str) -> None:
        if Path(local_path).resolve() != self._path(name).resolve():
            with self.replacing(name) as partial:
                shutil.copyfile(local_path, partial)

    def delete_files(self, names: Iterable[str]) -> None:
        for name in names:
            check_locks(self.path)
            self._path(name).unlink(missing_ok=True)

    def delete(self) -> None:
        check_locks(self.path)
        if Path(self.path).exists():
            shutil.rmtree(self.path)

    def delete_partial_files(self, prefix: str = "") -> None:
        check_locks(self.path)
        for path in Path(self.path).glob(f".{prefix}*{PARTIAL_SUFFIX}"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def check_writable(self) -> None:
        try:
            self.path.encode()
        except UnicodeEncodeError as error:  # tokenizers and TensorFlow accept only UTF-8 paths
            raise InputError(
                f"The path of an output must be UTF-8. Either {os.fsencode(self.path)!r} is not, or Python uses "
                "another encoding because of LC_ALL or PYTHONUTF8. Choose another path, or set PYTHONUTF8=1."
            ) from error
        path = Path(os.path.normpath(Path(self.path).absolute()))
        existing = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
        try:
            # The random name lets several programs do this at the same time.
            with tempfile.TemporaryDirectory(prefix=f".{PROBE_PREFIX}", suffix=PARTIAL_SUFFIX, dir=existing) as probe:
                folder = Path(probe) / path.relative_to(existing)
                folder.mkdir(parents=True, exist_ok=True)
                (folder / "file").write_bytes(b"-")
        except OSError as error:
            raise _not_writable(self.path, error, existing) from error

    @contextmanager
    def local_copy(self, names: Iterable[str] | None = None) -> Iterator[str]:  # noqa: ARG002
        if not Path(self.path).is_dir():
            raise InputError(f"There is no folder {self.path}.")
        yield self.path

    @contextmanager
    def staging(self) -> Iterator[str]:
        yield self.path

    def _path(self, name: str) -> Path:
        return Path(self.path_of(name)) if name else Path(self.path)


@contextmanager
def explained_refusals(folder: str) -> Iterator[None]:
    """Turn errors about missing permission into an InputError with a hint.

    Other errors, such as a full disk, are raised unchanged.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        raise _not_writable(folder, error, error.filename) from error


def _not_writable(folder: str, error: OSError, place: object) -> InputError:
    return InputError(
        f"The output folder must be writable; {folder} is not: {error.strerror or error} ({place}). Name another "
        "folder, or change the permissions of this folder."
    )


class _NewLocalFile(NewFile):
    """A file in a local folder. Until `finish`, it has a temporary name, which `list_files` leaves out."""

    def __init__(self, folder: str) -> None:
        check_locks(folder)
        self._folder = folder
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._partial = Path(folder) / f".{uuid.uuid4().hex}{PARTIAL_SUFFIX}"
        self._file = self._partial.open("xb")

    def finish(self, name: str) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        check_locks(self._folder)
        self._partial.replace(self._partial.with_name(name))

    def close(self) -> None:
        try:
            self._file.close()
        finally:
            self._partial.unlink(missing_ok=True)
