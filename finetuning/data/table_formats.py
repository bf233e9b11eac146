"""Readers of each table format: .csv, .tsv, .jsonl, .conll, .parquet and .txt."""

import io
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from mlm_common.corpus.csv_rows import DELIMITERS, CsvRows
from mlm_common.errors import InputError
from mlm_common.storage.encodings import is_unicode

logger = logging.getLogger(__name__)

Columns = dict[str, list[Any]]

# Names of the columns of a .conll file, as in most data sets of the Hub.
TOKENS, TAGS = "tokens", "ner_tags"
# Half of a surrogate pair, which can occur in JSON escapes only. No tokenizer accepts such a text.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_QUOTED = re.compile(r'"(?:[^"]|"")*""(?:[^"]|"")*"')


def read_csv(path: str, text: str, delimiter: str | None) -> tuple[Columns, str]:
    """Read a .csv file, and return its columns and its delimiter.

    Columns without name and values, which Excel sometimes adds, are left out.
    """
    rows = CsvRows(io.StringIO(text, newline=""), path, delimiter)
    fields = []
    for row in rows:
        if problem := rows.problem(row):
            raise InputError(f"Each row of {path} {_describe_names(rows.names)}; {problem}. {rows.hint}")
        fields.append(row.fields)
    if rows.num_blank:
        logger.warning(
            "%s has blank rows between others, the first in line %s. They are left out, and do not count as rows.",
            *(path, f"{rows.first_blank:,}"),
        )
    columns = [(name, [row[index] for row in fields]) for index, name in enumerate(rows.names)]
    columns = [(name, values) for name, values in columns if name.strip() or any(values)]
    _refuse_duplicates(path, [name for name, _ in columns])
    return dict(columns), rows.delimiter


def read_tsv(path: str, text: str, names: Sequence[str] | None = None, *, skips_short_rows: bool = False) -> Columns:
    """Read a file with tabs between its columns.

    Args:
        path: path of the file, used in error messages.
        text: content of the file.
        names: names of the columns, if the file has no header.
        skips_short_rows: whether to skip lines that have too few columns.
    """
    text = text.replace("\r\n", "\n")
    text = text if "\n" in text else text.replace("\r", "\n")
    lines = text.removesuffix("\n").split("\n") if text else []
    has_tabs = bool(lines) and "\t" in lines[0]
    first = 0 if names is not None else 1
    if names is None:
        names = lines[0].split("\t") if lines else []
        may_be_csv = bool(lines) and not has_tabs
        delimiter = next((sign for sign in DELIMITERS if sign in lines[0]), None) if may_be_csv else None
        if delimiter is not None:
            raise InputError(
                f"{path} must have tabs between its columns; its first line is {lines[0]!r:.80}. "
                f"If its columns are separated by {DELIMITERS[delimiter]}, rename the file to .csv."
            )
    _refuse_duplicates(path, names)
    rows, num_short = [], 0
    for number, line in enumerate(lines[first:], start=1 + first):
        if not line and has_tabs:
            continue
        row = line.split("\t")
        if len(row) < len(names) and skips_short_rows:
            num_short += 1
            continue
        if len(row) != len(names):
            raise InputError(
                f"Each line of {path} {_describe_names(names)}; line {number:,} has {len(row)}: {line!r:.80}. "
                "In a .tsv file quotation marks are text; if they enclose tabs or line ends, rename the file to .csv."
            )
        rows.append(row)
    if num_short:
        logger.warning("Skipped %s lines of %s, which have too few columns.", f"{num_short:,}", path)
    elif any(_QUOTED.fullmatch(field) for row in rows for field in row):
        logger.warning(
            "%s has fields in quotation marks. In a .tsv file the marks belong to the text; if they only enclose "
            "fields, rename the file to .csv.",
            path,
        )
    return {name: [row[index] for row in rows] for index, name in enumerate(names)}


def _describe_names(names: Sequence[str]) -> str:
    s = "" if len(names) == 1 else "s"
    return f"must have the {len(names)} column{s} {', '.join(names)}"


def _refuse_duplicates(path: str, names: Sequence[str]) -> None:
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise InputError(f"{path} has two columns called {twice!r}. Rename or remove one of them.")


def read_jsonl(path: str, text: str) -> Columns:
    """Read a file with a JSON object per line, or with one list of objects. Missing keys become None."""

    def row_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _refuse_duplicates(path, [name for name, _ in pairs])
        return dict(pairs)

    rows: list[Any] | None = None
    if text.lstrip().startswith("["):
        try:
            rows = json.loads(text, object_pairs_hook=row_of)
        except json.JSONDecodeError as error:
            if error.msg != "Extra data":  # otherwise each line is a list
                raise ValueError(f"line {error.lineno:,}, character {error.colno:,}: {error.msg}") from error
    if rows is None:
        rows = []
        for number, line in enumerate(text.split("\n"), start=1):
            try:
                rows += [json.loads(line, object_pairs_hook=row_of)] if line.strip() else []
            except json.JSONDecodeError as error:
                raise ValueError(f"line {number:,}, character {error.pos + 1:,}: {error.msg}") from error
    may_have_halves = _SURROGATE.search(text) is not None
    names: dict[str, None] = {}
    for number, row in enumerate(rows, start=1):
        if may_have_halves and not is_unicode(json.dumps(row, ensure_ascii=False)):
            raise InputError(f"Each text of {path} must be Unicode; row {number:,} has half of a surrogate pair.")
        if not isinstance(row, dict):
            rule = 'must be an object, such as {"text": "a text", "label": "a class"}'
            raise InputError(f"Each row of {path} {rule}; row {number:,} is {json.dumps(row):.60}.")
        names |= dict.fromkeys(row)
    return {name: [row.get(name) for row in rows] for name in names}


def read_conll(path: str, text: str) -> dict[str, list[Any]]:
    """Read sentences with a token per line and blank lines between sentences.

    If there are several columns, the last column contains the tags. Columns are separated by tabs if the file has tabs,
    else by spaces, so that a token may contain other white space. Lines that begin with -DOCSTART- are skipped, and so
    are comments. A comment is a line before a sentence that begins with # and has a different number of columns.
    """
    lines = [line.strip(" ") for line in text.split("\n")]
    has_tabs = any("\t" in line for line in lines)
    rows = [line.split("\t") if has_tabs else re.split(" +", line) for line in lines]
    is_between = [not line.strip("\t") or line.startswith("-DOCSTART-") for line in lines]
    tokens = [row for row, between in zip(rows, is_between, strict=True) if not between and not row[0].startswith("#")]
    num_columns = len(tokens[0]) if tokens else max(map(len, rows), default=0)
    tags = {row[-1] for row in tokens}
    sentences: list[list[list[str]]] = [[]]
    for number, (row, between) in enumerate(zip(rows, is_between, strict=True), start=1):
        may_be_comment = not between and not sentences[-1] and row[0].startswith("#")
        if between:
            sentences.append([])
        elif may_be_comment and len(row) != num_columns:
            continue
        elif may_be_comment and num_columns > 1 and row[-1] not in tags:
            raise InputError(
                f"Line {number:,} of {path} may be a comment or a token: it begins with #, and ends with {row[-1]!r}, "
                "which is not the tag of any other token. Delete the line if it is a comment."
            )
        elif len(row) != num_columns:
            rule = f"must have {num_columns} columns, as the first line has"
            raise InputError(f"Each line of {path} {rule}; line {number:,} has {len(row)}.")
        elif not row[0].strip():
            raise InputError(f"Each word of {path} must have a visible character; line {number:,} has {row[0]!r}.")
        else:
            sentences[-1].append(row)
    sentences = [sentence for sentence in sentences if sentence]
    columns = {TOKENS: [[row[0] for row in sentence] for sentence in sentences]}
    if sentences and num_columns > 1:
        columns[TAGS] = [[row[-1] for row in sentence] for sentence in sentences]
    return columns


def read_parquet(path: str, content: bytes) -> Columns:
    import pyarrow.parquet

    table = pyarrow.parquet.ParquetFile(io.BytesIO(content)).read()
    _refuse_duplicates(path, table.column_names)
    return {name: table.column(name).to_pylist() for name in table.column_names}


def read_lines(path: str, text: str) -> Columns:  # noqa: ARG001
    return {"text": [line.strip() for line in text.split("\n") if line.strip()]}


# {ending of the file name: reader of (path, text)}. The line ends of the text must be line feeds.
LINE_READERS: dict[str, Callable[[str, str], Columns]] = {
    ".conll": read_conll,
    ".json": read_jsonl,
    ".jsonl": read_jsonl,
    ".txt": read_lines,
}
ENDINGS = (".tsv", ".csv", ".jsonl", ".json", ".parquet", ".conll", ".txt")
