"""Objects in Cloud Storage as files to read: found by glob, and read from any byte on without a copy on disk."""

import contextlib
import fnmatch
import io
import re
from collections.abc import Iterator, Sequence
from typing import Any

from mlm_common.errors import InputError, RunFailedError
from mlm_common.storage.gcs_client import (
    PREFIX,
    blob_at,
    bucket_and_name,
    explained_errors,
    find_blob,
    is_missing_bucket,
    list_blobs,
)

_MAGIC = re.compile(r"[*?[]")


def find_objects(pattern: str) -> list[tuple[str, int, int, str]]:
    """Return the object of that name or, without one, those that match it: path, bytes, generation, CRC32C (base64).

    Raises:
        InputError: a malformed path, or Cloud Storage refuses.
        RunFailedError: it did not answer.
    """
    bucket, name = bucket_and_name(pattern)
    with _explained_errors(pattern):
        if magic := _MAGIC.search(name):
            blobs = {blob.name: blob for blob in list_blobs(bucket, name[: magic.start()])}
            names = [name] if name in blobs else [found for found in sorted(blobs) if _matches(found, name)]
            found = [blobs[name] for name in names]
        else:
            found = [blob for blob in [find_blob(pattern) if name else None] if blob]
    return [(f"{PREFIX}{bucket}/{blob.name}", blob.size, blob.generation, blob.crc32c) for blob in found]


@contextlib.contextmanager
def open_object(path: str, generation: int | None = None) -> Iterator[io.RawIOBase]:
    """Give an object as a file, that of a generation or the present one; each read is one request.

    Raises:
        FileNotFoundError: there is no such object.
        InputError: Cloud Storage refuses or, while reading, the object was replaced or deleted.
        RunFailedError: it did not answer.
    """
    with _explained_errors(path):
        if generation is None:
            found = find_blob(path)
            if found is None:
                raise FileNotFoundError(f"{path}: no such object")
            generation = found.generation
        yield _ObjectReader(path, generation)


@contextlib.contextmanager
def _explained_errors(path: str) -> Iterator[None]:
    try:
        with explained_errors(path):
            yield
    except ConnectionError as error:
        raise RunFailedError(f"{error} Run the same command again.") from error


class _ObjectReader(io.RawIOBase):
    """The bytes of one generation of an object; what is read is asked for, and no more."""

    def __init__(self, path: str, generation: int) -> None:
        self._path = path
        self._blob = blob_at(path)
        self._generation = generation
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
            if self._blob.size is None:
                with self._unchanged():
                    self._blob.reload(if_generation_match=self._generation)
            offset += self._blob.size
        self._position = offset
        return offset

    def readinto(self, buffer: Any) -> int:
        from google.cloud.exceptions import RequestRangeNotSatisfiable

        if not len(buffer):
            return 0
        with self._unchanged():
            try:
                # The bytes as they are stored, and without a checksum, which is that of the whole object.
                data = self._blob.download_as_bytes(
                    start=self._position,
                    end=self._position + len(buffer) - 1,
                    if_generation_match=self._generation,
                    raw_download=True,
                    checksum=None,
                )
            except RequestRangeNotSatisfiable:
                return 0  # the end
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    @contextlib.contextmanager
    def _unchanged(self) -> Iterator[None]:
        from google.api_core.exceptions import NotFound, PreconditionFailed

        try:
            yield
        except (NotFound, PreconditionFailed) as error:
            if is_missing_bucket(error):
                raise
            raise InputError(
                f"{self._path} must stay as it is while it is read; it was replaced or deleted since. Start again."
            ) from error


def _matches(name: str, pattern: str) -> bool:
    return _parts_match(name.split("/"), pattern.split("/"))


def _parts_match(names: Sequence[str], patterns: Sequence[str]) -> bool:
    """Return whether the parts of a name match those of a pattern by the rules of `glob` with `recursive`."""
    if not patterns or not names:
        return not patterns and not names
    if patterns[0] == "**" and len(patterns) == 1:
        return not any(name.startswith(".") for name in names)
    if patterns[0] == "**" and _parts_match(names, patterns[1:]):
        return True
    if names[0].startswith(".") and not patterns[0].startswith("."):
        return False
    rest = patterns if patterns[0] == "**" else patterns[1:]
    return fnmatch.fnmatchcase(names[0], patterns[0]) and _parts_match(names[1:], rest)
