"""Find text that two splits share, of one corpus or of two: what is trained on must not be evaluated on.

Files are compared by content, a .gz file also by its decompressed content; data sets of the Hub by commit and split.
Splits that were drawn with the same seed from the same text share nothing, since the draw depends on the text alone.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any

from mlm_common.corpus.config import BUILTIN, HELD_OUT_SPLITS, CorpusConfig, corpus_config_from_record
from mlm_common.corpus.identity import (
    Record,
    describe_file,
    files_keys,
    identity,
    is_path,
    record_of_split,
)
from mlm_common.hub.redaction import REDACTED

# All empty files are equal.
NO_CONTENT = f"sha256 {hashlib.sha256().hexdigest()}"
# Settings that decide what a document is, and with the percentages which split it is drawn for.
DRAW = ("seed", "sample_by", "text_column")


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

    @property
    def settings(self) -> Record:
        """The settings in `record`."""
        return dict(self.record["settings"])

    @cached_property
    def config(self) -> CorpusConfig:
        """The same as a `CorpusConfig`."""
        return corpus_config_from_record(self.record)

    @cached_property
    def files(self) -> list[Record]:
        """The files that are not empty."""
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
        source = one.settings["dataset_name"]
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
    here, there = one.settings["dataset_config"], other.settings["dataset_config"]
    if here != there and _are_one_dataset(one, other) and _hub_split(one) == _hub_split(other):
        return f"they are of the configurations {here} and {there} of {one.settings['dataset_name']}"
    return ""


def _are_drawn_apart(one: Part, other: Part) -> bool:
    """Return whether equal documents cannot be in both splits, since these are drawn by their text."""
    (start, stop), (other_start, other_stop) = (part.config.drawn_percents_of(part.split) for part in (one, other))
    is_one_draw = all(one.settings[name] == other.settings[name] for name in DRAW)
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
    if not _are_one_dataset(one, other) or one.settings["dataset_config"] != other.settings["dataset_config"]:
        return False
    if one.settings["dataset_name"] == BUILTIN:
        return not are_apart or one.record.get(BUILTIN) != other.record.get(BUILTIN)
    is_one_state = one.settings["dataset_revision"] == other.settings["dataset_revision"]
    return not is_one_state or (_hub_split(one) == _hub_split(other) and not are_apart)


def _are_one_dataset(one: Part, other: Part) -> bool:
    """Return whether two splits are of one data set: by its name or, if it was renamed, its commit."""
    name, other_name = (part.settings["dataset_name"] for part in (one, other))
    if name is None or other_name is None or is_path(name) or is_path(other_name):
        return False  # a folder is compared by its files
    is_one_commit = one.settings["dataset_revision"] == other.settings["dataset_revision"]
    return name == other_name or (is_one_commit and BUILTIN not in (name, other_name))


def _hub_split(part: Part) -> str:
    """Return which split of the data set a part was read from."""
    return next(filter(None, map(part.config.hub_split_of, HELD_OUT_SPLITS)), part.config.split)
