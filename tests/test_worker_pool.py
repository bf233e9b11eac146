"""Partitions in processes: same bytes as in one, few in memory, a killed worker reported."""

import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from tfrecord_prep.partition import PartitionSettings, build_partitions
from tfrecord_prep.plain_text import plain_text_tokenizer_json
from tokenizer_training.command_line import InputError
from tokenizer_training.worker_pool import ITEMS_PER_WORKER

SPECIAL_IDS = {"cls": 0, "pad": 1, "sep": 2, "unk": 3, "mask": 4}
DOCUMENT = "one two three two one two"
DOCUMENTS_PER_PARTITION = 4
PARTITION_BYTES = DOCUMENTS_PER_PARTITION * (len(DOCUMENT) + 1)


def partition_settings(folder: Path) -> PartitionSettings:
    vocabulary = {"<unk>": 3, "one": 5, "two": 6, "three": 7}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PartitionSettings(
        str(folder), plain_text_tokenizer_json(tokenizer.to_str()), 8, SPECIAL_IDS, "concat", 16, shard_size=2
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_two_processes_write_the_same_files_in_the_same_order(tmp_path: Path) -> None:
    documents = [DOCUMENT[number % 5 :] for number in range(30)]
    results = {}
    for num_processes in (1, 2):
        settings = partition_settings(tmp_path / str(num_processes))
        results[num_processes] = list(build_partitions(documents, settings, PARTITION_BYTES, num_processes))
    assert contents(tmp_path / "1") == contents(tmp_path / "2")
    assert len(results[1]) >= 7
    for one, two in zip(results[1], results[2], strict=True):
        assert (one.shards, one.totals) == (two.shards, two.totals)
        assert one.id_counts.tolist() == two.id_counts.tolist()
    assert "TOKENIZERS_PARALLELISM" not in os.environ


def test_reading_stays_a_few_partitions_ahead(tmp_path: Path) -> None:
    num_read = 0

    def documents() -> Iterator[str]:
        nonlocal num_read
        for _ in range(100):
            num_read += 1
            yield DOCUMENT

    results = build_partitions(documents(), partition_settings(tmp_path), PARTITION_BYTES, 2)
    next(results)
    # Those in flight, the one that had to wait, and the first document of the next.
    assert num_read == DOCUMENTS_PER_PARTITION * (2 * ITEMS_PER_WORKER + 1) + 1
    results.close()
    assert not multiprocessing.active_children()


def test_killed_worker_is_reported_with_a_cure(tmp_path: Path) -> None:
    def documents() -> Iterator[str]:
        for number in range(1000):
            if number == 20 * DOCUMENTS_PER_PARTITION:
                for worker in multiprocessing.active_children():
                    worker.kill()
            yield DOCUMENT

    results = build_partitions(documents(), partition_settings(tmp_path), PARTITION_BYTES, 2)
    with pytest.raises(InputError, match=r"A worker was killed.*fewer --num-workers"):
        list(results)
