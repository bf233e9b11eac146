"""Files cut into stretches: together they are the whole file, wherever it is cut, and errors name the place in it."""

import io
import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlm_common.errors import InputError
from mlm_common.storage import stored_files
from tokenizer_training.corpus import text_files as row_ranges
from tokenizer_training.corpus.text_files import Stretch, cut_file, first_row, read_file, read_stretch, row_bytes

LINE_ENDS = ["\n", "\r\n", "\r", "\n\n", "\n\r", "\r\r\n"]
# Separators to `str.splitlines`, but not in files, and the byte-order mark, which is one at the start only.
CHARACTERS = ["", "a", " ", "é", "☃", "😀", "\x85", "\u2028", "\x0c", "\ufeff"]
TEXTS = st.lists(st.sampled_from([*LINE_ENDS, *CHARACTERS]), max_size=40).map("".join)
JSON_ROWS = [json.dumps({"text": text}, ensure_ascii=False) for text in CHARACTERS] + ['{"n": 1}', '"a"', " "]
JSON_LINES = st.lists(st.tuples(st.sampled_from(JSON_ROWS), st.sampled_from(LINE_ENDS)), max_size=12)

SHARED_FOLDER = [HealthCheck.function_scoped_fixture]


@pytest.fixture
def small_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the borders of what is read at once lie within short contents, too."""
    monkeypatch.setattr(stored_files, "LOCAL_READ_BYTES", 3)
    monkeypatch.setattr(row_ranges, "ROW_END_BYTES", 2)


def in_stretches(path: Path, max_bytes: int, sample_by: str = "line") -> list[str]:
    stretches = cut_file(str(path), path.stat().st_size, sample_by, max_bytes)
    assert all(stretch.stop is None or stretch.stop - stretch.start <= max_bytes for stretch in stretches)
    return [text for stretch in stretches for text in read_stretch(stretch, "text", sample_by)]


@pytest.mark.usefixtures("small_reads")
@given(TEXTS, st.booleans(), st.integers(1, 30))
@settings(max_examples=300, deadline=None, suppress_health_check=SHARED_FOLDER)
def test_lines_of_all_stretches_are_those_of_the_file(
    tmp_path: Path, text: str, has_mark: bool, max_bytes: int
) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf" * has_mark + text.encode())
    expected = [line.rstrip("\n") for line in io.TextIOWrapper(io.BytesIO(path.read_bytes()), "utf-8-sig")]
    assert in_stretches(path, max_bytes) == expected
    assert list(read_file(str(path), "text", "line")) == expected


@pytest.mark.usefixtures("small_reads")
@given(JSON_LINES, st.booleans(), st.integers(1, 60))
@settings(max_examples=200, deadline=None, suppress_health_check=SHARED_FOLDER)
def test_json_rows_of_all_stretches_are_those_of_the_file(
    tmp_path: Path, lines: list[tuple[str, str]], has_mark: bool, max_bytes: int
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" * has_mark + "".join(row + line_end for row, line_end in lines).encode())
    try:
        expected = list(read_file(str(path), "text", "line"))
    except InputError:
        with pytest.raises(InputError, match="--text-column must name a column"):
            in_stretches(path, max_bytes)
    else:
        assert expected == [
            json.loads(row)["text"] if '"text"' in row else "a" * (row == '"a"') for row, _ in lines if row != " "
        ]
        assert in_stretches(path, max_bytes) == expected


@pytest.mark.usefixtures("small_reads")
@given(st.binary(max_size=40), st.lists(st.integers(0, 45), max_size=6))
@settings(deadline=None, suppress_health_check=SHARED_FOLDER)
def test_ranges_share_no_byte_and_leave_none_out(content: bytes, borders: list[int]) -> None:
    file = io.BytesIO(content)
    borders = sorted({0, *borders, len(content)})
    parts = [b"".join(row_bytes(file, *border, piece_bytes=3)) for border in pairwise(borders)]
    assert b"".join(parts) == content
    for start, part in zip(borders, parts, strict=False):
        if part:
            assert content[first_row(file, start, len(content)) :].startswith(part)


def test_cut_sizes() -> None:
    assert cut_file("a.jsonl", 10, "paragraph", 4) == [
        Stretch("a.jsonl", 0, 3), Stretch("a.jsonl", 3, 6), Stretch("a.jsonl", 6, 10),
    ]  # fmt: skip
    assert cut_file("gs://bucket/a.txt", 5, "line", 3, generation=7)[1] == Stretch("gs://bucket/a.txt", 2, 5, 7)
    for name in ("a.txt.gz", "a.jsonl.gz", "a.json", "a.csv", "a.parquet"):
        assert cut_file(name, 10, "line", 4) == [Stretch(name)]
    for sample_by in ("paragraph", "document"):
        assert cut_file("a.txt", 10, sample_by, 4) == [Stretch("a.txt")]
    assert cut_file("a.txt", 0, "line", 4) == cut_file("a.txt", 4, "line", 4) == [Stretch("a.txt")]


class CountingFile(io.BytesIO):
    num_bytes_read = 0

    def read(self, size: int | None = -1) -> bytes:
        piece = super().read(size)
        self.num_bytes_read += len(piece)
        return piece


def test_one_huge_row_is_not_read_once_a_stretch() -> None:
    file = CountingFile(b"x" * 2_000_000)
    borders = range(0, 2_000_001, 100_000)
    sizes = [sum(map(len, row_bytes(file, *border, piece_bytes=1 << 20))) for border in pairwise(borders)]
    assert sizes == [2_000_000] + [0] * 19
    assert file.num_bytes_read < 3 * 2_000_000


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize(
    ("row", "message"),
    [
        (b'{"text": "c"', "the line at byte {}, column 13: Expecting"),
        (b"[1]", r"the line at byte {} has list \[1\]"),
        (b'{"text": 17}', "'text' of .*a.jsonl, the line at byte {}, has int 17"),
        (b'{"text": "\\ud800"}', "the line at byte {}: .*surrogates"),
    ],
)
def test_json_errors_lead_to_the_line(line_end: bytes, row: bytes, message: str, tmp_path: Path) -> None:
    good = '{"text": "é ☃"}'.encode() + line_end
    path = tmp_path / "a.jsonl"
    path.write_bytes(good * 40 + line_end + row + line_end)
    with pytest.raises(InputError, match=message.format(40 * len(good) + len(line_end))):
        list(read_stretch(Stretch(str(path), len(good) * 20 - 3, path.stat().st_size), "text", "line"))
    with pytest.raises(InputError, match=r"\bline 42\b"):
        list(read_file(str(path), "text", "line"))


@pytest.mark.parametrize("ending", ["txt", "jsonl"])
def test_wrong_encoding_names_the_byte_in_the_file(ending: str, tmp_path: Path) -> None:
    rows = b'"\xc3\xa9"\n' * 1000
    path = tmp_path / f"a.{ending}"
    path.write_bytes(rows + b'"\xfc"\n' + rows)
    middle = len(rows) - 2
    with pytest.raises(InputError, match=f"; byte {len(rows) + 1} is 0xfc"):
        list(read_stretch(Stretch(str(path), middle, len(rows) + 100), "text", "line"))
    assert len(list(read_stretch(Stretch(str(path), 0, middle), "text", "line"))) == 1000
    assert len(list(read_stretch(Stretch(str(path), middle + 10, 2 * len(rows)), "text", "line"))) == 999


def test_what_a_file_lacks_is_found_in_any_stretch_of_it(tmp_path: Path) -> None:
    utf_16, other_column = tmp_path / "a.txt", tmp_path / "b.jsonl"
    utf_16.write_bytes("some lines\n".encode("utf-16-le") * 1000)
    other_column.write_bytes(b'{"title": "a", "n": 1}\n' * 1000)
    with pytest.raises(InputError, match=r"byte 1 is 0x00.*iconv -f UTF-16"):
        list(read_stretch(Stretch(str(utf_16), 9_000, 12_000), "text", "line"))
    with pytest.raises(InputError, match=r"b\.jsonl has title, n, not 'text'"):
        list(read_stretch(Stretch(str(other_column), 9_000, 12_000), "text", "line"))


def test_a_file_that_became_shorter(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"line\n" * 100)
    stretches = cut_file(str(path), 500, "line", 100)
    path.write_bytes(b"line\n" * 90)
    assert len(list(read_stretch(stretches[0], "text", "line"))) == 20
    with pytest.raises(InputError, match="must stay as it is while it is read"):
        list(read_stretch(stretches[-1], "text", "line"))
