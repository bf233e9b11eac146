"""Read and encode related texts: queries with passages and hard negatives, pairs with a score, or single texts.

The texts are read from tables, from files in SQuAD's format, and from folders in BeIR's format.
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
from finetuning.data.shared_rows import check_shared_rows
from finetuning.data.texts import TextRows
from finetuning.loop.model import Start
from finetuning.tasks.beir import is_beir, read_beir, read_documents
from finetuning.tasks.classification import INDEX_OF_PANDAS, NO_TEXT
from finetuning.tasks.retrieval import Judged, numbered
from finetuning.tasks.squad import SQUAD_ENDINGS, NotSquadError, Question, read_paragraphs, read_questions_to_predict
from mlm_common.cli.settings import require
from mlm_common.errors import InputError

# Features of a row: the number of the row's query among all distinct queries, and the row's score.
TEXT, SCORE = "text", "score"
# Names of columns with passages that do not answer the query.
NEGATIVE = re.compile(r"(hard[ _-]?)?neg(ative)?s?[ _-]?\d*", re.IGNORECASE)
# Matches texts and numbers, but not names of columns. If the first line contains texts, the table has no header.
NO_NAME = re.compile(r"\s|\W$|^[-+]?[\d.]+$")
MAX_NAME_CHARACTERS = 40


def read_splits(data: EmbeddingData) -> tuple[Examples, dict[str, Judged]]:
    """Read the texts of all splits.

    Returns:
        The examples to train on, and {"validation" or "test": the queries and passages to evaluate on}. Training
        examples have columns of queries, positive passages and hard negatives, or one column of single texts. Their
        labels are the scores of the pairs; None without scores. With `--max-eval-samples` and `--max-predict-samples`
        the number of queries is limited, but all passages are searched.

    Raises:
        InputError: a file or a column is missing, a text is empty, a row has too few or too many texts, or a folder in
            BeIR's format is invalid.
        HubAwayError: the Hub cannot be reached.
    """
    limits = num_samples(data)
    judged: dict[str, Judged] = {}
    others: dict[str, Any] = {"max_eval_samples": None, "max_predict_samples": None}
    for split in ("validation", "test"):
        path, flag = getattr(data, f"{split}_file"), f"--{split}-file"
        read_split = None
        if path is not None:
            read_split = read_beir(path, split) if is_beir(path) else _judged_questions(path, flag)
        if read_split is not None:
            judged[split], others[f"{split}_file"] = read_split.first(limits[split]), None
    others["do_predict"] = data.do_predict and "test" not in judged
    read = functools.partial(_read_file, is_single=data.unsupervised, delimiter=data.delimiter)
    tables = read_tables(replace(data, **others), read)
    for name in (*data.text_column_names, *filter(None, [data.score_column_name])):
        if not any(name in table.columns for table in tables.values()):
            flag = "--score-column-name" if name == data.score_column_name else "--text-column-names"
            tables["train"].column(name, flag)  # raises an error that lists the columns
    examples = {split: _examples(table, data, split) for split, table in tables.items()}
    if examples["train"].labels is not None:
        for table in tables.values():  # a split without scores would be evaluated by retrieval
            table.column(str(data.score_column_name), "The training split has scores, so --score-column-name")
    check_shared_rows(
        {split: list(zip(*pairs.texts[:2], strict=True)) for split, pairs in examples.items()},
        {split: pairs.name for split, pairs in examples.items()},
    )
    for split, pairs in examples.items():
        if split != "train":
            pairs = pairs if pairs.labels is None else pairs.first(limits[split])
            judged[split] = Judged.of(pairs.texts, pairs.labels).first(limits[split])
    return examples["train"], judged


def _judged_questions(path: str, flag: str) -> Judged | None:
    """Read answerable questions and all paragraphs of a file in SQuAD's format; None if it has a different format."""
    read = _read_questions(path, flag)
    if read is None:
        return None
    questions, contexts = read
    columns = [question.question for question in questions], [question.context for question in questions]
    return Judged.of(columns, None, contexts)


def _read_questions(path: str, flag: str) -> tuple[list[Question], list[str]] | None:
    """Read answerable questions and all paragraphs of a file in SQuAD's format; None if it has a different format."""
    if not path.endswith(SQUAD_ENDINGS):
        return None
    try:
        contexts = [paragraph["context"] for paragraph in read_paragraphs(path, flag)]
    except NotSquadError:
        return None
    # Questions with unknown answers (None) are kept, on the assumption that the paragraph answers them.
    questions = [question for question in read_questions_to_predict(path, flag) if question.answers != ()]
    require(bool(questions), "must have a question with an answer", flag, path)
    return questions, contexts


def _read_file(path: str, flag: str, *, is_single: bool, delimiter: str | None) -> Table:
    """Read the texts of a file or a folder as a table.

    With `is_single`, the training split is a column of single texts: each paragraph of SQuAD or BeIR once.
    """
    is_single = is_single and flag == "--train-file"
    if is_beir(path):
        return Table(path, {TEXT: read_documents(path, flag)} if is_single else _beir_pairs(path, flag))
    if is_single and path.endswith(SQUAD_ENDINGS):
        try:
            contexts = [paragraph["context"] for paragraph in read_paragraphs(path, flag)]
            return Table(path, {TEXT: list(dict.fromkeys(filter(str.strip, contexts)))})
        except NotSquadError:
            pass
    read = None if is_single else _read_questions(path, flag)
    if read is None:
        return read_table(path, flag, delimiter=delimiter)
    questions, _ = read
    columns = {name: [getattr(question, name) for question in questions] for name in ("question", "context")}
    return Table(path, columns)


def _beir_pairs(path: str, flag: str) -> dict[str, Sequence[str]]:
    judged = read_beir(path, "train")
    pairs = [(judged.queries[query], judged.passages[passage]) for query, passage in judged.pairs[judged.is_positive]]
    pairs = [pair for pair in pairs if all(pair)]
    require(bool(pairs), "must have a grade above 0 for a document with text", flag, path)
    queries, passages = zip(*pairs, strict=True)
    return {"query": list(queries), "passage": list(passages)}


def _text_columns(table: Table, data: EmbeddingData, *, is_single: bool) -> list[str]:
    """Choose the columns of text: the columns that the flag names, or else queries, passages and hard negatives.

    Raises:
        InputError: the columns are ambiguous, some columns contain numbers, or names look like texts, so that the table
            probably has no header.
    """
    columns = [name for name in data.text_column_names if name in table.columns]
    if columns:
        return columns
    left_out = (*NO_TEXT, str(data.score_column_name).lower())
    columns = [name for name in table.columns if name.lower() not in left_out and not INDEX_OF_PANDAS.fullmatch(name)]
    has_header = {".tsv", ".csv"} & set(PurePath(table.name).suffixes[-2:])
    for name in columns:
        is_text = NO_NAME.search(name) is not None or len(name) > MAX_NAME_CHARACTERS
        if has_header and is_text and not NEGATIVE.fullmatch(name):
            raise InputError(
                f"The first line of {table.name} must name its columns; {name[:60]!r} does not look like a name. Add "
                "such a line, or if it is a name, list it in --text-column-names."
            )
    numbers = [name for name in columns if all(np.isfinite(number(value)) for value in table.columns[name])]
    if numbers:
        texts = f"--text-column-names {' '.join(name for name in columns if name not in numbers) or 'NAME NAME'}"
        if data.score_column_name is not None:
            hint = f"Name the columns of text with {texts}."
        elif len(numbers) == 1:
            hint = f"If they are scores, use --score-column-name {numbers[0]}; if not, {texts}."
        else:
            hint = (
                "If a column holds the scores of the rows, name it with --score-column-name; name the columns of text "
                f"with {texts}."
            )
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


def _examples(table: Table, data: EmbeddingData, split: str) -> Examples:
    """Check and return the texts and scores of a split; raise InputError if they are invalid."""
    is_single = data.unsupervised and split == "train"
    has_scores = data.score_column_name in table.columns and not is_single
    columns = _text_columns(table, data, is_single=is_single)
    if is_single:
        require(
            len(columns) == 1, f"takes one text per row; name its column in {table.name}", "--unsupervised", columns
        )
    elif len(columns) < 2 or (has_scores and len(columns) > 2):
        rule = "the columns of the two texts" if has_scores else "the columns of queries and passages"
        hint = " With --unsupervised, single texts are enough." if split == "train" and not has_scores else ""
        raise InputError(
            f"--text-column-names must name {rule}; {table.name} has the columns of text {', '.join(columns)}.{hint}"
        )
    texts, source = texts_of(table, columns), f"{' and '.join(columns)} of {table.name}"
    for name, column in zip(columns, texts, strict=True):
        for row, text in enumerate(column, start=1):
            if not text.strip():
                raise InputError(f"Texts must not be empty; row {row:,} of {table.name} has no text in column {name}.")
    if not has_scores:
        return Examples(source, texts, None)
    values = table.columns[str(data.score_column_name)]
    scores = [number(value) for value in values]
    for row in np.flatnonzero(~np.isfinite(scores))[:1]:
        raise InputError(
            f"Column {data.score_column_name} of {table.name} must hold numbers, with a point before decimals; "
            f"row {row + 1:,} has {values[row]!r}."
        )
    if split != "test" and min(scores) == max(scores):  # the scores of a test split may be hidden, as in STS-B
        raise InputError(
            f"Column {data.score_column_name} of {table.name} must hold different numbers; all are {scores[0]:g}."
        )
    return Examples(source, texts, scores)


def number(value: Any) -> float:
    """Convert a value to a number; NaN if it is not a number."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")


def encode_pairs(start: Start, pairs: Examples) -> TextRows:
    """Encode the rows to train on. If the highest score is above 1, all scores are divided by it.

    Raises:
        InputError: `--max-seq-length` leaves no room for text, a score is below -1, or all passages are the same.
    """
    data: Any = start.config.data
    queries, *passages = pairs.texts if len(pairs.texts) > 1 else pairs.texts * 2
    joined = [text for column in passages for text in column]
    scores = np.zeros(pairs.num_rows, np.float32)
    if pairs.labels is not None:
        labels = np.asarray(pairs.labels)
        require(labels.min() >= -1, "must be at least -1, as cosines are", "Each score", labels.min())
        scores = (labels / max(1.0, labels.max())).astype(np.float32)
    distinct = list(dict.fromkeys(joined))
    if pairs.labels is None and len(distinct) < 2:
        raise InputError(f"{pairs.name} must have two or more different passages, which are each other's negatives.")
    rows, passage_rows = (
        start.encode_texts(([prompt + text for text in texts],), data.max_seq_length)
        for prompt, texts in ((data.query_prompt, queries), (data.passage_prompt, distinct))
    )
    row_values = dict(rows.row_values) | {TEXT: numbered(queries), SCORE: scores}
    members = numbered(joined).reshape(len(passages), -1).T
    return TextRows(rows.starts, rows.token_values, row_values, passage_rows, members)
