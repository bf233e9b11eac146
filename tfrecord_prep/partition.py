"""Turn a partition of the corpus, the unit of work, into shards: a function of its documents and the settings."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from mlm_common.corpus.config import CorpusConfig
from mlm_common.corpus.corpus import Partition, read_partition
from mlm_common.corpus.text_formats import BadRows
from mlm_common.errors import InputError
from mlm_common.folder_lock import FolderLock
from mlm_common.storage import NewFile, open_folder
from tfrecord_prep.chunking import CHUNKINGS, Framing, Rows
from tfrecord_prep.encoding import TokenBatch, encode_documents
from tfrecord_prep.manifest import PAIRS, ShardRecord, Totals
from tfrecord_prep.records import encode_rows
from tfrecord_prep.segment_pairs import PairRule, SentencesBy, sentences_of
from tfrecord_prep.split_folder import PartitionResult, write_sidecar


@dataclass(frozen=True)
class PartitionSettings:
    """What all partitions of a split share; `tokenizer_json` is what `plain_text_tokenizer_json` returned.

    `sentences_by` and `random_share` are used by pairs of segments only.
    """

    folder: str
    tokenizer_json: str
    vocabulary_size: int
    special_ids: dict[str, int]
    chunking: str
    max_length: int
    shard_size: int
    sentences_by: SentencesBy = "punctuation"
    random_share: float = PairRule.random_share


@dataclass(frozen=True)
class NumberedPartition:
    """A partition with its number in the split and its `partition_sha256`."""

    index: int
    sha256: str
    partition: Partition


@dataclass(frozen=True)
class SplitWork:
    """All that a process needs to work on partitions: where documents are read, and what they become."""

    corpus: CorpusConfig
    split_name: str
    settings: PartitionSettings
    owner: FolderLock | None = None


class TokenTally:
    """Iterates over batches of ids once, and counts documents and ids; `id_counts` leaves out unknown tokens."""

    def __init__(self, batches: Iterable[TokenBatch], settings: PartitionSettings) -> None:
        self._batches = batches
        self._special_ids = settings.special_ids
        self.num_documents = 0
        self.num_blank_documents = 0
        self.id_counts = np.zeros(settings.vocabulary_size, np.int64)

    def __iter__(self) -> Iterator[TokenBatch]:
        for batch in self._batches:
            self.num_documents += batch.num_documents
            self.num_blank_documents += batch.num_documents - len(batch.document_ends)
            self.id_counts += self._count(batch.ids)
            yield batch

    def _count(self, ids: NDArray[np.int32]) -> NDArray[np.int64]:
        counts = np.bincount(ids, minlength=len(self.id_counts))
        counts[self._special_ids["unk"]] = 0
        found = [name for name, special_id in self._special_ids.items() if counts[special_id]]
        if found:
            raise InputError(
                f"A tokenizer may not turn text into special tokens; --tokenizer-name-or-path made {', '.join(found)} "
                "of it. Train a tokenizer with train_unigram.py, or choose another one."
            )
        return counts


class PairTally:
    """Iterates over rows of pairs once, and counts pairs and ids: pairs leave out some text and repeat some."""

    def __init__(self, rows: Iterable[Rows], settings: PartitionSettings) -> None:
        self._rows = rows
        self._special_ids = list(settings.special_ids.values())
        self.num_rows = self.num_random_pairs = 0
        self.id_counts = np.zeros(settings.vocabulary_size, np.int64)

    def __iter__(self) -> Iterator[Rows]:
        for rows in self._rows:
            self.num_rows += len(rows.input_ids)
            if rows.next_sentence_labels is not None:
                self.num_random_pairs += int(rows.next_sentence_labels.sum())
            self.id_counts += np.bincount(rows.input_ids.ravel(), minlength=len(self.id_counts))
            self.id_counts[self._special_ids] = 0
            yield rows


def work_on_partition(work: SplitWork, numbered: NumberedPartition) -> PartitionResult:
    """Read, tokenize, cut and write one partition.

    Raises:
        InputError: its documents cannot be read, or the tokenizer turned text into a special token.
        FolderLostError: the folder belongs to another run now.
    """
    if work.owner is not None:
        work.owner.guard()
    bad_rows = BadRows()
    documents = read_partition(work.corpus, work.split_name, numbered.partition, bad_rows)
    return build_partition(numbered, documents, work.settings, bad_rows)


def build_partition(
    numbered: NumberedPartition, documents: Iterable[str], settings: PartitionSettings, bad_rows: BadRows
) -> PartitionResult:
    """Tokenize, cut and write the documents of a partition, its sidecar last, and return what was written.

    Memory does not depend on the number of documents, and a document takes no more than its text. `bad_rows` are those
    that are skipped while the documents are read.

    Raises:
        InputError: the tokenizer turned text into a special token.
    """
    special_ids = settings.special_ids
    framing = Framing(cls_id=special_ids["cls"], sep_id=special_ids["sep"], pad_id=special_ids["pad"])
    has_pairs = settings.chunking == PAIRS
    by_sentence = functools.partial(sentences_of, by=settings.sentences_by) if has_pairs else None
    tally = TokenTally(encode_documents(settings.tokenizer_json, documents, by_sentence), settings)
    rule = {"rule": PairRule(random_share=settings.random_share)} if has_pairs else {}
    rows: Iterable[Rows] = CHUNKINGS[settings.chunking](tally, framing, settings.max_length, **rule)
    pairs = PairTally(rows, settings) if has_pairs else None
    shards = write_shards(settings.folder, numbered.index, pairs or rows, settings.shard_size)
    totals = _totals(tally, shards, settings.max_length)
    id_counts = tally.id_counts
    if pairs is not None:
        # Only a single document of one sentence can be in no pair.
        num_without = 0 if pairs.num_rows else totals.num_documents - totals.num_blank_documents
        counts = {"num_random_pairs": pairs.num_random_pairs, "num_documents_without_pair": num_without}
        totals, id_counts = dataclasses.replace(totals, **counts), pairs.id_counts
    result = PartitionResult(numbered.index, numbered.sha256, shards, totals, bad_rows, id_counts)
    write_sidecar(settings.folder, result)
    return result


def _totals(tally: TokenTally, shards: tuple[ShardRecord, ...], max_length: int) -> Totals:
    num_rows = sum(shard.num_rows for shard in shards)
    num_tokens = sum(shard.num_tokens for shard in shards)
    return Totals(
        num_documents=tally.num_documents,
        num_blank_documents=tally.num_blank_documents,
        num_tokens=num_tokens,
        num_padding_tokens=num_rows * max_length - num_tokens,
        num_rows=num_rows,
    )


def write_shards(folder: str, partition: int, rows: Iterable[Rows], shard_size: int) -> tuple[ShardRecord, ...]:
    """Write the rows of a partition in shards of `shard_size` rows or, the last one, fewer; none is held in memory."""
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

        for some in rows:
            start = 0
            while start < len(some.input_ids):
                shard = shard or _Shard(files.enter_context(destination.new_file()))
                end = min(start + shard_size - shard.num_rows, len(some.input_ids))
                labels = None if some.next_sentence_labels is None else some.next_sentence_labels[start:end]
                shard.write(Rows(some.input_ids[start:end], some.num_tokens_per_row[start:end], labels))
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
