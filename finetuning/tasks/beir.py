"""Read folders in BeIR's format (Thakur et al. 2021), for evaluation by BeIR's rules.

A document with the id of a query is left out of this query's ranking. Grades of documents that are not in the corpus
are kept; such documents count as not found. Documents may be empty. Documents with equal scores are ranked as in
trec_eval, in descending order of their ids.
"""

import csv
import gzip
import json
import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from finetuning.config.embedding import CORPUS
from finetuning.data.labels import short
from finetuning.tasks.retrieval import Judged
from mlm_common.cli.console import counted
from mlm_common.errors import InputError
from mlm_common.storage import Folder, missing, open_folder
from mlm_common.storage.guard import guarded_read

logger = logging.getLogger(__name__)

QUERIES = "queries.jsonl"
# Names of the files with the grades. For each split, the first existing file is read.
QRELS = {"train": ("train",), "validation": ("dev", "validation"), "test": ("test",)}


def is_beir(path: str) -> bool:
    """Return whether a path is a folder in BeIR's format."""
    folder = open_folder(path)
    return folder.exists(_stored(folder, CORPUS))


def _stored(folder: Folder, name: str) -> str:
    """Return the name under which a file is stored, with .gz if it is compressed.

    If the file is missing, return `name`.
    """
    return next((stored for stored in (name, f"{name}.gz") if folder.exists(stored)), name)


def read_documents(path: str, flag: str) -> list[str]:
    """Read the documents that are not empty. Each text is a document's title followed by the document's text.

    Raises:
        InputError: the corpus cannot be read, or one of its lines has no id or no text.
    """
    folder = open_folder(path)
    return [text for text in _read_texts(folder, _stored(folder, CORPUS), flag).values() if text]


def read_beir(path: str, split: str) -> Judged:
    """Read the documents of a folder, the queries that have grades, and the grades.

    Args:
        path: path of the folder.
        split: "train", "validation" or "test".

    Raises:
        InputError: a file is missing or cannot be read, two texts have the same id, a grade is not a whole number or is
            given twice, the query of a grade is missing, or all graded documents are missing.
    """
    folder, flag = open_folder(path), f"--{split}-file"
    names = [_stored(folder, f"qrels/{name}.tsv") for name in QRELS[split]]
    qrels = next((name for name in names if folder.exists(name)), names[0])
    texts = [_stored(folder, name) for name in (CORPUS, QUERIES)]
    for name in (*texts, qrels):
        if not folder.exists(name):
            hint = ""
            if split == "validation" and folder.exists(_stored(folder, "qrels/test.tsv")):
                hint = " The test split must not decide which checkpoint is best; evaluate it with --test-file."
            raise InputError(
                f"{flag} must be a folder with {CORPUS}, {QUERIES} and {qrels}; {path} has no {name}.{hint}"
            )
    documents, queries = (_read_texts(folder, name, flag) for name in texts)
    documents = dict(sorted(documents.items(), reverse=True))
    grades = _read_grades(folder, qrels, flag, queries, documents)
    judged = list(dict.fromkeys(query for query, _ in grades))
    absent = list(dict.fromkeys(document for _, document in grades if document not in documents))
    if absent:
        if all(document not in documents for _, document in grades):
            raise InputError(f"{folder.path_of(qrels)} must grade documents of {CORPUS}; it grades none of them.")
        logger.warning(
            "%s grades %s that %s lacks, such as %s. They count as not found, as in BeIR.",
            *(folder.path_of(qrels), counted(len(absent), "document"), CORPUS, short(absent[0])),
        )
    rows = {name: index for index, name in enumerate(judged)}
    columns = {name: index for index, name in enumerate([*documents, *absent])}
    pairs = np.array([(rows[query], columns[document]) for query, document in grades], np.int32)
    identical = np.array([columns[query] if query in documents else -1 for query in judged], np.int32)
    return Judged(
        [queries[name] for name in judged],
        list(documents.values()),
        pairs,
        np.array(list(grades.values())),
        identical=identical,
    )


def _read_texts(folder: Folder, file: str, flag: str) -> dict[str, str]:
    """Return {id: text}, in the order of the file. The text of a document begins with its title."""
    texts: dict[str, str] = {}
    path = folder.path_of(file)
    for line, row in _read_objects(folder, file, flag):
        name, text, title = row.get("_id"), row.get("text"), row.get("title") if file.startswith(CORPUS) else None
        is_id = isinstance(name, str) or type(name) is int
        if not is_id or not isinstance(text, str) or not isinstance(title, str | None):
            key, value = (
                ("_id", name) if not is_id else ("text", text) if not isinstance(text, str) else ("title", title)
            )
            raise InputError(f"{flag}: {key} must be text; line {line:,} of {path} has {short(value)}.")
        text = f"{title or ''} {text}".strip()
        if texts.setdefault(str(name), text) != text:
            raise InputError(
                f"{flag}: texts with the same _id must be equal; line {line:,} of {path} repeats {short(name)} with "
                "another text."
            )
    if not texts:
        raise InputError(f"{flag} must be a folder with texts in {file}; {path} has none.")
    return texts


def _read_objects(folder: Folder, file: str, flag: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the number and the object of each line of a JSON Lines file, except for blank lines."""
    for number, line in enumerate(_read_lines(folder, file, flag), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            json.dumps(row, ensure_ascii=False).encode()  # fails for half of a surrogate pair, which is not valid text
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{flag}: each line must be a JSON object; line {number:,} of {folder.path_of(file)} is not: {error}."
            ) from error
        if not isinstance(row, dict):
            raise InputError(
                f"{flag}: each line must be a JSON object; line {number:,} of {folder.path_of(file)} is not."
            )
        yield number, row


def _read_lines(folder: Folder, file: str, flag: str) -> list[str]:
    path, is_compressed = folder.path_of(file), file.endswith(".gz")
    if not folder.exists(file):
        raise missing(path, flag, "file")
    with guarded_read(path, "a file of UTF-8 text" + " in gzip" * is_compressed, flag=flag):
        content = folder.read_bytes(file)
        content = gzip.decompress(content) if is_compressed else content
        return [line.removesuffix("\r") for line in content.decode("utf-8-sig").split("\n")]


def _read_grades(
    folder: Folder, file: str, flag: str, queries: Mapping[str, str], documents: Mapping[str, str]
) -> dict[tuple[str, str], float]:
    """Read a file of grades, {(query, document): grade}, with or without a header.

    BeIR's files have three columns, separated by tabs: query, document and grade. TREC's files have a second column
    that is ignored, and any white space may separate the columns.
    """
    path, lines = folder.path_of(file), _read_lines(folder, file, flag)
    has_tabs = any("\t" in line for line in lines)
    rule = f"{flag}: each line of {path} must have a query, a document and a whole number"
    grades: dict[tuple[str, str], float] = {}
    is_first = True
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        with guarded_read(path, "a table of grades", flag=flag):
            row = next(csv.reader([line], delimiter="\t")) if has_tabs else line.split()
        may_be_header, is_first = is_first, False
        if len(row) not in (3, 4):
            raise InputError(f"{rule}, or TREC's four columns; line {number:,} has {len(row)} columns.")
        query, document, grade = row[0], row[-2], _whole_number(row[-1])
        if grade is None:
            if may_be_header and query not in queries and document not in documents:
                continue
            hint = ""
            if _number(row[-1]) is not None:
                hint = (
                    " Grades are whole numbers, as in trec_eval: round the scores, or write a table of pairs and use "
                    "--score-column-name."
                )
            raise InputError(f"{rule}; line {number:,} has {short(row[-1])} instead of the number.{hint}")
        if query not in queries:
            raise InputError(f"{rule}; line {number:,} has the query {short(query)}, which {QUERIES} lacks.")
        if grades.setdefault((query, document), grade) != grade:
            raise InputError(
                f"{rule}, and each pair once; line {number:,} repeats {short(query)} with {short(document)}."
            )
    if not grades:
        raise InputError(f"{flag} must be a folder with grades; {path} has none.")
    return grades


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _whole_number(text: str) -> float | None:
    value = _number(text)
    return value if value is not None and value.is_integer() else None
