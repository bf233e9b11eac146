"""A local folder as --dataset-name: plain files, what `save_to_disk` wrote, damage, and values that are no text."""

import json
import lzma
import re
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlm_common.corpus.config import CorpusConfig
from mlm_common.corpus.corpus import open_corpus, read_partition
from mlm_common.corpus.text_formats import BadRows
from mlm_common.errors import InputError
from tests.fixtures.text_files import contents_of

TEXTS = ['She said "hi".\nNew line, Grüße.', "2020-01-01", "NA", "", "12", "null", "a\tb", "last"]
ROWS = [{"text": text} for text in TEXTS]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """Keep what `datasets` prepares out of the user's cache."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def read(folder: Path | str, bad_rows: BadRows | None = None, **config: Any) -> list[str]:
    corpus = open_corpus(CorpusConfig(dataset_name=str(folder), **config))
    documents = list(corpus.documents(corpus.config.split, bad_rows))
    parts = corpus.partitions(corpus.config.split, 100 if len(documents) < 100 else 4 << 20)
    assert [text for part in parts for text in read_partition(corpus.config, corpus.config.split, part)] == documents
    return documents


def refusal(folder: Path | str, **config: Any) -> str:
    with pytest.raises(InputError) as caught:
        read(folder, **config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write_json_lines(path: Path, rows: list[Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.mark.parametrize(
    ("ending", "streaming"),
    [("jsonl", False), ("json", True), ("csv", False), ("parquet", True), ("jsonl.gz", True), ("csv.gz", False)],
)
def test_files_in_a_folder_are_read_as_with_data_files(ending, streaming, tmp_path):
    for split in ("train", "validation"):
        (tmp_path / f"{split}.{ending}").write_bytes(contents_of([*TEXTS, split])[ending])
    assert read(tmp_path, streaming=streaming) == [*TEXTS, "train"]
    assert read(tmp_path, streaming=streaming, split="validation") == [*TEXTS, "validation"]
    assert "--split must be a split of" in refusal(tmp_path, split="nosuch")
    corpus = open_corpus(CorpusConfig(dataset_name=str(tmp_path)))
    files = open_corpus(CorpusConfig(data_files=[f"{tmp_path}/train.{ending}"]))
    assert corpus.record["data_files"] == files.record["data_files"]


@pytest.mark.parametrize(
    ("num_before", "value", "name", "streaming"),
    [
        (60, 5, "train.jsonl", True),
        (60, True, "train.jsonl", False),
        (60, ["x"], "train.ndjson", False),
        (60, 1.5, "train.ndjson", False),
        (60, {"a": 1}, "train.jsonl.xz", False),
        # `datasets` reads ten megabytes at a time, and decides the types by the first.
        (11_000, {"a": 1}, "train.jsonl", False),
        (11_000, 5, "train.ndjson", True),
    ],
)
def test_one_value_that_is_no_text_never_turns_texts_into_json(num_before, value, name, streaming, tmp_path):
    rows = [{"text": f'She said "hi" {number}.' + "x" * 1000} for number in range(num_before)]
    write_json_lines(tmp_path / "d" / name, [*rows, {"text": value}, {"text": 'He said "ho".'}])
    if name.endswith(".xz"):
        (tmp_path / "d" / name).write_bytes(lzma.compress((tmp_path / "d" / name).read_bytes(), preset=0))
    message = refusal(tmp_path / "d", streaming=streaming)
    if name == "train.jsonl":
        assert re.search(
            rf"train\.jsonl must contain text in 'text' .*; line {num_before + 1:,}: {type(value).__name__}", message
        )
        bad_rows = BadRows()
        texts = [row["text"] for row in rows]
        assert read(tmp_path / "d", bad_rows, on_bad_row="skip", streaming=streaming) == [*texts, 'He said "ho".']
        assert bad_rows.num_rows == 1
    else:
        assert re.search(rf"cannot be loaded: .*{name}.*text\) changed from string to|several types", message)


@pytest.mark.parametrize(("name", "streaming"), [("train.parquet", False), ("train.arrow", True)])
@pytest.mark.parametrize(
    ("column", "pattern"),
    [
        (pa.array([1, 2]), "int64|int 1"),
        (pa.array([["a"], ["b"]]), r"List|list \['a'\]"),
        (pa.array([{"a": "b"}] * 2), r"\{'a': "),
        (pa.array([b"a", b"b"]), "bytes b'a'|binary"),
        (pa.ExtensionArray.from_storage(pa.json_(), pa.array(['"a"', "5"])), "json"),
    ],
)
def test_a_column_of_another_type_is_refused(column, pattern, name, streaming, tmp_path):
    table = pa.table({"text": column})
    if name == "train.parquet":
        pq.write_table(table, tmp_path / name)
    else:
        with pa.ipc.new_stream(tmp_path / name, table.schema) as file:
            file.write_table(table)
    message = refusal(tmp_path, streaming=streaming)
    assert re.search(rf"must name a column of text; 'text' of .*({pattern})", message, re.IGNORECASE)


@pytest.mark.parametrize(("name", "streaming"), [("saved", False), ("sa[1]ved", True)])
def test_what_save_to_disk_wrote_is_read_without_its_cache(name, streaming, tmp_path):
    folder = tmp_path / name
    datasets.Dataset.from_list(ROWS).save_to_disk(folder)
    datasets.load_from_disk(folder).map(lambda row: {"text": "MAPPED " + row["text"]})
    datasets.load_from_disk(folder).filter(lambda row: row["text"] != "NA")
    assert list(folder.glob("cache-*.arrow"))
    assert read(folder, streaming=streaming) == TEXTS
    assert "--split must be a split of" in refusal(folder, split="test")
    (file,) = open_corpus(CorpusConfig(dataset_name=str(folder))).record["data_files"]
    assert Path(file["path"]).name == "data-00000-of-00001.arrow"


def test_several_splits_of_save_to_disk(tmp_path):
    parts = {"train": datasets.Dataset.from_list(ROWS), "held-out": datasets.Dataset.from_list([{"text": "held out"}])}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "saved")
    datasets.load_from_disk(tmp_path / "saved")["train"].map(lambda row: {"text": "MAPPED " + row["text"]})
    assert read(tmp_path / "saved") == TEXTS
    assert read(tmp_path / "saved", split="held-out") == ["held out"]
    corpus = open_corpus(CorpusConfig(dataset_name=str(tmp_path / "saved"), validation_split="held-out"))
    assert [list(corpus.documents(split)) for split in corpus.split_names] == [TEXTS, ["held out"]]
    assert "contains a cache file of `datasets`" in refusal(tmp_path)  # whose subfolder it is


@pytest.mark.parametrize("name", ["br[1]", "a::b"])
def test_a_path_that_datasets_takes_for_a_pattern_is_refused_with_another_way(name, tmp_path):
    write_json_lines(tmp_path / name / "train.jsonl", ROWS)
    assert "name its files instead" in refusal(tmp_path / name)
    corpus = open_corpus(CorpusConfig(data_files=[f"{tmp_path}/{name}/train.jsonl"]))
    assert list(corpus.documents("train")) == TEXTS


BROKEN = {
    "train.jsonl": b'{"text": "a"}\n{"text": "b"\n{"text": "c"}\n',
    "train.csv": b"text,n\na,1\nb\n",
    "train.parquet": b"PAR1 broken",
    "train.ndjson": b'{"text": "a"}\n{"text": "b"\n{"text": "c"}\n',
    "train.tsv": b"text\tn\na\t1\nb\t1\t2\n",
    "train.arrow": b"ARROW1 broken",
    "train.jsonl.gz": b"\x1f\x8b\x08 broken",
    "train.jsonl.xz": b"\xfd7zXZ broken",
}


@pytest.mark.parametrize(
    ("damage", "streaming"),
    [(lambda content: content, False), (lambda _: b"", True), (lambda _: b"\x80\xff\0" * 9, False)],
    ids=["broken", "empty", "binary"],
)
@pytest.mark.parametrize("name", BROKEN)
def test_data_that_datasets_cannot_read_is_one_line(name, damage, streaming, tmp_path, caplog):
    (tmp_path / name).write_bytes(damage(BROKEN[name]))
    message = refusal(tmp_path, streaming=streaming)
    assert str(tmp_path) in message
    assert not [record for record in caplog.records if record.levelname == "ERROR"], "datasets' line besides"


@pytest.mark.parametrize("streaming", [False, True])
def test_files_with_other_columns_are_read_or_named(streaming, tmp_path):
    write_json_lines(tmp_path / "train" / "1.jsonl", [{"text": "a", "n": 1}])
    write_json_lines(tmp_path / "train" / "2.jsonl", [{"text": "b", "title": "x"}])
    assert read(tmp_path, streaming=streaming) == ["a", "b"]
    write_json_lines(tmp_path / "train" / "3.jsonl", [{"body": "b"}])
    assert re.search(r"--text-column must name a column; .*3\.jsonl has body, not 'text'", refusal(tmp_path))


@given(
    rows=st.lists(
        st.one_of(st.text(max_size=9), st.none(), st.sampled_from([5, 1.5, True, ["x"], {"a": 1}, "2020-01-01", "NA"])),
        min_size=1,
        max_size=6,
    ),
    name=st.sampled_from(["train.jsonl", "train.ndjson"]),
    streaming=st.booleans(),
)
@settings(max_examples=12)
def test_documents_are_the_texts_of_the_rows_or_there_is_one_line(rows, name, streaming, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    write_json_lines(folder / name, [{"text": "first"}] + [{"text": row} for row in rows])
    expected = ["first", *(row or "" for row in rows if row is None or isinstance(row, str))]
    if all(row is None or isinstance(row, str) for row in rows):
        assert read(folder, streaming=streaming) == expected
    else:
        refusal(folder, streaming=streaming)
        if name == "train.jsonl":
            assert read(folder, streaming=streaming, on_bad_row="skip") == expected
