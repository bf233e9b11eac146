"""Files cut into byte ranges: together they are the whole file, wherever it is cut, and errors name the place in it."""

import io
import json
from itertools import chain, pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlm_common.corpus import text_files
from mlm_common.corpus.config import CorpusConfig
from mlm_common.corpus.text_files import ByteRange, cut_file, cut_passages, grouped_by_size, read_byte_range, row_blocks
from mlm_common.errors import InputError
from mlm_common.storage import reading
from mlm_common.storage.reading import StoredFile
from tests.fixtures.text_files import local_file, read_file, read_range

LINE_ENDS = ["\n", "\r\n", "\r", "\n\n", "\n\r", "\r\r\n"]
# Separators to `str.splitlines`, but not in files, and the byte-order mark, which is one at the start only.
CHARACTERS = ["", "a", " ", "é", "☃", "😀", "\x85", "\u2028", "\x0c", "\ufeff"]
TEXTS = st.lists(st.sampled_from([*LINE_ENDS, *CHARACTERS]), max_size=40).map("".join)
JSON_ROWS = [json.dumps({"text": text}, ensure_ascii=False) for text in CHARACTERS] + ['{"n": 1}', '"a"', " "]
JSON_LINES = st.lists(st.tuples(st.sampled_from(JSON_ROWS), st.sampled_from(LINE_ENDS)), max_size=12)


@pytest.fixture
def small_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the borders of what is read at once lie within short contents, too."""
    monkeypatch.setattr(reading.LocalReader, "read_ahead_bytes", 3)
    monkeypatch.setattr(text_files, "ROW_END_BYTES", 2)


def in_ranges(path: Path, max_bytes: int) -> list[str]:
    byte_ranges = cut_file(local_file(path), "line", max_bytes)
    assert all(byte_range.num_bytes <= max_bytes for byte_range in byte_ranges)
    return [text for byte_range in byte_ranges for text in read_byte_range(byte_range, CorpusConfig())]


@pytest.mark.usefixtures("small_reads")
@given(TEXTS, st.booleans(), st.integers(1, 30))
@settings(max_examples=100)
def test_lines_of_all_ranges_are_those_of_the_file(tmp_path, text, has_mark, max_bytes):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf" * has_mark + text.encode())
    expected = [line.rstrip("\n") for line in io.TextIOWrapper(io.BytesIO(path.read_bytes()), "utf-8-sig")]
    assert in_ranges(path, max_bytes) == expected
    assert read_file(path) == expected


@pytest.mark.usefixtures("small_reads")
@given(JSON_LINES, st.booleans(), st.integers(1, 60))
@settings(max_examples=80)
def test_json_rows_of_all_ranges_are_those_of_the_file(tmp_path, lines, has_mark, max_bytes):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" * has_mark + "".join(row + line_end for row, line_end in lines).encode())
    try:
        expected = read_file(path)
    except InputError:
        assert not any('"text"' in row for row, _ in lines)
    else:
        assert expected == [
            json.loads(row)["text"] if '"text"' in row else "a" * (row == '"a"') for row, _ in lines if row != " "
        ]
        assert in_ranges(path, max_bytes) == expected


@pytest.mark.usefixtures("small_reads")
@given(st.binary(max_size=40), st.lists(st.integers(0, 45), max_size=6))
def test_ranges_share_no_byte_and_leave_none_out(content, borders):
    file = io.BytesIO(content)
    borders = sorted({0, *borders, len(content)})
    ranges = [b"".join(row_blocks(file, *border, block_bytes=3)) for border in pairwise(borders)]
    assert b"".join(ranges) == content


def test_cut_sizes():
    rows, cloud_rows = StoredFile("a.jsonl", 10), StoredFile("gs://bucket/a.txt", 5, generation=7)
    assert cut_file(rows, "paragraph", 4) == [ByteRange(rows, 0, 3), ByteRange(rows, 3, 6), ByteRange(rows, 6, 10)]
    assert cut_file(cloud_rows, "line", 3)[1] == ByteRange(cloud_rows, 2, 5)
    for name in ("a.txt.gz", "a.jsonl.gz", "a.json", "a.csv"):
        assert cut_file(StoredFile(name, 10), "line", 4) == [ByteRange(StoredFile(name, 10))]
    text = StoredFile("a.txt", 10)
    for sample_by in ("paragraph", "document"):
        assert cut_file(text, sample_by, 4) == [ByteRange(text)]
    for num_bytes in (0, 4):
        assert cut_file(StoredFile("a.txt", num_bytes), "line", 4) == [ByteRange(StoredFile("a.txt", num_bytes))]


class CountingFile(io.BytesIO):
    num_bytes_read = 0

    def read(self, size: int | None = -1) -> bytes:
        block = super().read(size)
        self.num_bytes_read += len(block)
        return block


def test_one_huge_row_is_not_read_once_a_range():
    file = CountingFile(b"x" * 2_000_000)
    borders = range(0, 2_000_001, 100_000)
    sizes = [sum(map(len, row_blocks(file, *border, block_bytes=1 << 20))) for border in pairwise(borders)]
    assert sizes == [2_000_000] + [0] * 19
    assert file.num_bytes_read < 3 * 2_000_000


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize(
    ("row", "message"),
    [
        (b'{"text": "c"', "Expecting .* at column 13"),
        (b'{"text": "c', "Unterminated string starting at column 10"),
        (b"[1]", r"list \[1\]"),
        (b'{"text": 17}', "int 17"),
        (b'{"text": "\\ud800"}', "U.D800 is half"),
        (b'"\xfc"', "the byte 0xfc is not UTF-8"),
    ],
)
def test_json_errors_lead_to_the_line(line_end, row, message, tmp_path):
    good = '{"text": "é ☃"}'.encode() + line_end
    path = tmp_path / "a.jsonl"
    path.write_bytes(good * 40 + line_end + row + line_end)
    start = len(good) * 20 - 3
    with pytest.raises(InputError, match=rf"a.jsonl must contain .*; line 22 after byte {start}: {message}"):
        read_range(path, start, path.stat().st_size)
    with pytest.raises(InputError, match=rf"; line 42: {message}"):
        read_file(path)


@given(st.lists(st.text(st.sampled_from("abcd \n"), max_size=60), max_size=5), st.integers(1, 12))
def test_passages_keep_the_text_and_their_bound(documents, max_characters):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_files, "MAX_PASSAGE_CHARACTERS", max_characters)
        for document in documents:
            cut = list(cut_passages([document]))
            assert "".join(cut) == document
            assert all(len(passage) <= max_characters for passage in cut)
            if all(len(word) < max_characters for word in document.split()):
                assert list(chain.from_iterable(map(str.split, cut))) == document.split(), "a word was cut"
        one_by_one = chain.from_iterable(cut_passages([document]) for document in documents)
        assert list(cut_passages(documents)) == list(one_by_one)


@given(documents=st.lists(st.text(st.characters(exclude_categories=["Cs"]))), max_bytes=st.integers(1, 30))
def test_groups_keep_all_documents_and_their_bound(documents, max_bytes):
    groups = list(grouped_by_size(documents, max_bytes))
    assert list(chain.from_iterable(groups)) == documents
    for group in groups:
        assert len(group) == 1 or sum(len(document.encode()) + 1 for document in group) <= max_bytes
    for group, after in pairwise(groups):
        assert sum(len(document.encode()) + 1 for document in [*group, after[0]]) > max_bytes, "closed too early"
