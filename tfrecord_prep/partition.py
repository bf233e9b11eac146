"""Turn a partition of the corpus, the unit of work, into shards: a function of its documents and the settings."""

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
    """A partition with its number in the split and its `partition_sha256`.

    `duplicates` is the path of a file that says which documents are left out, as `find_duplicates` returns it.
    """

    index: int
    sha256: str
    partition: Partition
    duplicates: str | None = None


@dataclass(frozen=True)
class SplitWork:
    """All that a process needs to work on partitions: where documents are read, and what they become.

    `tokenizer_json` is what `plain_text_tokenizer_json` returned; `sentences_by` and `random_share` are used by pairs
    of segments only. With a `hashes_folder` the documents become hashes there, for `find_duplicates`, and no shards.
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
    """Counts documents, and the ids of their text without unknown tokens; of pairs of segments what is in the rows."""

    def __init__(self, work: SplitWork, num_duplicates: int) -> None:
        self._work = work
        self.num_duplicates = num_duplicates
        self.num_documents = self.num_blank_documents = self.num_random_pairs = self.num_words = 0
        self.id_counts = np.zeros(work.vocabulary_size, np.int64)

    def of_documents(self, documents: Iterable[str]) -> Iterator[str]:
        for document in documents:
            self.num_words += len(document.split())
            yield document

    def of_batches(self, batches: Iterable[TokenBatch]) -> Iterator[TokenBatch]:
        """Yield the batches; an InputError is raised for special tokens in the text."""
        special_ids = self._work.special_ids
        for batch in batches:
            self.num_documents += batch.num_documents
            self.num_blank_documents += batch.num_documents - len(batch.document_ends)
            counts = np.bincount(batch.ids, minlength=len(self.id_counts))
            counts[special_ids["unk"]] = 0
            if found := [name for name, special_id in special_ids.items() if counts[special_id]]:
                raise InputError(
                    "A tokenizer may not turn text into special tokens; --tokenizer-name-or-path made "
                    f"{', '.join(found)} of it. Train a tokenizer with train_unigram.py, or choose another one."
                )
            if self._work.chunking != PAIRS:
                self.id_counts += counts
            yield batch

    def of_pairs(self, all_rows: Iterable[Rows]) -> Iterator[Rows]:
        """Yield the rows of pairs, which leave out some text and repeat some."""
        for rows in all_rows:
            self.num_random_pairs += 0 if rows.next_sentence_labels is None else int(rows.next_sentence_labels.sum())
            self.id_counts += np.bincount(rows.input_ids.ravel(), minlength=len(self.id_counts))
            self.id_counts[list(self._work.special_ids.values())] = 0
            yield rows


def work_on_partition(work: SplitWork, numbered: NumberedPartition) -> int:
    """Read, tokenize, cut and write one partition; return its number. A FolderLostError if the folder is lost."""
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
    """Tokenize and cut the documents of a partition, and write them as `write_partition` does.

    Memory does not depend on the number of documents, and a document takes no more than its text. `bad_rows` are those
    that are skipped while the documents are read.

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
        documents = (text for text, is_one in zip(documents, is_duplicate, strict=True) if not is_one)
    tally = Tally(work, num_duplicates)
    batches = tally.of_batches(encode_documents(work.tokenizer_json, tally.of_documents(documents), by_sentence))
    rule = {"rule": PairRule(random_share=work.random_share)} if has_pairs else {}
    rows = CHUNKINGS[work.chunking](batches, framing, work.max_length, **rule)
    return write_partition(numbered, tally.of_pairs(rows) if has_pairs else rows, tally, work, bad_rows)


def write_partition(
    numbered: NumberedPartition, rows: Iterable[Rows], tally: Tally, work: SplitWork, bad_rows: BadRows
) -> PartitionResult:
    """Write the rows of a partition, which the tally counts, and its sidecar last; return what was written."""
    shards = write_shards(work.folder, numbered.index, rows, work.shard_size)
    num_rows, num_tokens = sum(shard.num_rows for shard in shards), sum(shard.num_tokens for shard in shards)
    # Only a single document of one sentence can be in no pair.
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
