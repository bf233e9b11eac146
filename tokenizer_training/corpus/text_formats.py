"""The texts in a file of each format, one row in memory at a time.

Text, JSON and CSV are read with the standard library: `datasets` guesses the type of a JSON value, so that a text that
looks like a date comes back as another text, and holds megabytes to give a row.
"""

import csv
import io
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TextIO

from mlm_common.errors import InputError

ROWS_PER_BATCH = 64
# Of JSON without the text column.
NUM_ROWS_CHECKED = 256
MAX_FIELD_CHARACTERS = 1 << 30  # what an unclosed quotation mark in a CSV file can take up
# Parquet holds a column of thousands of rows in one run of bytes, which is read in blocks of this size.
PARQUET_BUFFER_BYTES = 1 << 20


def plain_texts(file: TextIO, sample_by: str) -> Iterator[str]:
    """Yield the lines, paragraphs or the one document of a text file."""
    if sample_by == "document":
        yield file.read()
    elif sample_by == "line":
        for line in file:
            yield line.rstrip("\n")
    else:
        for is_blank, lines in itertools.groupby(file, str.isspace):
            if not is_blank:
                yield "".join(lines).rstrip("\n")


def csv_texts(file: TextIO, text_column: str, name: str) -> Iterator[str]:
    """Yield the text of each row; the first row names the columns.

    Raises:
        InputError: there is no such column, or a row has another number of fields.
    """
    csv.field_size_limit(MAX_FIELD_CHARACTERS)
    rows = csv.reader(file, strict=True)
    names = next(rows, None)
    if names is None:
        return
    if text_column not in names:
        raise _no_column(names, text_column, name)
    column = names.index(text_column)
    for row in rows:
        if row and len(row) != len(names):
            raise InputError(
                f"{name} must be CSV with {len(names)} fields per row, as in its first; the row that ends at line "
                f"{rows.line_num} has {len(row)}. Commas and line ends in a text need quotation marks around it."
            )
        if row:
            yield row[column]


def json_texts(
    file: TextIO, text_column: str, name: str, place: Callable[[int], str], check_column: Callable[[], None]
) -> Iterator[str]:
    """Yield the text of each object, an empty one where it has none; a row that is a string is a text itself.

    Args:
        file: JSON Lines or, in a file named .json, also one list or object over any number of lines.
        text_column: the key of the texts.
        name: the file's, for errors.
        place: says for an error where line number N of `file` is.
        check_column: called once, should a row come without the key before any with it; raises where it is missing.

    Raises:
        InputError: a line is not JSON, a row not an object, a text not one.
    """
    found = False
    for number, row in json_rows(file, name, place):
        if isinstance(row, dict):
            if not found:
                found = True
                if text_column not in row:
                    check_column()
            text = row.get(text_column) or ""
            if not isinstance(text, str):
                raise _no_text(text, text_column, f"{name}, {place(number)},")
        elif isinstance(row, str):
            text = row
        else:
            raise InputError(f"{name} must hold JSON objects; {place(number)} has {type(row).__name__} {row!r:.50}.")
        if not text.isascii():
            _check_unicode(text, name, number, place)
        yield text


def json_rows(file: TextIO, name: str, place: Callable[[int], str]) -> Iterator[tuple[int, Any]]:
    """Yield the number of its line and the value of each row.

    Raises:
        InputError: a line is not JSON.
    """
    may_be_one_value = name.removesuffix(".gz").endswith(".json")
    for number, line in enumerate(file, 1):
        if line.isspace():
            continue
        try:
            try:
                value = json.loads(line.rstrip())
            except json.JSONDecodeError:
                if not may_be_one_value:
                    raise
                value = json.loads(line + file.read())
        except json.JSONDecodeError as error:
            raise InputError(
                f"{name} must hold one JSON object per line; {place(number + error.lineno - 1)}, column {error.colno}: "
                f"{error.msg}."
            ) from error
        if may_be_one_value and isinstance(value, list):
            yield from ((number, row) for row in value)
        else:
            yield number, value
        may_be_one_value = False


def check_json_column(file: TextIO, text_column: str, name: str) -> None:
    """Raise InputError where none of the first rows of a JSON file has the column."""
    names: dict[str, None] = {}
    for _, row in itertools.islice(json_rows(file, name, "line {}".format), NUM_ROWS_CHECKED):
        if not isinstance(row, dict) or text_column in row:
            return
        names |= dict.fromkeys(row)
    if names:
        raise _no_column(names, text_column, name)


def parquet_texts(file: io.BufferedReader, text_column: str, name: str) -> Iterator[str]:
    """Yield the text of each row of a Parquet file, an empty one where it has none.

    Raises:
        InputError: there is no such column, or it holds something else than text.
    """
    from pyarrow.parquet import ParquetFile

    table = ParquetFile(file, buffer_size=PARQUET_BUFFER_BYTES)
    if text_column not in table.schema_arrow.names:
        raise _no_column(table.schema_arrow.names, text_column, name)
    for batch in table.iter_batches(ROWS_PER_BATCH, columns=[text_column], use_threads=False):
        for text in batch.column(0).to_pylist():
            yield _as_text(text, text_column, name)


def dataset_texts(rows: Any, text_column: str, source: str) -> Iterator[str]:
    """Yield the text of each row of a `datasets` data set, an empty one where the row has none.

    Raises:
        InputError: there is no such column, or it holds something else than text; names `source`.
    """
    for table in rows.with_format("arrow").iter(batch_size=ROWS_PER_BATCH):
        if text_column not in table.column_names:
            raise _no_column(table.column_names, text_column, source)
        for text in table[text_column].to_pylist():
            yield _as_text(text, text_column, source)


def _as_text(value: Any, text_column: str, source: str) -> str:
    if not isinstance(value, str | None):
        raise _no_text(value, text_column, source)
    return value or ""


def _check_unicode(text: str, name: str, number: int, place: Callable[[int], str]) -> None:
    """Raise InputError for half a surrogate pair, which JSON can spell."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"{name} must hold valid Unicode; {place(number)}: {error}.") from error


def _no_text(value: Any, text_column: str, source: str) -> InputError:
    return InputError(
        f"--text-column must hold text; {text_column!r} of {source} has {type(value).__name__} {value!r:.50}."
    )


def _no_column(names: Iterable[str], text_column: str, source: str) -> InputError:
    return InputError(f"--text-column must name a column; {source} has {', '.join(names)}, not {text_column!r}.")
