"""The record of a corpus beside what was made of it: the settings, and what tells its text from any other.

Files are known by their content, wherever they lie; a data set of the Hub by its commit, which is the recorded
`dataset_revision`; the built-in text by the versions of Python and the packages. Records of 0.2.0 have no commit, and
of a local file a `fingerprint` that another content may share: what they do not tell is unknown.
"""

import dataclasses
import re
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from mlm_common.cli.settings import describe_differences
from mlm_common.corpus.config import BUILTIN, DEFAULT_SAMPLE_BY, HELD_OUT_SPLITS, CorpusConfig
from mlm_common.hub.redaction import REDACTED
from mlm_common.storage.reading import StoredFile

Record = dict[str, Any]

# The keys of a record under which the files of the main split, of `validation` and of `test` stand.
FILES_KEYS = ("data_files", *(f"{split}_files" for split in HELD_OUT_SPLITS))
# Where files lie, and how a data set is fetched.
SETTINGS_WITHOUT_INFLUENCE = {*FILES_KEYS, "streaming", "trust_remote_code"}
COMMIT = re.compile(r"[0-9a-f]{40}")
NUM_SHOWN_CHARACTERS = len("sha256 ") + 12


def file_record(file: StoredFile) -> Record:
    """Record a file of the corpus: where it is, and what it holds."""
    record: Record = {"path": file.name, "num_bytes": file.num_bytes, "checksum": file.checksum}
    if file.content_checksum:
        record["content_checksum"] = file.content_checksum
    return record if file.is_local else record | {"generation": file.generation}


def record_of_split(record: Record, split_name: str) -> Record:
    """Reduce the record of a corpus to what decides the documents of one split: other settings are the default."""
    settings = record.get("settings", {})
    known = {name: value for name, value in settings.items() if name in CorpusConfig.__dataclass_fields__}
    config = CorpusConfig(**known)
    keys = [f"{split_name}_files"] if config.has_own_source(split_name) else ["data_files", BUILTIN]
    reduced = {"settings": settings | dataclasses.asdict(config.of_split(split_name))}
    return reduced | {key: record[key] for key in keys if key in record}


def identity(record: Record) -> Record:
    """Reduce a record to what tells its text from any other, so that equal text has an equal identity."""
    settings = dataclasses.asdict(CorpusConfig(sample_by=DEFAULT_SAMPLE_BY)) | record.get("settings", {})
    kept = {name: value for name, value in settings.items() if name not in SETTINGS_WITHOUT_INFLUENCE}
    if is_path(kept["dataset_name"]):
        kept["dataset_name"] = "a local folder"
    files = {key: [[file["num_bytes"], checksum_of(file)] for file in record[key]] for key in files_keys(record)}
    return {"settings": kept} | files | {BUILTIN: record.get(BUILTIN)}


def describe_changes(found: Record, asked: Record) -> str:
    """Name what of the corpus `asked` is other than in the record `found`; empty where nothing is known to be."""
    known, wanted = identity(found), identity(asked)
    if has_unknown_commit(found):
        known["settings"]["dataset_revision"] = wanted["settings"]["dataset_revision"]
    there, here = ({"corpus": {key: one[key] for key in ("settings", BUILTIN)}} for one in (known, wanted))
    changes = [describe_differences(there, here)]
    changes += [change for key in FILES_KEYS for change in _changed_files(key, found.get(key), asked.get(key))]
    hint = ""
    if known["settings"]["dataset_revision"] != wanted["settings"]["dataset_revision"]:
        hint = f" (for the one there: --dataset-revision {known['settings']['dataset_revision']})"
    return "; ".join(filter(None, changes)) + hint


def describe_changed_sources(found: Record, asked: Record) -> str:
    """Name the files of `asked` that are others than those in `found`, of the splits that are asked for alike."""

    def is_asked_alike(key: str) -> bool:
        names = ["split"] if key == "data_files" else [key, key.replace("_files", "_split")]
        return all(found["settings"].get(name) == asked["settings"].get(name) for name in names)

    keys = [key for key in files_keys(found) if key in asked and is_asked_alike(key)]
    return "; ".join(change for key in keys for change in _changed_files(key, found[key], asked[key]))


def describe_unknown(record: Record) -> str:
    """Name what a record of an older version does not tell of its text; empty where it tells all."""
    unknown = ["the commit of the data set"] if has_unknown_commit(record) else []
    if any(
        not checksum_of(file).startswith(("sha256 ", "crc32c ")) for key in files_keys(record) for file in record[key]
    ):
        unknown.append("the content of its files")
    return " and ".join(unknown)


def describe_file(file: Record) -> str:
    """Name a recorded file with what is known of its content."""
    path = file.get("path", file.get("name"))
    return f"{path} ({file['num_bytes']:,} bytes, {checksum_of(file)[:NUM_SHOWN_CHARACTERS]})"


def _changed_files(key: str, found: list[Record] | None, asked: list[Record] | None) -> Iterator[str]:
    """Name the first file that differs, with its place in the list, and how many more do."""
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
    (kind, _, value), (other_kind, _, other_value) = checksum_of(one).partition(" "), checksum_of(other).partition(" ")
    return kind != other_kind or value == other_value


def checksum_of(file: Record) -> str:
    """Look up `KIND VALUE`; version 0.2.0 wrote `blake2b …`, of the begin and the end of a local file."""
    return str(file.get("checksum") or file.get("fingerprint") or "none none")


def files_keys(record: Record) -> list[str]:
    """List the keys of a record that has files."""
    return [key for key in FILES_KEYS if key in record]


def is_path(dataset_name: str | None) -> bool:
    """Return whether a data set is a local folder, also where its path is redacted."""
    return dataset_name is not None and (dataset_name == REDACTED or Path(dataset_name).is_absolute())


def has_unknown_commit(record: Record) -> bool:
    """Return whether a record is of a data set of the Hub, at a commit that it does not name."""
    settings = record.get("settings", {})
    name = settings.get("dataset_name")
    if name in (None, BUILTIN) or is_path(name):
        return False
    return not COMMIT.fullmatch(settings.get("dataset_revision") or "")
