"""Files in a local folder or in Google Cloud Storage (`gs://bucket/name`), read and written the same way.

A write is all or nothing and replaces what was there: locally a temporary file in the same folder, then a rename; in
Cloud Storage see `cloud_storage.py`. A missing file is a `FileNotFoundError`. For a `gs://` path every function raises
`InputError` where a person must act (a malformed path, no credentials, no permission, no such bucket, another program
writing the same object), and `ConnectionError` where Cloud Storage did not answer for two minutes of repeated tries.
"""

import contextlib
import errno
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

from mlm_common.errors import InputError
from mlm_common.storage import gcs as cloud_storage
from mlm_common.storage import gcs_client as cloud_client
from mlm_common.worker_pool import interrupts_put_off

PARTIAL_SUFFIX = ".partial"

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")  # at least two letters, which spares the drives of Windows


def is_remote(path: str) -> bool:
    """Return whether `path` is in Cloud Storage.

    Raises:
        InputError: the path is neither a local one nor `gs://BUCKET/NAME`.
    """
    if path.startswith(cloud_client.PREFIX):
        cloud_client.bucket_and_name(path)
        return True
    if _SCHEME.match(path):
        raise InputError(f"A path must be local or gs://BUCKET/NAME; received {path!r}.")
    return False


def join(folder: str, *names: str) -> str:
    """Return the path of a file in `folder`, local or `gs://`."""
    return "/".join([folder.rstrip("/"), *names] if folder else names)


def exists(path: str) -> bool:
    """Return whether a file or a folder is there (in Cloud Storage a folder is there while a file is in it)."""
    return cloud_storage.exists(path) if is_remote(path) else Path(path).exists()


def list_files(folder: str) -> dict[str, int]:
    """Return name -> size in bytes of the files directly in `folder`, by name; empty where the folder is missing.

    What a killed write has left behind is not listed.
    """
    if is_remote(folder):
        return cloud_storage.list_files(folder)
    if not Path(folder).is_dir():
        return {}
    files = (path for path in sorted(Path(folder).iterdir()) if path.is_file())
    return {path.name: path.stat().st_size for path in files if not path.name.endswith(PARTIAL_SUFFIX)}


def read_bytes(path: str) -> bytes:
    """Return the content of a file."""
    return cloud_storage.read_bytes(path) if is_remote(path) else Path(path).read_bytes()


def read_text(path: str) -> str:
    """Return the content of a UTF-8 file."""
    return read_bytes(path).decode("utf-8")


def write_bytes(path: str, data: bytes) -> None:
    """Write a file, all or nothing, replacing what was there; missing folders are made."""
    if is_remote(path):
        cloud_storage.upload_bytes(data, path)
    else:
        with replacing(path) as partial:
            partial.write_bytes(data)


def write_text(path: str, text: str) -> None:
    """Write a UTF-8 file, all or nothing, replacing what was there; missing folders are made."""
    write_bytes(path, text.encode("utf-8"))


def upload_file(local_path: str, destination: str) -> None:
    """Copy a local file to `destination`, a `gs://` or local path, all or nothing, replacing what was there.

    Nothing is done where both are the same local file; nothing is sent where the object has the same bytes already.
    """
    if is_remote(destination):
        with Path(local_path).open("rb") as file:
            cloud_storage.upload_file(file, destination)
    elif Path(local_path).resolve() != Path(destination).resolve():
        with replacing(destination) as partial:
            shutil.copyfile(local_path, partial)


def upload_folder(local_folder: str, destination: str, last: str = "") -> None:
    """Copy all files of a local folder, those of its subfolders too, to the folder `destination`, several at once.

    Args:
        local_folder: where the files are; what a killed write has left behind there is not copied.
        destination: a `gs://` or local folder; other files in it stay.
        last: name of the files, in whatever subfolder, that are copied once all others are there: a manifest, whose
            presence says that its folder is complete.
    """
    root = Path(local_folder)
    if not root.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such folder", local_folder)
    names = _finished_files(root)

    def upload(name: Path) -> None:
        upload_file(str(root / name), join(destination, name.as_posix()))

    cloud_storage.for_all(upload, [name for name in names if name.name != last])
    cloud_storage.for_all(upload, [name for name in names if name.name == last])


def publish_folder(local_folder: str, destination: str, last: str) -> None:
    """Write all files of a local folder, those of its subfolders too, so that a killed write never seems complete.

    The file `last` is deleted from `destination` first and written last. A local destination appears in one step, or
    where it was there before, files are written unseen and then moved in; Ctrl-C is put off meanwhile.

    Args:
        local_folder: where the files are; what a killed write has left behind there is not copied.
        destination: a `gs://` or local folder; other files in it stay.
        last: name of the file, directly in the folder, whose presence says that the folder is complete.
    """
    if not Path(local_folder, last).is_file():
        raise FileNotFoundError(errno.ENOENT, "no such file", str(Path(local_folder, last)))
    if is_remote(destination):
        delete_files(destination, [last])
        upload_folder(local_folder, destination, last)
    else:
        with interrupts_put_off():
            _publish_locally(Path(local_folder), Path(destination).absolute(), Path(last))


def check_writable(folder: str) -> None:
    """Return when files can be written to `folder` and replaced, tried out and leaving nothing behind.

    Raises:
        InputError: they cannot; says why, and what cures it.
    """
    if is_remote(folder):
        cloud_storage.check_writable(folder)
        return
    path = Path(os.path.normpath(Path(folder).absolute()))
    existing = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
    try:
        # In a folder of another name, so that a second program doing the same is not in the way.
        with tempfile.TemporaryDirectory(prefix=".writable-", suffix=PARTIAL_SUFFIX, dir=existing) as probe:
            write_bytes(str(Path(probe) / path.relative_to(existing) / "file"), b"-")
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(
            f"The folder of the output must be writable; {folder} is not: {reason} ({existing}). Name another folder, "
            "or change its permissions."
        ) from error


def delete_files(folder: str, names: Iterable[str]) -> None:
    """Delete files directly in `folder`; one that is not there is passed over."""
    if is_remote(folder):
        cloud_storage.delete_files(folder, names)
    else:
        for name in names:
            Path(join(folder, name)).unlink(missing_ok=True)


@contextlib.contextmanager
def local_copy(folder: str) -> Iterator[str]:
    """Give a local folder with all files of `folder`: itself when local, else a copy that is deleted at the end.

    Raises:
        InputError: the folder is missing or, in Cloud Storage, empty.
    """
    if is_remote(folder):
        with tempfile.TemporaryDirectory(prefix="local-copy-") as copy:
            cloud_storage.download_folder(folder, copy)
            yield copy
    elif Path(folder).is_dir():
        yield folder
    else:
        raise InputError(f"The path of a folder is needed; there is no folder {folder}.")


def _publish_locally(folder: Path, destination: Path, last: Path) -> None:
    is_new = not destination.exists()
    # In an existing folder, which may be a disk of its own and all that one may write to.
    new = (destination.parent if is_new else destination) / f".{destination.name}.{uuid.uuid4().hex}{PARTIAL_SUFFIX}"
    try:
        upload_folder(str(folder), str(new))
        if is_new:
            new.rename(destination)
            return
        (destination / last).unlink(missing_ok=True)
        for name in sorted(_finished_files(folder), key=last.__eq__):
            (destination / name).parent.mkdir(parents=True, exist_ok=True)
            (new / name).replace(destination / name)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _finished_files(folder: Path) -> list[Path]:
    """Return the files of a folder and its subfolders, relative to it and sorted, without what killed writes left."""
    names = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return [name for name in names if not any(part.endswith(PARTIAL_SUFFIX) for part in name.parts)]


@contextlib.contextmanager
def replacing(path: str) -> Iterator[Path]:
    """Give a local path to write to; what was written there becomes `path` at the end, or is deleted after an error."""
    if is_remote(path):
        with tempfile.TemporaryDirectory(prefix="upload-") as folder:
            yield Path(folder) / "file"
            upload_file(str(Path(folder) / "file"), path)
        return
    final = Path(path)
    final.parent.mkdir(parents=True, exist_ok=True)
    partial = final.with_name(f".{final.name}.{uuid.uuid4().hex}{PARTIAL_SUFFIX}")
    try:
        yield partial
        with partial.open("rb+") as written:
            os.fsync(written.fileno())
        partial.replace(final)
    finally:
        partial.unlink(missing_ok=True)
