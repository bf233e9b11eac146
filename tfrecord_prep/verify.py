"""Read all shards of a preparation again and compare them with their manifests; nothing else is needed for it."""

import dataclasses
import glob
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from mlm_common.cli.console import progress_bar
from mlm_common.errors import InputError, RunFailedError
from mlm_common.storage import open_folder
from mlm_common.storage.reading import find_stored_files
from mlm_common.tokenizer import load_tokenizer, tokenizer_sha256
from mlm_common.worker_pool import map_in_order
from tfrecord_prep.manifest import (
    MANIFEST_NAME,
    PADDING_CHUNKINGS,
    PAIRS,
    PLAN_NAME,
    TOKENIZER_FOLDER_NAME,
    Manifest,
    ShardRecord,
    entropy_nats,
    open_shards,
)
from tfrecord_prep.records import LABEL_KEY, decode_rows, read_records


def verify_folder(output_dir: str, num_processes: int) -> str:
    """Check the folders of all splits, and describe what was checked.

    Raises:
        InputError: there is no split.
        RunFailedError: the first difference; says in which file and row.
    """
    return "\n".join([verify_split(folder, num_processes) for folder in split_folders(output_dir)])


def split_folders(output_dir: str) -> list[str]:
    """Find the folders of splits in `output_dir`, complete or not; it may itself be one."""
    if {MANIFEST_NAME, PLAN_NAME} & open_folder(output_dir).list_files().keys():
        return [output_dir]
    pattern = glob.escape(output_dir.rstrip("/"))
    found = [file.name for name in (MANIFEST_NAME, PLAN_NAME) for file in find_stored_files(f"{pattern}/*/{name}")]
    if not found:
        raise InputError(f"--verify needs the --output-dir of a preparation; {output_dir} has no */{MANIFEST_NAME}.")
    return sorted({name.rpartition("/")[0] for name in found})


def verify_split(folder: str, num_processes: int) -> str:
    """Check the folder of one split, and describe what was checked; a RunFailedError is the first difference."""
    try:
        shards = open_shards(folder)
        tokenizer = load_tokenizer(open_folder(folder).path_of(TOKENIZER_FOLDER_NAME))
    except InputError as error:
        raise RunFailedError(str(error)) from error
    manifest = shards.manifest
    if manifest is None:
        raise RunFailedError(f"{folder} has no {MANIFEST_NAME} to compare its shards with.")
    if tokenizer_sha256(tokenizer) != manifest.tokenizer.sha256:
        raise RunFailedError(f"{folder}/tokenizer is not the tokenizer of the manifest.")
    id_counts, num_random_pairs = np.zeros(manifest.tokenizer.vocabulary_size, np.int64), 0
    without_lists = dataclasses.replace(manifest, shards=(), corpus={})  # sent to a worker with each shard
    check = partial(check_shard, folder, without_lists)
    with progress_bar(f"Verifying {folder}", " shards", len(manifest.shards)) as bar:
        for found in map_in_order(check, _shards_to_check(manifest), num_processes, "Use fewer --num-workers."):
            id_counts += found.id_counts
            num_random_pairs += found.num_random_pairs
            bar.update()
    _check_totals(folder, manifest, id_counts, num_random_pairs)
    bad_rows = manifest.bad_rows
    left_out = f" Rows of the corpus that cannot be read: {bad_rows.describe()}." if bad_rows.num_rows else ""
    return (
        f"{folder}: right. Checked {len(manifest.shards):,} shards, {manifest.totals.num_rows:,} rows, "
        f"{manifest.totals.num_tokens:,} tokens: checksums of files and records, counts, ids, framing, padding, sums, "
        "and the tokenizer's hash." + left_out
    )


def _check_totals(folder: str, manifest: Manifest, id_counts: NDArray[np.int64], num_random_pairs: int) -> None:
    special_ids = manifest.tokenizer.special_ids
    num_padding = int(id_counts[special_ids["pad"]])
    text_counts = id_counts.copy()
    text_counts[list(special_ids.values())] = 0
    found = {
        "num_rows": int(id_counts.sum()) // manifest.max_length,
        "num_tokens": int(id_counts.sum()) - num_padding,
        "num_padding_tokens": num_padding,
        "num_random_pairs": num_random_pairs,
    }
    for name, value in found.items():
        if getattr(manifest.totals, name) != value:
            stated = getattr(manifest.totals, name)
            raise RunFailedError(f"{folder}/{MANIFEST_NAME} has {name} {stated:,}; the shards have {value:,}.")
    entropy = entropy_nats(text_counts)
    if not np.isclose(manifest.unigram_entropy_nats, entropy, rtol=1e-12):
        stated = manifest.unigram_entropy_nats
        raise RunFailedError(f"{folder}/{MANIFEST_NAME} has unigram_entropy_nats {stated}; the shards have {entropy}.")


@dataclass(frozen=True)
class ShardToCheck:
    """A shard, and whether it is the first or the last of its partition."""

    record: ShardRecord
    is_first: bool
    is_last: bool


def _shards_to_check(manifest: Manifest) -> Iterator[ShardToCheck]:
    partitions = [None, *(shard.name.split("-")[1] for shard in manifest.shards), None]
    for number, shard in enumerate(manifest.shards, 1):
        before, this, after = partitions[number - 1 : number + 2]
        yield ShardToCheck(shard, is_first=this != before, is_last=this != after)


@dataclass(frozen=True)
class ShardCounts:
    """Counts of each id in a shard, padding included, and the number of random pairs."""

    id_counts: NDArray[np.int64]  # (vocabulary_size,)
    num_random_pairs: int


def check_shard(folder: str, manifest: Manifest, shard: ShardToCheck) -> ShardCounts:
    """Check a shard, and count what is in it.

    Raises:
        RunFailedError: the first difference, with file and row (counted from 0).
    """
    files = open_folder(folder)
    path, data = files.path_of(shard.record.name), files.read_bytes(shard.record.name)
    rows = _read_rows(path, data, manifest)
    if len(rows.input_ids) != shard.record.num_rows:
        raise RunFailedError(f"{path} has {len(rows.input_ids):,} rows, the manifest {shard.record.num_rows:,}.")
    _check_ids(path, rows, manifest)
    _check_framing(path, rows, manifest, shard)
    _check_padding(path, rows, manifest, shard)
    num_tokens = int(rows.num_tokens.sum())
    if num_tokens != shard.record.num_tokens:
        raise RunFailedError(f"{path} has {num_tokens:,} tokens, the manifest {shard.record.num_tokens:,}.")
    crc32c = f"{google_crc32c.value(data):08x}"
    if crc32c != shard.record.crc32c:
        raise RunFailedError(f"{path} has the CRC32C {crc32c}, the manifest {shard.record.crc32c}.")
    id_counts = np.bincount(rows.input_ids.ravel(), minlength=manifest.tokenizer.vocabulary_size)
    return ShardCounts(id_counts, int(rows.labels.sum()))


@dataclass(frozen=True)
class _Rows:
    """All rows of a shard, and their ids before the padding, one after the other."""

    input_ids: NDArray[np.int64]  # (num_rows, max_length)
    is_token: NDArray[np.bool_]  # (num_rows, max_length)
    labels: NDArray[np.int64]  # (num_rows,), of pairs; else empty

    @property
    def num_tokens(self) -> NDArray[np.int64]:
        """Ids before the padding; (num_rows,)."""
        return self.is_token.sum(axis=1)

    def ends_of_rows(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Tell of each token whether it is the first and whether it is the last of its row; (num_tokens,) each."""
        number_in_row = np.nonzero(self.is_token)[1]
        return number_in_row == 0, number_in_row == np.repeat(self.num_tokens - 1, self.num_tokens)

    def any_in_row(self, is_bad_token: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Tell which rows have a bad one among their tokens, which are given in order; (num_rows,)."""
        bad = np.zeros_like(self.is_token)
        bad[self.is_token] = is_bad_token
        return np.logical_or.reduce(bad, axis=1)


def _read_rows(path: str, data: bytes, manifest: Manifest) -> _Rows:
    max_length = manifest.max_length
    examples: list[bytes] = []
    try:
        for example in read_records(data):
            examples.append(example)
    except ValueError as error:
        raise RunFailedError(f"{path}, row {len(examples)}: {error}.") from error
    try:
        input_ids = decode_rows(examples, "input_ids", max_length)
        mask = decode_rows(examples, "attention_mask", max_length)
        labels = decode_rows(examples if manifest.chunking == PAIRS else [], LABEL_KEY, 1)[:, 0]
    except ValueError as error:
        raise RunFailedError(f"{path}: {error}.") from error
    expected = np.arange(max_length) < mask.sum(axis=1)[:, None]
    _check_rows(path, mask != expected, "the attention mask is not ones, then zeros")
    _check_rows(path, ~expected[:, 0], "the row is empty")
    _check_rows(path, (labels < 0) | (labels > 1), f"{LABEL_KEY} is neither 0 nor 1")
    return _Rows(input_ids, expected, labels)


def _check_ids(path: str, rows: _Rows, manifest: Manifest) -> None:
    size = manifest.tokenizer.vocabulary_size
    is_outside = (rows.input_ids < 0) | (rows.input_ids >= size)
    _check_rows(path, is_outside, f"an id is outside the vocabulary of {size:,}")
    is_padding = rows.input_ids == manifest.tokenizer.special_ids["pad"]
    _check_rows(path, is_padding == rows.is_token, "padding is not where the attention mask is 0")
    is_mask = rows.input_ids == manifest.tokenizer.special_ids["mask"]
    _check_rows(path, is_mask, "text holds the mask token")


def _check_framing(path: str, rows: _Rows, manifest: Manifest, shard: ShardToCheck) -> None:
    tokens = rows.input_ids[rows.is_token]
    is_cls = tokens == manifest.tokenizer.special_ids["cls"]
    is_sep = tokens == manifest.tokenizer.special_ids["sep"]
    is_first, is_last = rows.ends_of_rows()
    if manifest.chunking != "concat":
        _check_rows(path, rows.any_in_row(is_first & ~is_cls), "the row does not begin with the cls token")
        _check_rows(path, rows.any_in_row(is_last & ~is_sep), "the row does not end with the sep token")
    if manifest.chunking in ("full_sentences", PAIRS):
        _check_rows(path, rows.any_in_row(is_cls & ~is_first), "a cls token is within the row")
    if manifest.chunking == PAIRS:
        is_empty = is_sep & np.append(False, (is_sep | is_cls)[:-1])
        _check_rows(path, rows.any_in_row(is_empty), "a segment is empty")
        num_segments = (rows.input_ids == manifest.tokenizer.special_ids["sep"]).sum(axis=1)
        _check_rows(path, num_segments != 2, "the row is not two segments with a sep token after each")
    if manifest.chunking in ("full_sentences", PAIRS):
        return
    # Documents follow each other as [CLS] … [SEP] [CLS] … [SEP], none of them empty, over the ends of rows.
    is_wrong = np.append(shard.is_first and not is_cls[0], is_cls[1:] != is_sep[:-1])
    is_wrong[1:] |= is_cls[:-1] & is_sep[1:]
    is_wrong[-1] |= shard.is_last and not is_sep[-1]
    _check_rows(path, rows.any_in_row(is_wrong), "documents are not framed by a cls and a sep token each")


def _check_padding(path: str, rows: _Rows, manifest: Manifest, shard: ShardToCheck) -> None:
    if manifest.chunking in PADDING_CHUNKINGS:
        return
    is_padded = rows.num_tokens < manifest.max_length
    is_padded[-1] &= not shard.is_last
    _check_rows(path, is_padded, "padding in a row that is not the last of its partition")


def _check_rows(path: str, is_bad: NDArray[np.bool_], problem: str) -> None:
    """Raise for the first bad row; (num_rows,), or of each id (num_rows, max_length)."""
    if is_bad.any():
        row = int(np.argwhere(is_bad)[0, 0])
        raise RunFailedError(f"{path}, row {row:,}: {problem}.")
