"""Find files by name or glob, local or in Cloud Storage, and read them from any byte on."""

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

    Attributes:
        read_ahead_bytes: number of bytes to read at once in a sequential read. The number is small, to save memory.
    """

    read_ahead_bytes = 1 << 20


@dataclass(frozen=True)
class StoredFile:
    """A file that was found, local or in Cloud Storage.

    Attributes:
        name: local path or `gs://` path.
        num_bytes: size.
        generation: state of a `gs://` object; None for a local file.
        checksum: checksum of the content: `crc32c BASE64` for an object, `sha256 HEX` for a local file, which has no
            checksum until it is hashed.
        modified_ns: time of the last change of a local file, in nanoseconds; None until the file is hashed.
        content_checksum: checksum of the decompressed content of a local .gz file; None until the file is hashed.
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
        """Yield the file, open for reading and seeking.

        The file must not have changed since it was found or, if it is local, since it was hashed.

        Raises:
            FileNotFoundError: the file no longer exists.
            InputError: Cloud Storage denies access, or the file was replaced, changed or deleted, perhaps while it was
                being read.
            CloudStorageError: Cloud Storage did not answer.
        """
        if self.generation is None:
            with LocalReader(self.name) as file:
                self._check_unchanged(file)
                yield file
                self._check_unchanged(file)
        else:
            from mlm_common.storage import gcs  # imported here, because it imports Google's packages

            with gcs.explained_errors(self.name):
                yield gcs.GcsReader(self.name, self.generation, self.num_bytes)

    def _check_unchanged(self, file: LocalReader) -> None:
        status = os.fstat(file.fileno())
        if self.modified_ns is not None and (status.st_size, status.st_mtime_ns) != (self.num_bytes, self.modified_ns):
            raise changed_file(self.name)


def changed_file(path: str) -> InputError:
    return InputError(f"{path} changed while it was being read. Run the command again.")


def find_stored_files(pattern: str) -> list[StoredFile]:
    """Find the file of this name, or else the files that match it as a glob (`*`, `?`, `[]`, `**`), sorted.

    Raises:
        InputError: a `gs://` path is malformed, Cloud Storage denies access, a link points to nothing, or a folder
            cannot be entered or listed.
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
    except (OSError, ValueError) as error:  # a folder cannot be entered, or the name is too long
        raise unreadable(name, "a file", error) from error


def _check_folders(pattern: str) -> None:
    """Check that all folders that a glob looks into can be listed, because `glob` silently skips unreadable folders.

    Raises:
        InputError: a folder cannot be listed.
    """
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
    """Yield the matches of a local glob. Unlike `glob` with `recursive`, visit each folder under `**` only once.

    Links could otherwise lead to a folder several times.

    Raises:
        InputError: a folder cannot be read.
    """
    recursive = _RECURSIVE.search(pattern)
    if recursive is None:
        _check_folders(pattern)
        yield from glob.glob(pattern)  # noqa: PTH207
        return
    tops, remainder = pattern[: recursive.start()], pattern[recursive.end() :] or "*"
    for top in glob.glob(tops or "."):  # noqa: PTH207
        for folder in _folders_below(top):
            yield from _expand(os.path.join(glob.escape(folder), remainder))  # noqa: PTH118


def _folders_below(top: str) -> Iterator[str]:
    """Yield the folder and all folders below it that are not hidden.

    Links are followed, but each folder is yielded only once.
    """

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
            # `match_glob` of Cloud Storage differs from a local glob: braces are special, hidden names are not, `**`
            # follows a different rule, and an object with exactly this name is not preferred.
            blobs = {blob.name: blob for blob in gcs.list_blobs(bucket, name[: magic.start()])}
            parts = name.split("/")
            is_name = name in blobs
            names = [name] if is_name else [other for other in sorted(blobs) if _parts_match(other.split("/"), parts)]
            matches = [blobs[match] for match in names]
        else:
            matches = [blob for blob in [gcs.find_blob(pattern) if name else None] if blob]
        return [
            StoredFile(f"{GCS_PREFIX}{bucket}/{blob.name}", blob.size, blob.generation, f"crc32c {blob.crc32c}")
            for blob in matches
        ]


def _parts_match(names: Sequence[str], patterns: Sequence[str]) -> bool:
    """Return whether the parts of a name match the parts of a pattern, by the rules of `glob` with `recursive`."""
    if not patterns or not names:
        return not patterns and not names
    if patterns[0] == "**" and len(patterns) == 1:
        return not any(name.startswith(".") for name in names)
    if patterns[0] == "**" and _parts_match(names, patterns[1:]):
        return True
    if names[0].startswith(".") and not patterns[0].startswith("."):
        return False
    next_patterns = patterns if patterns[0] == "**" else patterns[1:]
    return fnmatch.fnmatchcase(names[0], patterns[0]) and _parts_match(names[1:], next_patterns)
