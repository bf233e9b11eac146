"""The columns of a table in each format: .csv, .tsv, .jsonl, .conll, .parquet and .txt."""

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

# What the columns of a .conll file are called, and those of most data sets of the Hub.
TOKENS, TAGS = "tokens", "ner_tags"
# Half of a character, as only escapes of JSON can have it: no tokenizer takes such a text.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_QUOTED = re.compile(r'"(?:[^"]|"")*""(?:[^"]|"")*"')


def read_csv(path: str, text: str, delimiter: str | None) -> tuple[Columns, str]:
    """Read the columns, and return them and the delimiter; those without name and values are left out, as of Excel."""
    rows = CsvRows(io.StringIO(text, newline=""), path, delimiter)
    fields = []
    for row in rows:
        if problem := rows.problem(row):
            raise InputError(f"Each row of {path} {_describe_names(rows.names)}; {problem}. {rows.hint}")
        fields.append(row.fields)
    columns = [(name, [row[index] for row in fields]) for index, name in enumerate(rows.names)]
    columns = [(name, values) for name, values in columns if name.strip() or any(values)]
    _refuse_duplicates(path, [name for name, _ in columns])
    return dict(columns), rows.delimiter


def read_tsv(path: str, text: str, names: Sequence[str] | None = None, *, skips_short_rows: bool = False) -> Columns:
    """Read lines divided by tabs; `names` are those of the columns where no line has them."""
    text = text.replace("\r\n", "\n")
    text = text if "\n" in text else text.replace("\r", "\n")
    lines = text.removesuffix("\n").split("\n") if text else []
    has_tabs = bool(lines) and "\t" in lines[0]
    first = 0 if names is not None else 1
    if names is None:
        names = lines[0].split("\t") if lines else []
        other = next((one for one in DELIMITERS if one in lines[0]), None) if lines and not has_tabs else None
        if other is not None:
            raise InputError(
                f"{path} must have tabs between its columns; its first line is {lines[0]!r:.80}. "
                f"If {DELIMITERS[other]} are between them, name the file .csv."
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
                "Quotation marks are text in a .tsv file; if they enclose tabs or line ends, name the file .csv."
            )
        rows.append(row)
    if num_short:
        logger.warning("%s lines of %s have too few columns, and are left out.", f"{num_short:,}", path)
    elif any(_QUOTED.fullmatch(field) for row in rows for field in row):
        logger.warning("%s has texts in quotation marks, which are text in a .tsv file. If not, name it .csv.", path)
    return {name: [row[index] for row in rows] for index, name in enumerate(names)}


def _describe_names(names: Sequence[str]) -> str:
    s = "" if len(names) == 1 else "s"
    return f"must have the {len(names)} column{s} {', '.join(names)}"


def _refuse_duplicates(path: str, names: Sequence[str]) -> None:
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise InputError(f"Columns must differ in their names; {path} has two called {twice!r}. Rename or drop one.")


def read_jsonl(path: str, text: str) -> Columns:
    """Read an object a line, or one list of objects; a key that a row lacks is None there."""

    def row_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _refuse_duplicates(path, [name for name, _ in pairs])
        return dict(pairs)

    rows: list[Any] | None = None
    if text.lstrip().startswith("["):
        try:
            rows = json.loads(text, object_pairs_hook=row_of)
        except json.JSONDecodeError as error:
            if error.msg != "Extra data":  # a list a line
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
            raise InputError(f"Each row of {path} {rule}; row {number:,} is not: {json.dumps(row):.60}.")
        names |= dict.fromkeys(row)
    return {name: [row.get(name) for row in rows] for name in names}


def read_conll(path: str, text: str) -> dict[str, list[Any]]:
    """Read sentences, a token a line, with its tag as the last of several columns; blank lines divide sentences.

    Columns are divided by tabs where there are any, else by spaces, so that a token may hold other white space. A line
    that begins with -DOCSTART- belongs to no sentence, nor does a comment: a line that begins with # before a sentence
    and has another number of columns.
    """
    lines = [line.strip(" ") for line in text.split("\n")]
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


def read_parquet(path: str, content: bytes) -> Columns:
    import pyarrow.parquet

    table = pyarrow.parquet.ParquetFile(io.BytesIO(content)).read()
    _refuse_duplicates(path, table.column_names)
    return {name: table.column(name).to_pylist() for name in table.column_names}


def read_lines(path: str, text: str) -> Columns:  # noqa: ARG001
    return {"text": [line.strip() for line in text.split("\n") if line.strip()]}


# Those of a text, whose line ends are line feeds.
LINE_READERS: dict[str, Callable[[str, str], Columns]] = {
    ".conll": read_conll,
    ".json": read_jsonl,
    ".jsonl": read_jsonl,
    ".txt": read_lines,
}
ENDINGS = (".tsv", ".csv", ".jsonl", ".json", ".parquet", ".conll", ".txt")
