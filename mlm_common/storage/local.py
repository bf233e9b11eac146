"""A local folder: files are written under another name in the same folder, then renamed."""

import errno
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mlm_common.errors import InputError
from mlm_common.storage.folder import PARTIAL_SUFFIX, PROBE_PREFIX, Folder, NewFile, check_locks

REFUSALS = (errno.EACCES, errno.EPERM, errno.EROFS)


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
                # Without the sticky bit, so that anyone who may write there may also delete what others left.
                path.parent.chmod(stat.S_IMODE(path.parent.parent.stat().st_mode) & ~stat.S_ISVTX)
            with path.open("x", encoding="utf-8") as file:
                file.write(text)

    def replace_text(self, name: str, text: str, *, before: str) -> None:
        # In place: renaming would bring back a file that was deleted meanwhile.
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
        path = Path(os.path.normpath(Path(self.path).absolute()))
        existing = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
        try:
            # Under a random name, so that a second program may do the same.
            with tempfile.TemporaryDirectory(prefix=f".{PROBE_PREFIX}", suffix=PARTIAL_SUFFIX, dir=existing) as probe:
                folder = Path(probe) / path.relative_to(existing)
                folder.mkdir(parents=True, exist_ok=True)
                (folder / "file").write_bytes(b"-")
        except OSError as error:
            raise _not_writable(self.path, error, existing) from error

    @contextmanager
    def local_copy(self, names: Iterable[str] | None = None) -> Iterator[str]:  # noqa: ARG002
        if not Path(self.path).is_dir():
            raise InputError(f"The path of a folder is needed; there is no folder {self.path}.")
        yield self.path

    @contextmanager
    def staging(self) -> Iterator[str]:
        yield self.path

    def _path(self, name: str) -> Path:
        return Path(self.path_of(name)) if name else Path(self.path)


@contextmanager
def explained_refusals(folder: str) -> Iterator[None]:
    """Explain errors of missing permission; others, such as a full disk, stay as they are.

    Raises:
        InputError: names the folder, and how to fix it.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in REFUSALS:
            raise
        raise _not_writable(folder, error, error.filename) from error


def _not_writable(folder: str, error: OSError, place: object) -> InputError:
    return InputError(
        f"The folder of the output must be writable; {folder} is not: {error.strerror or error} ({place}). Name "
        "another folder, or change its permissions."
    )


class _NewLocalFile(NewFile):
    """A file in the folder, under a name that is not listed until `finish`."""

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
