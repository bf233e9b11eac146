"""Tables (files of .tsv, .csv, .jsonl, .parquet, .conll; data sets of the Hub), and the examples read from them."""

import csv
import gzip
import io
import json
import re
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from finetuning.config.settings import ExamplesConfig
from mlm_common.errors import InputError
from mlm_common.hub.retries import hub_error, one_line
from mlm_common.storage import folder_and_name, missing, read_file

SPLITS = ("train", "validation", "test")
# What the columns of a .conll file are called, and those of most data sets of the Hub.
TOKENS, TAGS = "tokens", "ner_tags"
# Half of a character, as only escapes of JSON can have it: no tokenizer takes such a text.
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(frozen=True)
class Table:
    """Columns of equal length.

    name: of the file, or of the data set and its split, for errors.
    columns: {name: values}, in their order.
    """

    name: str
    columns: Mapping[str, Sequence[Any]]

    def column(self, name: str, flag: str) -> Sequence[Any]:
        if name not in self.columns:
            raise InputError(f"{flag} must name a column of {self.name}: {', '.join(self.columns)}; received {name}.")
        return self.columns[name]

    def first(self, num_rows: int | None) -> "Table":
        columns = {name: values[:num_rows] for name, values in self.columns.items()}
        return Table(self.name, columns)


def check_data_file(path: str, flag: str) -> None:
    folder, name = folder_and_name(path)
    if not folder.exists(name):
        raise missing(path, flag, "file")


def read_table(path: str, flag: str, columns: Sequence[str] | None = None, *, skips_short_rows: bool = False) -> Table:
    """Read a file, which `flag` names.

    A .tsv file is divided by tabs and line feeds alone, as GLUE's are: quotes are text. A .csv file may quote. Blank
    lines of both are skipped where a row has several columns.

    Args:
        path: local or `gs://`, also with .gz at its end.
        columns: of a .tsv file without a line that names them.
        skips_short_rows: leave out lines of a .tsv file that have too few columns.

    Raises:
        InputError: it cannot be read, has no rows, a row with more or fewer columns than the others, or two columns of
            one name.
    """
    endings = [ending.lower() for ending in PurePath(path).suffixes]
    is_compressed = endings[-1:] == [".gz"]
    ending = "".join(endings[-2:-1] if is_compressed else endings[-1:])
    if ending not in READERS and ending != ".tsv":
        raise InputError(f"{flag} takes files ending in .tsv, {', '.join(READERS)}, also in .gz; received {path}.")
    check_data_file(path, flag)
    content = read_file(path)
    try:
        if is_compressed:
            content = gzip.decompress(content)
        if ending == ".tsv":
            read = _of_lines(path, _tsv_lines(content), columns, skips_short_rows)
        else:
            read = READERS[ending](path, content)
    except InputError:
        raise
    except (ValueError, csv.Error, EOFError, OSError, RecursionError, zlib.error) as error:  # of pyarrow, too
        if isinstance(error, UnicodeDecodeError) and ending != ".parquet":
            line, byte = error.object.count(b"\n", 0, error.start) + 1, error.object[error.start]
            raise InputError(
                f"{flag} must name a file of UTF-8 text; line {line} of {path} has the byte 0x{byte:02x}. Convert it, "
                "for example with `iconv -f ISO-8859-1 -t UTF-8`."
            ) from error
        raise InputError(f"{flag} must name a readable {ending} file; {path}: {one_line(error)}") from error
    if not read or not len(next(iter(read.values()))):
        raise InputError(f"{flag} must name a file with rows; {path} has none.")
    return Table(path, read)


def read_hub_tables(name: str, config: str | None, revision: str | None) -> dict[str, Table]:
    """Read all splits of a data set of the Hub, or of a folder, {split: table}; classes become their names.

    Raises:
        InputError: there is none.
        HubAwayError: the Hub cannot be reached.
    """
    from datasets import ClassLabel, LargeList, List, load_dataset

    try:
        splits = load_dataset(name, config, revision=revision)
    except Exception as error:  # files that are missing or malformed show as nearly any exception
        rule = "--dataset-name must be a data set of the Hub, or a folder with one"
        raise hub_error(f"{rule}; {name} cannot be read: {one_line(error)}", error) from error
    tables = {}
    for split, rows in splits.items():
        columns: dict[str, Sequence[Any]] = {column: list(rows[column]) for column in rows.column_names}
        for column, kind in rows.features.items():
            if isinstance(kind, ClassLabel):
                columns[column] = [_class_name(kind.names, value) for value in columns[column]]
            elif isinstance(kind, List | LargeList) and isinstance(kind.feature, ClassLabel):
                names = kind.feature.names
                columns[column] = [row and [_class_name(names, value) for value in row] for row in columns[column]]
        tables[split] = Table(f"{name}, split {split}", columns)
    return tables


def _class_name(names: Sequence[str], value: int | None) -> str | None:
    return None if value in (None, -1) else names[value]  # -1 stands for no label


def _tsv_lines(content: bytes) -> Iterator[list[str]]:
    text = content.decode("utf-8-sig").replace("\r\n", "\n")
    lines = text.removesuffix("\n").split("\n") if text else []
    has_columns = bool(lines) and "\t" in lines[0]
    return (line.split("\t") for line in lines if line or not has_columns)


def _of_lines(
    path: str, lines: Iterator[list[str]], columns: Sequence[str] | None, skips_short_rows: bool = False
) -> dict[str, list[Any]]:
    names = next(lines, []) if columns is None else list(columns)
    _refuse_duplicates(path, names)
    rows = []
    for number, row in enumerate(lines, start=2 if columns is None else 1):
        if len(row) < len(names) and skips_short_rows:
            continue
        if len(row) != len(names):
            rule = f"must have the {len(names)} columns {', '.join(names)}"
            raise InputError(f"Each line of {path} {rule}; line {number:,} has {len(row)}.")
        rows.append(row)
    return {name: [row[index] for row in rows] for index, name in enumerate(names)}


def _refuse_duplicates(path: str, names: Sequence[str]) -> None:
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise InputError(f"Columns must differ in their names; {path} has two called {twice!r}. Rename or drop one.")


def _read_csv(path: str, content: bytes) -> dict[str, list[Any]]:
    csv.field_size_limit(sys.maxsize)  # by default 131,072 characters
    text = io.StringIO(content.decode("utf-8-sig"), newline="")
    return _of_lines(path, (row for row in csv.reader(text, strict=True) if row), None)


def _read_jsonl(path: str, content: bytes) -> dict[str, list[Any]]:
    def row_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _refuse_duplicates(path, [name for name, _ in pairs])
        return dict(pairs)

    text = content.decode("utf-8-sig")
    if text.lstrip().startswith("["):
        rows = json.loads(text, object_pairs_hook=row_of)
    else:
        rows = []
        for number, line in enumerate(text.split("\n"), start=1):
            try:
                rows += [json.loads(line, object_pairs_hook=row_of)] if line.strip() else []
            except json.JSONDecodeError as error:
                raise ValueError(f"line {number:,}, character {error.pos + 1:,}: {error.msg}") from error
    if _SURROGATE.search(content):
        json.dumps(rows, ensure_ascii=False).encode()  # a ValueError where half of a pair is alone
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise InputError(f"Each row of {path} must be an object, {{column: value}}; row {number:,} is not.")
    names = list(rows[0]) if rows else []
    for number, row in enumerate(rows, start=1):
        if lacking := [name for name in names if name not in row]:
            raise InputError(
                f"Each row of {path} must have the columns of the first; row {number:,} lacks {lacking[0]}."
            )
    return {name: [row[name] for row in rows] for name in names}


def _read_conll(path: str, content: bytes) -> dict[str, list[Any]]:
    """Read sentences, a token a line, with its tag as the last of several columns; blank lines divide sentences.

    Columns are divided by tabs where there are any, else by spaces, so that a token may hold other white space. A line
    that begins with -DOCSTART- belongs to no sentence, nor does a comment: a line that begins with # before a sentence
    and has another number of columns.
    """
    lines = [line.strip(" \r") for line in content.decode("utf-8-sig").split("\n")]
    has_tabs = any("\t" in line for line in lines)
    rows = [line.split("\t") if has_tabs else re.split(" +", line) for line in lines]
    is_none = [not line.strip("\t") or line.startswith("-DOCSTART-") for line in lines]
    tokens = [row for row, none in zip(rows, is_none, strict=True) if not none and not row[0].startswith("#")]
    num_columns = len(tokens[0]) if tokens else max(map(len, rows), default=0)
    tags = {row[-1] for row in tokens}
    sentences: list[list[list[str]]] = [[]]
    for number, (row, none) in enumerate(zip(rows, is_none, strict=True), start=1):
        is_odd = not none and not sentences[-1] and row[0].startswith("#")
        if none:
            sentences.append([])
        elif is_odd and len(row) != num_columns:
            continue
        elif is_odd and num_columns > 1 and row[-1] not in tags:
            raise InputError(
                f"A comment must not look like a token and its tag; line {number:,} of {path} begins with # and ends "
                f"with {row[-1]!r}, which is no other token's tag. Delete the line if it is a comment."
            )
        elif len(row) != num_columns:
            rule = f"must have the number of columns of the first, {num_columns}"
            raise InputError(f"Each line of {path} {rule}; line {number:,} has {len(row)}.")
        else:
            sentences[-1].append(row)
    sentences = [sentence for sentence in sentences if sentence]
    read = {TOKENS: [[columns[0] for columns in sentence] for sentence in sentences]}
    if sentences and num_columns > 1:
        read[TAGS] = [[columns[-1] for columns in sentence] for sentence in sentences]
    return read


def _read_parquet(path: str, content: bytes) -> dict[str, list[Any]]:
    import pyarrow.parquet

    table = pyarrow.parquet.ParquetFile(io.BytesIO(content)).read()
    _refuse_duplicates(path, table.column_names)
    return {name: table.column(name).to_pylist() for name in table.column_names}


def _read_lines(path: str, content: bytes) -> dict[str, list[Any]]:  # noqa: ARG001
    lines = content.decode("utf-8-sig").split("\n")
    return {"text": [line.strip() for line in lines if line.strip()]}


READERS: dict[str, Callable[[str, bytes], dict[str, list[Any]]]] = {
    ".conll": _read_conll,
    ".csv": _read_csv,
    ".json": _read_jsonl,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
    ".txt": _read_lines,
}


@dataclass(frozen=True)
class Examples:
    """Texts with labels as in a table.

    name: of the table.
    texts: one or two columns.
    labels: None where there are none.
    """

    name: str
    texts: tuple[Sequence[str], ...]
    labels: Sequence[Any] | None

    @property
    def num_rows(self) -> int:
        return len(self.texts[0])

    def first(self, num_rows: int | None) -> "Examples":
        labels = None if self.labels is None else self.labels[:num_rows]
        return Examples(self.name, tuple(column[:num_rows] for column in self.texts), labels)


@dataclass(frozen=True)
class Parts:
    """All examples of a run.

    columns: which columns were read as what, {title: text}, for the plan.
    text_columns: those of the texts.
    validation: {ending of the names of the figures: examples}; the first is the one that checkpoints are chosen by.
    tests: {name of the predictions: examples}.
    """

    train: Examples
    columns: dict[str, str]
    text_columns: Sequence[str]
    validation: dict[str, Examples] = field(default_factory=dict)
    tests: dict[str, Examples] = field(default_factory=dict)


def read_tables(data: ExamplesConfig, read: Callable[[str, str], Table] = read_table) -> dict[str, Table]:
    """Read the files or splits that the flags name, {train, validation or test: table}, cut to --max-train-samples etc.

    Args:
        data: names them.
        read: reads a file, which a flag names.

    Raises:
        InputError: there is nothing to train on, or to predict with --do-predict.
        HubAwayError: the Hub cannot be reached.
    """
    if data.dataset_name is not None:
        tables = read_hub_tables(data.dataset_name, data.dataset_config_name, data.dataset_revision)
        tables = {split: tables[split] for split in SPLITS if split in tables}
    else:
        files = {split: getattr(data, f"{split}_file") for split in SPLITS}
        tables = {split: read(path, f"--{split}-file") for split, path in files.items() if path is not None}
    if "train" not in tables:
        rule = "--train-file is required, or a --dataset-name with a split train"
        of_glue = ", or --task-name for a task of GLUE" if hasattr(data, "task_name") else ""
        raise InputError(f"{rule}{of_glue}; received {data.dataset_name or 'nothing'}.")
    if data.predicts and "test" not in tables:
        raise InputError(
            f"--do-predict needs a part to predict: --test-file, or a split test; received {', '.join(tables)}."
        )
    if not data.predicts:
        tables.pop("test", None)
    limits = num_samples(data)
    return {split: tables[split].first(limits[split]) for split in SPLITS if split in tables}


def num_samples(data: ExamplesConfig) -> dict[str, int | None]:
    """Map each part to the number of its examples that are used; None where all are."""
    return {"train": data.max_train_samples, "validation": data.max_eval_samples, "test": data.max_predict_samples}


def texts_of(table: Table, names: Sequence[str], flag: str = "--text-column-names") -> tuple[Sequence[str], ...]:
    """Look up the columns of text, which `flag` names."""
    columns = tuple(table.column(name, flag) for name in names)
    for name, column in zip(names, columns, strict=True):
        for row, text in enumerate(column, start=1):
            if not isinstance(text, str):
                raise InputError(f"Column {name} of {table.name} must hold text; row {row:,} has {text!r}.")
    return columns
