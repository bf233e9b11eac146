"""The sample of a large corpus: as much as asked for, from all over it, the same for the same seed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlm_common.corpus import corpus as corpus_module
from mlm_common.corpus.config import CorpusConfig
from mlm_common.corpus.corpus import Corpus, open_corpus
from mlm_common.corpus.text_files import ByteRange, draw_byte_ranges, read_byte_range
from mlm_common.storage.reading import StoredFile
from tests.fixtures.text_files import with_seed

LINE_BYTES = 10


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    """200,000 bytes in lines that are numbers: a large file, 50 small ones, and a large one."""
    numbers = iter(range(20_000))
    for index, num_lines in enumerate([8_000, *[40] * 50, 10_000]):
        lines = "".join(f"{next(numbers):09d}\n" for _ in range(num_lines))
        (tmp_path / f"{index:02d}.txt").write_text(lines, encoding="utf-8")
    return open_corpus(CorpusConfig(data_files=[f"{tmp_path}/*.txt"]))


@pytest.fixture
def ranges_read(monkeypatch: pytest.MonkeyPatch) -> list[ByteRange]:
    """What has been read so far."""
    byte_ranges: list[ByteRange] = []

    def noting(byte_range: ByteRange, *settings: Any) -> Iterator[str]:
        byte_ranges.append(byte_range)
        return read_byte_range(byte_range, *settings)

    monkeypatch.setattr(corpus_module, "read_byte_range", noting)
    return byte_ranges


def num_bytes_of(byte_ranges: list[ByteRange]) -> int:
    return sum(byte_range.num_bytes for byte_range in byte_ranges)


def sampled(corpus: Corpus, max_bytes: int, seed: int = 0, split: str = "train") -> list[int]:
    return [int(text) for text in with_seed(corpus, seed).sampled_documents(split, max_bytes)]


def test_sample_is_from_all_over_the_corpus(corpus, ranges_read):
    numbers = sampled(corpus, 20_000)
    assert 3_900 < len(numbers) < 4_100
    assert numbers == sorted(set(numbers))
    for tenth in range(10):
        assert 250 < sum(tenth * 2_000 <= number < (tenth + 1) * 2_000 for number in numbers) < 550
    assert all(byte_range.stop for byte_range in ranges_read), "a file was read as a whole"
    assert abs(num_bytes_of(ranges_read) - 40_000) < 700
    assert corpus.num_sampled_bytes("train", 20_000) == num_bytes_of(ranges_read)


def test_sample_is_that_of_the_seed_and_differs_between_seeds(corpus):
    assert sampled(corpus, 20_000) == sampled(corpus, 20_000)
    assert sampled(corpus, 20_000) != sampled(corpus, 20_000, seed=1)
    drawn = set().union(*(sampled(corpus, 21_000, seed) for seed in range(30)))
    assert len(drawn) > 0.99 * 20_000
    assert {0, 19_999} <= drawn, "some documents can never be drawn"


def test_small_corpora_are_read_as_they_are(corpus):
    assert sampled(corpus, 100_000) == list(range(20_000))
    assert corpus.num_sampled_bytes("train", 100_000) == 20_000 * LINE_BYTES
    assert 17_900 < len(sampled(corpus, 90_000)) < 18_400


@pytest.mark.parametrize(
    "config", [{"limit": 15_000}, {"sample_by": "paragraph"}, {"data_files": ["a.txt.gz"]}, {"data_files": ["a.csv"]}]
)
def test_what_cannot_be_cut_is_read_as_it_is(corpus, tmp_path, config):
    import gzip

    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"20000\n"))
    (tmp_path / "a.csv").write_text("text\n20000\n", encoding="utf-8")
    files = [str(tmp_path / name) for name in config.pop("data_files", [])]
    other = open_corpus(CorpusConfig(data_files=[*corpus.config.data_files, *files], **config))
    assert list(other.sampled_documents("train", 1_000)) == list(other.documents("train"))
    assert (other.num_sampled_bytes("train", 1_000) is None) == ("limit" in config or bool(files and ".gz" in files[0]))


def test_drawn_splits_are_sampled_from_as_much_as_it_takes(corpus, ranges_read):
    config = CorpusConfig(data_files=corpus.config.data_files, validation_percent=10, test_percent=10)
    drawn = open_corpus(config)
    ranges_read.clear()
    validation = sampled(drawn, 5_000, split="validation")
    assert 800 < len(validation) < 1200
    assert set(validation) <= {int(text) for text in drawn.documents("validation")}
    assert abs(num_bytes_of(ranges_read[:-52]) - 100_000) < 2_000
    assert 9_000 < (drawn.num_sampled_bytes("validation", 5_000) or 0) < 11_000
    main = sampled(drawn, 5_000)
    assert 900 < len(main) < 1100
    assert not set(main) & set(validation)


@given(st.lists(st.integers(0, 3000), max_size=12), st.integers(1, 4000), st.integers())
def test_ranges_lie_in_their_files_and_share_nothing(sizes, num_bytes, seed):
    files = [StoredFile(f"{index}.txt", size, index) for index, size in enumerate(sizes)]
    byte_ranges = draw_byte_ranges(files, CorpusConfig(seed=seed), num_bytes)
    assert (byte_ranges is None) == (sum(sizes) <= num_bytes)
    ends = dict.fromkeys(files, 0)
    for byte_range in byte_ranges or ():
        assert ends[byte_range.file] <= byte_range.start < (byte_range.stop or 0) <= byte_range.file.num_bytes
        ends[byte_range.file] = byte_range.stop or 0
    if byte_ranges:
        places = [files.index(byte_range.file) for byte_range in byte_ranges]
        assert places == sorted(places)
        assert num_bytes_of(byte_ranges) <= num_bytes + num_bytes // 64 + 1
