"""Parquet cut by its row groups: together they are the whole file, wherever it is cut; samples are drawn of them."""

import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlm_common.corpus.config import CorpusConfig
from mlm_common.corpus.corpus import Corpus, open_corpus, read_partition
from mlm_common.corpus.text_files import cut_file, read_byte_range
from mlm_common.storage.reading import find_stored_files
from tests.fixtures.text_files import local_file, read_file, read_range, with_seed

GROUP_ROWS = 250
TEXTS = st.lists(st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=8), max_size=40)


def write(path: Path, texts: Sequence[str | None], rows_per_group: int, **settings) -> Path:
    table = pa.table({"n": range(len(texts)), "text": pa.array(texts, pa.string())})
    pq.write_table(table, path, row_group_size=rows_per_group, **settings)
    return path


def write_numbers(path: Path, numbers: range, rows_per_group: int = 1000, **settings) -> Path:
    """Write a text of ten bytes for each number."""
    return write(path, [f"{number:09d}\n" for number in numbers], rows_per_group, use_dictionary=False, **settings)


def numbers_in(texts: Sequence[str]) -> list[int]:
    return [int(text) for text in texts]


@given(
    TEXTS,
    st.integers(1, 12),
    st.integers(1, 2000),
    st.lists(st.integers(0, 3000), max_size=5),
    st.booleans(),
    st.sampled_from(["none", "zstd"]),
)
def test_rows_of_all_ranges_are_those_of_the_file(
    tmp_path, texts, rows_per_group, max_bytes, borders, use_dictionary, compression
):
    path = write(tmp_path / "a.parquet", texts, rows_per_group, use_dictionary=use_dictionary, compression=compression)
    expected = [text or "" for text in texts]
    assert read_file(path) == expected
    byte_ranges = cut_file(local_file(path), "line", max_bytes)
    assert [text for part in byte_ranges for text in read_byte_range(part, CorpusConfig())] == expected
    borders = sorted({0, *borders, path.stat().st_size})
    assert [text for border in pairwise(borders) for text in read_range(path, *border)] == expected


@pytest.mark.parametrize(("num_groups", "is_cut"), [(1, False), (4, False), (40, True)])
def test_row_groups_are_partitions_unless_they_are_few(tmp_path, num_groups, is_cut):
    write_numbers(tmp_path / "a.parquet", range(8_000), 8_000 // num_groups, compression="none")
    corpus = open_corpus(CorpusConfig(data_files=[str(tmp_path / "*.parquet")]))
    assert corpus.has_byte_ranges("train", 8_000) == is_cut
    partitions = list(corpus.partitions("train", 8_000))
    assert (len(partitions) == num_groups) == is_cut
    assert len(partitions) > 9, "without row groups to cut at, the documents are grouped"
    texts = [text for part in partitions for text in read_partition(corpus.config, "train", part)]
    assert numbers_in(texts) == list(range(8_000))


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    """Text of 2,500 bytes in each of 200 row groups, beside a column that takes ten times as much."""
    draw = random.Random(0)
    for index in range(4):
        numbers = range(index * 50 * GROUP_ROWS, (index + 1) * 50 * GROUP_ROWS)
        table = pa.table(
            {"vector": [draw.randbytes(100) for _ in numbers], "text": [f"{number:010d}" for number in numbers]}
        )
        pq.write_table(table, tmp_path / f"{index}.parquet", row_group_size=GROUP_ROWS, use_dictionary=False)
    return open_corpus(CorpusConfig(data_files=[f"{tmp_path}/*.parquet"]))


def groups_in_sample(corpus: Corpus, max_bytes: int, seed: int = 0) -> list[int]:
    """Read a sample, which must hold whole groups of numbers in order, and list them."""
    numbers = numbers_in(list(with_seed(corpus, seed).sampled_documents("train", max_bytes)))
    groups = [number // GROUP_ROWS for number in numbers[::GROUP_ROWS]]
    assert numbers == [group * GROUP_ROWS + row for group in groups for row in range(GROUP_ROWS)]
    assert groups == sorted(set(groups))
    return groups


def test_a_sample_is_of_row_groups_and_as_large_as_their_text(corpus):
    groups = groups_in_sample(corpus, 175_000)
    # Beside its ten bytes a text has its length in four: 350,000 bytes are those of a hundred groups.
    assert 98 <= len(groups) <= 100
    assert groups == groups_in_sample(corpus, 175_000) != groups_in_sample(corpus, 175_000, seed=1)
    assert len(groups_in_sample(corpus, 1)) == 64, "it is from all over the corpus"
    assert groups_in_sample(corpus, 375_000) == list(range(200))
    assert corpus.num_sampled_bytes("train", 5_000) is None, "compressed files do not tell"


def test_a_sample_beside_lines_is_of_both(corpus, tmp_path):
    lines = [f"{200 * GROUP_ROWS + number:09d}\n" for number in range(1000)]
    (tmp_path / "more.txt").write_text("".join(lines), encoding="utf-8")
    both = open_corpus(CorpusConfig(data_files=[*corpus.config.data_files, str(tmp_path / "more.txt")]))
    samples = [numbers_in(list(with_seed(both, seed).sampled_documents("train", 1))) for seed in range(10)]
    assert {max(numbers) >= 200 * GROUP_ROWS for numbers in samples} == {True, False}


def test_a_range_of_an_object_is_read_without_the_rest(cloud, tmp_path):
    texts = [random.Random(number).randbytes(500).hex() for number in range(20_000)]
    path = write(tmp_path / "a.parquet", texts, 1000, compression="none", use_dictionary=False)
    cloud.put("a.parquet", path.read_bytes())
    (file,) = find_stored_files(f"{cloud.bucket_url}/a.parquet")
    byte_ranges = cut_file(file, "line", 2 << 20)
    assert len(byte_ranges) == 10, "two groups of a megabyte come together"
    num_before = len(cloud.requests(path="a.parquet"))
    assert list(read_byte_range(byte_ranges[3], CorpusConfig())) == texts[6_000:8_000]
    requests = cloud.requests(path="a.parquet")[num_before:]
    asked = [request["range"].removeprefix("bytes=").split("-") for request in requests]
    num_bytes = [min(int(stop) + 1, file.num_bytes) - int(start) for start, stop in asked]
    assert len(num_bytes) == 2, "the footer and the range"
    assert sum(num_bytes) <= byte_ranges[3].num_bytes + (1 << 16)
