"""The manifest of a folder of shards: what is in them; it is written last, and checked before shards are read."""

import dataclasses
import functools
import json
import math
import operator
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
PLAN_NAME = "plan.json"  # instead of the manifest while shards are written
TOKENIZER_FOLDER_NAME = "tokenizer"

# Values of `chunking`: the one whose rows are pairs of segments, with a `next_sentence_label`.
PAIRS = "segment_pairs"
# In these a [SEP] ends every document and every framed passage, and is nowhere else: so the ids alone say which tokens
# of a row are of one document.
SEPARATED_CHUNKINGS = ("concat", "full_sentences", "documents", "packed")
# Values of `next_sentence_label`, as in google-research/bert and transformers: the second segment is of another
# document, or follows the first.
RANDOM_NEXT, IS_NEXT = 1, 0

# The last number of a name is its number of rows: the rule of transformers' TPU tutorial, whose trainer reads it so.
NUM_ROWS_IN_NAME = re.compile(r"-\d+-(\d+)\.tfrecord$")
# The tutorial's names have two numbers, those of this project three: partition, shard, rows.
MANAGED_SHARD_NAME = re.compile(r"^dataset-\d{5,}-\d{5,}-\d+\.tfrecord$")
# Fields of the manifest that are published as they are.
PUBLIC_FIELDS = (
    "format_version", "split", "max_length", "chunking", "sentences_by", "random_share", "shard_size",
    "partition_bytes", "tokenizer", "shards", "totals", "unigram_entropy_nats", "versions", "deduplicated",
)  # fmt: skip


Record = TypeVar("Record")
_types_of: Callable[[type], dict[str, Any]] = functools.cache(get_type_hints)


@dataclass(frozen=True)
class ShardRecord:
    """One shard: `num_tokens` counts ids that are not padding, `crc32c` is of the whole file, in hexadecimal."""

    name: str
    num_rows: int
    num_tokens: int
    num_bytes: int
    crc32c: str


@dataclass(frozen=True)
class TokenizerRecord:
    """The tokenizer that made the ids; `special_ids` has the keys cls, pad, sep, unk, mask."""

    sha256: str
    vocabulary_size: int
    special_ids: dict[str, int]


@dataclass(frozen=True)
class Totals:
    """Sums over a split; `num_tokens` counts ids that are not padding, framing included.

    `num_words` counts words of the text by white space; 0 in manifests of before it was counted. With pairs of
    segments, one per row, `num_random_pairs` of them have a second segment that does not follow the first, and
    `num_documents_without_pair` documents with text are in none.
    """

    num_documents: int
    num_blank_documents: int
    num_tokens: int
    num_padding_tokens: int
    num_rows: int
    num_random_pairs: int = 0
    num_documents_without_pair: int = 0
    num_words: int = 0
    num_duplicate_documents: int = 0  # left out, and not among `num_documents`

    def __add__(self, other: "Totals") -> "Totals":
        sums = map(operator.add, dataclasses.astuple(self), dataclasses.astuple(other))
        return Totals(*sums)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What is in the folder of a split and how it was made: equal settings and corpus make an equal manifest.

    `bad_rows` are the rows of the corpus that were skipped. `sentences_by` (how documents were cut into sentences) and
    `random_share` (the fraction of pairs that should be random) are those of pairs of segments, else None. Where
    duplicates are dropped, `deduplicated` has the hashes of the splits up to this one in which they are looked for.
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
    """A complete folder of shards, ready to be read; the tutorial's shards have no manifest."""

    folder: str
    paths: tuple[str, ...]
    num_rows_per_shard: tuple[int, ...]
    num_rows: int
    manifest: Manifest | None
    tokenizer_folder: str | None


def write_manifest(folder: str, manifest: Manifest) -> None:
    """Write `folder/manifest.json`, which declares the folder complete: the last file to be written."""
    record = dataclasses.asdict(manifest)
    if manifest.deduplicated is None:
        del record["deduplicated"], record["totals"]["num_duplicate_documents"]
    open_folder(folder).write_json(MANIFEST_NAME, record)


def read_manifest(folder: str) -> Manifest:
    """Read the manifest of a split's folder, local or `gs://`.

    Raises:
        InputError: as `parse_manifest`.
    """
    files = open_folder(folder)
    return parse_manifest(files.read_bytes(MANIFEST_NAME), files.path_of(MANIFEST_NAME))


def parse_manifest(content: bytes | str, path: str) -> Manifest:
    """Make a manifest of the content of its file; `path` is for errors.

    Raises:
        InputError: it is not JSON, of another format version, or lacks fields.
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
        raise ValueError(f"its {key} must be a list, and is {fields[key]!r:.60}")
    return fields[key]


def _record(kind: type[Record], fields: dict[str, Any], key: str) -> Record:
    """Make a record of the object under a key; a ValueError names a value that is missing or has another type."""
    values = fields[key]
    if not isinstance(values, dict):
        raise ValueError(f"its {key} must be an object, and is {values!r:.60}")
    prefix = f"{key}." if key else ""
    kinds = _types_of(kind)
    for one in dataclasses.fields(kind):  # type: ignore[arg-type]
        if one.name in values:
            _check_value(values[one.name], kinds[one.name], prefix + one.name)
        elif one.default is dataclasses.MISSING:
            raise ValueError(f"it has no {prefix}{one.name}")
    return kind(**values)


def _check_value(value: Any, kind: Any, key: str) -> None:
    """Raise a ValueError for a value that is not of a type of the dataclasses above; numbers are 0 or more."""
    kinds = [one for one in get_args(kind) if one is not type(None)]
    if type(None) in get_args(kind):
        if value is not None:
            _check_value(value, kinds[0], key)
    elif get_origin(kind) is dict:
        if not isinstance(value, dict):
            raise ValueError(f"its {key} must be an object, and is {value!r:.60}")
        for name, item in value.items():
            _check_value(item, kinds[1], f"{key}.{name}")
    elif kind is str and not isinstance(value, str):
        raise ValueError(f"its {key} must be text, and is {value!r:.60}")
    elif kind is int and not (type(value) is int and value >= 0):
        raise ValueError(f"its {key} must be a whole number from 0 on, and is {value!r:.60}")
    elif kind is float and not (type(value) in (int, float) and 0 <= value < math.inf):
        raise ValueError(f"its {key} must be a number from 0 on, and is {value!r:.60}")


def published_manifest(record: Mapping[str, Any]) -> dict[str, Any]:
    """Summarize a `manifest.json` for publishing; counts and checksums stay, which verify the shards."""
    published = {name: record[name] for name in PUBLIC_FIELDS if name in record}
    published["corpus"] = published_corpus(record["corpus"])
    return published | {"bad_rows": published_bad_rows(record.get("bad_rows"))}


def entropy_nats(counts: NDArray[np.int64]) -> float:
    """Compute the entropy of the distribution with these counts: the loss of predicting by frequency alone."""
    probabilities = counts[counts > 0] / counts.sum()
    return float((probabilities * np.log(1 / probabilities)).sum())


def open_shards(folder: str) -> ShardSet:
    """Check the shards of a split's folder, local or `gs://`, by listing it; no shard is opened.

    Names, sizes and counts are compared with the manifest. A folder without a manifest, made by the tutorial's method,
    is accepted with the counts in the names.

    Raises:
        InputError: no shards; an unfinished preparation; a shard that is missing, truncated, unknown to the manifest,
            or of another count.
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
            f"Shards must come with the manifest that is written last; {folder} has none, so its preparation "
            "did not end. Run prepare_tfrecord_shards.py again with the same flags: it resumes where it stopped."
        )
    if not names:
        if not (is_gcs(folder) or looks_local(folder)):
            hint = did_you_mean(folder) or "."
            raise InputError(f"There is no folder {folder}{hint} For shards on the Hub pass hub:USER/NAME.")
        check_folder(folder)
        raise InputError(
            f"{folder} contains no *.tfrecord files. Pass the folder of one split, such as work/shards/train."
        )
    found = [NUM_ROWS_IN_NAME.search(name) for name in names]
    if None in found:
        raise InputError(
            f"Shards without a manifest must be named dataset-SHARD-ROWS.tfrecord; {folder} holds "
            f"{names[found.index(None)]}. Prepare the shards again."
        )
    return [int(match[1]) for match in found if match]


def _check_against_listing(folder: Folder, manifest: Manifest, sizes_bytes: dict[str, int]) -> None:
    stated = {shard.name: shard.num_bytes for shard in manifest.shards}
    for name in sorted(stated | sizes_bytes):
        if stated.get(name) != sizes_bytes.get(name):
            here, there = (f"{one[name]:,} bytes" if name in one else "no such file" for one in (sizes_bytes, stated))
            raise InputError(
                f"A folder must have the shards of its manifest; {folder.path_of(name)}: {here}, in the manifest "
                f"{there}. Copy the folder again from where it was made, or prepare it again with --overwrite."
            )
