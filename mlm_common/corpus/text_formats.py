"""Read the texts of files of each format, with one row in memory at a time. Skip or reject bad rows.

Text, JSON and CSV are read with the standard library. `datasets` is not used, because it guesses the types of JSON
values, which changes texts that look like dates, and because it reads megabytes into memory to return a row.
"""

import io
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from mlm_common.corpus.config import OnBadRow
from mlm_common.corpus.csv_rows import NAMES_FIRST, CsvRows, parse_delimiter
from mlm_common.errors import InputError
from mlm_common.storage.encodings import conversion_hint
from mlm_common.storage.guard import guarded_read
from mlm_common.storage.reading import StoredFile

if TYPE_CHECKING:
    from pyarrow.parquet import FileMetaData, ParquetFile

ROWS_PER_BATCH = 64
# If a JSON file has at least one row, one of its first rows, up to this number, must have the text column.
NUM_ROWS_CHECKED = 256
# Parquet stores a column of thousands of rows in consecutive bytes, which are read in blocks of this size.
PARQUET_BUFFER_BYTES = 1 << 20
FIRST_SURROGATE_OF_BYTES = 0xDC80  # Python's error handler `surrogateescape` turns the byte 0x80 into this
MAX_LISTED = 100  # number of bad rows that are listed
LONG_CHARACTERS = 10_000_000  # longer than any book, so the file has probably lost its line ends
MAX_ODDITIES_SHOWN = 3


class BadRowHandler(Protocol):
    """Function that is called for an unreadable row.

    The handler's arguments are the number of the line (or row), the rule that the row breaks, the problem, and how to
    fix it.
    """

    def __call__(self, number: int, rule: str, problem: str, hint: str = "", /) -> None: ...


@dataclass(frozen=True)
class BadRow:
    """An unreadable row.

    Attributes:
        source: file or data set.
        place: place of the row in the source, such as `line 7`.
        problem: what is wrong with the row.
    """

    source: str
    place: str
    problem: str


@dataclass
class BadRows:
    """Unreadable rows that were skipped.

    Attributes:
        num_rows: number of these rows.
        listed: the first 100 of them.
        oddities: rows that were read although they look like mistakes, {(source, problem): [count, first place]}. This
            attribute is not a field of the dataclass, because it is not recorded.
    """

    num_rows: int = 0
    listed: list[BadRow] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.oddities: dict[tuple[str, str], tuple[int, str]] = {}

    def add(self, num_rows: int, listed: Iterable[BadRow]) -> None:
        self.num_rows += num_rows
        self.listed = [*self.listed, *listed][:MAX_LISTED]

    def handler(self, on_bad_row: OnBadRow, source: str, place: Callable[[int], str]) -> BadRowHandler:
        """Return the handler for the unreadable rows of a source.

        Args:
            on_bad_row: `fail` to raise an InputError, `skip` to count and list the row.
            source: file or data set, for errors.
            place: describes the place of line (or row) N.
        """

        def handle(number: int, rule: str, problem: str, hint: str = "", /) -> None:
            if on_bad_row == "fail":
                hint = f"{hint} Or skip" if hint else "Fix it, or skip"
                raise InputError(
                    f"{source} must contain {rule}; {place(number)}: {problem}. {hint} unreadable rows with "
                    "--on-bad-row skip."
                )
            self.num_rows += 1
            if len(self.listed) < MAX_LISTED:
                self.listed.append(BadRow(source, place(number), problem))

        return handle

    def note_oddities(self, texts: Iterable[str | None], source: str, after: str = "") -> Iterator[str]:
        """Yield the texts; count missing texts, which become empty texts, and texts that are very long.

        Args:
            texts: texts; None for a missing text.
            source: file or data set.
            after: where in the source the texts start, such as ` after byte 100`.
        """
        for number, text in enumerate(texts, 1):
            if text is None:
                self._add_oddity(source, "without text", f"document {number:,}{after}")
            elif len(text) > LONG_CHARACTERS:
                place = f"document {number:,}{after} ({len(text):,} characters)"
                self._add_oddity(source, f"longer than {LONG_CHARACTERS // 1_000_000} million characters", place)
            yield text or ""

    def _add_oddity(self, source: str, problem: str, place: str) -> None:
        count, first_place = self.oddities.get((source, problem), (0, place))
        self.oddities[source, problem] = count + 1, first_place

    def describe_oddities(self) -> str:
        texts = [
            f"{source}: {count:,} {problem}, such as {place}"
            for (source, problem), (count, place) in self.oddities.items()
        ]
        num_more = len(texts) - MAX_ODDITIES_SHOWN
        return "; ".join(texts[:MAX_ODDITIES_SHOWN]) + (f"; and {num_more:,} more" if num_more > 0 else "")

    def describe(self, num_shown: int = 1) -> str:
        shown = "; ".join(f"{row.source}, {row.place}: {row.problem}" for row in self.listed[:num_shown])
        return f"{self.num_rows:,} left out, such as {shown}"


def bad_rows_from_record(record: dict[str, Any]) -> BadRows:
    return BadRows(record["num_rows"], [BadRow(**row) for row in record["listed"]])


def txt_texts(file: TextIO, sample_by: str, on_bad_row: BadRowHandler) -> Iterator[str]:
    if sample_by == "document":
        rows: Iterable[tuple[int, str]] = [(1, file.read())]
    elif sample_by == "line":
        rows = ((number, line.rstrip("\n")) for number, line in enumerate(file, 1))
    else:
        rows = _paragraphs(file)
    for number, text in rows:
        if _is_unicode(text, number, on_bad_row):
            yield text


def _paragraphs(file: TextIO) -> Iterator[tuple[int, str]]:
    """Yield the number of the first line and the text of each paragraph."""
    for is_blank, numbered in itertools.groupby(enumerate(file, 1), lambda numbered: numbered[1].isspace()):
        if not is_blank:
            number, first_line = next(numbered)
            yield number, "".join([first_line, *(line for _, line in numbered)]).rstrip("\n")


def csv_texts(
    file: TextIO, text_column: str, name: str, on_bad_row: BadRowHandler, delimiter: str | None = None
) -> Iterator[str | None]:
    """Yield the text of each row of a CSV file, whose first row names the columns; None if the field is empty.

    Args:
        file: the file, opened with `newline=""`.
        text_column: name of the column with the text.
        name: name of the file, for errors.
        on_bad_row: called for a row that has a wrong number of fields or is not UTF-8.
        delimiter: value of --delimiter; None to detect the delimiter.

    Raises:
        InputError: there is no such column, or two delimiters are possible.
        CsvError: a misplaced quotation mark hides where rows end.
    """
    rows = CsvRows(file, name, parse_delimiter(delimiter))
    if not rows.names:
        return
    if text_column not in rows.names:
        raise InputError(f"{no_column(rows.names, text_column, name)}{f' {NAMES_FIRST}' if rows.has_title else ''}")
    column = rows.names.index(text_column)
    for row in rows:
        if len(row.fields) != len(rows.names):
            rule = f"CSV with {len(rows.names)} fields per row, as in the first row"
            problem = f"the row that starts here has {len(row.fields)}"
            on_bad_row(row.line, rule, problem, rows.hint)
        elif _is_unicode("".join(row.fields), row.line, on_bad_row):
            yield row.fields[column] or None


def json_texts(
    file: TextIO, text_column: str, name: str, on_bad_row: BadRowHandler, part: tuple[int, int | None] = (0, None)
) -> Iterator[str | None]:
    """Yield the text of each row of a JSON file.

    An object without the key, or with null, gives None. A row that is a string is the text itself. The file
    has one row per line. If its name ends in .json, it may also be a single list or object that spans any number of
    lines.

    Args:
        file: the rows.
        text_column: key of the text.
        name: name of the file, for errors.
        on_bad_row: called for a row that is not JSON, or whose text is not a string or not Unicode.
        part: the bytes (start, stop) of the file that the rows come from; None for the end of the file.

    Raises:
        InputError: a file of one list or object is not JSON, or the first rows of a file lack the key.
    """
    start, stop = part
    has_key, names = start > 0, dict[str, None]()
    for num_rows, (number, row) in enumerate(json_rows(file, name, on_bad_row), 1):
        text = row.get(text_column) if isinstance(row, dict) else row
        if not has_key:
            has_key = not isinstance(row, dict) or text_column in row
            names |= dict.fromkeys(row if isinstance(row, dict) else ())
            if not has_key and num_rows == NUM_ROWS_CHECKED:
                raise no_column(names, text_column, name)
        if text is None and isinstance(row, dict):
            yield None
        elif not isinstance(text, str):
            rule = f"text in {text_column!r} (--text-column)" if isinstance(row, dict) else "JSON objects"
            on_bad_row(number, rule, f"{type(text).__name__} {text!r:.50}")
        elif _is_unicode(text, number, on_bad_row):
            yield text
    if names and not has_key and stop is None:
        raise no_column(names, text_column, name)


def json_rows(file: TextIO, name: str, on_bad_row: BadRowHandler) -> Iterator[tuple[int, Any]]:
    """Yield the line number and the value of each row. A file whose name ends in .json may be one list of rows.

    Raises:
        InputError: a file that is one list or object is not valid JSON.
    """
    lines = enumerate(file, 1)
    if name.removesuffix(".gz").endswith(".json"):
        for number, line in lines:
            if line.isspace():
                continue
            try:
                value = json.loads(line)
            except ValueError:
                value = _one_json_value(line + file.read(), number, name)
            yield from ((number, row) for row in value) if isinstance(value, list) else [(number, value)]
            break
    for number, line in lines:
        if line.isspace() or not _is_unicode(line, number, on_bad_row):
            continue
        try:
            yield number, json.loads(line.rstrip())
        except json.JSONDecodeError as error:
            on_bad_row(number, "one JSON object per line", f"{error.msg.removesuffix(' at')} at column {error.colno}")
        except (ValueError, RecursionError) as error:
            on_bad_row(number, "one JSON object per line", str(error))


def _one_json_value(content: str, first_line: int, name: str) -> Any:
    try:
        return json.loads(content)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{name} must contain one JSON object per line, or a list of objects; line "
            f"{first_line + error.lineno - 1}, column {error.colno}: {error.msg}. Fix the file, or drop it from "
            "--data-files."
        ) from error


def parquet_texts(
    file: io.BufferedReader,
    text_column: str,
    name: str,
    on_bad_row: BadRowHandler,
    start: int = 0,
    stop: int = sys.maxsize,
) -> Iterator[str | None]:
    """Yield the text of each row in the row groups that start in bytes [start, stop); None if it is null.

    Raises:
        InputError: there is no such column, or it contains values that are not text.
    """
    table = _parquet_file(file)
    if text_column not in table.schema_arrow.names:
        raise no_column(table.schema_arrow.names, text_column, name)
    num_rows_before = 0
    for number, group_start in enumerate(_row_group_starts(table.metadata)):
        if start <= group_start < stop:
            batches = table.iter_batches(ROWS_PER_BATCH, row_groups=[number], columns=[text_column], use_threads=False)
            columns = (batch.column(0) for batch in batches)
            yield from arrow_texts(columns, text_column, name, on_bad_row, num_rows_before)
        num_rows_before += table.metadata.row_group(number).num_rows


@lru_cache(maxsize=1 << 16)
def row_group_starts(file: StoredFile) -> tuple[int, ...]:
    """Return the positions in bytes at which the row groups of a Parquet file start, in order.

    Raises:
        InputError: the file is not Parquet, or is damaged.
    """
    return tuple(sorted(_row_group_starts(_parquet_metadata(file))))


@lru_cache(maxsize=1 << 16)
def row_group_text_bytes(file: StoredFile, text_column: str) -> tuple[int, ...]:
    """Return the uncompressed size, in bytes, of the text column in each row group of a Parquet file.

    The row groups are in the order of `row_group_starts`.

    Raises:
        InputError: the file is not Parquet, is damaged, or has no such column.
    """
    metadata = _parquet_metadata(file)
    paths = [metadata.schema.column(index).path for index in range(metadata.num_columns)]
    if text_column not in paths:
        raise no_column(paths, text_column, file.name)
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    sizes_bytes = (group.column(paths.index(text_column)).total_uncompressed_size for group in groups)
    return tuple(size for _, size in sorted(zip(_row_group_starts(metadata), sizes_bytes, strict=True)))


def _parquet_metadata(file: StoredFile) -> "FileMetaData":
    with guarded_read(file.name, "a Parquet file"), file.open() as raw:
        return _parquet_file(raw).metadata


def _parquet_file(file: Any) -> "ParquetFile":
    from pyarrow.parquet import ParquetFile

    return ParquetFile(file, buffer_size=PARQUET_BUFFER_BYTES, pre_buffer=False)  # or it would read whole columns


def _row_group_starts(metadata: "FileMetaData") -> Iterator[int]:
    for number in range(metadata.num_row_groups):
        first = metadata.row_group(number).column(0)
        # A row group starts where its first column starts. The offset of the group itself is missing in files from old
        # writers. Missing offsets are None or 0.
        yield min(filter(None, (first.dictionary_page_offset, first.data_page_offset)), default=0)


def arrow_texts(
    columns: Iterable[Any], text_column: str, source: str, on_bad_row: BadRowHandler, num_rows_before: int = 0
) -> Iterator[str | None]:
    """Yield the texts of Arrow columns; None for null.

    Args:
        columns: batches of the text column.
        text_column: name of the column, for errors.
        source: file or data set, for errors.
        on_bad_row: called for a text that is not UTF-8.
        num_rows_before: number of rows of the source before the first batch.

    Raises:
        InputError: a value is not text.
    """
    import pyarrow as pa

    num_rows = num_rows_before
    for column in columns:
        if isinstance(column.type, pa.BaseExtensionType):  # such as JSON, which is stored as text but is not plain text
            raise InputError(
                f"--text-column must name a column of text; {text_column!r} of {source} has {column.type}."
            )
        for number, scalar in enumerate(column, num_rows + 1):
            try:
                value = scalar.as_py()
            except UnicodeDecodeError as error:
                on_bad_row(number, "UTF-8 text", f"the byte 0x{error.object[error.start]:02x} is not UTF-8")
                continue
            if not isinstance(value, str | None):
                raise InputError(
                    f"--text-column must name a column of text; {text_column!r} of {source} has "
                    f"{type(value).__name__} {value!r:.50}."
                )
            yield value
        num_rows += len(column)


def _is_unicode(text: str, number: int, on_bad_row: BadRowHandler) -> bool:
    """Return whether the text of the row in line `number` is valid Unicode; call the handler if it is not."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError as error:
        surrogate = ord(text[error.start])
        byte = surrogate - FIRST_SURROGATE_OF_BYTES + 0x80
        if 0x80 <= byte <= 0xFF:
            hint = conversion_hint(text.encode("utf-8", "surrogateescape"), is_line=True)
            on_bad_row(number, "UTF-8 text", f"the byte 0x{byte:02x} is not UTF-8", hint)
        else:
            on_bad_row(number, "valid Unicode", f"U+{surrogate:04X} is half of a surrogate pair")
        return False
    return True


def no_column(names: Iterable[str], text_column: str, source: str) -> InputError:
    return InputError(f"--text-column must name a column; {source} has {', '.join(names)}, not {text_column!r}.")
