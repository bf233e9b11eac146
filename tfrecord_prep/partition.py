"""A partition of the corpus, the unit of work: its shards depend on its documents and the settings alone."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from tfrecord_prep.chunking import CHUNKINGS, Framing, Rows
from tfrecord_prep.manifest import ShardRecord, Totals
from tfrecord_prep.plain_text import encode_documents
from tfrecord_prep.records import encode_rows
from tokenizer_training import storage
from tokenizer_training.command_line import InputError
from tokenizer_training.passages import grouped_by_size
from tokenizer_training.worker_pool import map_in_order


@dataclass(frozen=True)
class PartitionSettings:
    """What all partitions of a split share; `tokenizer_json` is that of `plain_text_tokenizer_json`."""

    folder: str
    tokenizer_json: str
    vocabulary_size: int
    special_ids: dict[str, int]
    chunking: str
    max_length: int
    shard_size: int


@dataclass(frozen=True)
class PartitionResult:
    """What became of a partition; `id_counts` is of the text, without framing and unknown tokens."""

    shards: tuple[ShardRecord, ...]
    totals: Totals
    id_counts: NDArray[np.int64]  # (vocabulary_size,)


def build_partition(index: int, documents: Sequence[str], settings: PartitionSettings) -> PartitionResult:
    """Tokenize, cut and write the documents of partition number `index`, and return what was written.

    Raises:
        InputError: the tokenizer turned text into a special token.
    """
    texts = [document for document in documents if document.strip()]
    ids, lengths = encode_documents(settings.tokenizer_json, texts)
    special_ids = settings.special_ids
    framing = Framing(cls_id=special_ids["cls"], sep_id=special_ids["sep"], pad_id=special_ids["pad"])
    rows = CHUNKINGS[settings.chunking](ids, lengths[lengths > 0], framing, settings.max_length)
    num_tokens = int(rows.num_tokens_per_row.sum())
    totals = Totals(
        num_documents=len(documents),
        num_blank_documents=len(documents) - int((lengths > 0).sum()),
        num_tokens=num_tokens,
        num_padding_tokens=rows.input_ids.size - num_tokens,
        num_rows=len(rows.input_ids),
    )
    id_counts = _count_ids(ids, settings)
    return PartitionResult(_write_shards(index, rows, settings), totals, id_counts)


def build_partitions(
    documents: Iterable[str], settings: PartitionSettings, partition_bytes: int, num_processes: int
) -> Iterator[PartitionResult]:
    """Yield the result of each partition, in order; one process means this one.

    Raises:
        InputError: a document is not valid Unicode, or a worker was killed.
    """
    partitions = enumerate(grouped_by_size(documents, partition_bytes))
    build = partial(_build_numbered, settings)
    yield from map_in_order(
        build, partitions, num_processes, "Give fewer --num-workers, or a smaller --partition-bytes."
    )


def _build_numbered(settings: PartitionSettings, numbered_documents: tuple[int, Sequence[str]]) -> PartitionResult:
    return build_partition(*numbered_documents, settings)


def _count_ids(ids: NDArray[np.int32], settings: PartitionSettings) -> NDArray[np.int64]:
    counts = np.bincount(ids, minlength=settings.vocabulary_size)
    counts[settings.special_ids["unk"]] = 0
    found = [name for name, special_id in settings.special_ids.items() if counts[special_id]]
    if found:
        raise InputError(
            f"A tokenizer may not turn text into special tokens; --tokenizer-name-or-path made {', '.join(found)} of "
            "it. Train a tokenizer with train-unigram, or name another one."
        )
    return counts


def _write_shards(index: int, rows: Rows, settings: PartitionSettings) -> tuple[ShardRecord, ...]:
    shards = []
    for number, start in enumerate(range(0, len(rows.input_ids), settings.shard_size)):
        input_ids = rows.input_ids[start : start + settings.shard_size]
        num_tokens_per_row = rows.num_tokens_per_row[start : start + settings.shard_size]
        name = f"dataset-{index:05d}-{number:05d}-{len(input_ids)}.tfrecord"
        data = encode_rows(input_ids, num_tokens_per_row)
        storage.write_bytes(storage.join(settings.folder, name), data)
        crc32c = f"{google_crc32c.value(data):08x}"
        shards.append(ShardRecord(name, len(input_ids), int(num_tokens_per_row.sum()), len(data), crc32c))
    return tuple(shards)
