"""Tables as people have them: .tsv, .csv, .jsonl, .parquet and .conll files, local or `gs://`; data sets of the Hub."""

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from mlm_common.errors import InputError
from mlm_common.hub.retries import hub_error, one_line
from mlm_common.storage import folder_and_name, read_file

# What the columns of a .conll file are called, and those of most data sets of the Hub.
TOKENS, TAGS = "tokens", "ner_tags"


@dataclass(frozen=True)
class Table:
    """Columns of equal length.

    name: of the file, or of the data set and its split, for errors.
    columns: {name: values}, in their order.
    holds_text: all values are text, whatever they stand for, as in .tsv and .csv files.
    """

    name: str
    columns: Mapping[str, Sequence[Any]]
    holds_text: bool = False

    @property
    def num_rows(self) -> int:
        """Rows of the table."""
        return len(next(iter(self.columns.values())))

    def column(self, name: str, flag: str) -> Sequence[Any]:
        """Look up a column, which `flag` names.

        Raises:
            InputError: there is none of that name.
        """
        if name not in self.columns:
            raise InputError(f"{flag} must name a column of {self.name}: {', '.join(self.columns)}; received {name}.")
        return self.columns[name]

    def first(self, num_rows: int | None) -> "Table":
        """Keep the first rows; all by default."""
        columns = {name: values[:num_rows] for name, values in self.columns.items()}
        return Table(self.name, columns, self.holds_text)


def read_table(path: str, flag: str, columns: Sequence[str] | None = None, *, skips_short_rows: bool = False) -> Table:
    """Read a file, which `flag` names.

    A .tsv file is divided by tabs and line feeds alone, as GLUE's are: quotes are text. A .csv file may quote.

    Args:
        path: local or `gs://`.
        flag: for errors.
        columns: of a .tsv file without a line that names them.
        skips_short_rows: leave out lines of a .tsv file that have too few columns.

    Raises:
        InputError: it cannot be read, has no rows, or a row with more or fewer columns than the others.
    """
    ending = PurePath(path).suffix
    if ending not in READERS and ending != ".tsv":
        raise InputError(f"{flag} takes files ending in .tsv, {', '.join(READERS)}; received {path}.")
    folder, name = folder_and_name(path)
    if not folder.exists(name):
        raise InputError(f"{flag} must name a file, local or gs://; there is no {path}.")
    content = read_file(path)
    try:
        if ending == ".tsv":
            read = _of_lines(path, _tsv_lines(content), columns, skips_short_rows)
        else:
            read = READERS[ending](path, content)
    except InputError:
        raise
    except (ValueError, csv.Error, OSError) as error:  # of pyarrow, too
        raise InputError(f"{flag} must name a readable {ending} file; {path}: {one_line(error)}") from error
    if not read or not len(next(iter(read.values()))):
        raise InputError(f"{flag} must name a file with rows; {path} has none.")
    return Table(path, read, holds_text=ending in (".tsv", ".csv"))


def read_hub_tables(name: str, config: str | None, revision: str | None) -> dict[str, Table]:
    """Read all splits of a data set of the Hub, or of a folder, {split: table}; classes become their names.

    Raises:
        InputError: there is none.
        HubAwayError: the Hub cannot be reached.
    """
    from datasets import ClassLabel, List, load_dataset

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
                # -1 stands for no label.
                columns[column] = [None if value in (None, -1) else kind.names[value] for value in columns[column]]
            elif isinstance(kind, List) and isinstance(kind.feature, ClassLabel):
                columns[column] = [[kind.feature.names[value] for value in row] for row in columns[column]]
        tables[split] = Table(f"{name}, split {split}", columns)
    return tables


def _tsv_lines(content: bytes) -> Iterator[list[str]]:
    text = content.decode("utf-8-sig").replace("\r\n", "\n")
    return (line.split("\t") for line in text.removesuffix("\n").split("\n") if text)


def _of_lines(
    path: str, lines: Iterator[list[str]], columns: Sequence[str] | None, skips_short_rows: bool = False
) -> dict[str, list[Any]]:
    names = next(lines, []) if columns is None else list(columns)
    rows = []
    for number, row in enumerate(lines, start=2 if columns is None else 1):
        if len(row) < len(names) and skips_short_rows:
            continue
        if len(row) != len(names):
            raise InputError(
                f"Each line of {path} must have the {len(names)} columns {', '.join(names)}; line {number:,} has "
                f"{len(row)}."
            )
        rows.append(row)
    return {name: [row[index] for row in rows] for index, name in enumerate(names)}


def _read_csv(path: str, content: bytes) -> dict[str, list[Any]]:
    text = io.StringIO(content.decode("utf-8-sig"), newline="")
    return _of_lines(path, (row for row in csv.reader(text, strict=True) if row), None)


def _read_jsonl(path: str, content: bytes) -> dict[str, list[Any]]:
    text = content.decode("utf-8-sig")
    if text.lstrip().startswith("["):
        rows = json.loads(text)
    else:
        rows = [json.loads(line) for line in text.split("\n") if line.strip()]
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise InputError(f"Each row of {path} must be an object, {{column: value}}; row {number:,} is not.")
    names = list(rows[0]) if rows else []
    for number, row in enumerate(rows, start=1):
        missing = [name for name in names if name not in row]
        if missing:
            raise InputError(
                f"Each row of {path} must have the columns of the first; row {number:,} lacks {missing[0]}."
            )
    return {name: [row[name] for row in rows] for name in names}


def _read_conll(path: str, content: bytes) -> dict[str, list[Any]]:
    """Read sentences, a token a line, with its tag as the last of several columns; blank lines divide sentences.

    A line that begins with -DOCSTART- is none of a sentence.
    """
    sentences: list[list[list[str]]] = [[]]
    num_columns = 0
    for number, line in enumerate(content.decode("utf-8-sig").split("\n"), start=1):
        columns = line.split()
        if not columns or columns[0] == "-DOCSTART-":
            sentences.append([])
            continue
        num_columns = num_columns or len(columns)
        if len(columns) != num_columns:
            raise InputError(
                f"Each line of {path} must have as many columns as the first, {num_columns}; line {number:,} has "
                f"{len(columns)}."
            )
        sentences[-1].append(columns)
    sentences = [sentence for sentence in sentences if sentence]
    read = {TOKENS: [[columns[0] for columns in sentence] for sentence in sentences]}
    if sentences and len(sentences[0][0]) > 1:
        read[TAGS] = [[columns[-1] for columns in sentence] for sentence in sentences]
    return read


def _read_parquet(_: str, content: bytes) -> dict[str, list[Any]]:
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(io.BytesIO(content))
    return {name: table.column(name).to_pylist() for name in table.column_names}


READERS: dict[str, Callable[[str, bytes], dict[str, list[Any]]]] = {
    ".conll": _read_conll,
    ".csv": _read_csv,
    ".json": _read_jsonl,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
}
