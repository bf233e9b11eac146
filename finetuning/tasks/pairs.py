"""Texts that belong together: rows of a query, its passage and hard negatives, pairs with a score, or single texts."""

import gzip
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finetuning.config.embedding import EmbeddingData
from finetuning.data.examples import SPLITS, num_samples, read_tables, texts_of
from finetuning.data.inputs import EncodedRows
from finetuning.data.tables import Table, read_table
from finetuning.data.texts import TextRows
from finetuning.loop.model import Start
from finetuning.tasks.classification import INDEX_OF_PANDAS, NO_TEXT
from finetuning.tasks.squad import SQUAD_ENDINGS, read_questions_to_predict
from mlm_common.cli.settings import require
from mlm_common.errors import InputError
from mlm_common.storage import read_file

# The features of a row beside its tokens: the number of its query among all different ones, and its score.
TEXT, SCORE = "text", "score"


@dataclass(frozen=True)
class Pairs:
    """Rows of texts.

    name: of the table.
    columns: of the texts, by name.
    texts: columns of queries, positive passages and hard negatives; one column where rows are single texts.
    scores: (rows,), how alike the two texts are; None where the first passage simply belongs to the query.
    """

    name: str
    columns: tuple[str, ...]
    texts: tuple[Sequence[str], ...]
    scores: NDArray[np.float64] | None

    @property
    def num_rows(self) -> int:
        return len(self.texts[0])


def read_pairs(data: EmbeddingData, without: Sequence[str] = ()) -> dict[str, Pairs]:
    """Read {train, validation or test: rows of texts} of the parts that are given.

    Args:
        data: names the files.
        without: parts that are read elsewhere.

    Raises:
        InputError: a file or a column is missing, a text is empty, or a row has too few or too many texts.
        HubAwayError: the Hub cannot be reached.
    """
    if data.dataset_name is not None:
        tables = read_tables(data)
    else:
        files = {split: getattr(data, f"{split}_file") for split in SPLITS if split not in without}
        tables = {
            split: _read_file(path, f"--{split}-file", is_single=data.unsupervised and split == "train")
            for split, path in files.items()
            if path is not None
        }
    parts = (*tables, *without)
    require("train" in parts, "or a --dataset-name with a split train is required", "--train-file", "nothing")
    if data.predicts and "test" not in parts:
        raise InputError(f"--do-predict needs --test-file, or a split test; received {', '.join(parts)}.")
    if not data.predicts:
        tables.pop("test", None)
    for name in (*data.text_column_names, *filter(None, [data.score_column_name])):
        flag = "--score-column-name" if name == data.score_column_name else "--text-column-names"
        if tables and not any(name in table.columns for table in tables.values()):
            next(iter(tables.values())).column(name, flag)  # says which columns there are
    limits = num_samples(data)
    return {split: _pairs(table.first(limits[split]), data, split) for split, table in tables.items()}


def _read_file(path: str, flag: str, *, is_single: bool) -> Table:
    """Read a table; of a file in SQuAD's format the questions with their paragraphs, or each paragraph once."""
    if not (path.endswith(SQUAD_ENDINGS) and _is_squad(path)):
        return read_table(path, flag)
    questions = [one for one in read_questions_to_predict(path, flag) if one.answers != ()]  # () has no answer
    require(bool(questions), "must have a question with an answer", flag, path)
    contexts = [one.context for one in questions]
    if is_single:
        return Table(path, {"text": list(dict.fromkeys(contexts))})
    return Table(path, {"question": [one.question for one in questions], "context": contexts})


def _is_squad(path: str) -> bool:
    try:
        content = read_file(path)
        content = json.loads(gzip.decompress(content) if path.endswith(".gz") else content)
    except (ValueError, OSError, EOFError, zlib.error):
        return False
    return isinstance(content, dict) and "data" in content


def _pairs(table: Table, data: EmbeddingData, split: str) -> Pairs:
    columns = [name for name in data.text_column_names if name in table.columns]
    if not columns:
        others = (*NO_TEXT, str(data.score_column_name).lower())
        columns = [one for one in table.columns if one.lower() not in others and not INDEX_OF_PANDAS.fullmatch(one)]
        for name in columns:
            if all(np.isfinite(number(value)) for value in table.columns[name]):
                raise InputError(
                    f"Column {name} of {table.name} holds numbers. Use --score-column-name {name} if they are scores, "
                    "--text-column-names to name the columns of text if not."
                )
    is_single = data.unsupervised and split == "train"
    has_scores = data.score_column_name in table.columns and not is_single
    if is_single:
        require(len(columns) == 1, f"takes one text a row; name its column of {table.name}", "--unsupervised", columns)
    elif len(columns) < 2 or (has_scores and len(columns) > 2):
        rule = "the two texts of a row" if has_scores else "the texts of a row, a query and its passage"
        hint = " With --unsupervised single texts are enough." if split == "train" and not has_scores else ""
        raise InputError(
            f"--text-column-names must name {rule}; {table.name} has the texts {', '.join(columns)}.{hint}"
        )
    texts = texts_of(table, columns)
    for name, column in zip(columns, texts, strict=True):
        for row, text in enumerate(column, start=1):
            if not text.strip():
                raise InputError(f"Texts must not be empty; row {row:,} of {table.name} has none in column {name}.")
    if not has_scores:
        return Pairs(table.name, tuple(columns), texts, None)
    values = table.columns[str(data.score_column_name)]
    scores = np.array([number(value) for value in values])
    for row in np.flatnonzero(~np.isfinite(scores))[:1]:
        raise InputError(
            f"Column {data.score_column_name} of {table.name} must hold numbers; row {row + 1:,} has {values[row]!r}."
        )
    return Pairs(table.name, tuple(columns), texts, scores)


def number(value: Any) -> float:
    """Read a number; what is none becomes NaN."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")


def encode_pairs(start: Start, pairs: Pairs) -> TextRows:
    """Encode rows to train on; scores become cosines.

    Raises:
        InputError: `--max-seq-length` leaves no room for text, or scores are below -1.
    """
    data: Any = start.config.data
    queries, *passages = pairs.texts if len(pairs.texts) > 1 else pairs.texts * 2
    joined = [text for column in passages for text in column]
    scores = np.zeros(pairs.num_rows, np.float32)
    if pairs.scores is not None:
        require(pairs.scores.min() >= -1, "must be from -1 on, as cosines are", "Each score", pairs.scores.min())
        scores = (pairs.scores / max(1.0, pairs.scores.max())).astype(np.float32)
    rows = encode_prompted(start, queries, data.query_prompt)
    of_rows = dict(rows.of_rows) | {TEXT: numbered(queries), SCORE: scores}
    return TextRows(
        rows.starts,
        rows.of_tokens,
        of_rows,
        encode_prompted(start, list(dict.fromkeys(joined)), data.passage_prompt),
        numbered(joined).reshape(len(passages), -1).T,
    )


def encode_prompted(start: Start, texts: Sequence[str], prompt: str) -> EncodedRows:
    """Encode single texts after a prompt."""
    return start.encode_texts(([prompt + text for text in texts],), start.config.data.max_seq_length)


def numbered(texts: Sequence[str]) -> NDArray[np.int32]:
    """Number texts by their first appearance, equal ones alike."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(text, len(numbers)) for text in texts], np.int32)
