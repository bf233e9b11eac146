"""Read CSV as written by Excel and other programs: detect the delimiter, and keep the line number of each row."""

import csv
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from mlm_common.errors import InputError

# {delimiter: its name in messages, in the plural}
DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
# The delimiter is detected from at most this many lines and characters.
MAX_LINES, MAX_CHARACTERS = 1000, 1 << 20
# Maximum length of a field, which limits how much text an unclosed quotation mark can swallow.
MAX_FIELD_CHARACTERS = 1 << 30
MAX_SHOWN_CHARACTERS = 80
# With the right delimiter, more than this fraction of the rows have as many fields as the first row. The fraction is
# below 1, because any row can have an error.
MIN_SHARE = 0.5
MIN_ROWS_BELOW_TITLE = 2  # the names of the columns, and a row
NAMES_FIRST = "The first row must name the columns: delete a title above it."
CLOSED = "Close each quotation mark, and double quotation marks inside a quoted text."


@dataclass(frozen=True)
class CsvRow:
    """A row.

    Attributes:
        line: number of its first line, from 1 on.
        fields: its fields.
        text: its first line.
    """

    line: int
    fields: list[str]
    text: str


class CsvRows:
    """The rows of a CSV text after the first row, which names the columns.

    Rows whose fields are all blank are skipped. Blank fields after the last column are dropped, and missing fields of
    columns without a name are added, because spreadsheets write blank rows below a table and extra delimiters.

    Args:
        lines: lines of the text with their line ends, from a file opened with `newline=""`.
        name: name of the file, for errors.
        delimiter: the delimiter; None to detect it from the first rows. A first line such as `sep=;` also sets the
            delimiter, and does not count as a row.

    Attributes:
        names: names of the columns; empty if there are no rows.
        delimiter: the delimiter that is used.
        has_title: whether the first row seems to be a title above the names of the columns.
        num_blank: number of blank rows between the rows that were read so far. Blank rows below the table do not count.
        first_blank: line of the first of these rows.

    Raises:
        InputError: two delimiters are possible, or whole rows are in quotation marks.
        CsvError: a row has a misplaced quotation mark. The error may be raised while iterating.
    """

    def __init__(self, lines: Iterable[str], name: str, delimiter: str | None = None) -> None:
        csv.field_size_limit(MAX_FIELD_CHARACTERS)
        remaining = iter(lines)
        first, is_whole = _first_lines(remaining)
        num_skipped = 0
        if first and (separator := _separator_line(first[0])):
            delimiter, first, num_skipped = delimiter or separator, first[1:], 1
        if delimiter is None:
            _check_not_quoted_whole(first, is_whole, name)
        self.delimiter = delimiter or _find_delimiter(first, is_whole, name, num_skipped)
        self.has_title = _has_title(first, is_whole, self.delimiter)
        self._rows = _rows(itertools.chain(first, remaining), self.delimiter, num_skipped)
        header = next(self._rows, None)
        self.names = header.fields if header else []
        self.num_blank = self.first_blank = 0

    def __iter__(self) -> Iterator[CsvRow]:
        has_columns = len(self.names) > 1
        blank_lines = []
        for row in self._rows:
            if has_columns and not any(field.strip() for field in row.fields):
                blank_lines.append(row.line)
            else:
                self.first_blank = self.first_blank or next(iter(blank_lines), 0)
                self.num_blank += len(blank_lines)
                blank_lines.clear()
                yield replace(row, fields=self._fitted(row.fields))

    def _fitted(self, fields: list[str]) -> list[str]:
        """Return one field per column if only blank fields must be dropped or added; otherwise return all fields."""
        num_names, num_fields = len(self.names), len(fields)
        if any(text.strip() for text in (*fields[num_names:], *self.names[num_fields:])):
            return fields
        return fields[:num_names] + [""] * (num_names - num_fields)

    def problem(self, row: CsvRow) -> str | None:
        """Describe a row whose number of fields differs from the number of columns; return None for any other row."""
        if len(row.fields) == len(self.names):
            return None
        return f"line {row.line:,} has {len(row.fields)}: `{_shown(row.text)}`"

    @property
    def hint(self) -> str:
        """Sentence that says how to fix a row with a wrong number of fields."""
        if len(self.names) == 1 or self.has_title:
            return NAMES_FIRST
        delimiters = DELIMITERS.get(self.delimiter, f"`{self.delimiter}`")
        return f"Put texts that contain {delimiters} or line ends in quotation marks, or name another --delimiter."


class CsvError(ValueError):
    """A misplaced quotation mark, which hides where the row ends."""

    def __init__(self, line: int, shown: str, reason: str) -> None:
        super().__init__(f"the row that starts in line {line:,} has a misplaced quotation mark ({reason}): `{shown}`")
        self.line, self.hint = line, CLOSED


def parse_delimiter(value: str | None) -> str | None:
    r"""Return the delimiter that --delimiter names: a character, or `tab` or `\t`.

    Raises:
        InputError: the value is something else.
    """
    delimiter = {"tab": "\t", "\\t": "\t"}.get(value or "", value)
    if delimiter is not None and (len(delimiter) != 1 or delimiter in '"\r\n' or delimiter.isalnum()):
        raise InputError(
            f"--delimiter must be one character between the columns of a .csv file, such as ',' ';' '|' or tab; "
            f"received {value!r}."
        )
    return delimiter


def _first_lines(lines: Iterator[str]) -> tuple[list[str], bool]:
    """Take the lines from which the delimiter is detected; return them, and whether the text has no more lines."""
    first: list[str] = []
    num_characters = 0
    for line in lines:
        first.append(line)
        num_characters += len(line)
        if len(first) == MAX_LINES or num_characters > MAX_CHARACTERS:
            return first, False
    return first, True


def _separator_line(line: str) -> str | None:
    """Return the delimiter that a first line in Excel's format names, such as `sep=;`; None for another line."""
    text = line.rstrip("\r\n").strip('"')
    return text[4] if len(text) == 5 and text[:4].lower() == "sep=" else None


def _find_delimiter(lines: Sequence[str], is_whole: bool, name: str, num_skipped: int) -> str:
    """Find the delimiter with which most rows have as many fields as the first row; a comma for a single column.

    Raises:
        InputError: several delimiters are possible.
    """
    shares = {
        delimiter: share
        for delimiter in DELIMITERS
        if (share := _share_of_rows(lines, delimiter, is_whole)) is not None
    }
    possible = [delimiter for delimiter, share in shares.items() if share > MIN_SHARE]
    if len(shares) <= 1 or len(possible) == 1:
        return next(iter(possible or shares), ",")
    below = [] if possible else _delimiters_below_title(lines, is_whole)
    if len(below) == 1:
        return below[0]
    header = next((number for number, line in enumerate(lines, 1 + num_skipped) if line.strip()), 1)
    candidates = possible or list(shares)
    words = " or ".join(DELIMITERS[delimiter] for delimiter in candidates)
    raise InputError(
        f"{name} may have {words} between its columns; line {header} is `{_shown(lines[header - 1 - num_skipped])}`. "
        f"Pass {' or '.join(map(_flag, candidates))}."
    )


def _has_title(lines: Sequence[str], is_whole: bool, delimiter: str) -> bool:
    """Return whether the first row is a title.

    Most rows then have a different number of fields than the first row, but the same number as the second row.
    """
    is_table = (_share_of_rows(lines, delimiter, is_whole) or 0) > MIN_SHARE
    return not is_table and bool(_delimiters_below_title(lines, is_whole))


def _delimiters_below_title(lines: Sequence[str], is_whole: bool) -> list[str]:
    """Find the delimiters with which most rows after the first have as many fields as the second row."""
    title = next((number for number, line in enumerate(lines) if line.strip()), 0)
    below = lines[title + 1 :]
    if sum(bool(line.strip()) for line in below) < MIN_ROWS_BELOW_TITLE:
        return []
    return [delimiter for delimiter in DELIMITERS if (_share_of_rows(below, delimiter, is_whole) or 0) > MIN_SHARE]


def _check_not_quoted_whole(lines: Sequence[str], is_whole: bool, name: str) -> None:
    """Check that whole rows are not in quotation marks. Some spreadsheets add such marks when they save a table again.

    Raises:
        InputError: most rows are in quotation marks.
    """
    try:
        rows = [row for row in csv.reader(lines, strict=True) if row]
    except csv.Error:
        return
    if len(rows) < 2 or any(len(row) > 1 for row in rows) or not lines[0].startswith('"'):
        return
    inner = [row[0] for row in rows]
    for delimiter in DELIMITERS:
        if delimiter in inner[0] and (_share_of_rows(inner, delimiter, is_whole) or 0) > MIN_SHARE:
            raise InputError(
                f"{name} has quotation marks around whole rows, such as `{_shown(lines[0])}`, so each row is one "
                "column. Remove the outer quotation marks, and write the inner ones only once. If the table really has "
                "one column, pass a --delimiter."
            )


def _share_of_rows(lines: Sequence[str], delimiter: str, is_whole: bool) -> float | None:
    """Return the fraction of rows with as many fields as the first row; None if that has one field or is not CSV."""
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    num_fields = num_rows = num_equal = 0
    try:
        for row in filter(None, rows):
            num_fields = num_fields or len(row)
            if num_fields == 1:
                return None
            num_rows, num_equal = num_rows + 1, num_equal + (len(row) == num_fields)
    except csv.Error:
        is_cut = not is_whole and rows.line_num == len(lines)
        num_rows += 0 if is_cut else 1 + len(lines) - rows.line_num  # all following lines count as wrong rows
    return num_equal / num_rows if num_fields else None


def _rows(lines: Iterable[str], delimiter: str, num_skipped: int) -> Iterator[CsvRow]:
    start: list[str] = []  # has the first line of the row that is being read

    def noting_start() -> Iterator[str]:
        for line in lines:
            if not start:
                start.append(line)
            yield line

    reader = csv.reader(noting_start(), delimiter=delimiter, strict=True)
    while True:
        number = reader.line_num + 1 + num_skipped
        start.clear()
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise CsvError(number, _shown("".join(start)), str(error)) from error
        if row is None:
            return
        if row:
            yield CsvRow(number, row, start[0])


def _shown(line: str) -> str:
    start = line.rstrip("\r\n")[:MAX_SHOWN_CHARACTERS]
    text = "".join(character if character.isprintable() else repr(character)[1:-1] for character in start)
    return text + (" …" if len(line.rstrip("\r\n")) > MAX_SHOWN_CHARACTERS else "")


def _flag(delimiter: str) -> str:
    return "--delimiter tab" if delimiter == "\t" else f"--delimiter '{delimiter}'"
