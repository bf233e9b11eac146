"""CSV as Excel and others write it: recognize the delimiter by the first rows; read rows with their line numbers."""

import csv
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from mlm_common.errors import InputError

# {delimiter: its plural in messages}
DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
# The lines that decide the delimiter.
MAX_LINES, MAX_CHARACTERS = 1000, 1 << 20
# What a quotation mark that is never closed can take up.
MAX_FIELD_CHARACTERS = 1 << 30
MAX_SHOWN_CHARACTERS = 80
# The delimiter gives more of the rows than this as many fields as the first, as any row can have an error.
MIN_SHARE = 0.5
MIN_ROWS_BELOW_TITLE = 2  # the names, and a row
NAMES_FIRST = "The first row must name the columns: delete a title above it."
CLOSED = "Close each quotation mark, and double those within a text in quotation marks."


@dataclass(frozen=True)
class CsvRow:
    """A row: the line where it begins, its fields, and its first line."""

    line: int
    fields: list[str]
    text: str


class CsvRows:
    """The rows of a CSV text after the first, which names the columns, without those whose fields are all blank.

    A spreadsheet writes blank rows below a table, and delimiters after the last field: blank fields after the last
    column are left out, and those of columns without a name may be missing.

    Args:
        lines: of the text with their ends, as a file opened with `newline=""` gives them.
        name: of the file, for errors.
        delimiter: None to recognize it by the first rows. A first line `sep=;` decides, too, and is no row.

    Attributes:
        names: of the columns; empty if there is no row.
        delimiter: that was found.
        has_title: whether the first row is rather a title above the names.

    Raises:
        InputError: two delimiters are possible, or each row is in quotation marks as a whole.
        CsvError: a row, also while iterating, has a quotation mark out of place.
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

    def __iter__(self) -> Iterator[CsvRow]:
        has_columns = len(self.names) > 1
        for row in self._rows:
            if not has_columns or any(field.strip() for field in row.fields):
                yield replace(row, fields=self._fitted(row.fields))

    def _fitted(self, fields: list[str]) -> list[str]:
        """Return a field for each column where only blank ones are missing or too many."""
        num_names, num_fields = len(self.names), len(fields)
        if any(one.strip() for one in (*fields[num_names:], *self.names[num_fields:])):
            return fields
        return fields[:num_names] + [""] * (num_names - num_fields)

    def problem(self, row: CsvRow) -> str | None:
        """Say what is wrong with a row that has another number of fields than the first; None if nothing is."""
        if len(row.fields) == len(self.names):
            return None
        return f"line {row.line:,} has {len(row.fields)}: `{_shown(row.text)}`"

    @property
    def hint(self) -> str:
        """How to fix a row with another number of fields."""
        if len(self.names) == 1 or self.has_title:
            return NAMES_FIRST
        others = DELIMITERS.get(self.delimiter, f"`{self.delimiter}`")
        return f"Put texts with {others} or line ends in quotation marks, or name another --delimiter."


class CsvError(ValueError):
    """A quotation mark out of place, which hides where the row ends."""

    def __init__(self, line: int, shown: str, reason: str) -> None:
        super().__init__(
            f"the row that begins in line {line:,} has a quotation mark out of place ({reason}): `{shown}`"
        )
        self.line, self.hint = line, CLOSED


def parse_delimiter(value: str | None) -> str | None:
    r"""Return the delimiter that --delimiter names: a character, or `tab` or `\t`.

    Raises:
        InputError: it is something else.
    """
    delimiter = {"tab": "\t", "\\t": "\t"}.get(value or "", value)
    if delimiter is not None and (len(delimiter) != 1 or delimiter in '"\r\n' or delimiter.isalnum()):
        raise InputError(
            f"--delimiter must be one character between the columns of a .csv file, such as ',' ';' '|' or tab; "
            f"received {value!r}."
        )
    return delimiter


def _first_lines(lines: Iterator[str]) -> tuple[list[str], bool]:
    """Take the lines that decide the delimiter, and return them and whether these are all."""
    first: list[str] = []
    num_characters = 0
    for line in lines:
        first.append(line)
        num_characters += len(line)
        if len(first) == MAX_LINES or num_characters > MAX_CHARACTERS:
            return first, False
    return first, True


def _separator_line(line: str) -> str | None:
    """Return the delimiter that Excel's first line names, such as `sep=;`."""
    text = line.rstrip("\r\n").strip('"')
    return text[4] if len(text) == 5 and text[:4].lower() == "sep=" else None


def _find_delimiter(lines: Sequence[str], is_whole: bool, name: str, num_skipped: int) -> str:
    """Find the delimiter that gives all rows as many fields as the first; a comma for a single column."""
    shares = {one: share for one in DELIMITERS if (share := _share_of_rows(lines, one, is_whole)) is not None}
    possible = [one for one, share in shares.items() if share > MIN_SHARE]
    if len(shares) <= 1 or len(possible) == 1:
        return next(iter(possible or shares), ",")
    below = [] if possible else _delimiters_below_title(lines, is_whole)
    if len(below) == 1:
        return below[0]
    header = next((number for number, line in enumerate(lines, 1 + num_skipped) if line.strip()), 1)
    found = possible or list(shares)
    words = " or ".join(DELIMITERS[one] for one in found)
    raise InputError(
        f"{name} may have {words} between its columns; line {header} is `{_shown(lines[header - 1 - num_skipped])}`. "
        f"Say which: {' or '.join(_flag(one) for one in found)}."
    )


def _has_title(lines: Sequence[str], is_whole: bool, delimiter: str) -> bool:
    """Return whether most rows have other fields than the first, but as many as the second: below a title."""
    is_table = (_share_of_rows(lines, delimiter, is_whole) or 0) > MIN_SHARE
    return not is_table and bool(_delimiters_below_title(lines, is_whole))


def _delimiters_below_title(lines: Sequence[str], is_whole: bool) -> list[str]:
    """Find the delimiters that give most rows after the first as many fields as the second has."""
    title = next((number for number, line in enumerate(lines) if line.strip()), 0)
    below = lines[title + 1 :]
    if sum(bool(line.strip()) for line in below) < MIN_ROWS_BELOW_TITLE:
        return []
    return [one for one in DELIMITERS if (_share_of_rows(below, one, is_whole) or 0) > MIN_SHARE]


def _check_not_quoted_whole(lines: Sequence[str], is_whole: bool, name: str) -> None:
    """Check that rows are not texts in quotation marks that hold the columns, as some spreadsheets save a table again.

    Raises:
        InputError: most of them are.
    """
    try:
        rows = [row for row in csv.reader(lines, strict=True) if row]
    except csv.Error:
        return
    if len(rows) < 2 or any(len(row) > 1 for row in rows) or not lines[0].startswith('"'):
        return
    inner = [row[0] for row in rows]
    for one in DELIMITERS:
        if one in inner[0] and (_share_of_rows(inner, one, is_whole) or 0) > MIN_SHARE:
            raise InputError(
                f"{name} has quotation marks around whole rows, such as `{_shown(lines[0])}`, so that each is one "
                "column. Remove the outer ones, and write those within once; or, if it is one column, name a "
                "--delimiter."
            )


def _share_of_rows(lines: Sequence[str], delimiter: str, is_whole: bool) -> float | None:
    """Return the share of rows with as many fields as the first; None if that has only one, or is no row of CSV."""
    rows = csv.reader(lines, delimiter=delimiter, strict=True)
    num_fields = num_rows = num_right = 0
    try:
        for row in filter(None, rows):
            num_fields = num_fields or len(row)
            if num_fields == 1:
                return None
            num_rows, num_right = num_rows + 1, num_right + (len(row) == num_fields)
    except csv.Error:
        is_cut = not is_whole and rows.line_num == len(lines)
        num_rows += 0 if is_cut else 1 + len(lines) - rows.line_num  # none of the lines that follow counts
    return num_right / num_rows if num_fields else None


def _rows(lines: Iterable[str], delimiter: str, num_skipped: int) -> Iterator[CsvRow]:
    start: list[str] = []  # the first line of the row that is being read

    def noted() -> Iterator[str]:
        for line in lines:
            if not start:
                start.append(line)
            yield line

    reader = csv.reader(noted(), delimiter=delimiter, strict=True)
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
    text = "".join(one if one.isprintable() else repr(one)[1:-1] for one in start)
    return text + (" …" if len(line.rstrip("\r\n")) > MAX_SHOWN_CHARACTERS else "")


def _flag(delimiter: str) -> str:
    return "--delimiter tab" if delimiter == "\t" else f"--delimiter '{delimiter}'"
