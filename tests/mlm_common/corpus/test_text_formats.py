"""Rows that cannot be read: left out, counted and named, in every format; and what is no row."""

import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mlm_common.corpus import text_formats
from mlm_common.corpus.byte_ranges import ByteRange
from mlm_common.corpus.config import CorpusConfig
from mlm_common.corpus.corpus import open_corpus
from mlm_common.corpus.text_files import read_byte_range
from mlm_common.corpus.text_formats import BadRow, BadRows
from mlm_common.errors import InputError
from tests.fixtures.text_files import local_file


def read(path: Path, sample_by: str = "line") -> tuple[list[str], BadRows]:
    bad_rows = BadRows()
    return list(read_byte_range(ByteRange(local_file(path)), "text", sample_by, "skip", bad_rows)), bad_rows


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.mark.parametrize("value", [b"0", b"false", b"[]", b"{}", b"17", b"1.5", b"true"])
@pytest.mark.parametrize("row", [b'{"text": %s}', b'[{"text": %s}]'])
def test_a_json_value_that_is_not_text_is_a_bad_row(value: bytes, row: bytes, tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", row % value + b"\n")
    with pytest.raises(InputError, match=r"must hold text in 'text' .*; line 1: \w+ .*--on-bad-row skip"):
        list(read_byte_range(ByteRange(local_file(path)), "text", "line"))
    texts, bad_rows = read(path)
    assert (texts, bad_rows.num_rows) == ([], 1)


def test_null_and_a_missing_text_are_blank_documents(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b'{"text": "a"}\n{"text": null}\n{"id": 1}\n')
    assert read(path) == (["a", "", ""], BadRows())


@pytest.mark.parametrize(
    ("name", "sample_by", "content", "texts", "listed"),
    [
        ("a.txt", "line", b"a\n\xff\nb\n", ["a", "b"], {2: "the byte 0xff is not UTF-8"}),
        ("a.txt.gz", "line", b"a\n\xff\nb\n", ["a", "b"], {2: "the byte 0xff is not UTF-8"}),
        ("a.txt", "paragraph", b"a\n\nb\n\xc3(\nb\n\nc\n", ["a", "c"], {3: "the byte 0xc3 is not UTF-8"}),
        ("a.txt", "document", b"a\n\xff", [], {1: "the byte 0xff is not UTF-8"}),
        (
            "a.jsonl",
            "line",
            b'{"text": "a"}\n{"text": "c"\n[1]\n{"text": "\\ud800"}\n{"n": "\xe9", "text": "x"}\n"b"\n'
            + b"[" * 100_000
            + b"\n",
            ["a", "b"],
            {
                2: "Expecting ',' delimiter at column 13",
                3: "list [1]",
                4: "U+D800 is half of a surrogate pair",
                5: "the byte 0xe9 is not UTF-8",
                7: "maximum recursion",
            },
        ),
        ("a.json", "line", b'[{"text": "a"},\n {"text": 1}, 2,\n "b"]', ["a", "b"], {1: "int"}),
        ("a.csv", "line", b"n,text\n1,a\n2\n3,\xfc\n4,b,c\n5,d\n", ["a", "d"], {3: "has 1", 4: "0xfc", 5: "has 3"}),
    ],
)
def test_the_other_rows_are_read(
    name: str, sample_by: str, content: bytes, texts: list[str], listed: dict[int, str], tmp_path: Path
) -> None:
    found, bad_rows = read(write(tmp_path / name, content), sample_by)
    assert found == texts
    assert list(dict.fromkeys(row.place for row in bad_rows.listed)) == [f"line {number}" for number in listed]
    assert all(problem in row.problem for problem, row in zip(listed.values(), bad_rows.listed, strict=False))


def test_a_parquet_value_that_is_not_utf_8_costs_its_row(tmp_path: Path) -> None:
    texts = pa.array([b"text %d" % number for number in range(200)] + [b"\xff", None, b"last"])
    pq.write_table(pa.table({"text": texts.cast(pa.string(), safe=False).view(pa.string())}), tmp_path / "a.parquet")
    found, bad_rows = read(tmp_path / "a.parquet")
    assert found == [*(f"text {number}" for number in range(200)), "", "last"]
    assert bad_rows.listed == [BadRow(f"{tmp_path}/a.parquet", "row 201", "the byte 0xff is not UTF-8")]
    with pytest.raises(InputError, match=r"a\.parquet must hold UTF-8 text; row 201"):
        list(read_byte_range(ByteRange(local_file(tmp_path / "a.parquet")), "text", "line"))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b'text,n\n"one,1\ntwo,2\n', "readable csv file; unexpected end of data"),
        ("a.csv", b'text,n\n"He said "no",\n1\n', "readable csv file"),
        ("a.json", b'[\n{"text": "a"},\n{"text" "b"}]', "or a list of them; line 3, column 9"),
        ("a.txt", "text".encode("utf-16"), "must be UTF-8 text; byte 0"),
        ("a.parquet", b"PAR1", "readable parquet file"),
    ],
)
def test_where_rows_cannot_be_told_apart_the_file_is_refused(
    name: str, content: bytes, message: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=message):
        read(write(tmp_path / name, content))


def test_a_missing_column_is_no_bad_row(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has title, not 'text'"):
        read(write(tmp_path / "a.jsonl", b'{"title": "a"}\n' * 300))


def test_all_are_counted_and_the_first_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_formats, "MAX_LISTED", 3)
    _, bad_rows = read(write(tmp_path / "a.txt", b"\xff\n" * 50))
    assert (bad_rows.num_rows, [row.place for row in bad_rows.listed]) == (50, ["line 1", "line 2", "line 3"])
    bad_rows.add(2, [BadRow("b.txt", "line 1", "bad")] * 2)
    assert (bad_rows.num_rows, len(bad_rows.listed)) == (52, 3)


def test_a_corpus_of_bad_rows_only_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", b'{"text": 0}\n' * 4)
    with pytest.raises(InputError, match=r"is blank \(see --text-column; .* 4 left out, such as .*line 1: int 0\)"):
        open_corpus(CorpusConfig(data_files=[str(path)], on_bad_row="skip"))


def test_unknown_way_to_deal_with_bad_rows() -> None:
    with pytest.raises(InputError, match="--on-bad-row is one of fail, skip; got 'ignore'"):
        CorpusConfig(on_bad_row="ignore")  # type: ignore[arg-type]


@pytest.mark.parametrize("start", [b"a\n", b"\xff\n"])
@pytest.mark.parametrize("on_bad_row", ["fail", "skip"])
def test_a_zero_byte_at_the_start_cannot_be_skipped(tmp_path: Path, start: bytes, on_bad_row: str) -> None:
    path = write(tmp_path / "a.txt", start + b"b\0\n")
    with pytest.raises(InputError, match=r"leave it out of --data-files\. --on-bad-row skip does not help"):
        list(read_byte_range(ByteRange(local_file(path)), "text", "line", on_bad_row))
