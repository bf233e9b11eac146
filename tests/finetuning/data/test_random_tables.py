"""Random tables, opened as a run does: it trains on exactly what was written, or refuses in one line."""

import csv
import gzip
import io
import itertools
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from finetuning.config.settings import ClassificationConfig, TaggingConfig, parse_finetuning_config
from finetuning.tasks.classification import ClassificationJob
from finetuning.tasks.tagging import TaggingJob
from mlm_common.errors import InputError
from tests.fixtures.results import write_jsonl
from train.runtime.machines import Cluster

NAMES = ("pos", " pos", "Pos", "neg", "neg ", "a,b", "b", "a;b", "New York, NY", "--1", "1_0", "NaN", "nan", "?", "-1",
         "01", "1", "1.0", "0", "é", "e\u0301", "['a']", "True", "Infinity", "x\ty", "x\ny", "#")  # fmt: skip
NUMBERS = ("0", "1", "2", "3", "-4", "0.5", "1e-3", "3,5", "1,0", "1e39", "1.0", "+2", "7.", ".5", "1_0", "inf")
TEXTS = (
    "a list",
    "of text",
    "",
    " ",
    "12",
    "3",
    '"quoted", with',
    "two\nlines",
    "tab\there",
    "\u2028",
    "🙂",
    "[MASK]",
    "\u0301",
)
MISSING = (None, "", float("nan"))
LABELS = st.one_of(
    st.lists(st.sampled_from(NAMES), min_size=1, max_size=6),
    st.lists(st.sampled_from(NUMBERS), min_size=1, max_size=6),
    st.lists(
        st.one_of(st.integers(-2, 3), st.sampled_from([0.0, 1.0, 0.5, 1e39, True, math.inf])), min_size=1, max_size=6
    ),
    st.lists(st.lists(st.sampled_from([*NAMES[:8], 1, None]), max_size=3), min_size=1, max_size=5),
    st.lists(st.lists(st.sampled_from([0, 1, True, "1", 2]), min_size=3, max_size=3), min_size=1, max_size=5),
    st.lists(
        st.one_of(st.sampled_from([*NAMES, *MISSING, {"a": 1}]), st.lists(st.sampled_from(NAMES))),
        min_size=1,
        max_size=5,
    ),
)
FLAGS = st.fixed_dictionaries(
    {},
    optional={
        "--problem-type": st.sampled_from(["single_label_classification", "multi_label_classification", "regression"]),
        "--similar-labels": st.sampled_from(["merge", "keep"]),
        "--label-lists": st.sampled_from(["names", "vectors"]),
        "--decimal-separator": st.sampled_from([".", ","]),
        "--text-column-names": st.just("text"),
    },
)


def write_table(path: Path, encoding: str, columns: list[tuple[str, list[Any]]], delimiter: str = ",") -> list[Any]:
    """Write columns, of which some may have one name, and return the values of the last as they are stored."""
    names, rows = [name for name, _ in columns], list(zip(*(values for _, values in columns), strict=True))
    if path.suffix == ".parquet":
        try:
            arrays = [pyarrow.array(values) for _, values in columns]
        except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError):  # values of several types
            arrays = [pyarrow.array([None if cell is None else str(cell) for cell in values]) for _, values in columns]
        pyarrow.parquet.write_table(pyarrow.table(arrays, names=names), path)
        return arrays[-1].to_pylist()
    if path.suffix == ".jsonl":
        pairs = [
            [f"{json.dumps(name)}: {json.dumps(cell)}" for name, cell in zip(names, row, strict=True)] for row in rows
        ]
        text = "".join(f"{{{', '.join(fields)}}}\n" for fields in pairs)
    elif path.suffix == ".tsv":
        text = "\n".join("\t".join("" if cell is None else str(cell) for cell in row) for row in (names, *rows))
    else:
        stream = io.StringIO()
        csv.writer(stream, delimiter=delimiter).writerows([names, *rows])
        text = stream.getvalue()
    try:
        content = text.encode(encoding)
    except UnicodeEncodeError:
        content = text.encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return columns[-1][1]


def open_or_refuse(job: Any, config: Any) -> Any:
    """Open a run; return None where it is refused, and check that this is one line."""
    try:
        return job.open_run(config, Cluster())
    except InputError as error:
        message = str(error)
    assert len(message.splitlines()) == 1
    return None


def number_of(value: Any, separator: str) -> float:
    """Read a number as a person would."""
    return float(str(value).strip().replace(",", ".") if separator == "," else str(value))


def name_of(value: Any) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def alike(name: str) -> Any:
    """What is left of a name without white space, case and the form of a number."""
    import unicodedata

    folded = "".join(unicodedata.normalize("NFC", name).split()).casefold()
    try:
        whole = float(folded)
        return int(whole) if (whole.is_integer() and folded.lstrip("+-")[:1] != "0") or whole == 0 else folded
    except (ValueError, OverflowError):
        return folded


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    labels=LABELS,
    texts=st.lists(st.sampled_from(TEXTS), min_size=6, max_size=6),
    ending=st.sampled_from([".csv", ".tsv", ".jsonl", ".parquet", ".csv.gz"]),
    encoding=st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-32", "latin-1", "cp1252", "gb18030"]),
    index=st.sampled_from([None, "", "Unnamed: 0", "number", "text", "id"]),
    flags=FLAGS,
    delimiter=st.sampled_from([",", ";", "\t", "|"]),
)
@example(["a,b", "b"], list(TEXTS[:6]), ".jsonl", "utf-8", None, {}, ",")
@example([[0, 1, 0], [1, 0, 0]], list(TEXTS[:6]), ".parquet", "utf-8", None, {}, ",")
@example(["pos", " pos", "neg"], list(TEXTS[:6]), ".csv", "utf-8", "", {}, "|")
@example(["3,5", "1,0"], list(TEXTS[:6]), ".csv", "utf-8", None, {}, ";")
@example(["pos", "neg"], list(TEXTS[:6]), ".csv", "utf-8", "text", {}, "\t")
def test_a_table_is_read_as_written_or_refused(tiny_start, labels, texts, ending, encoding, index, flags, delimiter):
    texts = texts[: len(labels)]
    columns = [("text", texts), ("label", labels)]
    if index is not None:
        columns.insert(0, (index, list(range(len(labels)))))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"train{ending}")
        labels = write_table(path, encoding, columns, delimiter)
        argv = ["--train-file", str(path), "--init-from", str(tiny_start / "start"), "--output-dir", f"{folder}/run"]
        argv += ["--max-seq-length", "30", *itertools.chain(*flags.items())]
        config = parse_finetuning_config(ClassificationConfig, argv, "")
        run = open_or_refuse(ClassificationJob(), config)
    if run is None:
        return
    rows, task_labels = run.phases[0].inputs.train_rows, run.phases[0].task.labels
    expected = run.phases[0].inputs.tokenizer(texts, truncation=True, max_length=30)["input_ids"]
    ids = rows.token_values["input_ids"]
    assert [ids[start:end].tolist() for start, end in itertools.pairwise(rows.starts)] == expected
    encoded, separator = rows.row_values["label"], flags.get("--decimal-separator", ".")
    described = run.phases[0].inputs.describe_rows()
    assert described["kind of label"]
    assert described["texts"].split(";")[0] == "text"
    as_text = ending.startswith((".csv", ".tsv"))
    if task_labels.problem_type == "regression":
        assert encoded.tolist() == [np.float32(number_of(value, separator)) for value in labels]
        assert np.isfinite(encoded).all()
    elif task_labels.problem_type == "single_label_classification":
        written = [str(value) if as_text else name_of(value) for value in labels]
        names = [task_labels.names[label_id] for label_id in encoded]
        if flags.get("--similar-labels") == "merge":
            assert list(map(alike, names)) == list(map(alike, written))
        else:
            assert names == written
        if "--similar-labels" not in flags:
            assert len({alike(name) for name in task_labels.names}) == len(task_labels.names)
        if "--problem-type" not in flags:
            assert not any(isinstance(value, list) for value in labels)
    else:
        assert flags.get("--problem-type") or all(isinstance(value, list) for value in labels)
        for value, row in zip(labels, encoded, strict=True):
            several = (
                value
                if isinstance(value, list)
                else [name.strip() for name in ("" if value is None else str(value)).split(",") if name.strip()]
            )
            if flags.get("--label-lists") == "vectors":
                assert [str(bit) in ("1", "1.0", "True") for bit in several] == row.astype(bool).tolist()
            else:
                names = {name for name, holds in zip(task_labels.names, row, strict=True) if holds}
                assert set(map(alike, names)) == {alike(name_of(label)) for label in several}
        if "--label-lists" not in flags:
            binary = {"0", "1", "0.0", "1.0", "True", "False"}
            is_vector = [
                len(value) > 1 and set(map(str, value)) <= binary for value in labels if isinstance(value, list)
            ]
            assert not is_vector or not all(is_vector) or len({len(value) for value in labels}) > 1


TAGS = ("O", "B-X", "I-X", "o", "1", 1, 1.0, None, float("nan"), "", "a b", ["O"])
WORDS = ("list", "file", "of", "#", "10\u00a0000", " ", "", "-DOCSTART-", "é", 7)


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sentences=st.lists(
        st.lists(st.tuples(st.sampled_from(WORDS), st.sampled_from(TAGS)), min_size=1, max_size=4),
        min_size=1,
        max_size=4,
    ),
    similar=st.sampled_from([None, "merge", "keep"]),
)
def test_tagged_sentences_are_read_as_written_or_refused(tiny_start, sentences, similar):
    rows = [
        {"tokens": [word for word, _ in sentence], "ner_tags": [tag for _, tag in sentence]} for sentence in sentences
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = write_jsonl(Path(folder, "train.jsonl"), *rows)
        argv = ["--train-file", str(path), "--init-from", str(tiny_start / "start"), "--output-dir", f"{folder}/run"]
        argv += ["--max-seq-length", "30", *(["--similar-labels", similar] if similar else [])]
        config = parse_finetuning_config(TaggingConfig, argv, "")
        run = open_or_refuse(TaggingJob(), config)
    if run is None:
        return
    read, names = run.phases[0].inputs.train_rows, run.phases[0].task.labels.names
    begun = read.token_values["label"] != -100
    flat = [name_of(tag) for row in rows for tag in row["ner_tags"]]
    learned = [names[tag] for tag in read.token_values["label"][begun]]
    assert list(map(alike, learned)) == list(map(alike, flat))
    if similar != "merge":
        assert learned == flat
