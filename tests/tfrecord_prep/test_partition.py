"""A partition: its shards hold every token of its documents, and its sidecar says so."""

import shutil
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlm_common.corpus.text_files import grouped_by_size
from mlm_common.errors import InputError
from mlm_common.storage import open_folder
from tests.fixtures.partitions import SHA256, SPECIAL_IDS, build_partition, split_work
from tests.servers.fixtures import CloudStorageHandle
from tfrecord_prep.chunking import Rows
from tfrecord_prep.partition import write_shards
from tfrecord_prep.records import decode_feature, encode_rows, read_records
from tfrecord_prep.split_folder import PartitionResult, read_sidecar

PROJECT = Path(__file__).parents[2]


def rows_of(folder: Path, result: PartitionResult) -> list[list[int]]:
    """Read the rows of the shards, without padding."""
    rows = []
    for shard in result.shards:
        for record in read_records((folder / shard.name).read_bytes()):
            ids, mask = decode_feature(record, "input_ids"), decode_feature(record, "attention_mask")
            assert (ids == SPECIAL_IDS["pad"]).tolist() == (mask == 0).tolist()
            rows.append(ids[mask == 1].tolist())
    return rows


@pytest.mark.parametrize("chunking", ["concat", "packed"])
@settings(max_examples=30)
@given(
    documents=st.lists(st.lists(st.integers(5, 299), max_size=40), max_size=15),
    max_length=st.integers(8, 20),
    shard_size=st.integers(1, 6),
    partition_bytes=st.integers(1, 400),
)
def test_tokens_in_are_tokens_written_for_any_partitions(chunking, documents, max_length, shard_size, partition_bytes):
    folder = Path(tempfile.mkdtemp())
    asked = split_work(folder, chunking=chunking, max_length=max_length, shard_size=shard_size)
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
        if chunking == "concat":
            assert all(len(row) == max_length for row in rows[:-1])
    expected = list(chain.from_iterable(documents))
    assert (sorted(written) == sorted(expected)) if chunking == "packed" else (written == expected)
    shutil.rmtree(folder)


def test_sidecar_tells_what_was_written(tmp_path):
    result = build_partition(7, ["5 6 7", "", "unheard 5"], split_work(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"dataset-00007-00000-1.tfrecord", "partition-00007.json"}
    sidecar = read_sidecar(str(tmp_path), "partition-00007.json")
    assert sidecar is not None
    assert (sidecar.index, sidecar.sha256, sidecar.shards, sidecar.totals) == (7, SHA256, result.shards, result.totals)
    assert np.flatnonzero(sidecar.id_counts).tolist() == [5, 6, 7]  # the unknown token does not count
    assert sidecar.id_counts.tolist() == result.id_counts.tolist()
    (tmp_path / "partition-00007.json").write_text("{}", encoding="utf-8")
    assert read_sidecar(str(tmp_path), "partition-00007.json") is None


def test_a_tokenizer_that_makes_special_tokens_of_text_is_refused(tmp_path):
    asked = split_work(tmp_path, special_ids=SPECIAL_IDS | {"mask": 5})
    with pytest.raises(InputError, match="produced mask"):
        build_partition(0, ["6 5"], asked)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("separator", [" ", ""])
def test_memory_hardly_grows_with_a_document(tmp_path, separator):
    """`tokenizers` alone would need half a gigabyte more for the longer document."""
    settings = f"split_work({str(tmp_path)!r}, tokenizer_json=tokenizer_json, shard_size=10_000)"
    program = f"""
import resource, sys
from tests.fixtures.partitions import build_partition, split_work
from mlm_common.tokenizer import plain_text_tokenizer_json
from tests.fixtures.tiny_tokenizers import byte_level
tokenizer_json = plain_text_tokenizer_json(byte_level().to_str())
document = sys.argv[2].join(["model", "language", "of", "masks"] * int(sys.argv[1]))
build_partition(0, [document], {settings})
print("bytes", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""
    peak_bytes = []
    for num_repeats in (60_000, 160_000):
        command = [sys.executable, "-c", program, str(num_repeats), separator]
        done = subprocess.run(command, cwd=PROJECT, capture_output=True, encoding="utf-8", check=True)
        peak_bytes.append(int(done.stdout.split()[-1]))
    assert peak_bytes[1] - peak_bytes[0] < 50_000_000


@pytest.fixture(params=["local", "cloud"])
def folder(request: pytest.FixtureRequest, cloud: CloudStorageHandle, tmp_path: Path) -> str:
    return f"{cloud.bucket_url}/data" if request.param == "cloud" else str(tmp_path / "data")


def some_rows(num_rows: int, max_length: int = 8) -> Rows:
    input_ids = np.arange(num_rows * max_length, dtype=np.int32).reshape(num_rows, max_length)
    return Rows(input_ids, np.full(num_rows, max_length))


def test_rows_are_divided_wherever_they_were(folder):
    rows = some_rows(10)
    blocks = [Rows(rows.input_ids[a:b], rows.num_tokens_per_row[a:b]) for a, b in ((0, 1), (1, 1), (1, 9), (9, 10))]
    records = write_shards(folder, 3, blocks, shard_size=4)
    assert [record.name for record in records] == [
        "dataset-00003-00000-4.tfrecord", "dataset-00003-00001-4.tfrecord", "dataset-00003-00002-2.tfrecord",
    ]  # fmt: skip
    assert open_folder(folder).list_files() == {record.name: record.num_bytes for record in records}
    for record, (start, end) in zip(records, ((0, 4), (4, 8), (8, 10)), strict=True):
        data = open_folder(folder).read_bytes(record.name)
        assert data == encode_rows(rows.input_ids[start:end], rows.num_tokens_per_row[start:end])
        assert (record.num_rows, record.num_tokens) == (end - start, 8 * (end - start))
        assert record.crc32c == f"{google_crc32c.value(data):08x}"


def test_after_an_error_nothing_is_left_of_the_shard(folder, tmp_path):
    def rows() -> Iterator[Rows]:
        yield some_rows(6)
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        write_shards(folder, 0, rows(), shard_size=4)
    assert list(open_folder(folder).list_files()) == ["dataset-00000-00000-4.tfrecord"]
    assert not list(tmp_path.glob("data/.*"))


def test_a_shard_is_not_held_in_memory(tmp_path):
    rows = some_rows(100, 512)
    tracemalloc.start()
    (record,) = write_shards(str(tmp_path), 0, (rows for _ in range(60)), shard_size=6000)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert record.num_bytes > 10e6
    assert peak_bytes < 4e6
