"""Find files by name or glob, local or in Cloud Storage, and read them from any byte."""

import fnmatch
import glob
import io
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mlm_common.errors import InputError
from mlm_common.storage import is_gcs
from mlm_common.storage.folder import GCS_PREFIX, bucket_and_name
from mlm_common.storage.guard import unreadable

if TYPE_CHECKING:
    from mlm_common.storage.gcs import GcsReader

_MAGIC = re.compile(r"[*?[]")
_RECURSIVE = re.compile(r"(?:(?<=/)|^)\*\*(?:/+|$)")


class LocalReader(io.FileIO):
    """A local file open for reading, without a buffer.

    `read_ahead_bytes` is how much to read at once in a sequential read: little, to save memory.
    """

    read_ahead_bytes = 1 << 20


@dataclass(frozen=True)
class StoredFile:
    """A file that was found.

    `generation` identifies the state of a `gs://` object; local files have none. `checksum`, of the whole content, is
    `crc32c BASE64` for an object. A local file has a checksum, and the time of its last change, once it was hashed; a
    local .gz file then also has the `content_checksum` of its decompressed content.
    """

    name: str
    num_bytes: int
    generation: int | None = None
    checksum: str | None = None
    modified_ns: int | None = None
    content_checksum: str | None = None

    @property
    def is_local(self) -> bool:
        return self.generation is None

    @contextmanager
    def open(self) -> "Iterator[LocalReader | GcsReader]":
        """Yield the file, open for reading and seeking, as it was when it was found or, if local, hashed.

        Raises:
            FileNotFoundError: it no longer exists.
            InputError: Cloud Storage refuses; or the file was replaced, changed or deleted, perhaps while it was read.
            CloudStorageError: Cloud Storage did not answer.
        """
        if self.generation is None:
            with LocalReader(self.name) as file:
                self._check_unchanged(file)
                yield file
                self._check_unchanged(file)
        else:
            from mlm_common.storage import gcs  # Google's packages, for objects alone

            with gcs.explained_errors(self.name):
                yield gcs.GcsReader(self.name, self.generation, self.num_bytes)

    def _check_unchanged(self, file: LocalReader) -> None:
        found = os.fstat(file.fileno())
        if self.modified_ns is not None and (found.st_size, found.st_mtime_ns) != (self.num_bytes, self.modified_ns):
            raise changed_file(self.name)


def changed_file(path: str) -> InputError:
    return InputError(f"{path} changed while it was being read. Run the command again.")


def find_stored_files(pattern: str) -> list[StoredFile]:
    """Find the file of that name or else the files that match it as a glob (`*`, `?`, `[]`, `**`), sorted.

    Raises:
        InputError: a malformed `gs://` path, or Cloud Storage refuses; a link to nothing, or a folder that cannot be
            entered or listed.
        CloudStorageError: Cloud Storage did not answer.
    """
    if is_gcs(pattern):
        return _find_objects(pattern)
    names = [pattern] if os.path.isfile(pattern) else sorted(set(_expand(pattern)))  # noqa: PTH113
    return [StoredFile(name, Path(name).stat().st_size) for name in names if _is_file(name)]


def _is_file(name: str) -> bool:
    try:
        return stat.S_ISREG(Path(name).stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        if Path(name).is_symlink():
            raise InputError(f"{name} is a link to {Path(name).readlink()}, which does not exist.") from None
        return False
    except (OSError, ValueError) as error:  # a folder that cannot be entered, a name that is too long
        raise unreadable(name, "a file", error) from error


def _check_folders(pattern: str) -> None:
    """Check that all folders that a glob looks into may be: `glob` skips those that may not."""
    head, tail = os.path.split(pattern)
    if not head or head == pattern:
        return
    for folder in glob.glob(head) if glob.has_magic(head) else [head]:  # noqa: PTH207
        try:
            if glob.has_magic(tail):
                os.scandir(folder).close()
            else:
                os.stat(os.path.join(folder, "."))  # noqa: PTH116, PTH118
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as error:
            raise unreadable(folder, "a folder that can be listed", error) from error
    _check_folders(head)


def _expand(pattern: str) -> Iterator[str]:
    """Yield what a local glob matches, as `glob` with `recursive`, but each folder under `**` only once, despite links.

    A folder there that cannot be read is an InputError.
    """
    recursive = _RECURSIVE.search(pattern)
    if recursive is None:
        _check_folders(pattern)
        yield from glob.glob(pattern)  # noqa: PTH207
        return
    tops, rest = pattern[: recursive.start()], pattern[recursive.end() :] or "*"
    for top in glob.glob(tops or "."):  # noqa: PTH207
        for folder in _folders_below(top):
            yield from _expand(os.path.join(glob.escape(folder), rest))  # noqa: PTH118


def _folders_below(top: str) -> Iterator[str]:
    """Yield the folder and all folders in it that are not hidden; links are followed, no folder comes twice."""

    def refuse(error: OSError) -> None:
        raise unreadable(error.filename, "a folder that can be listed", error) from error

    seen = {os.path.realpath(top)}
    for folder, subfolders, _ in os.walk(top, followlinks=True, onerror=refuse):
        yield folder
        new = []
        for name in sorted(subfolders):
            real = os.path.realpath(os.path.join(folder, name))  # noqa: PTH118
            if not name.startswith(".") and real not in seen:
                seen.add(real)
                new.append(name)
        subfolders[:] = new


def _find_objects(pattern: str) -> list[StoredFile]:
    from mlm_common.storage import gcs

    bucket, name = bucket_and_name(pattern)
    with gcs.explained_errors(pattern):
        if magic := _MAGIC.search(name):
            # `match_glob` differs from a local glob: braces are special, hidden names are not, `**` has another rule,
            # and an object of that very name does not come first.
            blobs = {blob.name: blob for blob in gcs.list_blobs(bucket, name[: magic.start()])}
            parts = name.split("/")
            names = [name] if name in blobs else [one for one in sorted(blobs) if _parts_match(one.split("/"), parts)]
            found = [blobs[name] for name in names]
        else:
            found = [blob for blob in [gcs.find_blob(pattern) if name else None] if blob]
        return [
            StoredFile(f"{GCS_PREFIX}{bucket}/{blob.name}", blob.size, blob.generation, f"crc32c {blob.crc32c}")
            for blob in found
        ]


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
