"""A partition: its shards hold every token of its documents, and its sidecar says so."""

import dataclasses
import shutil
import subprocess
import sys
import tempfile
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from mlm_common.errors import InputError
from tfrecord_prep.chunking import CHUNKINGS
from tfrecord_prep.encoding import plain_text_tokenizer_json
from tfrecord_prep.partition import PartitionSettings, build_partition
from tfrecord_prep.records import decode_feature, read_records
from tfrecord_prep.split_folder import PartitionResult, read_sidecar
from tokenizer_training.corpus.passages import grouped_by_size

SPECIAL_IDS = {"cls": 0, "pad": 1, "sep": 2, "unk": 3, "mask": 4}
PROJECT = Path(__file__).parents[2]
PLAN_SHA256 = "ab" * 32


def partition_settings(folder: Path | str, **changes: object) -> PartitionSettings:
    """Return settings under which the word `12` has the id 12."""
    vocabulary = {"<unk>": 3} | {str(number): number for number in range(5, 300)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer_json = plain_text_tokenizer_json(tokenizer.to_str())
    settings = PartitionSettings(str(folder), PLAN_SHA256, tokenizer_json, 300, SPECIAL_IDS, "concat", 16, shard_size=2)
    return dataclasses.replace(settings, **changes)


def rows_of(folder: Path, result: PartitionResult) -> list[list[int]]:
    """Return the rows of the shards, without padding."""
    rows = []
    for shard in result.shards:
        for record in read_records((folder / shard.name).read_bytes()):
            ids, mask = decode_feature(record, "input_ids"), decode_feature(record, "attention_mask")
            assert (ids == SPECIAL_IDS["pad"]).tolist() == (mask == 0).tolist()
            rows.append(ids[mask == 1].tolist())
    return rows


@pytest.mark.parametrize("chunking", CHUNKINGS)
@settings(deadline=None, max_examples=60)
@given(
    documents=st.lists(st.lists(st.integers(5, 299), max_size=40), max_size=15),
    max_length=st.integers(8, 20),
    shard_size=st.integers(1, 6),
    partition_bytes=st.integers(1, 400),
)
def test_tokens_in_are_tokens_written_for_any_partitions(
    chunking: str, documents: list[list[int]], max_length: int, shard_size: int, partition_bytes: int
) -> None:
    folder = Path(tempfile.mkdtemp())
    asked = partition_settings(folder, chunking=chunking, max_length=max_length, shard_size=shard_size)
    texts = [" ".join(map(str, document)) for document in documents]
    written: list[int] = []
    for index, group in enumerate(grouped_by_size(texts, partition_bytes)):
        result = build_partition(index, group, asked)
        rows = rows_of(folder, result)
        written += [token for token in chain.from_iterable(rows) if token not in (0, 2)]
        assert [shard.num_rows for shard in result.shards[:-1]] == [shard_size] * (len(result.shards) - 1)
        assert sum(shard.num_rows for shard in result.shards) == len(rows) == result.totals.num_rows
        assert sum(shard.num_tokens for shard in result.shards) == sum(map(len, rows)) == result.totals.num_tokens
        assert result.totals.num_padding_tokens == len(rows) * max_length - result.totals.num_tokens
        num_blank = sum(not text for text in group)
        assert (result.totals.num_documents, result.totals.num_blank_documents) == (len(group), num_blank)
        if chunking != "documents":
            assert all(len(row) == max_length for row in rows[:-1])
    assert written == list(chain.from_iterable(documents))
    shutil.rmtree(folder)


def test_sidecar_tells_what_was_written(tmp_path: Path) -> None:
    result = build_partition(7, ["5 6 7", "", "unheard 5"], partition_settings(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "dataset-00007-00000-1.tfrecord",
        "partition-00007.json",
    ]
    found = read_sidecar(str(tmp_path), "partition-00007.json", PLAN_SHA256)
    assert found is not None
    assert (found.index, found.shards, found.totals) == (7, result.shards, result.totals)
    assert np.flatnonzero(found.id_counts).tolist() == [5, 6, 7]  # the unknown token does not count
    assert found.id_counts.tolist() == result.id_counts.tolist()


def test_sidecar_of_another_plan_is_none(tmp_path: Path) -> None:
    build_partition(0, ["5"], partition_settings(tmp_path))
    assert read_sidecar(str(tmp_path), "partition-00000.json", "cd" * 32) is None
    (tmp_path / "partition-00000.json").write_text("{}")
    assert read_sidecar(str(tmp_path), "partition-00000.json", PLAN_SHA256) is None


def test_documents_are_taken_as_they_are_needed(tmp_path: Path) -> None:
    written_before: list[int] = []

    def documents():
        for _ in range(15):
            yield "5 6 7 " * 50_000
            written_before.append(len(list(tmp_path.glob("*.tfrecord"))))

    build_partition(0, documents(), partition_settings(tmp_path, shard_size=1000))
    assert written_before[10] > 50


def test_no_documents_give_no_shards(tmp_path: Path) -> None:
    result = build_partition(0, [], partition_settings(tmp_path))
    assert (result.shards, result.totals.num_rows) == ((), 0)
    assert [path.name for path in tmp_path.iterdir()] == ["partition-00000.json"]


def test_a_tokenizer_that_makes_special_tokens_of_text_is_refused(tmp_path: Path) -> None:
    asked = partition_settings(tmp_path, special_ids=SPECIAL_IDS | {"mask": 5})
    with pytest.raises(InputError, match="made mask of it"):
        build_partition(0, ["6 5"], asked)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("separator", [" ", ""])
def test_memory_hardly_grows_with_a_document(tmp_path: Path, separator: str) -> None:
    """`tokenizers` alone would need half a gigabyte more for the longer document."""
    settings = f"partition_settings({str(tmp_path)!r}, tokenizer_json=tokenizer_json, shard_size=10_000)"
    program = f"""
import resource, sys
from tests.tfrecord_prep.test_partition import build_partition, partition_settings, plain_text_tokenizer_json
from tests.fixtures.tiny_tokenizers import byte_level
tokenizer_json = plain_text_tokenizer_json(byte_level().to_str())
document = sys.argv[2].join(["model", "language", "of", "masks"] * int(sys.argv[1]))
build_partition(0, [document], {settings})
print("bytes", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""
    peak_bytes = []
    for num_repeats in (60_000, 160_000):
        command = [sys.executable, "-c", program, str(num_repeats), separator]
        done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True)
        peak_bytes.append(int(done.stdout.split()[-1]))
    assert peak_bytes[1] - peak_bytes[0] < 50_000_000
