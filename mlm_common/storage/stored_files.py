"""Files to read, local or in Cloud Storage: found by name or glob, and opened for reading from any byte on."""

import contextlib
import glob
import hashlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mlm_common.storage import files as storage
from mlm_common.storage import gcs_reading as cloud_reading

# What is read at once: of a local file little, to save memory; of an object much, since each read is a request.
LOCAL_READ_BYTES = 1 << 20
REQUEST_BYTES = 8 << 20
FINGERPRINT_BYTES = 1 << 16


@dataclass(frozen=True)
class StoredFile:
    """A file that was found.

    `generation` tells the states of one `gs://` object apart, and `crc32c` is its checksum in base64; local files have
    neither.
    """

    name: str
    num_bytes: int
    generation: int | None = None
    crc32c: str | None = None


def find_stored_files(pattern: str) -> list[StoredFile]:
    """Return the file of that name or, without one, those that match it as a glob (`*`, `?`, `[]`, `**`), sorted.

    Raises:
        InputError: a `gs://` path that is malformed, or Cloud Storage refuses.
    """
    if storage.is_remote(pattern):
        return [StoredFile(*found) for found in cloud_reading.find_objects(pattern)]
    names = [pattern] if Path(pattern).is_file() else sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207
    return [StoredFile(name, Path(name).stat().st_size) for name in names if Path(name).is_file()]


def fingerprint(file: StoredFile) -> str:
    """Return what tells the file from another one of its name and size, at the price of two short reads.

    It goes by content, since copies of a file have different times: the CRC32C that Cloud Storage keeps of an object,
    the BLAKE2b of a local file's first and last 64 KiB (all of a smaller one).
    """
    if file.crc32c is not None:
        return f"crc32c {file.crc32c}"
    digest = hashlib.blake2b(digest_size=16)
    with Path(file.name).open("rb") as content:
        digest.update(content.read(FINGERPRINT_BYTES))
        content.seek(max(content.tell(), file.num_bytes - FINGERPRINT_BYTES))
        digest.update(content.read(FINGERPRINT_BYTES))
    return f"blake2b {digest.hexdigest()}"


@contextlib.contextmanager
def open_stored(name: str, generation: int | None = None) -> Iterator[io.RawIOBase]:
    """Give the file, open for reading and seeking; each read goes to the disk or to Cloud Storage.

    Raises:
        InputError: Cloud Storage refuses, or the object is not of that generation any more.
    """
    if storage.is_remote(name):
        with cloud_reading.open_object(name, generation) as opened:
            yield opened
    else:
        with Path(name).open("rb", buffering=0) as file:
            yield file


def read_ahead_bytes(name: str) -> int:
    """Return how many bytes of the file to read at once, where it is read from its begin to its end."""
    return REQUEST_BYTES if storage.is_remote(name) else LOCAL_READ_BYTES
