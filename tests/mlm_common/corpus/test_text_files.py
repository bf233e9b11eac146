"""Files that are not what they should be, very long lines, and rows that cannot be read, in every format."""

import gzip
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlm_common.corpus import text_formats
from mlm_common.corpus.config import CorpusConfig, SampleBy
from mlm_common.corpus.text_files import ByteRange, read_byte_range
from mlm_common.corpus.text_formats import BadRow, BadRows, parquet_texts
from mlm_common.errors import InputError
from tests.fixtures.text_files import local_file, read_file

GOOD = "gut genug ☃".encode()
LATIN_1 = "gut genüg".encode("latin-1")  # "ü" is 0xfc, at its fifth place

# What comes before all rows, a row, what comes after.
FORMATS: dict[str, tuple[bytes, bytes, bytes]] = {
    "txt": (b"", b"%s\n", b""),
    "jsonl": (b"", b'{"n": 1, "text": "%s"}\n', b""),
    "json": (b'[{"text": ""}', b',\n {"text": "%s"}', b"]"),
    "csv": (b"n,text\n", b'1,"%s"\n', b""),
}
ENDINGS = [ending + compression for ending in FORMATS for compression in ("", ".gz")]


def content_of(ending: str, texts: list[bytes]) -> bytes:
    start, row, end = FORMATS[ending.removesuffix(".gz")]
    return start + b"".join(row % text for text in texts) + end


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(gzip.compress(content, 1) if path.suffix == ".gz" else content)
    return path


@pytest.mark.parametrize("num_good", [0, 100_000])
@pytest.mark.parametrize("ending", ENDINGS)
def test_wrong_encoding_names_file_line_byte_and_fix(ending, num_good, tmp_path):
    name = write(tmp_path / f"a.{ending}", content_of(ending, [GOOD] * num_good + [LATIN_1] + [GOOD] * 50))
    with pytest.raises(InputError) as caught:
        read_file(name)
    message = str(caught.value)
    assert message.startswith(f"{name} must contain UTF-8 text")
    number = 1 if ending.startswith("json") and "l" not in ending else num_good + 1 + ("csv" in ending)
    assert f"; line {number:,}: the byte 0xfc is not UTF-8" in message
    assert all(part in message for part in ("iconv -f WINDOWS-1252 -t UTF-8", "--on-bad-row skip"))
    assert "\n" not in message


@given(st.binary(max_size=40), st.integers(0, 4000))
@settings(max_examples=60)
def test_text_is_that_of_pythons_decoder(tmp_path, tail, num_before):
    content = b"x" * num_before + tail
    name = write(tmp_path / "a.txt", content)
    try:
        text = content.decode()
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:
        with pytest.raises(InputError, match=r"must (be|contain) UTF-8 text"):
            read_file(name)
    else:
        text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
        assert read_file(name, sample_by="document") == [text]
        assert read_file(name) == text.removesuffix("\n").split("\n") * bool(text)


def test_character_cut_at_a_block_border_or_at_the_end(tmp_path):
    whole = b"x" * ((1 << 20) - 1) + "é".encode()
    assert len(read_file(write(tmp_path / "a.txt", whole))[0]) == 1 << 20
    for content, byte in ((whole + b"\xe9x", "e9"), (whole[:-1], "c3")):
        with pytest.raises(InputError, match=f"byte 0x{byte} is not UTF-8"):
            read_file(write(tmp_path / "a.txt", content))


@pytest.mark.parametrize("damage", ["cut short", "changed", "wrong checksum", "more after it"])
@pytest.mark.parametrize("ending", ["txt.gz", "csv.gz"])
def test_damaged_gzip_files(ending, damage, tmp_path):
    whole = gzip.compress(content_of(ending, [b"%d" % number for number in range(20_000)]))
    middle = len(whole) // 2
    damaged = {
        "cut short": whole[:middle],
        "changed": whole[:middle] + b"\xff" * 30 + whole[middle + 30 :],
        "wrong checksum": whole[:-8] + bytes(8),
        "more after it": whole + b"more",
    }
    path = tmp_path / f"a.{ending}"
    path.write_bytes(damaged[damage])
    with pytest.raises(InputError, match=r"must (be a (text|JSON|CSV) file in gzip;|contain)"):
        read_file(path)


MEASURE = """
import json, resource, sys
from mlm_common.corpus.config import CorpusConfig
from mlm_common.corpus.text_files import ByteRange, read_byte_range
from mlm_common.storage.reading import StoredFile
before_kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
file, config = StoredFile(sys.argv[1], 0), CorpusConfig(sample_by=sys.argv[2])
lengths = [len(text) for text in read_byte_range(ByteRange(file), config)]
peak_kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kilobytes
print(json.dumps([lengths, peak_kilobytes / 1e3]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("ending", "sample_by"), [("txt", "paragraph"), ("jsonl.gz", "line")])
def test_lines_of_50_megabytes(ending, sample_by, tmp_path):
    """Three such documents take no more memory than one."""
    num_characters = 50_000_000
    texts = [letter * num_characters + b"\n" * (sample_by == "paragraph") for letter in (b"x", b"y", b"z")]
    name = write(tmp_path / f"a.{ending}", content_of(ending, texts))
    program = [sys.executable, "-c", MEASURE, name, sample_by]
    answer = subprocess.run(program, check=True, capture_output=True, encoding="utf-8")
    lengths, peak_megabytes = json.loads(answer.stdout)
    assert lengths == [num_characters] * 3
    assert peak_megabytes < 250


@pytest.mark.parametrize("rows_per_group", [1_000, 1_000_000])
def test_parquet_is_read_as_its_rows_are_needed(rows_per_group, tmp_path):
    path = tmp_path / "a.parquet"
    texts = [os.urandom(500).hex() for _ in range(10_000)]
    pq.write_table(pa.table({"text": texts}), path, row_group_size=rows_per_group, compression="none")
    reads: list[int] = []

    class NotingFile(io.FileIO):
        def readinto(self, buffer: Any) -> int | None:
            reads.append(len(buffer))
            return super().readinto(buffer)

    with io.BufferedReader(NotingFile(path), 1 << 20) as file:
        documents = parquet_texts(file, "text", str(path), lambda *_: None)
        assert next(documents) == texts[0]
        assert sum(reads) < 4 << 20 < path.stat().st_size
        assert list(documents) == texts[1:]
        assert max(reads) <= 2 << 20


def test_json_texts_stay_as_they_are(tmp_path):
    """Readers that guess types make times of the first two, and quote strings beside other values."""
    texts = ["2020-01-01", "2021-01-02 10:00:00", "17", "null", "", " a\u2028b\x85c ", "😀"]
    lines = [json.dumps({"text": text, "id": place} | {f"key {place}": [place]}) for place, text in enumerate(texts)]
    assert read_file(write(tmp_path / "a.jsonl", "\n\n".join(lines).encode())) == texts
    rows = json.dumps([{"text": text} for text in texts], indent=1)
    assert read_file(write(tmp_path / "b.json", rows.encode())) == texts
    assert read_file(write(tmp_path / "c.json", json.dumps(texts, ensure_ascii=False).encode())) == texts
    assert read_file(write(tmp_path / "d.json", b'{\n "text": "one"\n}\n')) == ["one"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b'{"text": "one"}\n{"title": "t"}\n{"text": null}\n{"text": ""}\n'),
        ("a.csv", b"text,n\none,1\n,2\n,3\n"),
        ("a.parquet", {"text": ["one", None, None, ""]}),
    ],
)
def test_missing_texts_are_counted(name, content, tmp_path):
    if isinstance(content, dict):
        pq.write_table(pa.table(content), tmp_path / name)
    else:
        write(tmp_path / name, content)
    texts, bad_rows = read(tmp_path / name)
    assert set(texts[1:]) == {""}
    assert bad_rows.num_rows == 0
    assert bad_rows.describe_oddities() == f"{tmp_path / name}: 2 without text, such as document 2"


def test_very_long_texts_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(text_formats, "LONG_CHARACTERS", 1_000_000)
    path = write(tmp_path / "a.txt", b"short\n" + b"ab " * 400_000 + b"\n")
    _, bad_rows = read(path)
    expected = f"{path}: 1 longer than 1 million characters, such as document 2 (1,200,000 characters)"
    assert bad_rows.describe_oddities() == expected


def read(path: Path, sample_by: SampleBy = "line") -> tuple[list[str], BadRows]:
    bad_rows, config = BadRows(), CorpusConfig(sample_by=sample_by, on_bad_row="skip")
    return list(read_byte_range(ByteRange(local_file(path)), config, bad_rows)), bad_rows


@pytest.mark.parametrize("value", [b"0", b"[]", b"{}", b"true"])
@pytest.mark.parametrize("row", [b'{"text": %s}', b'[{"text": %s}]'])
def test_a_json_value_that_is_not_text_is_a_bad_row(value, row, tmp_path):
    path = write(tmp_path / "a.json", row % value + b"\n")
    with pytest.raises(InputError, match=r"must contain text in 'text' .*; line 1: \w+ .*--on-bad-row skip"):
        read_file(path)
    texts, bad_rows = read(path)
    assert (texts, bad_rows.num_rows) == ([], 1)


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
            b'{"text": "a"}\n{"text": "c"\n[1]\n{"text": "\\ud800"}\n{"n": "\xe9", "text": "x"}\n"b"\n' + b"[" * 99_999,
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
def test_the_other_rows_are_read(name, sample_by, content, texts, listed, tmp_path):
    documents, bad_rows = read(write(tmp_path / name, content), sample_by)
    assert documents == texts
    assert list(dict.fromkeys(row.place for row in bad_rows.listed)) == [f"line {number}" for number in listed]
    assert all(problem in row.problem for problem, row in zip(listed.values(), bad_rows.listed, strict=False))
    number, problem = next(iter(listed.items()))
    says = rf"{name} must contain .*; line {number}: .*{re.escape(problem)}.*--on-bad-row skip"
    with pytest.raises(InputError, match=says):
        read_file(tmp_path / name, sample_by)


def test_a_parquet_value_that_is_not_utf_8_costs_its_row(tmp_path):
    texts = pa.array([b"text %d" % number for number in range(200)] + [b"\xff", None, b"last"])
    table = pa.table({"text": texts.cast(pa.string(), safe=False).view(pa.string())})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=50)  # whose rows are counted over all groups
    documents, bad_rows = read(tmp_path / "a.parquet")
    assert documents == [*(f"text {number}" for number in range(200)), "", "last"]
    assert bad_rows.listed == [BadRow(f"{tmp_path}/a.parquet", "row 201", "the byte 0xff is not UTF-8")]
    with pytest.raises(InputError, match=r"a\.parquet must contain UTF-8 text; row 201"):
        read_file(tmp_path / "a.parquet")


def test_all_are_counted_and_the_first_are_listed(tmp_path, monkeypatch):
    monkeypatch.setattr(text_formats, "MAX_LISTED", 3)
    _, bad_rows = read(write(tmp_path / "a.txt", b"\xff\n" * 50))
    assert (bad_rows.num_rows, [row.place for row in bad_rows.listed]) == (50, ["line 1", "line 2", "line 3"])
    bad_rows.add(2, [BadRow("b.txt", "line 1", "bad")] * 2)
    assert (bad_rows.num_rows, len(bad_rows.listed)) == (52, 3)
