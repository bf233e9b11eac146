"""The partitions of a split: their sizes, the default size, and those left out that are complete."""

import gzip
from pathlib import Path

import pytest

from tfrecord_prep.split import SplitProgress, WorkList, default_partition_bytes, total_bytes
from tokenizer_training.corpus.config import CorpusConfig
from tokenizer_training.corpus.corpus import open_corpus, read_partition

MIB = 1 << 20


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    (tmp_path / "a.txt").write_text("one line of é\n" * 100)  # 1,500 bytes
    with gzip.open(tmp_path / "b.txt.gz", "wt") as file:
        file.write("another line\n" * 100)
    return [str(tmp_path / "a.txt"), str(tmp_path / "b.txt.gz")]


def test_numbers_sizes_and_progress(files: list[str]) -> None:
    corpus = open_corpus(CorpusConfig(data_files=files))
    progress = SplitProgress("train", total_bytes(corpus, "train", 400), None)
    work_list = WorkList(corpus, "train", 400, {1, 2}, progress)
    taken = dict(work_list)
    assert work_list.num_partitions == 5  # four of the first file, the second as a whole
    assert list(taken) == [0, 3, 4]
    assert progress._num_bytes_before == 750
    for index in taken:
        work_list.finish(index, 10)
    assert progress._num_bytes_before + progress._num_bytes == total_bytes(corpus, "train", 400)
    assert total_bytes(corpus, "train", 400) == sum(Path(name).stat().st_size for name in files)
    documents = [text for partition in taken.values() for text in read_partition(corpus.config, "train", partition)]
    assert documents == ["one line of é"] * 50 + ["another line"] * 100


def test_documents_that_the_parent_reads(files: list[str]) -> None:
    corpus = open_corpus(CorpusConfig(data_files=files, limit=10))
    assert total_bytes(corpus, "train", 400) is None
    progress = SplitProgress("train", None, None)
    work_list = WorkList(corpus, "train", 60, (), progress)
    assert [len(partition) for _, partition in work_list] == [4, 4, 2]
    for index in range(3):
        work_list.finish(index, 10)
    assert progress._num_bytes == 10 * len("one line of é".encode())


@pytest.mark.parametrize(("num_bytes", "expected"), [(20_000, MIB), (300 * MIB, 300 * MIB // 128), (1 << 40, 64 * MIB)])
def test_default_size_follows_the_corpus(tmp_path: Path, num_bytes: int, expected: int) -> None:
    path = tmp_path / "a.txt"
    path.write_text("text\n" * 2000)  # the start is looked at
    with path.open("r+b") as file:
        file.truncate(num_bytes)  # takes no room on the disk
    corpus = open_corpus(CorpusConfig(data_files=[str(path)]))
    assert default_partition_bytes(corpus) == expected
    assert default_partition_bytes(open_corpus(CorpusConfig(data_files=[str(path)], limit=1))) == 4 * MIB
