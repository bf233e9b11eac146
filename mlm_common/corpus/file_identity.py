"""What a local file holds, as a SHA-256 of all its bytes; it is remembered while the file stays untouched.

A .gz file also gets the SHA-256 of its decompressed content, which is that of the same file without compression.

Remembered as `git` does it, by what the file system says of the file: device, inode, size, and the times at which its
content and the file itself last changed, the second of which no program can set. So only a new or changed file is read.
"""

import dataclasses
import gzip
import hashlib
import io
import json
import logging
import os
import time
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mlm_common.errors import InputError
from mlm_common.storage import open_folder
from mlm_common.storage.reading import StoredFile, changed_file

logger = logging.getLogger(__name__)

NUM_READERS = 8
BLOCK_BYTES = 1 << 20
# Smaller files are read anew: that takes no longer than to look them up.
MIN_REMEMBERED_BYTES = 8 << 20
# A file that is younger may change once more without another time, in the same tick of the file system's clock.
MIN_AGE_SECONDS = 2.0
# Hashing is announced from here on.
MANY_BYTES = 10 << 30
# What stands in the way of the remembered checksums, none of which matters: no home, a folder that cannot be written,
# a damaged file.
CACHE_ERRORS = (OSError, RuntimeError, ValueError, KeyError, TypeError)

# As `StoredFile` has them: `checksum`, and of a .gz file `content_checksum`.
Checksums = dict[str, str | None]


def with_checksums(files: Iterable[StoredFile]) -> list[StoredFile]:
    """Give each local file its checksums, `sha256 HEX`, and the time of this state; objects come with theirs.

    Raises:
        InputError: a file cannot be read, or changes while it is.
    """
    found = list(files)
    num_bytes = sum(file.num_bytes for file in found if file.is_local)
    if num_bytes >= MANY_BYTES:
        logger.info("Hashing the corpus's local files, %.1f GB, but for those hashed before.", num_bytes / 1e9)
    with ThreadPoolExecutor(NUM_READERS) as pool:
        return list(pool.map(_with_checksum, found))


def _with_checksum(file: StoredFile) -> StoredFile:
    if not file.is_local:
        return file
    try:
        before = _state(file.name)
        checksums = _remembered(file.name, before) or _checksums(file.name)
        if _state(file.name) != before:
            raise changed_file(file.name)
        _remember(file.name, before, checksums)
    except OSError as error:
        raise InputError(f"A file of the corpus must be readable; {file.name}: {error.strerror}.") from error
    return dataclasses.replace(file, num_bytes=before["size"], modified_ns=before["mtime_ns"], **checksums)  # type: ignore[arg-type]


def _state(path: str) -> dict[str, int]:
    found = Path(path).stat()
    return {name: getattr(found, f"st_{name}") for name in ("dev", "ino", "size", "mtime_ns", "ctime_ns")}


def _checksums(path: str) -> Checksums:
    with Path(path).open("rb", buffering=0) as file:
        checksums: Checksums = {"checksum": _sha256(file)}
    return checksums | {"content_checksum": _content_sha256(path)} if path.endswith(".gz") else checksums


def _content_sha256(path: str) -> str | None:
    """Hash what a .gz file holds; None for a damaged one, which is refused when it is read."""
    try:
        with gzip.open(path) as file:
            return _sha256(file)
    except (EOFError, gzip.BadGzipFile, zlib.error):
        return None


def _sha256(file: io.RawIOBase | gzip.GzipFile) -> str:
    digest, block = hashlib.sha256(), bytearray(BLOCK_BYTES)
    while num_bytes := file.readinto(block):
        digest.update(memoryview(block)[:num_bytes])
    return f"sha256 {digest.hexdigest()}"


def _remembered(path: str, state: dict[str, int]) -> Checksums | None:
    if state["size"] < MIN_REMEMBERED_BYTES:
        return None
    names = ["checksum"] + ["content_checksum"] * path.endswith(".gz")
    try:
        record = json.loads(open_folder(_cache_folder()).read_text(_name_in_cache(path)))
        return {name: record[name] for name in names} if record["state"] == state else None
    except CACHE_ERRORS:
        return None


def _remember(path: str, state: dict[str, int], checksums: Checksums) -> None:
    age_seconds = time.time() - max(state["mtime_ns"], state["ctime_ns"]) / 1e9
    if state["size"] < MIN_REMEMBERED_BYTES or age_seconds < MIN_AGE_SECONDS or _remembered(path, state):
        return
    try:
        open_folder(_cache_folder()).write_json(_name_in_cache(path), {"state": state} | checksums)
    except CACHE_ERRORS as error:
        logger.info("The hash of %s is not remembered: %s", path, error.__cause__ or error)


def _cache_folder() -> str:
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return str(Path(caches, "mlm-pretraining", "checksums"))


def _name_in_cache(path: str) -> str:
    return hashlib.sha256(os.fsencode(Path(path).resolve())).hexdigest() + ".json"
