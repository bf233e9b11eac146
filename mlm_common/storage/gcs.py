"""The `gs://` half of `storage.py`: Google Cloud Storage through google-cloud-storage.

An upload names the generation of the object that it replaces and carries the CRC32C of its bytes. So a try that is
repeated after a lost answer can neither overwrite another program's object nor leave other bytes
(https://cloud.google.com/storage/docs/request-preconditions). Transient failures (408, 429, 5xx, lost connections) are
repeated by the client, for two minutes; bytes that were changed on their way are sent again here.
"""

import base64
import contextlib
import errno
import functools
import mimetypes
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

from mlm_common.errors import InputError
from mlm_common.storage.gcs_client import blob_at, bucket_and_name, explained_errors, find_blob, list_blobs

# The client's connection pool holds ten.
NUM_TRANSFERS = 8
PROBE_NAME = ".writable"
NUM_TRIES_DAMAGED = 3


def exists(path: str) -> bool:
    """Return whether an object is at `path`, or any object under it; a bucket alone exists, or is an InputError."""
    with explained_errors(path):
        _, name = bucket_and_name(path)
        return any(True for _ in _list_folder(path, max_results=1)) or not name or find_blob(path) is not None


def list_files(folder: str) -> dict[str, int]:
    """Return name -> size in bytes of the objects directly in `folder`, by name."""
    with explained_errors(folder):
        return {blob.name.rpartition("/")[2]: blob.size for blob in _list_folder(folder, delimiter="/")}


def read_bytes(path: str) -> bytes:
    """Return an object's content, which the client checks against the object's checksum."""
    with explained_errors(path):
        return blob_at(path).download_as_bytes()


def upload_bytes(data: bytes, path: str) -> None:
    """Make `data` the content of the object, all or nothing."""
    _upload(path, [data], lambda blob, **options: blob.upload_from_string(data, "application/octet-stream", **options))


def upload_file(file: BinaryIO, path: str) -> None:
    """Make the content of an open file that of the object, all or nothing; objects with the same bytes stay."""
    options = {"size": file.seek(0, os.SEEK_END), "content_type": mimetypes.guess_type(path)[0], "rewind": True}
    _upload(path, _pieces(file), lambda blob, **conditions: blob.upload_from_file(file, **options, **conditions))


def download_folder(folder: str, local_folder: str) -> None:
    """Download all objects of `folder`, those of its subfolders too, several at once.

    Raises:
        InputError: there are none, or an object's name leads out of the folder.
    """
    destination = Path(local_folder).resolve()
    prefix = _listing_prefix(folder)[1]

    def download(blob: Any) -> None:
        path = (destination / blob.name.removeprefix(prefix)).resolve()
        if not path.is_relative_to(destination):
            raise InputError(f"Names in {folder} must be those of files; {blob.name!r} leads out of the folder.")
        path.parent.mkdir(parents=True, exist_ok=True)
        blob.download_to_filename(str(path))

    with explained_errors(folder):
        blobs = list(_list_folder(folder))
        if not blobs:
            raise InputError(f"A folder with files is needed; there are none in {folder}.")
        for_all(download, blobs)


def delete_files(folder: str, names: Iterable[str]) -> None:
    """Delete objects directly in `folder`, several at once; one that is not there is passed over."""
    from google.api_core.exceptions import NotFound

    def delete(name: str) -> None:
        with contextlib.suppress(NotFound):
            blob_at(f"{folder.rstrip('/')}/{name}").delete()

    with explained_errors(folder):
        for_all(delete, names)


def check_writable(folder: str) -> None:
    """Write an empty object to `folder` and delete it: to replace an object takes both permissions.

    Tried out, since `testIamPermissions` on the bucket sees neither grants for a part of its objects nor the access
    scopes of a machine (https://cloud.google.com/storage/docs/oauth-scopes).
    """
    upload_bytes(b"", f"{folder.rstrip('/')}/{PROBE_NAME}")
    delete_files(folder, [PROBE_NAME])


def for_all(function: Callable[[Any], None], items: Iterable[Any]) -> None:
    """Call `function` on all items, several at once; the first failure is raised, and cancels those not begun."""
    with ThreadPoolExecutor(NUM_TRANSFERS) as pool:
        for _ in pool.map(function, items):
            pass


def _upload(path: str, pieces: Iterable[bytes], send: Callable[..., None]) -> None:
    """Upload one object: `send(blob, if_generation_match=…)` transfers the bytes that `pieces` is made of."""
    from google.api_core.exceptions import PreconditionFailed

    crc32c = _crc32c(pieces)
    with explained_errors(path):
        replaced = find_blob(path)
        if replaced and replaced.crc32c == crc32c:
            return
        stored = blob_at(path)
        try:
            _send_whole(functools.partial(send, stored, if_generation_match=replaced.generation if replaced else 0))
        except PreconditionFailed as error:
            # Also what the second try meets when the first succeeded and its answer was lost.
            stored = find_blob(path)
            if not stored or stored.crc32c != crc32c:
                raise InputError(f"{path} must be written by one program at a time; another one wrote it.") from error
        if stored.crc32c != crc32c:
            raise OSError(errno.EIO, f"changed while it was uploaded (CRC32C {stored.crc32c}, expected {crc32c})", path)


def _send_whole(send: Callable[[], None]) -> None:
    """Call `send` until its bytes arrive as they are: Cloud Storage refuses them where the checksum is another."""
    from google.api_core.exceptions import BadRequest

    for num_tries in range(1, NUM_TRIES_DAMAGED + 1):
        try:
            send()
            return
        except BadRequest as error:
            if "crc32c" not in str(error) or num_tries == NUM_TRIES_DAMAGED:
                raise


def _crc32c(pieces: Iterable[bytes]) -> str:
    """Return the checksum as Cloud Storage spells it: base64 of the big-endian CRC32C."""
    import google_crc32c

    checksum = google_crc32c.Checksum()
    for piece in pieces:
        checksum.update(piece)
    return base64.b64encode(checksum.digest()).decode()


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    file.seek(0)
    while piece := file.read(1 << 20):
        yield piece


def _list_folder(folder: str, **options: Any) -> Iterator[Any]:
    return list_blobs(*_listing_prefix(folder), **options)


def _listing_prefix(folder: str) -> tuple[str, str]:
    return bucket_and_name(folder.rstrip("/") + "/")
