"""Tables of each kind, which columns are texts and labels, those of GLUE too, and what is wrong with others."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import datasets
import pytest

from finetuning.config.settings import ClassificationData
from finetuning.data.examples import Table, read_hub_tables, read_table
from finetuning.data.glue import GLUE_TASKS
from finetuning.tasks.classification import read_splits
from mlm_common.errors import InputError

# The columns of each task's files, as the download has them: of training, and of the test part where that has others.
HEADERS = {
    "cola": ("", "index sentence"),
    "mnli": ("index sentence1 sentence2 label1 gold_label", "index sentence1 sentence2"),
    "mrpc": ("Quality|#1 ID|#2 ID|#1 String|#2 String", "index|#1 ID|#2 ID|#1 String|#2 String"),
    "qnli": ("index question sentence label", "index question sentence"),
    "qqp": ("id qid1 qid2 question1 question2 is_duplicate", "id question1 question2"),
    "rte": ("index sentence1 sentence2 label", "index sentence1 sentence2"),
    "sst2": ("sentence label", "index sentence"),
    "stsb": ("index genre sentence1 sentence2 score", "index genre sentence1 sentence2"),
    "wnli": ("index sentence1 sentence2 label", "index sentence1 sentence2"),
}
LABELS = {"stsb": ("2.5", "4.000"), "mnli": ("neutral", "entailment"), "rte": ("not_entailment", "entailment")}
LABELS["qnli"] = LABELS["rte"]


def write_part(path: Path, header: str, values: dict[str, tuple[str, str]], names: tuple[str, ...] = ()) -> None:
    columns = names or tuple(header.split("|") if "|" in header else header.split())
    lines = [] if names else ["\t".join(columns)]
    lines += ["\t".join(values.get(column, ("0", "1"))[row] for column in columns) for row in range(2)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.mark.parametrize("name", GLUE_TASKS)
def test_a_task_of_glue_is_read(name, tmp_path):
    task = GLUE_TASKS[name]
    texts = {column: (f"{column} one", f'"{column} two') for column in task.texts}
    labels = LABELS.get(name, ("0", "1"))
    (tmp_path / task.folder).mkdir()
    for file in ("train", *task.validation.values()):
        path = tmp_path / task.folder / f"{file}.tsv"
        write_part(path, HEADERS[name][0], {**texts, task.label: labels}, task.columns or ())
    (tmp_path / "diagnostic").mkdir()
    for file, _ in task.all_tests.values():
        path = tmp_path / f"{file}.tsv" if "/" in file else tmp_path / task.folder / f"{file}.tsv"
        write_part(path, HEADERS[name][1], texts)

    parts = read_splits(ClassificationData(task_name=name, glue_dir=str(tmp_path), do_predict=True))
    expected = tuple(list(column) for column in texts.values())
    for examples in (parts.train, *parts.validation.values(), *parts.tests.values()):
        assert tuple(list(column) for column in examples.texts) == expected
    assert list(parts.train.labels or ()) == (list(task.label_names) or list(labels))
    assert all(examples.labels is None for examples in parts.tests.values())
    assert set(parts.validation) == {"", *(["_mm"] if name == "mnli" else [])}
    assert set(parts.tests) == {name, *(["mnli-mm", "mnli-ax"] if name == "mnli" else [])}


def test_diagnostics_of_the_hub_are_another_configuration(monkeypatch):
    columns = {"premise": ["a"], "hypothesis": ["b"], "label": ["neutral"]}
    asked = []

    def read(name: str, config: str, revision: str | None) -> dict[str, Table]:
        asked.append((name, config, revision))
        splits = ("train", "validation_matched", "validation_mismatched", "test_matched", "test_mismatched")
        return {split: Table(f"{config} {split}", columns) for split in (("test",) if config == "ax" else splits)}

    monkeypatch.setattr("finetuning.data.glue.read_hub_tables", read)
    parts = read_splits(ClassificationData(task_name="mnli", do_predict=True))
    assert asked == [("nyu-mll/glue", "mnli", None), ("nyu-mll/glue", "ax", None)]
    assert {name: examples.name for name, examples in parts.tests.items()} == {
        "mnli": "mnli test_matched",
        "mnli-mm": "mnli test_mismatched",
        "mnli-ax": "ax test",
    }


def data_of(tmp_path: Path, content: str, **settings: object) -> ClassificationData:
    (tmp_path / "a.tsv").write_text(content, encoding="utf-8")
    return ClassificationData(train_file=str(tmp_path / "a.tsv"), **settings)


def test_columns_of_other_files(tmp_path):
    parts = read_splits(data_of(tmp_path, "id\tpremise\tlabel\thypothesis\n7\ta\tx\tb\n"))
    assert (parts.train.texts, parts.train.labels) == ((["a"], ["b"]), ["x"])
    named = read_splits(data_of(tmp_path, "a\tb\tc\td\n1\t2\t3\t4\n", text_column_names=["c"], label_column_name="a"))
    assert (named.train.texts, named.train.labels) == ((["3"],), ["1"])
    several = data_of(tmp_path, "text\tlabel\nt\tx, y\nu\t\n", problem_type="multi_label_classification")
    assert read_splits(several).train.labels == ["x, y", ""]


def test_the_index_that_pandas_writes_is_no_text(tmp_path):
    for name in ("", "Unnamed: 0"):
        parts = read_splits(data_of(tmp_path, f"{name}\ttext\tlabel\n0\ta\tx\n1\tb\ty\n"))
        assert parts.train.texts == (["a", "b"],)
        assert parts.columns == {"texts": f"text; not read: {name!r}", "labels": f"label of {tmp_path / 'a.tsv'}"}


def test_whole_numbers_are_texts_only_where_they_are_named(tmp_path):
    content = "row\ttext\tlabel\n0\ta\tx\n1\tb\ty\n"
    with pytest.raises(InputError, match=r"Column row of .* If it is text, use --text-column-names row text;"):
        read_splits(data_of(tmp_path, content))
    parts = read_splits(data_of(tmp_path, content, text_column_names=["row", "text"]))
    assert parts.train.texts == (["0", "1"], ["a", "b"])


def test_a_test_part_may_have_labels(tmp_path):
    for content, labels in (("text\nt\n", None), ("text\tlabel\nt\tx\n", ["x"])):
        (tmp_path / "b.tsv").write_text(content, encoding="utf-8")
        data = data_of(tmp_path, "text\tlabel\nt\tx\n", test_file=str(tmp_path / "b.tsv"))
        assert read_splits(data).tests["test"].labels == labels


@pytest.mark.parametrize(
    ("content", "settings", "message"),
    [
        ("a\tb\tc\tlabel\n1\t2\t3\t4\n", {}, "--text-column-names must name the one or two columns of text in"),
        (
            "text\tclass\nt\tx\n",
            {},
            "--label-column-name must name a column of .*, which has text, class, but no label",
        ),
        ("review\tstars\na\t5\nb\t1\n", {}, "--label-column-name must name a column of .*, which has review, stars"),
    ],
)
def test_what_is_missing(tmp_path, content, settings, message):
    with pytest.raises(InputError, match=message):
        read_splits(data_of(tmp_path, content, **settings))


ROWS = [{"text": 'a "b', "label": "x"}, {"text": "c, d", "label": "y"}]


def write(path, content):
    data = content.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.tsv", 'text\tlabel\na "b\tx\nc, d\ty\n'),
        ("a.jsonl", "\ufeff" + "".join(json.dumps(row) + "\n" for row in ROWS)),
        ("a.json", json.dumps(ROWS)),
        ("a.csv.gz", 'text,label\n"a ""b",x\n"c, d",y\n'),
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
        ("a.xlsx", "text", r"optionally with .gz; received .*a\.xlsx\. Save the sheet as \.csv\."),
        ("b.tsv", "text\tlabel\n", "must name a file with rows"),
        ("a.csv", "text,label\na,b,c\n", "must have the 2 columns text, label; line 2 has 3: `a,b,c`. Put texts that"),
        ("c.csv", 'text,label\n"a\nb",x\n"c "d",y\n', 'row that starts in line 4 has a misplaced quotation mark .*`"c'),
        ("d.csv", "a;b,c;d\n1;2,3;4\n", "commas or semicolons between its columns; line 1 is `a;b,c;d`. Pass --del"),
        ("e.tsv", "text,label\na,b\n", "must have tabs between its columns; .* rename the file to .csv"),
        ("c.jsonl", '{"text": "a"}\n\n{"text": \n', "c.jsonl must be a readable .jsonl file; line 3, character"),
        ("a.parquet", "text", "must be a readable .parquet file"),
        ("e.jsonl", '{"text": "\\ud800"}\n', "must be Unicode; row 1 has half of a surrogate pair"),
        ("g.jsonl", '["a", "b"]\n["c", "d"]\n', r'Each row of .*g\.jsonl must be an object, .*; row 1 is \["a", "b"\]'),
        ("f.jsonl", "[" * 100_000, "must be a readable .jsonl file"),
        ("c.conll", "a O\n\n\u00a0 O\nb O\n", r"Each word of .*c\.conll must .*; line 3 has '\\xa0'"),
        ("d.conll", "a\tO\n\tO\n", r"Each word of .*d\.conll must have a visible character; line 2 has ''"),
        ("b.conll", "# newdoc\na O\n", "Line 1 of .* may be a comment or a token: it begins with #, and ends with"),
    ],
)
def test_what_is_no_table(tmp_path, name, content, message):
    with pytest.raises(InputError, match=message):
        read_table(write(tmp_path / name, content), "--train-file")


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.conll"])
def test_text_of_another_encoding_is_refused_with_its_line_and_a_way_to_convert_it(tmp_path, name):
    path = tmp_path / name
    path.write_bytes("\ufefftext,label\nschon,a\nschön,b\n".encode()[:-4].replace("ö".encode(), b"\xf6"))
    with pytest.raises(InputError, match=r"line 3 has the byte 0xf6.*iconv -f WINDOWS-1252 -t UTF-8"):
        read_table(str(path), "--train-file")


@pytest.mark.parametrize("name", ["a.csv", "a.parquet"])
def test_a_folder_and_a_file_that_cannot_be_read_are_one_line(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(InputError, match=f"--file: .*{name} must be a readable .*is a directory. Check the path"):
        read_table(str(tmp_path / name), "--file")
    (tmp_path / f"loop.{name}").symlink_to(tmp_path / f"loop.{name}")
    with pytest.raises(InputError, match="loop"):
        read_table(str(tmp_path / f"loop.{name}"), "--file")


def test_keys_of_json_that_rows_lack_are_missing(tmp_path):
    path = write(
        tmp_path / "a.jsonl", '{"text": "a", "label": "x", "metadata": {}}\n{"text": "b", "label": "y", "id": 1}\n'
    )
    columns = {"text": ["a", "b"], "label": ["x", "y"], "metadata": [{}, None], "id": [None, 1]}
    assert read_table(path, "").columns == columns
    path = write(tmp_path / "b.jsonl", '{"text": "a", "label": "x"}\n{"label": "y"}\n')
    with pytest.raises(InputError, match=r"Column text of .* must hold text; row 2 has None"):
        read_splits(ClassificationData(train_file=path))


def test_a_short_line_of_qqp_moves_no_prediction(tmp_path):
    """Rows with labels may lack columns, those to predict may not."""
    (tmp_path / "QQP").mkdir()
    for part, header in (("train", HEADERS["qqp"][0]), ("dev", HEADERS["qqp"][0]), ("test", HEADERS["qqp"][1])):
        names = header.split()
        lines = ["\t".join(names), "\t".join(map(str, range(len(names) - 1))) + "\t1", "7\tonly"]
        (tmp_path / "QQP" / f"{part}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    data = ClassificationData(task_name="qqp", glue_dir=str(tmp_path))
    assert read_splits(data).train.num_rows == 1
    with pytest.raises(InputError, match="must have the 3 columns id, question1, question2; line 3 has 2"):
        read_splits(replace(data, do_predict=True))


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


def test_a_damaged_file_of_a_data_set_is_named_in_one_line(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "train.jsonl", '{"text": "a"}\n{"text": "b')
    with pytest.raises(InputError, match=r"cannot be read: .*train\.jsonl"):
        read_hub_tables(str(tmp_path / "data"), None, None)
    assert caplog.records == []


def test_a_long_text_of_a_csv_file(tmp_path):
    text = "a" * 200_000
    assert read_table(write(tmp_path / "a.csv", f"text,label\n{text},x\n"), "").columns["text"] == [text]


def test_no_label_of_a_data_set_is_none(tmp_path):
    kind = datasets.ClassLabel(names=["x", "y"])
    features = datasets.Features({"label": kind, "tags": datasets.List(kind)})
    rows = datasets.Dataset.from_dict({"label": [1, -1, 0], "tags": [[0, -1], None, []]}, features)
    rows.save_to_disk(tmp_path)
    columns = read_hub_tables(str(tmp_path), None, None)["train"].columns
    assert columns == {"label": ["y", None, "x"], "tags": [["x", None], None, []]}


def test_a_folder_that_save_to_disk_wrote_is_read_without_its_cache(tmp_path):
    rows = datasets.Dataset.from_list([{"text": f"row {number}", "label": number % 2} for number in range(30)])
    rows.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": rows, "held-out": rows.select([0])}).save_to_disk(tmp_path / "several")
    for folder in (tmp_path / "one", tmp_path / "several" / "train"):
        datasets.load_from_disk(folder).map(lambda row: {"text": "MAPPED " + row["text"]})
    for folder, splits in ((tmp_path / "one", {"train": 30}), (tmp_path / "several", {"train": 30, "held-out": 1})):
        tables = read_hub_tables(str(folder), None, None)
        assert {split: len(table.columns["text"]) for split, table in tables.items()} == splits
        assert tables["train"].columns["text"] == [f"row {number}" for number in range(30)]


@pytest.mark.parametrize("name", ["br[1]", "a::b"])
def test_a_path_that_datasets_takes_for_a_pattern_is_refused_with_another_way(name, tmp_path):
    (tmp_path / name).mkdir()
    write(tmp_path / name / "train.jsonl", "".join(json.dumps(row) + "\n" for row in ROWS))
    with pytest.raises(InputError, match=r"--dataset-name must be a path without .*; .* or name its files instead\."):
        read_hub_tables(str(tmp_path / name), None, None)
