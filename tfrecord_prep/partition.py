"""Turn a partition of the corpus, which is the unit of work, into shards.

The shards depend only on the documents of the partition and on the settings.
"""

import functools
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import google_crc32c
import numpy as np

from mlm_common.corpus.config import CorpusConfig
from mlm_common.corpus.corpus import Partition, read_partition
from mlm_common.corpus.text_formats import BadRows
from mlm_common.errors import InputError
from mlm_common.folder_lock import FolderLock
from mlm_common.storage import NewFile, open_folder, read_file
from tfrecord_prep.chunking import CHUNKINGS, Framing, Rows
from tfrecord_prep.duplicates import hashes_name, write_hashes
from tfrecord_prep.encoding import TokenBatch, encode_documents
from tfrecord_prep.manifest import PAIRS, ShardRecord, Totals
from tfrecord_prep.records import encode_rows
from tfrecord_prep.segment_pairs import PairRule, SentencesBy, sentences_of
from tfrecord_prep.split_folder import PartitionResult, write_sidecar


@dataclass(frozen=True)
class NumberedPartition:
    """A partition with its number and its hash.

    Attributes:
        index: number of the partition in the split, from 0 on.
        sha256: hash returned by `partition_sha256`.
        partition: byte ranges or documents.
        duplicates: path of a file with one byte per document, 1 for a document to leave out; None to keep all.
    """

    index: int
    sha256: str
    partition: Partition
    duplicates: str | None = None


@dataclass(frozen=True)
class SplitWork:
    """Everything that a worker needs to process partitions of one split.

    Attributes:
        corpus: settings of the corpus to read.
        split_name: name of the split.
        folder: folder of the split, to which shards are written.
        tokenizer_json: result of `plain_text_tokenizer_json`.
        vocabulary_size: number of ids of the tokenizer.
        special_ids: ids by the keys cls, pad, sep, unk and mask.
        chunking: key of `CHUNKINGS`.
        max_length: tokens per row.
        shard_size: maximum number of rows per shard.
        sentences_by: how to find sentences; only for pairs of segments.
        random_share: fraction of random pairs; only for pairs of segments.
        owner: lock of the output folder. A worker stops if the owner has lost the lock.
        hashes_folder: folder for hashes of documents. If this folder is set, hashes for `find_duplicates` are written
            instead of shards.
    """

    corpus: CorpusConfig
    split_name: str
    folder: str
    tokenizer_json: str
    vocabulary_size: int
    special_ids: dict[str, int]
    chunking: str
    max_length: int
    shard_size: int
    sentences_by: SentencesBy = "punctuation"
    random_share: float = PairRule.random_share
    owner: FolderLock | None = None
    hashes_folder: str | None = None


class Tally:
    """Counts the documents, words and ids of a partition while they pass through.

    `id_counts` excludes special tokens. For pairs of segments it counts the ids in the rows, because rows leave out
    some text and repeat other text. For other rows it counts the ids of the documents.
    """

    def __init__(self, work: SplitWork, num_duplicates: int) -> None:
        self._work = work
        self.num_duplicates = num_duplicates
        self.num_documents = self.num_blank_documents = self.num_random_pairs = self.num_words = 0
        self.id_counts = np.zeros(work.vocabulary_size, np.int64)

    def count_documents(self, documents: Iterable[str]) -> Iterator[str]:
        for document in documents:
            self.num_words += len(document.split())
            yield document

    def count_batches(self, batches: Iterable[TokenBatch]) -> Iterator[TokenBatch]:
        """Count the documents and ids of the batches, and yield the batches unchanged.

        Raises:
            InputError: the tokenizer turned text into a special token.
        """
        special_ids = self._work.special_ids
        for batch in batches:
            self.num_documents += batch.num_documents
            self.num_blank_documents += batch.num_documents - len(batch.document_ends)
            counts = np.bincount(batch.ids, minlength=len(self.id_counts))
            counts[special_ids["unk"]] = 0
            if special_names := [name for name, special_id in special_ids.items() if counts[special_id]]:
                raise InputError(
                    "A tokenizer must not turn text into special tokens; the tokenizer in --tokenizer-name-or-path "
                    f"produced {', '.join(special_names)}. Train a tokenizer with train_unigram.py, or choose another."
                )
            if self._work.chunking != PAIRS:
                self.id_counts += counts
            yield batch

    def count_pairs(self, all_rows: Iterable[Rows]) -> Iterator[Rows]:
        """Count the ids and the random pairs in rows of segment pairs, and yield the rows unchanged."""
        for rows in all_rows:
            self.num_random_pairs += 0 if rows.next_sentence_labels is None else int(rows.next_sentence_labels.sum())
            self.id_counts += np.bincount(rows.input_ids.ravel(), minlength=len(self.id_counts))
            self.id_counts[list(self._work.special_ids.values())] = 0
            yield rows


def work_on_partition(work: SplitWork, numbered: NumberedPartition) -> int:
    """Read, tokenize, cut and write one partition, or write the hashes of its documents; return its number.

    Raises:
        FolderLostError: another process has taken over the output folder.
    """
    if work.owner is not None:
        work.owner.guard()
    bad_rows = BadRows()
    documents = read_partition(work.corpus, work.split_name, numbered.partition, bad_rows)
    if work.hashes_folder is not None:
        write_hashes(work.hashes_folder, hashes_name(numbered.index, numbered.sha256), documents)
        return numbered.index
    return build_partition(numbered, documents, work, bad_rows).index


def build_partition(
    numbered: NumberedPartition, documents: Iterable[str], work: SplitWork, bad_rows: BadRows
) -> PartitionResult:
    """Tokenize and cut the documents of a partition, and write them with `write_partition`.

    Memory does not grow with the number of documents. A long document takes little more memory than its text.

    Args:
        numbered: the partition.
        documents: texts of the partition.
        work: settings of the split.
        bad_rows: rows of the corpus that were skipped. Rows are added while `documents` are read.

    Raises:
        InputError: the tokenizer turned text into a special token.
    """
    ids, has_pairs = work.special_ids, work.chunking == PAIRS
    framing = Framing(cls_id=ids["cls"], sep_id=ids["sep"], pad_id=ids["pad"])
    by_sentence = functools.partial(sentences_of, by=work.sentences_by) if has_pairs else None
    num_duplicates = 0
    if numbered.duplicates is not None:
        is_duplicate = read_file(numbered.duplicates)
        num_duplicates = sum(is_duplicate)
        documents = (text for text, is_copy in zip(documents, is_duplicate, strict=True) if not is_copy)
    tally = Tally(work, num_duplicates)
    batches = tally.count_batches(encode_documents(work.tokenizer_json, tally.count_documents(documents), by_sentence))
    rule = {"rule": PairRule(random_share=work.random_share)} if has_pairs else {}
    rows = CHUNKINGS[work.chunking](batches, framing, work.max_length, **rule)
    return write_partition(numbered, tally.count_pairs(rows) if has_pairs else rows, tally, work, bad_rows)


def write_partition(
    numbered: NumberedPartition, rows: Iterable[Rows], tally: Tally, work: SplitWork, bad_rows: BadRows
) -> PartitionResult:
    """Write the rows of a partition as shards and then its sidecar, which declares the partition complete.

    The tally must count the rows while they are read from `rows`.
    """
    shards = write_shards(work.folder, numbered.index, rows, work.shard_size)
    num_rows, num_tokens = sum(shard.num_rows for shard in shards), sum(shard.num_tokens for shard in shards)
    # All other partitions have a pair, because only a single document of one sentence cannot be paired with anything.
    is_without_pair = work.chunking == PAIRS and not num_rows
    totals = Totals(
        num_documents=tally.num_documents,
        num_blank_documents=tally.num_blank_documents,
        num_tokens=num_tokens,
        num_padding_tokens=num_rows * work.max_length - num_tokens,
        num_rows=num_rows,
        num_random_pairs=tally.num_random_pairs,
        num_documents_without_pair=tally.num_documents - tally.num_blank_documents if is_without_pair else 0,
        num_words=tally.num_words,
        num_duplicate_documents=tally.num_duplicates,
    )
    result = PartitionResult(numbered.index, numbered.sha256, shards, totals, bad_rows, tally.id_counts)
    write_sidecar(work.folder, result)
    return result


def write_shards(folder: str, partition: int, rows: Iterable[Rows], shard_size: int) -> tuple[ShardRecord, ...]:
    """Write the rows of a partition in shards of `shard_size` rows; the last shard may have fewer.

    Rows are streamed to the file, so no shard is held in memory.
    """
    records: list[ShardRecord] = []
    destination = open_folder(folder)
    with ExitStack() as files, ThreadPoolExecutor(1) as finisher:
        shard: _Shard | None = None
        finished: Future[None] | None = None

        def finish(shard: _Shard) -> Future[None]:
            if finished:
                finished.result()  # one at a time, so that a failure stops the work soon
            records.append(shard.record(f"dataset-{partition:05d}-{len(records):05d}-{shard.num_rows}.tfrecord"))
            return finisher.submit(shard.finish, records[-1].name)

        for batch in rows:
            start = 0
            while start < len(batch.input_ids):
                shard = shard or _Shard(files.enter_context(destination.new_file()))
                end = min(start + shard_size - shard.num_rows, len(batch.input_ids))
                labels = None if batch.next_sentence_labels is None else batch.next_sentence_labels[start:end]
                shard.write(Rows(batch.input_ids[start:end], batch.num_tokens_per_row[start:end], labels))
                if shard.num_rows == shard_size:
                    finished, shard = finish(shard), None
                start = end
        if shard:
            finished = finish(shard)
        if finished:
            finished.result()
    return tuple(records)


class _Shard:
    """A shard that is being written, and its counts."""

    def __init__(self, file: NewFile) -> None:
        self._file = file
        self._checksum = google_crc32c.Checksum()
        self._num_bytes = self._num_tokens = self.num_rows = 0

    def write(self, rows: Rows) -> None:
        data = encode_rows(rows.input_ids, rows.num_tokens_per_row, rows.next_sentence_labels)
        self._file.write(data)
        self._checksum.update(data)
        self._num_bytes += len(data)
        self._num_tokens += int(rows.num_tokens_per_row.sum())
        self.num_rows += len(rows.input_ids)

    def record(self, name: str) -> ShardRecord:
        return ShardRecord(name, self.num_rows, self._num_tokens, self._num_bytes, self._checksum.hexdigest().decode())

    def finish(self, name: str) -> None:
        with self._file:
            self._file.finish(name)
