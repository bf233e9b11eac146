"""Identify the text of a corpus by checksums and a record, compared with others and published; find shared text.

A corpus is recorded next to what was made of it. Files are identified by their content, wherever they are; a data set
of the Hub by its commit, which is the recorded `dataset_revision`; the built-in text by the versions of Python and the
packages.

The checksum of a local file is remembered in the user's cache while the file stays untouched, as `git` does it: by
device, inode, size, and the times at which content and file last changed, the second of which no program can set. So
only a new or changed file is read.

Two splits, of one corpus or of two, share text where files have equal content, a .gz file also its decompressed
content, or where both are of one commit and split of a data set of the Hub: what is trained on must not be evaluated
on. Splits drawn with the same seed from the same text share nothing, since the draw depends on the text alone.
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
from pathlib import Path, PurePosixPath
from typing import Any

from mlm_common.cli.settings import describe_differences
from mlm_common.corpus.config import BUILTIN, HELD_OUT_SPLITS, CorpusConfig, corpus_config_from_record
from mlm_common.errors import InputError
from mlm_common.hub.redaction import REDACTED, redact_except, redact_settings
from mlm_common.storage import folder_and_name
from mlm_common.storage.reading import StoredFile, changed_file

logger = logging.getLogger(__name__)

Record = dict[str, Any]

# The keys of the files of the main split, of `validation` and of `test` in a record.
FILES_KEYS = ("data_files", *(f"{split}_files" for split in HELD_OUT_SPLITS))
# Where files are, and how a data set is fetched.
SETTINGS_WITHOUT_INFLUENCE = {*FILES_KEYS, "streaming", "trust_remote_code"}
# Fields of a file that are published as they are.
PUBLIC_FILE_FIELDS = ("checksum", "content_checksum")
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
NUM_SHOWN_CHARACTERS = len("sha256 ") + 12

NUM_READERS = 8
BLOCK_BYTES = 1 << 20
# Smaller files are hashed again: that takes no longer than to look them up.
MIN_REMEMBERED_BYTES = 8 << 20
# A younger file may change again without another time, in the same tick of the file system's clock.
MIN_AGE_SECONDS = 2.0
MANY_BYTES = 10 << 30  # hashing them is announced
# Without a cache everything is done again: no home, a folder that cannot be written, a damaged file.
CACHE_ERRORS = (OSError, RuntimeError, ValueError, KeyError, TypeError, EOFError, zlib.error)

# As `StoredFile` has them: `checksum`, and of a .gz file `content_checksum`.
Checksums = dict[str, str | None]


def file_record(file: StoredFile) -> Record:
    """Record a file of the corpus: where it is, and checksums of its content."""
    record: Record = {"path": file.name, "num_bytes": file.num_bytes, "checksum": file.checksum}
    if file.content_checksum:
        record["content_checksum"] = file.content_checksum
    return record if file.is_local else record | {"generation": file.generation}


def record_of_split(record: Record, split_name: str) -> Record:
    """Reduce the record of a corpus to what decides the documents of one split: other settings are the default."""
    config = corpus_config_from_record(record)
    keys = [f"{split_name}_files"] if config.has_separate_source(split_name) else ["data_files", BUILTIN]
    reduced = {"settings": dataclasses.asdict(config.of_split(split_name))}
    return reduced | {key: record[key] for key in keys if key in record}


def identity(record: Record, *, has_bad_rows: bool = False) -> Record:
    """Reduce a record to what identifies its text: equal text has an equal identity.

    Without bad rows it makes no difference how they are treated.
    """
    kept = {name: value for name, value in record["settings"].items() if name not in SETTINGS_WITHOUT_INFLUENCE}
    kept |= {} if has_bad_rows else {"on_bad_row": "fail"}
    if is_path(kept["dataset_name"]):
        kept["dataset_name"] = "a local folder"
    files = {key: [[file["num_bytes"], file["checksum"]] for file in record[key]] for key in files_keys(record)}
    return {"settings": kept} | files | {BUILTIN: record.get(BUILTIN)}


def describe_changes(found: Record, asked: Record, *, has_bad_rows: bool = False) -> str:
    """Describe how the corpus `asked` differs from the recorded one; empty if it does not."""
    known, wanted = (identity(one, has_bad_rows=has_bad_rows) for one in (found, asked))
    there, here = ({"corpus": {key: one[key] for key in ("settings", BUILTIN)}} for one in (known, wanted))
    changes = [describe_differences(there, here)]
    changes += [change for key in FILES_KEYS for change in _changed_files(key, found.get(key), asked.get(key))]
    hint = ""
    if known["settings"]["dataset_revision"] != wanted["settings"]["dataset_revision"]:
        hint = f" (for the one there: --dataset-revision {known['settings']['dataset_revision']})"
    return "; ".join(filter(None, changes)) + hint


def describe_changed_sources(found: Record, asked: Record) -> str:
    """Describe the files that changed, of the splits with the same settings in both records."""

    def has_same_settings(key: str) -> bool:
        names = ["split"] if key == "data_files" else [key, key.replace("_files", "_split")]
        return all(found["settings"][name] == asked["settings"][name] for name in names)

    keys = [key for key in files_keys(found) if key in asked and has_same_settings(key)]
    return "; ".join(change for key in keys for change in _changed_files(key, found[key], asked[key]))


def describe_file(file: Record) -> str:
    return f"{file['path']} ({file['num_bytes']:,} bytes, {file['checksum'][:NUM_SHOWN_CHARACTERS]})"


def _changed_files(key: str, found: list[Record] | None, asked: list[Record] | None) -> Iterator[str]:
    """Describe the first file that differs, and the number of the others."""
    pairs = enumerate(zip_longest(found or (), asked or ()))
    different = [(number, one, other) for number, (one, other) in pairs if not _may_be_same(one, other)]
    if different:
        number, one, other = different[0]
        there, here = (describe_file(file) if file else "missing" for file in (one, other))
        more = f", and {len(different) - 1:,} more" * (len(different) > 1)
        yield f"corpus.{key}[{number}] is {there} there, {here} is asked for{more}"


def _may_be_same(one: Record | None, other: Record | None) -> bool:
    if one is None or other is None or one["num_bytes"] != other["num_bytes"]:
        return False
    (kind, _, value), (other_kind, _, other_value) = one["checksum"].partition(" "), other["checksum"].partition(" ")
    return kind != other_kind or value == other_value


def files_keys(record: Record) -> list[str]:
    return [key for key in FILES_KEYS if key in record]


def is_path(dataset_name: str | None) -> bool:
    """Return whether a data set is a local folder, even if its path is redacted."""
    return dataset_name is not None and (dataset_name == REDACTED or Path(dataset_name).is_absolute())


def published_corpus(record: Mapping[str, Any]) -> dict[str, Any]:
    """Redact names of files and folders in the record of a corpus. Its identity stays."""
    published = redact_except(record, [BUILTIN])
    published["settings"] = redact_settings(record["settings"], [CorpusConfig])
    if (name := record["settings"]["dataset_name"]) in (BUILTIN, hub_dataset(record)):
        published["settings"]["dataset_name"] = name
    for key in FILES_KEYS:
        if key in record:
            published[key] = [redact_except(file, PUBLIC_FILE_FIELDS) for file in record[key]]
    return published


def published_bad_rows(record: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Keep only the number of bad rows, if they are recorded."""
    return {"num_rows": record["num_rows"], "listed": []} if record else None


def hub_dataset(record: Mapping[str, Any]) -> str | None:
    """Return the id of the Hub's data set in the record of a corpus, None for any other corpus, or an empty record."""
    name = record.get("settings", {}).get("dataset_name")
    is_on_hub = name not in (None, BUILTIN) and HUB_ID.fullmatch(name) and not Path(name).exists()
    return name if is_on_hub else None


def names_its_text(record: Mapping[str, Any]) -> bool:
    """Return whether a record says which text it is of: a published one may not."""
    settings = record["settings"]
    return REDACTED not in [settings["dataset_name"], *(path for key in FILES_KEYS for path in settings[key])]


def with_checksums(files: Iterable[StoredFile]) -> list[StoredFile]:
    """Add checksums, `sha256 HEX`, and the time of the last change to the local files; objects have a checksum.

    A .gz file also gets the checksum of its decompressed content, which is that of the same file uncompressed.

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
    found = Path(path).stat()
    return {name: getattr(found, f"st_{name}") for name in ("dev", "ino", "size", "mtime_ns", "ctime_ns")}


def _checksums(path: str) -> Checksums:
    with Path(path).open("rb", buffering=0) as file:
        checksums: Checksums = {"checksum": _sha256(file)}
    return checksums | {"content_checksum": _content_sha256(path)} if path.endswith(".gz") else checksums


def _content_sha256(path: str) -> str | None:
    """Hash the decompressed content; None for a damaged file, which is refused when it is read."""
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
    """Return the folder of what this project keeps between commands; a RuntimeError if the user has no home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "mlm-pretraining")


def recall(name: str, key: Any) -> Any:
    """Read what was kept in a file of the user's cache under this key; None if nothing was, or the file is damaged."""
    try:
        found = json.loads(gzip.decompress((cache_folder() / name).read_bytes()))
        return found["value"] if found["key"] == key else None
    except CACHE_ERRORS:
        return None


def keep(name: str, key: Any, value: Any) -> None:
    """Keep a value of JSON's types instead of what the file had; do nothing if the cache cannot be written."""
    content = json.dumps({"key": key, "value": value}, ensure_ascii=False).encode()
    try:
        folder, file_name = folder_and_name(str(cache_folder() / name))
        folder.delete_partial_files(file_name)  # of a run that was killed
        folder.write_bytes(file_name, gzip.compress(content, compresslevel=1, mtime=0))
    except CACHE_ERRORS as error:
        logger.info("%s is not kept for the next command: %s", name, error.__cause__ or error)


# All empty files are equal.
NO_CONTENT = f"sha256 {hashlib.sha256().hexdigest()}"
# Settings that decide what a document is, and with the percentages which split it is drawn for.
DRAW = ("seed", "sample_by", "text_column", "delimiter")


@dataclass(frozen=True)
class Part:
    """A split of a corpus.

    corpus: the record of the corpus, or what `record_of_split` makes of it.
    split: the name of the split.
    """

    corpus: Record
    split: str

    @cached_property
    def record(self) -> Record:
        """The record, reduced to what decides the documents of this split."""
        return record_of_split(self.corpus, self.split)

    @cached_property
    def config(self) -> CorpusConfig:
        return corpus_config_from_record(self.record)

    @cached_property
    def files(self) -> list[Record]:
        found = [file for key in files_keys(self.record) for file in self.record[key]]
        return [file for file in found if file["num_bytes"] and file.get("content_checksum") != NO_CONTENT]


def describe_shared_text(one: Part, other: Part) -> str:
    """Describe the text that two splits share, or the files that changed in between; empty if none is known."""
    are_apart = _are_drawn_apart(one, other)
    if shared := list(_shared_files(one, other, are_apart)):
        file, other_file = shared[0]
        source = describe_file(file)
        if other_file["path"] not in (REDACTED, file["path"]):
            source += f" or a copy of it, {other_file['path']}"
        source += f" and {len(shared) - 1:,} more" * (len(shared) > 1)
    elif _share_dataset(one, other, are_apart):
        source = str(one.config.dataset_name)
    else:
        return ""
    if one.split == other.split and identity(one.record) == identity(other.record):
        return f"both are the split `{one.split}` of {source}"
    return f"both were made of {source}"


def describe_possibly_shared_text(one: Part, other: Part) -> str:
    """Describe why it is unknown whether two splits share text; empty if nothing points to it."""
    if _are_drawn_apart(one, other):
        return ""
    by_name = {_bare_name(file): file for file in other.files}
    for file in one.files:
        other_file = by_name.get(_bare_name(file))
        if other_file and file["path"] != REDACTED and _may_have_equal_text(file, other_file):
            return f"the checksums of {file['path']} and {other_file['path']} cannot be compared"
    here, there = one.config.dataset_config, other.config.dataset_config
    if here != there and _are_one_dataset(one, other) and _hub_split(one) == _hub_split(other):
        return f"they are of the configurations {here} and {there} of {one.config.dataset_name}"
    return ""


def _are_drawn_apart(one: Part, other: Part) -> bool:
    """Return whether equal documents cannot be in both splits, since these are drawn by their text."""
    (start, stop), (other_start, other_stop) = (part.config.drawn_percents_of(part.split) for part in (one, other))
    is_one_draw = all(getattr(one.config, name) == getattr(other.config, name) for name in DRAW)
    return is_one_draw and (stop <= other_start or other_stop <= start)


def _shared_files(one: Part, other: Part, are_apart: bool) -> Iterator[tuple[Record, Record]]:
    """Yield files of both with the same text, and those that changed in between, of which much may be the same."""
    by_content = {_content(file): file for file in other.files}
    by_path = {file["path"]: file for file in other.files if file["path"] != REDACTED}
    for file in one.files:
        if copy := by_content.get(_content(file)):
            if not are_apart:
                yield file, copy
        elif changed := by_path.get(file["path"]):
            yield file, changed


def _content(file: Record) -> Any:
    """Return a key that only files of the same text share."""
    checksum = file.get("content_checksum") or file["checksum"]
    return checksum if checksum.startswith("sha256 ") else (file["num_bytes"], checksum)


def _bare_name(file: Record) -> str:
    return PurePosixPath(file["path"].removesuffix(".gz")).name


def _may_have_equal_text(file: Record, other: Record) -> bool:
    """Return whether files of one name may have the same text, although their checksums are of different kinds."""
    if file["path"].endswith(".gz") == other["path"].endswith(".gz"):
        kinds = {one["checksum"].partition(" ")[0] for one in (file, other)}
        return len(kinds) > 1 and file["num_bytes"] == other["num_bytes"]
    zipped, plain = (file, other) if file["path"].endswith(".gz") else (other, file)
    return "content_checksum" not in zipped or not plain["checksum"].startswith("sha256 ")


def _share_dataset(one: Part, other: Part, are_apart: bool) -> bool:
    """Return whether two splits were read from the same rows of a data set, or from different states of it."""
    if not _are_one_dataset(one, other) or one.config.dataset_config != other.config.dataset_config:
        return False
    if one.config.dataset_name == BUILTIN:
        return not are_apart or one.record.get(BUILTIN) != other.record.get(BUILTIN)
    is_one_state = one.config.dataset_revision == other.config.dataset_revision
    return not is_one_state or (_hub_split(one) == _hub_split(other) and not are_apart)


def _are_one_dataset(one: Part, other: Part) -> bool:
    """Return whether two splits are of one data set: by its name or, if it was renamed, its commit."""
    name, other_name = (part.config.dataset_name for part in (one, other))
    if name is None or other_name is None or is_path(name) or is_path(other_name):
        return False  # a folder is compared by its files
    is_one_commit = one.config.dataset_revision == other.config.dataset_revision
    return name == other_name or (is_one_commit and BUILTIN not in (name, other_name))


def _hub_split(part: Part) -> str:
    """Return which split of the data set a part was read from."""
    return next(filter(None, map(part.config.hub_split_of, HELD_OUT_SPLITS)), part.config.split)
