"""Texts that belong together: rows of a query, its passage and hard negatives, pairs with a score, or single texts.

They are read from tables, from files in SQuAD's format, and from folders in BeIR's format.
"""

import functools
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any

import numpy as np

from finetuning.config.embedding import EmbeddingData
from finetuning.data.examples import Examples, Table, num_samples, read_table, read_tables, texts_of
from finetuning.data.texts import TextRows
from finetuning.loop.model import Start
from finetuning.tasks.beir import is_beir, read_beir, read_documents
from finetuning.tasks.classification import INDEX_OF_PANDAS, NO_TEXT
from finetuning.tasks.retrieval import Judged, numbered
from finetuning.tasks.squad import SQUAD_ENDINGS, NotSquadError, Question, read_paragraphs, read_questions_to_predict
from mlm_common.cli.settings import require
from mlm_common.errors import InputError

# The features of a row beside its tokens: the number of its query among all different ones, and its score.
TEXT, SCORE = "text", "score"
# Names of columns with passages that do not answer the query.
NEGATIVE = re.compile(r"(hard[ _-]?)?neg(ative)?s?[ _-]?\d*", re.IGNORECASE)
# Parts of texts and of numbers, but not of names: a table without a line of names would lose its first row.
NO_NAME = re.compile(r"\s|\W$|^[-+]?[\d.]+$")
MAX_NAME_CHARACTERS = 40


def read_parts(data: EmbeddingData) -> tuple[Examples, dict[str, Judged]]:
    """Read what to train on, and {validation or test: what to evaluate on}, of the parts that are given.

    Rows to train on have columns of queries, positive passages and hard negatives, or one column of single texts; their
    labels are scores, None where the first passage simply belongs to the query. All passages of a part are searched,
    also if it is limited to its first queries.

    Raises:
        InputError: a file or a column is missing, a text is empty, or a row has too few or too many texts; and as
            `read_beir` says.
        HubAwayError: the Hub cannot be reached.
    """
    limits = num_samples(data)
    judged: dict[str, Judged] = {}
    others: dict[str, Any] = {"max_eval_samples": None, "max_predict_samples": None}
    for split in ("validation", "test"):
        path, flag = getattr(data, f"{split}_file"), f"--{split}-file"
        found = None if path is None else read_beir(path, split) if is_beir(path) else _judged_questions(path, flag)
        if found is not None:
            judged[split], others[f"{split}_file"] = found.first(limits[split]), None
    others["do_predict"] = data.do_predict and "test" not in judged
    read = functools.partial(_read_file, is_single=data.unsupervised, delimiter=data.delimiter)
    tables = read_tables(replace(data, **others), read)
    for name in (*data.text_column_names, *filter(None, [data.score_column_name])):
        if not any(name in table.columns for table in tables.values()):
            flag = "--score-column-name" if name == data.score_column_name else "--text-column-names"
            tables["train"].column(name, flag)  # says which columns there are
    pairs = {split: _pairs(table, data, split) for split, table in tables.items()}
    if pairs["train"].labels is not None:
        for table in tables.values():  # where it is missing, a search would be evaluated
            table.column(str(data.score_column_name), "Training pairs have scores: --score-column-name")
    for split, part in pairs.items():
        if split != "train":
            part = part if part.labels is None else part.first(limits[split])
            judged[split] = Judged.of(part.texts, part.labels).first(limits[split])
    return pairs["train"], judged


def _judged_questions(path: str, flag: str) -> Judged | None:
    """Read a file in SQuAD's format: the questions that have an answer, among all paragraphs; None for another form."""
    found = _read_questions(path, flag)
    if found is None:
        return None
    questions, contexts = found
    return Judged.of(([one.question for one in questions], [one.context for one in questions]), None, contexts)


def _read_questions(path: str, flag: str) -> tuple[list[Question], list[str]] | None:
    """Read the questions of a file in SQuAD's format that have an answer, and all paragraphs; None for another form."""
    if not path.endswith(SQUAD_ENDINGS):
        return None
    try:
        contexts = [one["context"] for one in read_paragraphs(path, flag)]
    except NotSquadError:
        return None
    questions = [one for one in read_questions_to_predict(path, flag) if one.answers != ()]  # () has no answer
    require(bool(questions), "must have a question with an answer", flag, path)
    return questions, contexts


def _read_file(path: str, flag: str, *, is_single: bool, delimiter: str | None) -> Table:
    """Read the pairs of a file or a folder; of SQuAD and BeIR to train on single texts, each paragraph once."""
    is_single = is_single and flag == "--train-file"
    if is_beir(path):
        return Table(path, {TEXT: read_documents(path, flag)} if is_single else _beir_pairs(path, flag))
    if is_single and path.endswith(SQUAD_ENDINGS):
        try:
            contexts = [one["context"] for one in read_paragraphs(path, flag)]
            return Table(path, {TEXT: list(dict.fromkeys(filter(str.strip, contexts)))})
        except NotSquadError:
            pass
    found = None if is_single else _read_questions(path, flag)
    if found is None:
        return read_table(path, flag, delimiter=delimiter)
    questions, _ = found
    return Table(path, {"question": [one.question for one in questions], "context": [one.context for one in questions]})


def _beir_pairs(path: str, flag: str) -> dict[str, Sequence[str]]:
    judged = read_beir(path, "train")
    pairs = [(judged.queries[query], judged.passages[passage]) for query, passage in judged.pairs[judged.is_positive]]
    pairs = [pair for pair in pairs if all(pair)]
    require(bool(pairs), "must have a grade above 0 of a document with text", flag, path)
    queries, passages = zip(*pairs, strict=True)
    return {"query": list(queries), "passage": list(passages)}


def _text_columns(table: Table, data: EmbeddingData, *, is_single: bool) -> list[str]:
    """Choose the columns of text: those named by the flag, or queries, passages, and columns called negative.

    Raises:
        InputError: the flag must name them: there are others, or columns of numbers, or the names look like texts.
    """
    columns = [name for name in data.text_column_names if name in table.columns]
    if columns:
        return columns
    left_out = (*NO_TEXT, str(data.score_column_name).lower())
    columns = [one for one in table.columns if one.lower() not in left_out and not INDEX_OF_PANDAS.fullmatch(one)]
    has_line_of_names = {".tsv", ".csv"} & set(PurePath(table.name).suffixes[-2:])
    for name in columns:
        is_text = NO_NAME.search(name) is not None or len(name) > MAX_NAME_CHARACTERS
        if has_line_of_names and is_text and not NEGATIVE.fullmatch(name):
            raise InputError(
                f"The first line of {table.name} must name its columns; {name[:60]!r} does not look like a name. Add "
                "such a line, or if it is a name, repeat it after --text-column-names."
            )
    numbers = [name for name in columns if all(np.isfinite(number(value)) for value in table.columns[name])]
    if numbers:
        texts = f"--text-column-names {' '.join(name for name in columns if name not in numbers) or 'NAME NAME'}"
        if data.score_column_name is not None:
            hint = f"Name the columns of text: {texts}."
        elif len(numbers) == 1:
            hint = f"Use --score-column-name {numbers[0]} if they are scores, {texts} if not."
        else:
            hint = f"If one has the scores of the rows, name it with --score-column-name; name the texts with {texts}."
        columns_hold = "Column {} of {} holds" if len(numbers) == 1 else "Columns {} of {} hold"
        raise InputError(f"{columns_hold.format(', '.join(numbers), table.name)} numbers. {hint}")
    negatives = [name for name in columns if NEGATIVE.fullmatch(name)]
    others = [name for name in columns if name not in negatives]
    if is_single:
        return others
    if len(others) > 2:
        raise InputError(
            "--text-column-names must name the columns of queries, passages, and any hard negatives, in this order; "
            f"{table.name} has {', '.join(columns)[:200]}. By default only columns called negative, negative_1 and so "
            "on are hard negatives."
        )
    return [*others, *negatives]


def _pairs(table: Table, data: EmbeddingData, split: str) -> Examples:
    is_single = data.unsupervised and split == "train"
    has_scores = data.score_column_name in table.columns and not is_single
    columns = _text_columns(table, data, is_single=is_single)
    if is_single:
        require(
            len(columns) == 1, f"takes one text per row; name its column of {table.name}", "--unsupervised", columns
        )
    elif len(columns) < 2 or (has_scores and len(columns) > 2):
        rule = "the two texts of a row" if has_scores else "the texts of a row, a query and its passage"
        hint = " With --unsupervised single texts are enough." if split == "train" and not has_scores else ""
        raise InputError(
            f"--text-column-names must name {rule}; {table.name} has the texts {', '.join(columns)}.{hint}"
        )
    texts, described = texts_of(table, columns), f"{' and '.join(columns)} of {table.name}"
    for name, column in zip(columns, texts, strict=True):
        for row, text in enumerate(column, start=1):
            if not text.strip():
                raise InputError(f"Texts must not be empty; row {row:,} of {table.name} has none in column {name}.")
    if not has_scores:
        return Examples(described, texts, None)
    values = table.columns[str(data.score_column_name)]
    scores = [number(value) for value in values]
    for row in np.flatnonzero(~np.isfinite(scores))[:1]:
        raise InputError(
            f"Column {data.score_column_name} of {table.name} must hold numbers; row {row + 1:,} has {values[row]!r}."
        )
    if split != "test" and min(scores) == max(scores):  # scores of a test may have been taken out, as those of STS-B
        raise InputError(
            f"Column {data.score_column_name} of {table.name} must hold different numbers; all are {scores[0]:g}."
        )
    return Examples(described, texts, scores)


def number(value: Any) -> float:
    """Read a number; what is none becomes NaN."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")


def encode_pairs(start: Start, pairs: Examples) -> TextRows:
    """Encode rows to train on; scores become cosines.

    Raises:
        InputError: `--max-seq-length` leaves no room for text, or scores are below -1.
    """
    data: Any = start.config.data
    queries, *passages = pairs.texts if len(pairs.texts) > 1 else pairs.texts * 2
    joined = [text for column in passages for text in column]
    scores = np.zeros(pairs.num_rows, np.float32)
    if pairs.labels is not None:
        given = np.asarray(pairs.labels)
        require(given.min() >= -1, "must be from -1 on, as cosines are", "Each score", given.min())
        scores = (given / max(1.0, given.max())).astype(np.float32)
    different = list(dict.fromkeys(joined))
    rule = "must be two or more, the negatives of each other"
    require(pairs.labels is not None or len(different) > 1, rule, "Different passages", f"1, {pairs.name}")
    rows, passage_rows = (
        start.encode_texts(([prompt + text for text in texts],), data.max_seq_length)
        for prompt, texts in ((data.query_prompt, queries), (data.passage_prompt, different))
    )
    of_rows = dict(rows.of_rows) | {TEXT: numbered(queries), SCORE: scores}
    members = numbered(joined).reshape(len(passages), -1).T
    return TextRows(rows.starts, rows.of_tokens, of_rows, passage_rows, members)
