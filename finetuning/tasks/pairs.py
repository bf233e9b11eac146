"""Texts that belong together: rows of a query, its passage and hard negatives, pairs with a score, or single texts.

They are read from tables, from files in SQuAD's format, and from folders in BeIR's form (Thakur et al. 2021).
"""

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from finetuning.config.embedding import CORPUS, EmbeddingData
from finetuning.data.examples import Examples, Table, num_samples, read_table, read_tables, texts_of
from finetuning.data.texts import TextRows
from finetuning.loop.model import Start
from finetuning.tasks.classification import INDEX_OF_PANDAS, NO_TEXT
from finetuning.tasks.retrieval import Judged, numbered
from finetuning.tasks.squad import SQUAD_ENDINGS, NotSquadError, read_questions_to_predict
from mlm_common.cli.settings import require
from mlm_common.errors import InputError
from mlm_common.storage import open_folder

# The features of a row beside its tokens: the number of its query among all different ones, and its score.
TEXT, SCORE = "text", "score"
# Of a folder in BeIR's form beside the corpus, and the files of its grades, the first that exists for each part.
QUERIES = "queries.jsonl"
GRADES = {"train": ("train",), "validation": ("dev", "validation"), "test": ("test",)}


def read_parts(data: EmbeddingData) -> tuple[Examples, dict[str, Judged]]:
    """Read what to train on, and {validation or test: what to evaluate on}, of the parts that are given.

    Rows to train on have columns of queries, positive passages and hard negatives, or one column of single texts; their
    labels are scores, None where the first passage simply belongs to the query.

    Raises:
        InputError: a file or a column is missing, a text is empty, or a row has too few or too many texts; and as
            `read_beir` says.
        HubAwayError: the Hub cannot be reached.
    """
    files = {split: getattr(data, f"{split}_file") for split in ("validation", "test")}
    folders = {split: path for split, path in files.items() if path is not None and is_beir(path)}
    others: dict[str, Any] = {f"{split}_file": None for split in folders}
    others["do_predict"] = data.do_predict and "test" not in folders
    tables = read_tables(
        replace(data, **others), functools.partial(_read_file, is_single=data.unsupervised, delimiter=data.delimiter)
    )
    for name in (*data.text_column_names, *filter(None, [data.score_column_name])):
        if not any(name in table.columns for table in tables.values()):
            flag = "--score-column-name" if name == data.score_column_name else "--text-column-names"
            tables["train"].column(name, flag)  # says which columns there are
    pairs = {split: _pairs(table, data, split) for split, table in tables.items()}
    if pairs["train"].labels is not None:
        for table in tables.values():  # where it is missing, a search would be evaluated
            table.column(str(data.score_column_name), "Training pairs have scores: --score-column-name")
    judged = {split: Judged.of(part.texts, part.labels) for split, part in pairs.items() if split != "train"}
    limits = num_samples(data)
    judged |= {split: read_beir(path, split).first(limits[split]) for split, path in folders.items()}
    return pairs["train"], judged


def _read_file(path: str, flag: str, *, is_single: bool, delimiter: str | None) -> Table:
    """Read the pairs of a file or a folder; of SQuAD and BeIR to train on single texts, each paragraph once."""
    is_single = is_single and flag == "--train-file"
    if is_beir(path):
        if is_single:
            return Table(path, {TEXT: list(_beir_texts(path, CORPUS, flag).values())})
        judged = read_beir(path, "train")
        queries, passages = judged.pairs[judged.grades > 0].T.tolist()
        require(bool(queries), "must have a grade above 0", flag, path)
        return Table(
            path,
            {"query": [judged.queries[one] for one in queries], "passage": [judged.passages[one] for one in passages]},
        )
    if not path.endswith(SQUAD_ENDINGS):
        return read_table(path, flag, delimiter=delimiter)
    try:
        questions = read_questions_to_predict(path, flag)
    except NotSquadError:
        return read_table(path, flag)
    questions = [one for one in questions if one.answers != ()]  # () has no answer
    require(bool(questions), "must have a question with an answer", flag, path)
    contexts = [one.context for one in questions]
    if is_single:
        return Table(path, {TEXT: list(dict.fromkeys(contexts))})
    return Table(path, {"question": [one.question for one in questions], "context": contexts})


def is_beir(path: str) -> bool:
    """Return whether a path is of a folder in BeIR's form, and not of a file."""
    return open_folder(path).exists(CORPUS)


def read_beir(path: str, split: str) -> Judged:
    """Read the passages of a folder, those queries that are judged, and their grades.

    Raises:
        InputError: a file or a column is missing, an id occurs twice, or a grade is of an unknown query or passage.
    """
    folder, flag = open_folder(path), f"--{split}-file"
    names = [f"qrels/{name}.tsv" for name in GRADES[split]]
    qrels = next((name for name in names if folder.exists(name)), names[0])
    for name in (QUERIES, qrels):
        if not folder.exists(name):
            of_test = split == "validation" and folder.exists("qrels/test.tsv")
            hint = " The grades of the test must not choose a checkpoint: use --test-file for them." if of_test else ""
            raise InputError(
                f"{flag} must be a folder with {CORPUS}, {QUERIES} and {qrels}; {path} has no {name}.{hint}"
            )
    passages, queries = (_beir_texts(path, name, flag) for name in (CORPUS, QUERIES))
    table = read_table(folder.path_of(qrels), flag)
    if len(table.columns) != 3:
        raise InputError(
            f"{table.name} must have the columns query-id, corpus-id and score; it has {', '.join(table.columns)}."
        )
    grades: dict[tuple[str, str], float] = {}
    for row, (query, passage, grade) in enumerate(zip(*table.columns.values(), strict=True), start=1):
        is_known = query in queries and passage in passages and np.isfinite(number(grade))
        if not is_known or (query, passage) in grades:
            raise InputError(
                f"Each row of {table.name} must grade a document of the folder for a query by a number, no two rows "
                f"the same; row {row:,} has {query}, {passage}, {grade}."
            )
        grades[query, passage] = number(grade)
    judged = list(dict.fromkeys(query for query, _ in grades))
    rows, columns = ({name: place for place, name in enumerate(names)} for names in (judged, passages))
    pairs = np.array([(rows[query], columns[passage]) for query, passage in grades], np.int32)
    return Judged([queries[one] for one in judged], list(passages.values()), pairs, np.array(list(grades.values())))


def _beir_texts(path: str, file: str, flag: str) -> Mapping[str, str]:
    """Return {id: title and text}, in the order of the file."""
    table, texts = read_table(open_folder(path).path_of(file), flag), {}
    titles = table.columns.get("title") or [""] * len(table.column("_id", "The id"))
    rows = zip(table.columns["_id"], titles, table.column("text", "The text"), strict=True)
    for row, (name, title, text) in enumerate(rows, start=1):
        if str(name) in texts:
            raise InputError(f"Each _id of {table.name} must be unique; row {row:,} repeats {name}.")
        texts[str(name)] = f"{title or ''} {text}".strip()
        if not isinstance(text, str) or not texts[str(name)]:
            raise InputError(f"Texts must not be empty; row {row:,} of {table.name} has none.")
    return texts


def _pairs(table: Table, data: EmbeddingData, split: str) -> Examples:
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
