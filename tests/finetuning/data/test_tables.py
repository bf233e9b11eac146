"""Tables of each kind, and what is wrong with those that are none."""

import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest

from finetuning.data.examples import read_hub_tables, read_table
from mlm_common.errors import InputError

ROWS = [{"text": 'a "b', "label": "x"}, {"text": "c, d", "label": "y"}]


def write(path, content):
    if isinstance(content, str):
        data = content.encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    elif content is not None:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(content), path)
    return str(path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.tsv", 'text\tlabel\na "b\tx\nc, d\ty\n'),
        ("b.tsv", 'text\tlabel\r\na "b\tx\r\nc, d\ty'),
        ("a.csv", 'text,label\n"a ""b",x\n\n"c, d",y\n'),
        ("a.jsonl", "\ufeff" + "".join(json.dumps(row) + "\n" for row in ROWS)),
        ("a.json", json.dumps(ROWS)),
        ("A.CSV", 'text,label\n"a ""b",x\n"c, d",y\n'),
        ("c.tsv", 'text\tlabel\na "b\tx\n\nc, d\ty\n\n'),
        ("a.csv.gz", 'text,label\n"a ""b",x\n"c, d",y\n'),
        ("a.parquet", ROWS),
    ],
)
def test_a_table_is_read(tmp_path, name, content):
    table = read_table(write(tmp_path / name, content), "--train-file")
    assert {column: list(values) for column, values in table.columns.items()} == {
        "text": [row["text"] for row in ROWS],
        "label": [row["label"] for row in ROWS],
    }
    assert table.first(1).columns["text"] == [ROWS[0]["text"]]


def test_lines_without_names_and_short_ones(tmp_path):
    path = write(tmp_path / "a.tsv", "1\ta\n2\n3\tb\u2028b\n")
    table = read_table(path, "", ("number", "text"), skips_short_rows=True)
    assert table.columns == {"number": ["1", "3"], "text": ["a", "b\u2028b"]}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.doc", "text", "--train-file takes files ending in .tsv, .conll, .csv"),
        ("a.tsv", None, "there is no"),
        ("a.tsv", "", "must name a file with rows"),
        ("b.tsv", "text\tlabel\n", "must name a file with rows"),
        ("c.tsv", "text\tlabel\na\tb\na\n", "must have the 2 columns text, label; line 3 has 1"),
        ("a.csv", "text,label\na,b,c\n", "line 2 has 3"),
        ("a.jsonl", '{"text": "a"}\n{"label": 1}\n', "must have the columns of the first; row 2 lacks text"),
        ("b.jsonl", '{"text": "a"}\n[1]\n', "row 2 is not"),
        ("c.jsonl", '{"text": "a"}\n\n{"text": \n', "must name a readable .jsonl file; .*c.jsonl: line 3, character"),
        ("a.parquet", "text", "must name a readable .parquet file"),
        ("a.csv.gz", "text,label\n", "must name a file with rows"),
        ("b.csv.gz", None, "there is no"),
        ("d.tsv", "text\ttext\tlabel\na\tb\tx\n", "Columns must differ in their names; .* has two called 'text'"),
        ("d.jsonl", '{"text": "a", "text": "b"}\n', "has two called 'text'"),
        ("e.jsonl", '{"text": "\\ud800"}\n', "must name a readable .jsonl file.*surrogates not allowed"),
        ("f.jsonl", "[" * 100_000, "must name a readable .jsonl file"),
        ("a.conll", "a O\nb\n", "must have the number of columns of the first, 2; line 2 has 1"),
        ("b.conll", "# newdoc\na O\n", "line 1 of .* begins with # and ends with 'newdoc'"),
    ],
)
def test_what_is_no_table(tmp_path, name, content, message):
    with pytest.raises(InputError, match=message):
        read_table(write(tmp_path / name, content), "--train-file")


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl", "a.conll"])
def test_text_of_another_encoding_is_refused_with_its_line_and_a_way_to_convert_it(tmp_path, name):
    path = tmp_path / name
    path.write_bytes("\ufefftext,label\nschon,a\nschön,b\n".encode()[:-4].replace("ö".encode(), b"\xf6"))
    with pytest.raises(InputError, match=r"line 3 of .* has the byte 0xf6.*iconv -f ISO-8859-1 -t UTF-8"):
        read_table(str(path), "--train-file")


def test_a_data_set_of_a_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    for split in ("train", "validation"):
        write(tmp_path / "data" / f"{split}.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS))
    tables = read_hub_tables(str(tmp_path / "data"), None, None)
    assert {split: list(table.columns["text"]) for split, table in tables.items()} == {
        split: ['a "b', "c, d"] for split in ("train", "validation")
    }
    with pytest.raises(InputError, match="--dataset-name must be a data set of the Hub"):
        read_hub_tables(str(tmp_path / "nowhere"), None, None)


def test_a_long_text_of_a_csv_file(tmp_path):
    text = "a" * 200_000
    assert read_table(write(tmp_path / "a.csv", f"text,label\n{text},x\n"), "").columns["text"] == [text]


def test_two_columns_of_one_name_in_parquet(tmp_path):
    table = pyarrow.table([["a"], ["b"]], names=["text", "text"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(InputError, match="has two called 'text'"):
        read_table(str(tmp_path / "a.parquet"), "--train-file")


def test_no_label_of_a_data_set_is_none(monkeypatch):
    datasets = pytest.importorskip("datasets")
    kind = datasets.ClassLabel(names=["x", "y"])
    features = datasets.Features({"label": kind, "tags": datasets.List(kind)})
    rows = datasets.Dataset.from_dict({"label": [1, -1, 0], "tags": [[0, -1], None, []]}, features)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: {"train": rows})
    columns = read_hub_tables("a", None, None)["train"].columns
    assert columns == {"label": ["y", None, "x"], "tags": [["x", None], None, []]}
