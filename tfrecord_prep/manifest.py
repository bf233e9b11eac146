"""The manifest of a folder of shards, which describes their content.

The manifest is written last, and it is checked before the shards are read.
"""

import dataclasses
import functools
import json
import math
import operator
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from mlm_common.corpus.identity import published_bad_rows, published_corpus
from mlm_common.corpus.text_formats import BadRows, bad_rows_from_record
from mlm_common.errors import InputError
from mlm_common.storage import Folder, check_folder, did_you_mean, is_gcs, looks_local, open_folder
from mlm_common.storage.guard import guarded_read

FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
PLAN_NAME = "plan.json"  # exists instead of the manifest while shards are being written
TOKENIZER_FOLDER_NAME = "tokenizer"

# The value of `chunking` for rows that are pairs of segments with a `next_sentence_label`.
PAIRS = "segment_pairs"
# With these values of `chunking`, rows contain a [SEP] at the end of each document (with some values, also where a
# document is cut), and nowhere else. So the ids of a row show which tokens belong to the same document.
SEPARATED_CHUNKINGS = ("concat", "full_sentences", "documents", "packed")
# Values of `next_sentence_label`, as in google-research/bert and transformers: the second segment comes from another
# document, or follows the first.
RANDOM_NEXT, IS_NEXT = 1, 0

# The last number in the name of a shard is its number of rows, as in the TPU tutorial of transformers.
NUM_ROWS_IN_NAME = re.compile(r"-\d+-(\d+)\.tfrecord$")
# Names in this project have three numbers: partition, shard, rows. Names in the tutorial have two.
MANAGED_SHARD_NAME = re.compile(r"^dataset-\d{5,}-\d{5,}-\d+\.tfrecord$")
# Fields of the manifest that are published unchanged.
PUBLIC_FIELDS = (
    "format_version", "split", "max_length", "chunking", "sentences_by", "random_share", "shard_size",
    "partition_bytes", "tokenizer", "shards", "totals", "unigram_entropy_nats", "versions", "deduplicated",
)  # fmt: skip


Record = TypeVar("Record")
_types_of: Callable[[type], dict[str, Any]] = functools.cache(get_type_hints)


@dataclass(frozen=True)
class ShardRecord:
    """One shard.

    Attributes:
        name: file name in the folder of the split.
        num_rows: number of rows.
        num_tokens: number of ids that are not padding.
        num_bytes: size of the file.
        crc32c: checksum of the whole file, in hexadecimal.
    """

    name: str
    num_rows: int
    num_tokens: int
    num_bytes: int
    crc32c: str


@dataclass(frozen=True)
class TokenizerRecord:
    """The tokenizer that made the ids.

    Attributes:
        sha256: hash returned by `tokenizer_sha256`.
        vocabulary_size: number of ids.
        special_ids: ids by the keys cls, pad, sep, unk and mask.
    """

    sha256: str
    vocabulary_size: int
    special_ids: dict[str, int]


@dataclass(frozen=True)
class Totals:
    """Sums over a split.

    Attributes:
        num_documents: number of documents, including blank ones.
        num_blank_documents: number of documents without text.
        num_tokens: number of ids that are not padding, including [CLS] and [SEP].
        num_padding_tokens: number of ids that are padding.
        num_rows: number of rows.
        num_random_pairs: number of segment pairs whose second segment comes from another document.
        num_documents_without_pair: number of documents with text that gave no segment pair.
        num_words: number of words of the text, separated by white space; 0 for older manifests, which lack this number.
        num_duplicate_documents: number of duplicates that were left out; `num_documents` does not include them.
    """

    num_documents: int
    num_blank_documents: int
    num_tokens: int
    num_padding_tokens: int
    num_rows: int
    num_random_pairs: int = 0
    num_documents_without_pair: int = 0
    num_words: int = 0
    num_duplicate_documents: int = 0

    def __add__(self, other: "Totals") -> "Totals":
        sums = map(operator.add, dataclasses.astuple(self), dataclasses.astuple(other))
        return Totals(*sums)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of a split's folder, and how it was made. Equal settings and text give equal manifests.

    Attributes:
        format_version: version of this format.
        split: name of the split.
        max_length: ids per row.
        chunking: how documents were cut into rows, a key of `CHUNKINGS`.
        sentences_by: how documents were cut into sentences; None unless the rows are segment pairs.
        random_share: probability of a random second segment; None unless the rows are segment pairs.
        shard_size: maximum number of rows per shard.
        partition_bytes: size of a partition of the corpus.
        tokenizer: tokenizer that made the ids.
        corpus: record of the corpus.
        shards: all shards, in order.
        totals: sums over the split.
        bad_rows: rows of the corpus that were skipped because they cannot be read.
        unigram_entropy_nats: loss of guessing each token from token frequencies alone.
        versions: versions of the libraries.
        deduplicated: {SOURCE/SPLIT: hash} of the splits in which duplicates of this split's documents were searched,
            including this split; None if duplicates were kept.
    """

    format_version: int = FORMAT_VERSION
    split: str
    max_length: int
    chunking: str
    sentences_by: str | None = None
    random_share: float | None = None
    shard_size: int
    partition_bytes: int
    tokenizer: TokenizerRecord
    corpus: dict[str, Any]
    shards: tuple[ShardRecord, ...]
    totals: Totals
    bad_rows: BadRows
    unigram_entropy_nats: float
    versions: dict[str, str]
    deduplicated: dict[str, str] | None = None


@dataclass(frozen=True)
class ShardSet:
    """A complete folder of shards, ready to be read.

    Attributes:
        folder: folder of the split.
        paths: paths of the shards.
        num_rows_per_shard: number of rows of each shard.
        num_rows: number of rows of all shards.
        manifest: the manifest; None for shards made by the TPU tutorial of transformers.
        tokenizer_folder: folder of the tokenizer that made the ids, if it is stored with the shards.
    """

    folder: str
    paths: tuple[str, ...]
    num_rows_per_shard: tuple[int, ...]
    num_rows: int
    manifest: Manifest | None
    tokenizer_folder: str | None


def write_manifest(folder: str, manifest: Manifest) -> None:
    """Write `folder/manifest.json`. This file must be written last, because it declares the folder complete."""
    record = dataclasses.asdict(manifest)
    if manifest.deduplicated is None:
        del record["deduplicated"], record["totals"]["num_duplicate_documents"]
    open_folder(folder).write_json(MANIFEST_NAME, record)


def read_manifest(folder: str) -> Manifest:
    """Read the manifest of a split's folder, local or `gs://`.

    Raises:
        InputError: see `parse_manifest`.
    """
    files = open_folder(folder)
    return parse_manifest(files.read_bytes(MANIFEST_NAME), files.path_of(MANIFEST_NAME))


def parse_manifest(content: bytes | str, path: str) -> Manifest:
    """Parse the content of a manifest file; `path` is named in errors.

    Raises:
        InputError: the content is not JSON, has a different format version, or lacks fields.
    """
    hint = "Prepare the shards again with --overwrite."
    with guarded_read(path, "a manifest: JSON with the fields of docs/reference/shards.md", hint=hint):
        fields = json.loads(content)
        if (version := fields["format_version"]) == FORMAT_VERSION:
            fields["tokenizer"] = _record(TokenizerRecord, fields, "tokenizer")
            shards = {f"shards[{number}]": shard for number, shard in enumerate(_listed(fields, "shards"))}
            fields["shards"] = tuple(_record(ShardRecord, shards, name) for name in shards)
            fields["totals"] = _record(Totals, fields, "totals")
            _check_value(fields["bad_rows"]["num_rows"], int, "bad_rows.num_rows")
            fields["bad_rows"] = bad_rows_from_record(fields["bad_rows"])
            return _record(Manifest, {"": fields}, "")
    raise InputError(f"This version reads format_version {FORMAT_VERSION}; {path} has {version!r}. {hint}")


def _listed(fields: dict[str, Any], key: str) -> list[Any]:
    if not isinstance(fields[key], list):
        raise ValueError(f"its {key} must be a list, but is {fields[key]!r:.60}")
    return fields[key]


def _record(kind: type[Record], fields: dict[str, Any], key: str) -> Record:
    """Convert the JSON object under a key into a dataclass.

    Raises:
        ValueError: a value is missing or has the wrong type; the message names it.
    """
    values = fields[key]
    if not isinstance(values, dict):
        raise ValueError(f"its {key} must be an object, but is {values!r:.60}")
    prefix = f"{key}." if key else ""
    kinds = _types_of(kind)
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        if field.name in values:
            _check_value(values[field.name], kinds[field.name], prefix + field.name)
        elif field.default is dataclasses.MISSING:
            raise ValueError(f"it has no {prefix}{field.name}")
    return kind(**values)


def _check_value(value: Any, kind: Any, key: str) -> None:
    """Check the type of a JSON value; numbers must be 0 or more.

    Args:
        value: the value.
        kind: type of its field in one of the dataclasses above.
        key: where the value is, for errors.

    Raises:
        ValueError: the value does not have this type.
    """
    kinds = [argument for argument in get_args(kind) if argument is not type(None)]
    if type(None) in get_args(kind):
        if value is not None:
            _check_value(value, kinds[0], key)
    elif get_origin(kind) is dict:
        if not isinstance(value, dict):
            raise ValueError(f"its {key} must be an object, but is {value!r:.60}")
        for name, item in value.items():
            _check_value(item, kinds[1], f"{key}.{name}")
    elif kind is str and not isinstance(value, str):
        raise ValueError(f"its {key} must be text, but is {value!r:.60}")
    elif kind is int and not (type(value) is int and value >= 0):
        raise ValueError(f"its {key} must be a whole number of at least 0, but is {value!r:.60}")
    elif kind is float and not (type(value) in (int, float) and 0 <= value < math.inf):
        raise ValueError(f"its {key} must be a number of at least 0, but is {value!r:.60}")


def published_manifest(record: Mapping[str, Any]) -> dict[str, Any]:
    """Redact a `manifest.json` for publishing. Counts and checksums stay, so that the shards can be verified."""
    published = {name: record[name] for name in PUBLIC_FIELDS if name in record}
    published["corpus"] = published_corpus(record["corpus"])
    return published | {"bad_rows": published_bad_rows(record.get("bad_rows"))}


def entropy_nats(counts: NDArray[np.int64]) -> float:
    """Return the entropy of the distribution with these counts, which is the loss of predicting by frequency alone."""
    probabilities = counts[counts > 0] / counts.sum()
    return float((probabilities * np.log(1 / probabilities)).sum())


def open_shards(folder: str) -> ShardSet:
    """Check the shards of a split's folder, local or `gs://`, by listing it. No shard is opened.

    The names and sizes of the files are compared with the manifest. A folder that was made as in the TPU tutorial of
    transformers has no manifest, but is accepted. The numbers of rows are then taken from the names of the files.

    Raises:
        InputError: the folder has no shards, its preparation is unfinished, or a shard is missing, truncated, or not
            in the manifest.
    """
    files = open_folder(folder)
    sizes_bytes = files.list_files()
    names = sorted(name for name in sizes_bytes if name.endswith(".tfrecord"))
    if MANIFEST_NAME in sizes_bytes:
        manifest = read_manifest(folder)
        _check_against_listing(files, manifest, {name: sizes_bytes[name] for name in names})
        names = [shard.name for shard in manifest.shards]
        num_rows = [shard.num_rows for shard in manifest.shards]
    else:
        manifest = None
        num_rows = _num_rows_in_names(folder, names, has_plan=PLAN_NAME in sizes_bytes)
    tokenizer = files.subfolder(TOKENIZER_FOLDER_NAME)
    return ShardSet(
        folder=folder,
        paths=tuple(files.path_of(name) for name in names),
        num_rows_per_shard=tuple(num_rows),
        num_rows=sum(num_rows),
        manifest=manifest,
        tokenizer_folder=tokenizer.path if tokenizer.list_files() else None,
    )


def _num_rows_in_names(folder: str, names: list[str], has_plan: bool) -> list[int]:
    if has_plan or any(MANAGED_SHARD_NAME.match(name) for name in names):
        raise InputError(
            f"{folder} has no {MANIFEST_NAME}, which is written last, so its preparation did not finish. Run "
            "prepare_tfrecord_shards.py again with the same flags: it resumes where it stopped."
        )
    if not names:
        if not (is_gcs(folder) or looks_local(folder)):
            hint = did_you_mean(folder) or "."
            raise InputError(f"There is no folder {folder}{hint} For shards on the Hub pass hub:USER/NAME.")
        if os.path.isfile(folder):  # noqa: PTH113 (pathlib's is_file raises for unreadable parents)
            raise InputError(
                f"{folder} is a file, but rows are read from a folder of shards. Make one with "
                "prepare_tfrecord_shards.py, and pass the folder of one split, such as work/shards/train."
            )
        check_folder(folder)
        raise InputError(
            f"{folder} contains no *.tfrecord files. Pass the folder of one split, such as work/shards/train."
        )
    matches = [NUM_ROWS_IN_NAME.search(name) for name in names]
    if None in matches:
        raise InputError(
            f"Shards without a manifest must be named dataset-SHARD-ROWS.tfrecord; {folder} contains "
            f"{names[matches.index(None)]}. Prepare the shards again."
        )
    return [int(match[1]) for match in matches if match]


def _check_against_listing(folder: Folder, manifest: Manifest, sizes_bytes: dict[str, int]) -> None:
    recorded_sizes_bytes = {shard.name: shard.num_bytes for shard in manifest.shards}
    for name in sorted(recorded_sizes_bytes | sizes_bytes):
        if recorded_sizes_bytes.get(name) != sizes_bytes.get(name):
            actual, recorded = (
                f"{sizes[name]:,} bytes" if name in sizes else "no such file"
                for sizes in (sizes_bytes, recorded_sizes_bytes)
            )
            raise InputError(
                f"A folder must have exactly the shards of its manifest; {folder.path_of(name)}: {actual}, in the "
                f"manifest {recorded}. Copy the folder again from where it was made, or prepare it again with "
                "--overwrite."
            )
