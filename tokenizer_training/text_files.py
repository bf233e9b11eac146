"""Local text files: which ones a pattern names, and the texts in each.

Text, JSON and CSV are read here with the standard library, one row in memory at a time: `datasets` guesses the type of
a JSON value, so that a text that looks like a date comes back as another text, and holds megabytes to give a row.
"""

import codecs
import csv
import glob
import gzip
import io
import itertools
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from tokenizer_training.command_line import InputError

FORMAT_OF_ENDING = {".txt": "text", ".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
ROWS_PER_BATCH = 64
# Of JSON without the text column, and of the start of a file that is searched for what no text has (as `git` does).
NUM_ROWS_CHECKED = 256
NUM_BYTES_CHECKED = 8000
MAX_FIELD_CHARACTERS = 1 << 30  # what an unclosed quotation mark in a CSV file can take up


def find_files(patterns: list[str], flag: str) -> dict[str, int]:
    """Return name -> size in bytes of the files that the patterns name, in the patterns' order, each glob's sorted.

    Raises:
        InputError: a pattern without a match, or a file whose ending is not one that can be read; names `flag`.
    """
    files: dict[str, int] = {}
    for pattern in patterns:
        names = [pattern] if Path(pattern).is_file() else sorted(glob.glob(pattern, recursive=True))  # noqa: PTH207
        names = [name for name in names if Path(name).is_file()]
        if not names:
            raise InputError(f"{flag} must name local files; no file matches {pattern!r}.")
        for name in names:
            _format_of(name, flag)
            files[name] = Path(name).stat().st_size
    return files


def read_file(name: str, text_column: str, sample_by: str) -> Iterator[str]:
    """Yield the texts of one file, in the file's order; an empty one for a row without text.

    Raises:
        InputError: the file is not what its ending says, is not UTF-8, or lacks the text column. Texts that come
            before the mistake may have been yielded.
    """
    file_format = _format_of(name, "--data-files")
    try:
        if file_format == "parquet":
            yield from _parquet_texts(name, text_column)
            return
        with _open(name) as binary:
            _check_start(name, binary.peek(NUM_BYTES_CHECKED)[:NUM_BYTES_CHECKED])
            # Without its byte-order mark, should it have one.
            file = io.TextIOWrapper(binary, encoding="utf-8-sig", newline="" if file_format == "csv" else None)
            if file_format == "text":
                yield from _plain_texts(file, sample_by)
            elif file_format == "csv":
                yield from _csv_texts(file, text_column, name)
            else:
                yield from _json_texts(file, text_column, name)
    except InputError:
        raise
    except (OSError, EOFError, ValueError, RecursionError, csv.Error, zlib.error) as error:
        if isinstance(error, UnicodeDecodeError) and file_format != "parquet":
            with _open(name) as binary:
                _check_utf8(name, binary)
        kind = "gzip" if isinstance(error, EOFError | gzip.BadGzipFile | zlib.error) else file_format
        raise InputError(
            f"{name} must be a readable {kind} file; {' '.join(str(error).split()).rstrip('.')}. "
            "Make or fetch it again, or leave it out of --data-files."
        ) from error


def rows_to_texts(rows: Any, text_column: str, source: str) -> Iterator[str]:
    """Yield the text of each row of a `datasets` data set, an empty one where the row has none.

    Raises:
        InputError: there is no such column, or it holds something else than text; names `source`.
    """
    for table in rows.with_format("arrow").iter(batch_size=ROWS_PER_BATCH):
        if text_column not in table.column_names:
            raise _no_column(table.column_names, text_column, source)
        for text in table[text_column].to_pylist():
            yield _as_text(text, text_column, source)


def _plain_texts(file: TextIO, sample_by: str) -> Iterator[str]:
    if sample_by == "document":
        yield file.read()
    elif sample_by == "line":
        for line in file:
            yield line.rstrip("\n")
    else:
        for is_blank, lines in itertools.groupby(file, str.isspace):
            if not is_blank:
                yield "".join(lines).rstrip("\n")


def _csv_texts(file: TextIO, text_column: str, name: str) -> Iterator[str]:
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


def _json_texts(file: TextIO, text_column: str, name: str) -> Iterator[str]:
    """Yield the text of each object; a row that is a string is one itself."""
    found = False
    names: dict[str, None] = {}
    for number, row in enumerate(_json_rows(file, name), 1):
        if not isinstance(row, dict | str):
            raise InputError(f"{name} must hold JSON objects; row {number} is {type(row).__name__} {row!r:.50}.")
        if not found:
            found = isinstance(row, str) or text_column in row
            names |= dict.fromkeys(row)
            if number == NUM_ROWS_CHECKED and not found:
                break
        text = _as_text(row if isinstance(row, str) else row.get(text_column), text_column, name)
        if not text.isascii():
            text.encode()  # fails for half a surrogate pair, which JSON can spell
        yield text
    if names and not found:
        raise _no_column(names, text_column, name)


def _json_rows(file: TextIO, name: str) -> Iterator[Any]:
    """Yield the rows of JSON Lines or, in a file named .json, also of one list or object over any number of lines."""
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
                f"{name} must hold one JSON object per line; line {number + error.lineno - 1}, column {error.colno}: "
                f"{error.msg}."
            ) from error
        yield from value if may_be_one_value and isinstance(value, list) else [value]
        may_be_one_value = False


def _parquet_texts(name: str, text_column: str) -> Iterator[str]:
    from datasets import load_dataset

    # A streamed file is not copied to a cache; the name is escaped because `datasets` takes it for a glob.
    rows = load_dataset("parquet", data_files=[glob.escape(name)], split="train", streaming=True)
    return rows_to_texts(rows, text_column, name)


def _as_text(value: Any, text_column: str, source: str) -> str:
    if not isinstance(value, str | None):
        raise InputError(
            f"--text-column must hold text; {text_column!r} of {source} has {type(value).__name__} {value!r:.50}."
        )
    return value or ""


def _no_column(names: Iterable[str], text_column: str, source: str) -> InputError:
    return InputError(f"--text-column must name a column; {source} has {', '.join(names)}, not {text_column!r}.")


def _open(name: str) -> gzip.GzipFile | io.BufferedReader:
    return gzip.open(name) if name.endswith(".gz") else Path(name).open("rb")


def _check_start(name: str, start: bytes) -> None:
    """Raise InputError for a start with a zero byte: that of a binary file or of UTF-16, which can pass for UTF-8."""
    before, zero, _ = start.partition(b"\0")
    if zero:
        _check_utf8(name, io.BytesIO(before))
        raise _not_text(name, len(before), 0)


def _check_utf8(name: str, file: io.BufferedIOBase) -> None:
    """Raise InputError for the first byte that is not UTF-8, should there be one; in pieces, to save memory."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    num_bytes = 0
    piece = b"-"
    while piece:
        piece = file.read(1 << 20)
        num_bytes += len(piece)
        try:
            decoder.decode(piece, final=not piece)
        except UnicodeDecodeError as error:
            offset = num_bytes - len(error.object) + error.start
            raise _not_text(name, offset, error.object[error.start]) from error


def _not_text(name: str, offset: int, byte: int) -> InputError:
    is_utf16 = byte == 0 or (offset == 0 and byte in codecs.BOM_UTF16)
    where = f"byte {offset} of its uncompressed content" if name.endswith(".gz") else f"byte {offset}"
    return InputError(
        f"{name} must be UTF-8 text; {where} is 0x{byte:02x} (counted from 0). It may be a binary file or in another "
        f"encoding: convert it, for instance with `iconv -f {'UTF-16' if is_utf16 else 'ISO-8859-1'} -t UTF-8`, or "
        "leave it out of --data-files."
    )


def _format_of(name: str, flag: str) -> str:
    path = Path(name.removesuffix(".gz"))
    file_format = FORMAT_OF_ENDING.get(path.suffix)
    if file_format is None or name.endswith(".parquet.gz"):
        raise InputError(
            f"{flag} takes files ending in {', '.join(FORMAT_OF_ENDING)} (also .gz, but for .parquet); got {name!r}."
        )
    return file_format
