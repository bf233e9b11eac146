"""A folder in Google Cloud Storage, accessed with google-cloud-storage. Error messages say how to fix the problem.

An upload names the generation of the object that it replaces and carries the CRC32C of its bytes. So a retry after a
lost answer can neither overwrite another program's object nor store wrong bytes
(https://cloud.google.com/storage/docs/request-preconditions).

The client retries transient errors (408, 429, 5xx, lost connections) for two minutes. This module also repeats
transfers whose bytes were damaged on arrival.

A large file is uploaded in parts, several at a time, which Cloud Storage then joins
(https://cloud.google.com/storage/docs/parallel-composite-uploads). Multipart uploads of the XML API are not used,
because they do not support preconditions.
"""

import base64
import contextlib
import errno
import functools
import io
import mimetypes
import mmap
import os
import re
import tempfile
import textwrap
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import google_crc32c
from google.api_core import exceptions as api_errors
from google.auth import exceptions as auth_errors
from google.cloud import storage
from google.cloud.storage.exceptions import DataCorruption
from requests import RequestException

from mlm_common.errors import InputError, retry_call
from mlm_common.storage.folder import (
    GCS_PREFIX,
    NUM_TRANSFERS,
    OWNER_FOLDER,
    PARTIAL_SUFFIX,
    CloudStorageError,
    Folder,
    NewFile,
    bucket_and_name,
    check_locks,
    for_all,
)

PROBE_NAME = ".writable"
NUM_TRIES_DAMAGED = 4  # as TensorFlow's client
BLOCK_BYTES = 1 << 20
# Files of at least this size are uploaded in parts. For smaller files, uploading in parts would not be much faster.
IN_PARTS_BYTES = 64 << 20


@dataclass(frozen=True)
class GcsFolder(Folder):
    """A bucket, or the objects in it whose names start with the folder's name."""

    is_local = False

    def __post_init__(self) -> None:
        bucket_and_name(self.path)

    def exists(self, name: str = "") -> bool:
        folder = self.subfolder(name) if name else self
        with explained_errors(folder.path):
            _, object_name = bucket_and_name(folder.path)
            is_folder = any(True for _ in _list_objects(folder.path, max_results=1))
            return is_folder or not object_name or find_blob(folder.path) is not None

    def list_files(self) -> dict[str, int]:
        with explained_errors(self.path):
            blobs = _list_objects(self.path, delimiter="/")
            return {blob.name.rpartition("/")[2]: blob.size for blob in blobs if not _is_partial(blob)}

    def read_bytes(self, name: str) -> bytes:
        path = self.path_of(name)
        with explained_errors(path):
            return bytes(_again_if_damaged(blob_at(path).download_as_bytes))

    def write_bytes(self, name: str, data: bytes) -> None:
        self.upload_open_file(io.BytesIO(data), name)

    def create_text(self, name: str, text: str) -> None:
        path, file = self.path_of(name), io.BytesIO(text.encode())
        with explained_errors(path):
            if not _replace(path, 0, _crc32c(file), _sender(file)):
                raise FileExistsError(errno.EEXIST, "the object exists", path)

    def replace_text(self, name: str, text: str, *, before: str) -> None:
        path, file = self.path_of(name), io.BytesIO(text.encode())
        with explained_errors(path):
            current = find_blob(path)
            if (
                current is None
                or current.crc32c != _crc32c(io.BytesIO(before.encode()))
                or not _replace(path, current.generation, _crc32c(file), _sender(file))
            ):
                raise FileNotFoundError(errno.ENOENT, "the object was changed", path)

    def append_text(self, name: str, text: str, *, before: str) -> None:
        self.write_text(name, before + text)

    @contextmanager
    def replacing(self, name: str) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="upload-") as folder:
            path = Path(folder) / "file"
            yield path
            if path.stat().st_size < IN_PARTS_BYTES:
                self.upload_file(str(path), name)
            else:
                self._upload_in_parts(path, name)

    def new_file(self) -> NewFile:
        return _NewObject(self)

    def upload_file(self, local_path: str, name: str) -> None:
        with Path(local_path).open("rb") as file:
            self.upload_open_file(file, name)

    def upload_open_file(self, file: BinaryIO | mmap.mmap, name: str) -> None:
        """Upload an open file, all or nothing. Does nothing if the object already has the same bytes."""
        _upload(self.path_of(name), file, _sender(file))

    def _upload_in_parts(self, path: Path, name: str) -> None:
        """Upload a local file, all or nothing, as temporary objects that Cloud Storage joins."""
        folder, slash, last = name.rpartition("/")
        stem = f"{folder}{slash}.{last}.{uuid.uuid4().hex}"
        size = path.stat().st_size
        pages_per_part = -(-size // (NUM_TRANSFERS * mmap.ALLOCATIONGRANULARITY))
        starts = range(0, size, pages_per_part * mmap.ALLOCATIONGRANULARITY)
        names = [f"{stem}.{number}{PARTIAL_SUFFIX}" for number in range(len(starts))]

        def upload_part(number: int) -> None:
            num_bytes = min(starts.step, size - starts[number])
            with mmap.mmap(file.fileno(), num_bytes, access=mmap.ACCESS_READ, offset=starts[number]) as part:
                self.upload_open_file(part, names[number])

        def join(blob: Any, **conditions: Any) -> None:
            blob.content_type = "application/octet-stream"
            blob.compose([blob_at(self.path_of(part_name)) for part_name in names], **conditions)

        try:
            with path.open("rb") as file:
                for_all(upload_part, range(len(starts)))
                _upload(self.path_of(name), file, join)
        finally:
            with contextlib.suppress(InputError, CloudStorageError):  # the next run deletes leftovers
                self.delete_files(names)

    def delete_files(self, names: Iterable[str]) -> None:
        def delete(name: str) -> None:
            try:
                blob_at(self.path_of(name)).delete()
            except api_errors.NotFound as error:
                if is_missing_bucket(error):
                    raise

        check_locks(self.path)
        with explained_errors(self.path):
            for_all(delete, names)

    def delete(self) -> None:
        with explained_errors(self.path):
            prefix = _listing_prefix(self.path)[1]
            names = [blob.name.removeprefix(prefix) for blob in _list_objects(self.path)]
        self.delete_files(names)

    def delete_partial_files(self, prefix: str = "") -> None:
        bucket, start = bucket_and_name(self.path_of(f".{prefix}"))
        with explained_errors(self.path):
            names = [
                blob.name.rpartition("/")[2] for blob in list_blobs(bucket, start, delimiter="/") if _is_partial(blob)
            ]
        self.delete_files(names)

    def check_writable(self) -> None:
        # Replacing an object needs the permissions to create and to delete. `testIamPermissions` on the bucket would
        # consider neither grants for some of its objects nor the access scopes of the machine
        # (https://cloud.google.com/storage/docs/oauth-scopes).
        self.write_bytes(PROBE_NAME, b"")
        self.delete_files([PROBE_NAME])

    @contextmanager
    def local_copy(self, names: Iterable[str] | None = None) -> Iterator[str]:
        with tempfile.TemporaryDirectory(prefix="local-copy-") as copy:
            self._download(Path(copy).resolve(), names)
            yield copy

    @contextmanager
    def staging(self) -> Iterator[str]:
        with tempfile.TemporaryDirectory(prefix="staging-") as folder:
            yield folder

    def _download(self, destination: Path, names: Iterable[str] | None) -> None:
        """Download the objects of these names, or all objects in the folder and its subfolders, several at a time."""
        prefix = _listing_prefix(self.path)[1]

        def download(blob: Any) -> None:
            path = (destination / blob.name.removeprefix(prefix)).resolve()
            if not path.is_relative_to(destination):
                raise InputError(
                    f"The names of objects in {self.path} must be inside this folder; {blob.name!r} is outside."
                )
            path.parent.mkdir(parents=True, exist_ok=True)
            with explained_errors(self.path_of(blob.name.removeprefix(prefix))):
                _again_if_damaged(lambda: blob.download_to_filename(str(path)))

        with explained_errors(self.path):
            if names is None:
                owners = f"{prefix}{OWNER_FOLDER}/"
                objects = _list_objects(self.path)
                blobs = [blob for blob in objects if not blob.name.startswith(owners) and not _is_partial(blob)]
                if not blobs:
                    raise InputError(f"There are no files in the folder {self.path}.")
            else:
                blobs = [blob_at(self.path_of(name)) for name in names]
            for_all(download, blobs)


class _NewObject(NewFile):
    """A nameless temporary file that is uploaded when it is complete. A killed process leaves nothing behind."""

    def __init__(self, folder: GcsFolder) -> None:
        self._folder = folder
        self._file = tempfile.TemporaryFile()  # noqa: SIM115

    def finish(self, name: str) -> None:
        self._file.flush()
        self._folder.upload_open_file(self._file, name)


class GcsReader(io.RawIOBase):
    """One generation of an object, open for reading. Each read is one request for exactly the bytes that are read.

    google-cloud-storage's BlobReader is not used, because it requests the size of the object before it seeks, and
    downloads more bytes than are read.

    Attributes:
        read_ahead_bytes: number of bytes to read at once in a sequential read. The number is large, because each read
            is a request.
    """

    read_ahead_bytes = 8 << 20

    def __init__(self, path: str, generation: int, num_bytes: int) -> None:
        self._path = path
        self._blob = blob_at(path)
        self._generation = generation
        self._num_bytes = num_bytes
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_CUR:
            offset += self._position
        elif whence == io.SEEK_END:
            offset += self._num_bytes
        self._position = offset
        return offset

    def readinto(self, buffer: Any) -> int:
        if not len(buffer):
            return 0
        with self._unchanged():
            try:
                # `raw_download` returns the bytes as stored. Part of an object cannot be checked, because the checksum
                # is for the whole object.
                data = self._blob.download_as_bytes(
                    start=self._position,
                    end=self._position + len(buffer) - 1,
                    if_generation_match=self._generation,
                    raw_download=True,
                    checksum=None,
                )
            except api_errors.RequestRangeNotSatisfiable:
                return 0  # the end of the object
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        try:
            yield
        except (api_errors.NotFound, api_errors.PreconditionFailed) as error:
            if is_missing_bucket(error):
                raise
            raise InputError(
                f"{self._path} was replaced or deleted while it was being read. Run the command again."
            ) from error


def _upload(path: str, file: BinaryIO | mmap.mmap, send: Callable[..., None]) -> None:
    """Upload an object, unless it already has the same bytes.

    Args:
        path: path of the object.
        file: content of the object.
        send: `send(blob, if_generation_match=…)` transfers the bytes of the file.

    Raises:
        InputError: another program wrote the object at the same time.
    """
    check_locks(path)
    crc32c = _crc32c(file)
    with explained_errors(path):
        replaced = find_blob(path)
        if replaced and replaced.crc32c == crc32c:
            return
        if not _replace(path, replaced.generation if replaced else 0, crc32c, send):
            raise InputError(f"Only one program at a time may write {path}; another one has just written it.")


def _replace(path: str, generation: int, crc32c: str, send: Callable[..., None]) -> bool:
    """Replace an object if it still has this generation (0 if it must not exist); return whether it was replaced."""
    stored = blob_at(path)
    upload = functools.partial(send, stored, if_generation_match=generation)
    try:
        _again_if_damaged(upload)
    except api_errors.PreconditionFailed:
        # A retry gets this error, too, if an earlier attempt succeeded but its answer was lost.
        stored = find_blob(path)
        if not stored or stored.crc32c != crc32c:
            return False
    if stored.crc32c != crc32c:
        raise CloudStorageError(f"{path} changed during the upload: its CRC32C is {stored.crc32c}, not {crc32c}.")
    return True


def _sender(file: BinaryIO | mmap.mmap) -> Callable[..., None]:
    file.seek(0, os.SEEK_END)
    size = file.tell()

    def send(blob: Any, **conditions: Any) -> None:
        content_type = mimetypes.guess_type(blob.name)[0]
        blob.upload_from_file(file, size=size, content_type=content_type, rewind=True, **conditions)

    return send


def _again_if_damaged(transfer: Callable[[], Any]) -> Any:
    """Transfer a whole object, and repeat the transfer if the bytes arrive with a wrong checksum."""
    return retry_call(transfer, [0.0] * (NUM_TRIES_DAMAGED - 1), _is_damaged)


def _is_damaged(error: Exception) -> bool:
    return isinstance(error, DataCorruption) or (isinstance(error, api_errors.BadRequest) and "crc32c" in str(error))


def _crc32c(file: BinaryIO | mmap.mmap) -> str:
    """Compute the checksum in the format of Cloud Storage: base64 of the big-endian CRC32C."""
    checksum = google_crc32c.Checksum()
    file.seek(0)
    while block := file.read(BLOCK_BYTES):
        checksum.update(block)
    return base64.b64encode(checksum.digest()).decode()


def _is_partial(blob: Any) -> bool:
    return bool(blob.name.endswith(PARTIAL_SUFFIX))


def _list_objects(folder: str, **options: Any) -> Iterator[Any]:
    return list_blobs(*_listing_prefix(folder), **options)


def _listing_prefix(folder: str) -> tuple[str, str]:
    return bucket_and_name(folder.rstrip("/") + "/")


@functools.cache
def _client(_process_id: int) -> Any:
    """Make the client of a process. The cache has one client per process, so that a fork shares no connections."""
    return storage.Client(project=None)  # only creating and listing buckets needs a project


def blob_at(path: str) -> Any:
    """Return a handle for an object, which need not exist."""
    bucket, name = bucket_and_name(path)
    return _client(os.getpid()).bucket(bucket).blob(name)


def find_blob(path: str) -> Any | None:
    """Look up the current state of an object, with its generation and checksum; None if it does not exist."""
    blob = blob_at(path)  # a new handle, because a handle that was loaded before keeps its generation
    try:
        blob.reload()
    except api_errors.NotFound as error:
        if is_missing_bucket(error):
            raise
        return None
    return blob


def list_blobs(bucket: str, prefix: str, **options: Any) -> Iterator[Any]:
    """List the objects whose names start with `prefix`, sorted by name.

    Names that end in a slash are left out: Google's console creates such empty objects to show folders.
    """
    blobs = _client(os.getpid()).list_blobs(bucket, prefix=prefix, **options)
    return (blob for blob in blobs if not blob.name.endswith("/"))


def is_missing_bucket(error: Exception) -> bool:
    return "bucket does not exist" in str(error)


@contextmanager
def explained_errors(path: str) -> Iterator[None]:
    """Turn the exceptions of the client into the exceptions that `Folder` documents, with a hint."""
    try:
        yield
    except (api_errors.GoogleAPIError, auth_errors.GoogleAuthError, RequestException, DataCorruption) as error:
        raise _explain(path, error) from error


def _explain(path: str, error: Exception) -> Exception:
    """Convert an exception of the client. Unless the error is known to be final, the result is a CloudStorageError."""
    answer = textwrap.shorten(str(error), 300)
    is_transient = getattr(error, "retryable", False) or isinstance(error, auth_errors.TransportError)
    if isinstance(error, auth_errors.GoogleAuthError | api_errors.Unauthorized) and not is_transient:
        return InputError(
            f"{path} needs Google credentials, and none were found or accepted. Run `gcloud auth application-default "
            f"login`, or on a TPU VM give its service account access to the bucket. ({answer})"
        )
    if isinstance(error, api_errors.NotFound):
        if not is_missing_bucket(error):
            return FileNotFoundError(errno.ENOENT, "no such object", path)
        bucket = GCS_PREFIX + bucket_and_name(path)[0]
        return InputError(
            f"The bucket of {path} does not exist. Create it with `gcloud storage buckets create {bucket}`."
        )
    if isinstance(error, api_errors.Forbidden):
        return InputError(f"Access to {path} is denied. {_hint_for_refusal(str(error))} ({answer})")
    status = getattr(error, "code", None) or 0
    is_answered = 400 <= status < 500 and status not in (408, 429)
    if is_answered or isinstance(error, DataCorruption):
        return CloudStorageError(f"{path}: the transfer failed. ({answer}) Run the same command again.")
    return CloudStorageError(f"{path}: Cloud Storage did not answer. ({answer}) Run the same command again.")


def _hint_for_refusal(answer: str) -> str:
    """Return a sentence that says how to get the missing permission."""
    if re.search(r"(authentication|OAuth2?|Provided) scope", answer):
        return (
            "The access scopes of this machine forbid it, regardless of the permissions of its account. They are set "
            "when a machine is created: use `--scopes=cloud-platform`."
        )
    permission = re.search(r"storage\.objects\.\w+", answer)
    lacking = f", which lacks {permission[0]}," if permission else ""
    return (
        f"Grant the account in use{lacking} the role Storage Object Admin (roles/storage.objectAdmin) on the bucket "
        "or, for reading only, Storage Object Viewer (roles/storage.objectViewer)."
    )
