"""Identify the text of a corpus by a record with checksums, compare and publish records, and find shared text.

The record of a corpus is stored next to everything that is made from the corpus. The record identifies files by their
content, no matter where they are stored. The record identifies a data set on the Hub by its commit, recorded as
`dataset_revision`, and the built-in text by the versions of Python and of the packages.

The checksum of a local file is remembered in the user's cache until the file changes, so that only new and changed
files are read. Like `git`, this module recognizes an unchanged file by its device, inode, size, and the times when
its content and its metadata last changed. No program can set the time of the last metadata change.

Models must not be evaluated on text that they were trained on. So this module finds splits that share text, within a
corpus or between two corpora. Two splits share text if they have files with equal content (for .gz files, also
decompressed content), or if both are the same split of the same commit of a data set on the Hub. Splits that are drawn
with the same seed from the same text share nothing, because the draw depends only on the text.
"""

import dataclasses
import gzip
import hashlib
import io
import json
import logging
import os
import re
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

from mlm_common.cli.settings import describe_differences
from mlm_common.corpus.config import BUILTIN, HELD_OUT_SPLITS, CorpusConfig, corpus_config_from_record
from mlm_common.errors import InputError
from mlm_common.hub.redaction import REDACTED, redact_except, redact_settings
from mlm_common.storage import folder_and_name
from mlm_common.storage.reading import StoredFile, changed_file

logger = logging.getLogger(__name__)

Record = dict[str, Any]

# The keys in a record for the files of the main split, of `validation` and of `test`.
FILES_KEYS = ("data_files", *(f"{split}_files" for split in HELD_OUT_SPLITS))
# Settings that do not change the text: where files are, and how a data set is fetched.
SETTINGS_WITHOUT_INFLUENCE = {*FILES_KEYS, "streaming", "trust_remote_code"}
# Fields of a file that are published unchanged.
PUBLIC_FILE_FIELDS = ("checksum", "content_checksum")
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
NUM_SHOWN_CHARACTERS = len("sha256 ") + 12

NUM_READERS = 8
BLOCK_BYTES = 1 << 20
# Files smaller than this are hashed each time, because hashing them takes no longer than looking up a checksum.
MIN_REMEMBERED_BYTES = 8 << 20
# If a file changed more recently than this, it may change again within the same tick of the file system's clock. The
# file's time would then stay the same.
MIN_AGE_SECONDS = 2.0
MANY_BYTES = 10 << 30  # if more bytes than this must be hashed, a message says so
# Errors that mean that there is no usable cache: no home, a folder that cannot be written, a damaged file.
CACHE_ERRORS = (OSError, RuntimeError, ValueError, KeyError, TypeError, EOFError, zlib.error)

# The fields `checksum` and, for a .gz file, `content_checksum` of a `StoredFile`.
Checksums = dict[str, str | None]


def file_record(file: StoredFile) -> Record:
    """Return the record of a file of the corpus: its path, its size, and the checksums of its content."""
    record: Record = {"path": file.name, "num_bytes": file.num_bytes, "checksum": file.checksum}
    if file.content_checksum:
        record["content_checksum"] = file.content_checksum
    return record if file.is_local else record | {"generation": file.generation}


def record_of_split(record: Record, split_name: str) -> Record:
    """Reduce a corpus's record to the facts that determine a split's documents. Other settings get their defaults."""
    config = corpus_config_from_record(record)
    keys = [f"{split_name}_files"] if config.has_separate_source(split_name) else ["data_files", BUILTIN]
    reduced = {"settings": dataclasses.asdict(config.of_split(split_name))}
    return reduced | {key: record[key] for key in keys if key in record}


def identity(record: Record, *, has_bad_rows: bool = False) -> Record:
    """Reduce a record to the facts that identify its text. Equal text has an equal identity.

    Args:
        record: record of a corpus.
        has_bad_rows: whether the corpus has unreadable rows. Without unreadable rows, the setting for such rows does
            not matter.
    """
    kept = {name: value for name, value in record["settings"].items() if name not in SETTINGS_WITHOUT_INFLUENCE}
    kept |= {} if has_bad_rows else {"on_bad_row": "fail"}
    if is_path(kept["dataset_name"]):
        kept["dataset_name"] = "a local folder"
    files = {key: [[file["num_bytes"], file["checksum"]] for file in record[key]] for key in files_keys(record)}
    return {"settings": kept} | files | {BUILTIN: record.get(BUILTIN)}


def describe_changes(recorded: Record, requested: Record, *, has_bad_rows: bool = False) -> str:
    """Describe how the requested corpus differs from the recorded one; return "" if it does not."""
    old, new = (identity(record, has_bad_rows=has_bad_rows) for record in (recorded, requested))
    old_fields, new_fields = ({"corpus": {key: corpus[key] for key in ("settings", BUILTIN)}} for corpus in (old, new))
    changes = [describe_differences(old_fields, new_fields)]
    changes += [change for key in FILES_KEYS for change in _changed_files(key, recorded.get(key), requested.get(key))]
    hint = ""
    if old["settings"]["dataset_revision"] != new["settings"]["dataset_revision"]:
        hint = f" (to use the revision there, pass --dataset-revision {old['settings']['dataset_revision']})"
    return "; ".join(filter(None, changes)) + hint


def describe_changed_sources(recorded: Record, requested: Record) -> str:
    """Describe the changed files of the splits whose settings are the same in both records."""

    def has_same_settings(key: str) -> bool:
        names = ["split"] if key == "data_files" else [key, key.replace("_files", "_split")]
        return all(recorded["settings"][name] == requested["settings"][name] for name in names)

    keys = [key for key in files_keys(recorded) if key in requested and has_same_settings(key)]
    return "; ".join(change for key in keys for change in _changed_files(key, recorded[key], requested[key]))


def describe_file(file: Record) -> str:
    return f"{file['path']} ({file['num_bytes']:,} bytes, {file['checksum'][:NUM_SHOWN_CHARACTERS]})"


def _changed_files(key: str, recorded: list[Record] | None, requested: list[Record] | None) -> Iterator[str]:
    """Describe the first file that differs, and the number of other files that differ."""
    pairs = enumerate(zip_longest(recorded or (), requested or ()))
    different = [(number, old, new) for number, (old, new) in pairs if not _may_be_same(old, new)]
    if different:
        number, old, new = different[0]
        recorded_file, requested_file = (describe_file(file) if file else "missing" for file in (old, new))
        others = f", and {len(different) - 1:,} more" * (len(different) > 1)
        yield f"corpus.{key}[{number}] is {recorded_file} there, but {requested_file} is requested{others}"


def _may_be_same(file: Record | None, other: Record | None) -> bool:
    if file is None or other is None or file["num_bytes"] != other["num_bytes"]:
        return False
    (kind, _, value), (other_kind, _, other_value) = file["checksum"].partition(" "), other["checksum"].partition(" ")
    return kind != other_kind or value == other_value


def files_keys(record: Record) -> list[str]:
    return [key for key in FILES_KEYS if key in record]


def is_path(dataset_name: str | None) -> bool:
    """Return whether the name of a data set is the path of a local folder, which may be redacted."""
    return dataset_name is not None and (dataset_name == REDACTED or Path(dataset_name).is_absolute())


def published_corpus(record: Mapping[str, Any]) -> dict[str, Any]:
    """Redact the names of files and folders in the record of a corpus. The corpus's identity stays the same."""
    published = redact_except(record, [BUILTIN])
    published["settings"] = redact_settings(record["settings"], [CorpusConfig])
    if (name := record["settings"]["dataset_name"]) in (BUILTIN, hub_dataset(record)):
        published["settings"]["dataset_name"] = name
    for key in FILES_KEYS:
        if key in record:
            published[key] = [redact_except(file, PUBLIC_FILE_FIELDS) for file in record[key]]
    return published


def published_bad_rows(record: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the record of bad rows with their number, but without listing them; None if there is no record."""
    return {"num_rows": record["num_rows"], "listed": []} if record else None


def hub_dataset(record: Mapping[str, Any]) -> str | None:
    """Return the Hub id of the data set in the record of a corpus; None if the record is empty or has no such id."""
    name = record.get("settings", {}).get("dataset_name")
    is_on_hub = name not in (None, BUILTIN) and HUB_ID.fullmatch(name) and not Path(name).exists()
    return name if is_on_hub else None


def names_its_text(record: Mapping[str, Any]) -> bool:
    """Return whether a record names the text of its corpus. In a published record the name may be redacted."""
    settings = record["settings"]
    return REDACTED not in [settings["dataset_name"], *(path for key in FILES_KEYS for path in settings[key])]


def with_checksums(files: Iterable[StoredFile]) -> list[StoredFile]:
    """Add the checksum, `sha256 HEX`, and the time of the last change to local files. `gs://` files have a checksum.

    A .gz file also gets the checksum of its decompressed content, so that it can be compared with uncompressed files.

    Raises:
        InputError: a file cannot be read, or changes while it is being read.
    """
    files = list(files)
    num_bytes = sum(file.num_bytes for file in files if file.is_local)
    if num_bytes >= MANY_BYTES:
        logger.info("Hashing the local files of the corpus, %.1f GB, except those hashed before.", num_bytes / 1e9)
    with ThreadPoolExecutor(NUM_READERS) as pool:
        return list(pool.map(_with_checksum, files))


def _with_checksum(file: StoredFile) -> StoredFile:
    if not file.is_local:
        return file
    name = f"checksums/{hashlib.sha256(os.fsencode(Path(file.name).resolve())).hexdigest()}.json.gz"
    try:
        before = _state(file.name)
        is_large = before["size"] >= MIN_REMEMBERED_BYTES
        remembered = recall(name, before) if is_large else None
        checksums = remembered or _checksums(file.name)
        if _state(file.name) != before:
            raise changed_file(file.name)
        age_seconds = time.time() - max(before["mtime_ns"], before["ctime_ns"]) / 1e9
        if is_large and remembered is None and age_seconds >= MIN_AGE_SECONDS:
            keep(name, before, checksums)
    except OSError as error:
        raise InputError(f"A file of the corpus must be readable; {file.name}: {error.strerror}.") from error
    return dataclasses.replace(file, num_bytes=before["size"], modified_ns=before["mtime_ns"], **checksums)


def _state(path: str) -> dict[str, int]:
    status = Path(path).stat()
    return {name: getattr(status, f"st_{name}") for name in ("dev", "ino", "size", "mtime_ns", "ctime_ns")}


def _checksums(path: str) -> Checksums:
    with Path(path).open("rb", buffering=0) as file:
        checksums: Checksums = {"checksum": _sha256(file)}
    return checksums | {"content_checksum": _content_sha256(path)} if path.endswith(".gz") else checksums


def _content_sha256(path: str) -> str | None:
    """Hash the decompressed content; None for a damaged file, which will cause an error when its text is read."""
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


def cache_folder() -> Path:
    """Return the folder for files that this project keeps between commands.

    Raises:
        RuntimeError: the user has no home.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "mlm-pretraining")


def recall(name: str, key: Any) -> Any:
    """Read the value of a file in the user's cache; None if it has no value for this key, or is damaged."""
    try:
        cached = json.loads(gzip.decompress((cache_folder() / name).read_bytes()))
        return cached["value"] if cached["key"] == key else None
    except CACHE_ERRORS:
        return None


def keep(name: str, key: Any, value: Any) -> None:
    """Write a key and a JSON value to a file in the user's cache, if the cache can be written."""
    content = json.dumps({"key": key, "value": value}, ensure_ascii=False).encode()
    try:
        folder, file_name = folder_and_name(str(cache_folder() / name))
        folder.delete_partial_files(file_name)  # a killed run may have left partial files
        folder.write_bytes(file_name, gzip.compress(content, compresslevel=1, mtime=0))
    except CACHE_ERRORS as error:
        logger.info("%s was not cached for the next command: %s", name, error.__cause__ or error)


# The checksum of empty files, which do not count as shared text.
NO_CONTENT = f"sha256 {hashlib.sha256().hexdigest()}"
# Settings that determine what a document is and, together with the percentages, for which split it is drawn.
DRAW = ("seed", "sample_by", "text_column", "delimiter")


@dataclass(frozen=True)
class Part:
    """A split of a corpus.

    Attributes:
        corpus: record of the corpus, or the result of `record_of_split` for it.
        split: name of the split.
    """

    corpus: Record
    split: str

    @cached_property
    def record(self) -> Record:
        """Record of the corpus, reduced to the facts that determine the documents of this split."""
        return record_of_split(self.corpus, self.split)

    @cached_property
    def config(self) -> CorpusConfig:
        return corpus_config_from_record(self.record)

    @cached_property
    def files(self) -> list[Record]:
        """Records of the files of this split that are not empty."""
        files = [file for key in files_keys(self.record) for file in self.record[key]]
        return [file for file in files if file["num_bytes"] and file.get("content_checksum") != NO_CONTENT]


def describe_shared_text(part: Part, other: Part) -> str:
    """Describe the text that two splits share; return "" if no shared text is known.

    Two different states of the same file or data set count as shared text.
    """
    are_apart = _are_drawn_apart(part, other)
    if shared := list(_shared_files(part, other, are_apart)):
        file, other_file = shared[0]
        source = describe_file(file)
        if other_file["path"] not in (REDACTED, file["path"]):
            source += f" or a copy of it, {other_file['path']}"
        source += f" and {len(shared) - 1:,} more" * (len(shared) > 1)
    elif _share_dataset(part, other, are_apart):
        source = str(part.config.dataset_name)
    else:
        return ""
    if part.split == other.split and identity(part.record) == identity(other.record):
        return f"both are the split `{part.split}` of {source}"
    return f"both were made from {source}"


def _are_drawn_apart(part: Part, other: Part) -> bool:
    """Return whether two splits are drawn by their text in such a way that no document can be in both."""
    (start, stop), (other_start, other_stop) = (each.config.drawn_percents_of(each.split) for each in (part, other))
    is_same_draw = all(getattr(part.config, name) == getattr(other.config, name) for name in DRAW)
    return is_same_draw and (stop <= other_start or other_stop <= start)


def _shared_files(part: Part, other: Part, are_apart: bool) -> Iterator[tuple[Record, Record]]:
    """Yield pairs of files of two splits with the same text, or with the same path (an older state of the file)."""
    by_content = {_content(file): file for file in other.files}
    by_path = {file["path"]: file for file in other.files if file["path"] != REDACTED}
    for file in part.files:
        if copy := by_content.get(_content(file)):
            if not are_apart:
                yield file, copy
        elif changed := by_path.get(file["path"]):
            yield file, changed


def _content(file: Record) -> Any:
    """Return a key that is equal only for files with the same text."""
    checksum = file.get("content_checksum") or file["checksum"]
    return checksum if checksum.startswith("sha256 ") else (file["num_bytes"], checksum)


def _share_dataset(part: Part, other: Part, are_apart: bool) -> bool:
    """Return whether two splits were read from the same rows of a data set, or from different states of it."""
    if not _are_same_dataset(part, other) or part.config.dataset_config != other.config.dataset_config:
        return False
    if part.config.dataset_name == BUILTIN:
        return not are_apart or part.record.get(BUILTIN) != other.record.get(BUILTIN)
    is_same_state = part.config.dataset_revision == other.config.dataset_revision
    return not is_same_state or (_hub_split(part) == _hub_split(other) and not are_apart)


def _are_same_dataset(part: Part, other: Part) -> bool:
    """Return whether two splits come from the same data set, by its name or, in case it was renamed, its commit."""
    name, other_name = (each.config.dataset_name for each in (part, other))
    if name is None or other_name is None or is_path(name) or is_path(other_name):
        return False  # local folders are compared by their files
    is_same_commit = part.config.dataset_revision == other.config.dataset_revision
    return name == other_name or (is_same_commit and BUILTIN not in (name, other_name))


def _hub_split(part: Part) -> str:
    """Return the split of the data set from which the documents of a part are read."""
    return next(filter(None, map(part.config.hub_split_of, HELD_OUT_SPLITS)), part.config.split)
