"""The partitions that are left to do, and the progress: rate, fraction done and estimate of this run alone."""

import gzip
import io
import logging
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from mlm_common.corpus import identity
from mlm_common.corpus.config import CorpusConfig
from mlm_common.corpus.corpus import Corpus, open_corpus, read_partition
from mlm_common.corpus.text_formats import BadRows
from tfrecord_prep import split
from tfrecord_prep.manifest import Totals
from tfrecord_prep.split import SplitProgress, WorkList, default_partition_bytes, split_progress, total_bytes
from tfrecord_prep.split_folder import CompletePartitions, PartitionResult

MIB = 1 << 20


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    (tmp_path / "a.txt").write_text("one line of é\n" * 100, encoding="utf-8")  # 1,500 bytes
    with gzip.open(tmp_path / "b.txt.gz", "wt", encoding="utf-8") as file:
        file.write("another line\n" * 100)
    return [str(tmp_path / "a.txt"), str(tmp_path / "b.txt.gz")]


def work_list_of(
    corpus: Corpus, partition_bytes: int, progress: SplitProgress, complete: Sequence[int] = ()
) -> WorkList:
    results = [
        PartitionResult(index, "same", (), Totals(0, 0, 0, 0, 0), BadRows(), np.zeros(1, np.int64))
        for index in complete
    ]
    partitions = corpus.partitions("train", partition_bytes)
    return WorkList(partitions, lambda _: "same", CompletePartitions("nowhere", results), progress)


def test_numbers_sizes_and_progress(files: list[str]) -> None:
    corpus = open_corpus(CorpusConfig(data_files=files))
    progress = SplitProgress("train", total_bytes(corpus, "train", 400), None)
    partitions = work_list_of(corpus, 400, progress, complete=(1, 2))
    taken = {numbered.index: numbered.partition for numbered in partitions}
    assert list(partitions.sha256) == list(range(5))  # four of the first file, the second as a whole
    assert list(taken) == [0, 3, 4]
    assert progress._num_bytes_before == 750
    for index in taken:
        partitions.finish(index, 10)
    assert progress._num_bytes_before + progress._num_bytes == total_bytes(corpus, "train", 400)
    assert total_bytes(corpus, "train", 400) == sum(Path(name).stat().st_size for name in files)
    documents = [text for partition in taken.values() for text in read_partition(corpus.config, "train", partition)]
    assert documents == ["one line of é"] * 50 + ["another line"] * 100


def test_documents_that_the_parent_reads(files: list[str]) -> None:
    corpus = open_corpus(CorpusConfig(data_files=files, limit=10))
    assert total_bytes(corpus, "train", 400) is None
    progress = SplitProgress("train", None, None)
    partitions = work_list_of(corpus, 60, progress)
    assert [len(numbered.partition) for numbered in partitions] == [4, 4, 2]
    for index in range(3):
        partitions.finish(index, 10)
    assert progress._num_bytes == 10 * len("one line of é".encode())


@pytest.mark.parametrize(("num_bytes", "expected"), [(20_000, MIB), (300 * MIB, 300 * MIB // 128), (1 << 34, 64 * MIB)])
def test_default_size_follows_the_corpus(
    tmp_path: Path, num_bytes: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "_sha256", lambda _: "sha256 of much")
    path = tmp_path / "a.txt"
    path.write_text("text\n" * 2000, encoding="utf-8")  # the start is looked at
    with path.open("r+b") as file:
        file.truncate(num_bytes)  # takes no room on the disk
    corpus = open_corpus(CorpusConfig(data_files=[str(path)]))
    assert default_partition_bytes(corpus) == expected
    assert default_partition_bytes(open_corpus(CorpusConfig(data_files=[str(path)], limit=1))) == 4 * MIB


class Clock:
    seconds = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: clock.seconds)
    return clock


def test_lines_in_the_log(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, split.__name__)
    with split_progress("train", 10_000_000) as progress:
        progress.skip(4_000_000)
        for _ in range(5):
            clock.seconds += 20
            progress.add(500_000, 1000)
        progress.skip(3_500_000)
    assert [record.getMessage() for record in caplog.records] == [
        "train: 50 % of 10.0 MB, 50 tokens/s, 3.3 minutes left",
        "train: 60 % of 10.0 MB, 50 tokens/s, 2.7 minutes left",
        "train: 100 % of 10.0 MB, 50 tokens/s",
    ]


def test_total_that_is_not_known(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, split.__name__)
    with split_progress("test", None) as progress:
        clock.seconds += 10
        progress.add(2_000_000, 100)
    assert [record.getMessage() for record in caplog.records] == ["test: 2.0 MB, 10 tokens/s"]


def test_bar_on_a_terminal() -> None:
    from tqdm import tqdm

    screen = io.StringIO()
    with tqdm(desc="train", total=10_000_000, unit="B", unit_scale=True, smoothing=0, file=screen, ncols=100) as bar:
        progress = SplitProgress("train", 10_000_000, bar)
        bar.start_t -= 20  # a run of twenty seconds
        progress.skip(4_000_000)
        progress.add(4_000_000, 1000)
        bar.refresh()
        shown = bar.format_dict
    assert (shown["n"], shown["initial"], shown["rate"]) == (8_000_000, 4_000_000, None)
    assert "80%" in screen.getvalue()
    assert "[00:20<00:10" in screen.getvalue()  # 4 MB took 20 seconds, 2 MB are left
    assert "tokens/s" in screen.getvalue()
