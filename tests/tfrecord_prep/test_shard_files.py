"""Shards are written as their rows come: under their names once complete, and not held in memory."""

import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import google_crc32c
import numpy as np
import pytest

from mlm_common.storage import open_folder
from tests.servers.fixtures import CloudStorageHandle
from tfrecord_prep.chunking import Rows
from tfrecord_prep.partition import write_shards
from tfrecord_prep.records import encode_rows


@pytest.fixture(params=["local", "cloud"])
def folder(request: pytest.FixtureRequest, cloud: CloudStorageHandle, tmp_path: Path) -> str:
    return f"{cloud.bucket_url}/data" if request.param == "cloud" else str(tmp_path / "data")


def some_rows(num_rows: int, max_length: int = 8) -> Rows:
    input_ids = np.arange(num_rows * max_length, dtype=np.int32).reshape(num_rows, max_length)
    return Rows(input_ids, np.full(num_rows, max_length))


def test_rows_are_divided_wherever_they_were(folder: str) -> None:
    rows = some_rows(10)
    parts = [Rows(rows.input_ids[a:b], rows.num_tokens_per_row[a:b]) for a, b in ((0, 1), (1, 1), (1, 9), (9, 10))]
    records = write_shards(folder, 3, parts, shard_size=4)
    assert [record.name for record in records] == [
        "dataset-00003-00000-4.tfrecord", "dataset-00003-00001-4.tfrecord", "dataset-00003-00002-2.tfrecord",
    ]  # fmt: skip
    assert open_folder(folder).list_files() == {record.name: record.num_bytes for record in records}
    for record, (start, end) in zip(records, ((0, 4), (4, 8), (8, 10)), strict=True):
        data = open_folder(folder).read_bytes(record.name)
        assert data == encode_rows(rows.input_ids[start:end], rows.num_tokens_per_row[start:end])
        assert (record.num_rows, record.num_tokens) == (end - start, 8 * (end - start))
        assert record.crc32c == f"{google_crc32c.value(data):08x}"


def test_no_rows_no_shards(folder: str) -> None:
    assert write_shards(folder, 0, [some_rows(0)], shard_size=4) == ()
    assert open_folder(folder).list_files() == {}


def test_after_an_error_nothing_is_left_of_the_shard(folder: str, tmp_path: Path) -> None:
    def rows() -> Iterator[Rows]:
        yield some_rows(6)
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        write_shards(folder, 0, rows(), shard_size=4)
    assert list(open_folder(folder).list_files()) == ["dataset-00000-00000-4.tfrecord"]
    assert not list(tmp_path.glob("data/.*"))


def test_a_shard_is_not_held_in_memory(tmp_path: Path) -> None:
    rows = some_rows(100, 512)
    tracemalloc.start()
    (record,) = write_shards(str(tmp_path), 0, (rows for _ in range(60)), shard_size=6000)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert record.num_bytes > 10e6
    assert peak_bytes < 4e6


def test_a_streamed_file_replaces_what_was_there(folder: str) -> None:
    files = open_folder(folder)
    files.write_bytes("file", b"old")
    with files.new_file() as file:
        for data in (b"ne", b"", b"w"):
            file.write(data)
        assert files.list_files() == {"file": 3}
        file.finish("file")
    assert files.read_bytes("file") == b"new"
    assert files.list_files() == {"file": 3}
