"""Of ugly files that are accepted as a corpus the documents are those that other programs read."""

import gzip
import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from mlm_common.corpus.config import CorpusConfig
from mlm_common.corpus.corpus import open_corpus
from mlm_common.errors import InputError
from tests.fixtures.fuzzed_commands import fed
from tests.fixtures.ugly_files import LINES

READ_OTHERWISE = ("duplicate_names.parquet",)  # the first of the two columns is read
# The same table by another separator, in another encoding.
DIALECTS = ("semicolons.csv", "separator_named.csv", "decimal_commas.csv", "tabs.csv", "utf16.csv", "excel_unicode.csv")


def content_of(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes()) if path.name.endswith(".gz") else path.read_bytes()


def lines_of(path: Path) -> list[str]:
    return re.split("\r\n|\r|\n", content_of(path).decode("utf-8-sig"))


def rows_of_json(path: Path) -> list[str]:
    text = content_of(path).decode("utf-8-sig")
    try:
        rows = json.loads(text)
        rows = rows if isinstance(rows, list) else [rows]
    except ValueError:
        rows = [json.loads(line) for line in text.split("\n") if line.strip()]
    return [row if isinstance(row, str) else row.get("text") or "" for row in rows]


def cells_of(path: Path) -> list[str]:
    if path.name.removesuffix(".gz") in DIALECTS:
        return list(LINES)
    table = pd.read_csv(io.BytesIO(content_of(path)), dtype=str, keep_default_na=False, encoding="utf-8-sig")
    return list(table["text"])


def rows_of_parquet(path: Path) -> list[str]:
    return [text or "" for text in pd.read_parquet(path, columns=["text"])["text"]]


READERS: dict[str, Callable[[Path], list[str]]] = {
    ".txt": lines_of,
    ".jsonl": rows_of_json,
    ".json": rows_of_json,
    ".csv": cells_of,
    ".parquet": rows_of_parquet,
}


def documents_of(path: Path) -> list[str] | None:
    """Read the documents of a file as stages 1 and 2 do; None if it is refused."""
    try:
        return list(open_corpus(CorpusConfig(data_files=[str(path)], sample_by="line")).documents("train"))
    except InputError:
        return None


@pytest.mark.parametrize("ending", READERS)
def test_a_corpus_is_read_as_other_programs_read_it(ending, ugly):
    num_read, wrong = 0, {}
    for name, path in fed(ugly, f"*{ending} *{ending}.gz").items():
        if not path.is_file() or name in READ_OTHERWISE or (documents := documents_of(path)) is None:
            continue
        num_read += 1
        read, expected = (
            [text.strip() for text in texts if text.strip()] for texts in (documents, READERS[ending](path))
        )
        if read != expected:
            wrong[name] = (len(read), len(expected), sorted(set(read) ^ set(expected))[:2])
    assert wrong == {}
    assert num_read >= 3
