"""Questions about paragraphs as SQuAD has them, read and checked; exact match and F1 as its script computes them."""

import functools
import gzip
import json
import re
import string
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from finetuning.config.settings import QuestionData
from finetuning.data.examples import Table, check_data_file, read_table, read_tables
from finetuning.data.labels import short
from mlm_common.errors import InputError
from mlm_common.storage import read_file
from mlm_common.storage.guard import guarded_read

SQUAD_ENDINGS = (".json", ".json.gz")
COLUMNS = ("id", "question", "context", "answers", "is_impossible")
# No UTF-8 file can have them; JSON's escapes can.
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
# Words at the beginning of a paragraph that a guess answers with, whatever the question.
NUM_FIRST_WORDS = (1, 2, 3, 5, 10, 20)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class NotSquadError(InputError):
    """A file is not of SQuAD's form."""


@dataclass(frozen=True)
class Question:
    """A question about a paragraph.

    answers: texts with the character of the paragraph that each begins at; empty where the paragraph has no answer,
        None where that is not known.
    """

    id: str
    question: str
    context: str
    answers: tuple[tuple[str, int], ...] | None


def read_questions(data: QuestionData) -> dict[str, list[Question]]:
    """Read {train, validation or test: questions} of the parts that are given.

    Raises:
        InputError: a file, a column or an answer is missing or malformed; an answer that is not in its paragraph; two
            questions with the same id in a part that is evaluated or predicted.
        HubAwayError: the Hub cannot be reached.
    """
    if data.dataset_name is None and str(data.train_file).endswith(SQUAD_ENDINGS):
        # A part to evaluate on is predicted as well, so --do-predict needs no other.
        tables = read_tables(replace(data, do_predict=False), _read_squad)
    else:
        tables = read_tables(data)
    parts = {split: _questions(table, needs_answers=split != "test") for split, table in tables.items()}
    for split, questions in parts.items():
        if split != "train":
            _check_ids(questions, tables[split].name)
    _check_answered(parts, tables)
    return parts


def read_questions_to_predict(path: str, flag: str) -> list[Question]:
    """Read the questions of a file, which `flag` names, with or without answers.

    A .json file that is not of SQuAD's form is a NotSquadError.
    """
    table = _read_squad(path, flag) if path.endswith(SQUAD_ENDINGS) else read_table(path, flag)
    questions = _questions(table, needs_answers=False)
    _check_ids(questions, path)
    return questions


def read_paragraphs(path: str, flag: str) -> list[dict[str, Any]]:
    """Read the paragraphs of a file in SQuAD's format, which `flag` names: {context: text, qas: its questions}.

    Raises:
        NotSquadError: the file is of another form.
    """
    check_data_file(path, flag)
    if not path.endswith(SQUAD_ENDINGS):
        raise InputError(
            f"{flag} must be a file in SQuAD's format, .json or .json.gz, like --train-file; received {path}."
        )
    with guarded_read(path, "a file in SQuAD's format", flag=flag):
        content = read_file(path)
    try:
        articles = json.loads(gzip.decompress(content) if path.endswith(".gz") else content)["data"]
        paragraphs = [
            {"context": paragraph["context"], "qas": [dict(one) for one in paragraph.get("qas") or ()]}
            for article in articles
            for paragraph in article["paragraphs"]
        ]
    except (ValueError, KeyError, TypeError, AttributeError, OSError, EOFError, zlib.error) as error:
        raise NotSquadError(f"{flag} must be of SQuAD's form, data, paragraphs, qas; {path}: {error!r}.") from error
    for number, one in enumerate(paragraphs, start=1):
        if not isinstance(one["context"], str) or LONE_SURROGATE.search(one["context"]):
            raise InputError(
                f"The context must be text (Unicode); paragraph {number:,} of {path} has {short(one['context'])}."
            )
    return paragraphs


def _read_squad(path: str, flag: str) -> Table:
    entries = [
        {**one, "context": paragraph["context"]}
        for paragraph in read_paragraphs(path, flag)
        for one in paragraph["qas"]
    ]
    if not entries:
        raise InputError(f"{flag} must name a file with questions; {path} has none.")
    return Table(path, {name: [one.get(name) for one in entries] for name in COLUMNS})


def _questions(table: Table, *, needs_answers: bool) -> list[Question]:
    names = [name for name in COLUMNS if name in table.columns]
    missing = [name for name in COLUMNS[:3] if name not in names]
    if missing:
        raise InputError(
            f"A table of questions needs the columns id, question, context and answers; {table.name} has no "
            f"{missing[0]}, only {', '.join(table.columns)}."
        )
    rows = zip(*(table.columns[name] for name in names), strict=True)
    entries = (dict(zip(names, row, strict=True)) for row in rows)
    return [_question(one, number, table.name, needs_answers) for number, one in enumerate(entries, start=1)]


def _question(entry: Mapping[str, Any], number: int, source: str, needs_answers: bool) -> Question:
    name = entry.get("id")
    if not isinstance(name, str | int) or isinstance(name, bool) or LONE_SURROGATE.search(str(name)):
        raise InputError(f"Each id must be text or a whole number; question {number:,} of {source} has {short(name)}.")
    place = f"question {short(name)} of {source}"
    for key in ("question", "context"):
        if not isinstance(entry.get(key), str) or LONE_SURROGATE.search(entry[key]):
            raise InputError(f"The {key} must be text (Unicode); {place} has {short(entry.get(key))}.")
    context, answers = entry["context"], _answers(entry, place)
    if answers is None and needs_answers:
        raise InputError(f"Each question to train or evaluate on must have answers; {place} has none.")
    for text, start in answers or ():
        if not text.strip():
            hint = "If the paragraph has no answer, leave the list of answers empty."
            raise InputError(f"Each answer must have text; {place} has {text!r}. {hint}")
        found = context[start : start + len(text)] if start >= 0 else ""
        if found != text:
            raise InputError(
                f"Each answer must be in the paragraph at its answer_start, which counts characters from 0; {place} "
                f"has {short(text)} at {start}, but the paragraph has {short(found)} there."
            )
    return Question(str(name), entry["question"].strip(), context, answers)


def _answers(entry: Mapping[str, Any], place: str) -> tuple[tuple[str, int], ...] | None:
    """Read the answers of an entry; None where they are not known."""
    answers, is_impossible = entry.get("answers"), entry.get("is_impossible")
    if is_impossible not in (None, False, True):
        raise InputError(f"is_impossible must be true or false; {place} has {short(is_impossible)}.")
    if is_impossible:
        return ()
    if answers is None:
        return None
    pairs: list[tuple[Any, Any]] | None = None
    if isinstance(answers, Mapping):
        texts, starts = answers.get("text"), answers.get("answer_start")
        if isinstance(texts, list) and isinstance(starts, list) and len(texts) == len(starts):
            pairs = list(zip(texts, starts, strict=True))
    elif isinstance(answers, list) and all(isinstance(one, Mapping) for one in answers):
        pairs = [(one.get("text"), one.get("answer_start")) for one in answers]
    if pairs is None or not all(isinstance(text, str) and type(start) is int for text, start in pairs):
        raise InputError(
            "answers must be a list of {text, answer_start}, or {text: [...], answer_start: [...]} with lists of equal "
            f"length, each text a string and each answer_start a whole number; {place} has {short(answers)}."
        )
    # An empty list means that the paragraph has no answer, unless the entry says that it has one.
    return None if not pairs and is_impossible is not None else tuple(pairs)


def _check_ids(questions: Sequence[Question], source: str) -> None:
    first: dict[str, int] = {}
    for number, one in enumerate(questions, start=1):
        if one.id in first:
            raise InputError(
                f"Each id of {source} must be unique, since predictions are written by id; questions {first[one.id]:,} "
                f"and {number:,} both have {short(one.id)}."
            )
        first[one.id] = number


def _check_answered(parts: Mapping[str, Sequence[Question]], tables: Mapping[str, Table]) -> None:
    """Refuse parts to train or evaluate on whose answers were taken out."""
    if not any(one.answers for one in parts["train"]):
        raise InputError(f"Some questions to train on must have an answer; none of {tables['train'].name} has one.")
    has_all = all(one.answers for one in parts["train"])
    if has_all and "validation" in parts and not any(one.answers for one in parts["validation"]):
        raise InputError(
            f"Some questions to evaluate on must have an answer, as all of {tables['train'].name} have; none of "
            f"{tables['validation'].name} has one."
        )


@functools.lru_cache(maxsize=1 << 16)
def normalized(text: str) -> str:
    """Write a text in lower case, without punctuation, articles and superfluous white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def f1(prediction: str, answer: str) -> float:
    """Compute the harmonic mean of precision and recall of words."""
    predicted, expected = normalized(prediction).split(), normalized(answer).split()
    if not predicted or not expected:
        return float(predicted == expected)
    num_shared = sum((Counter(predicted) & Counter(expected)).values())
    if num_shared == 0:
        return 0.0
    precision, recall = num_shared / len(predicted), num_shared / len(expected)
    return 2 * precision * recall / (precision + recall)


def scores(questions: Sequence[Question], predictions: Sequence[str]) -> dict[str, float]:
    """Compute `exact_match` and `f1` in per cent of the predictions for these questions, in the same order.

    Each question counts by the best of its answers. If some questions have no answer, both kinds are scored separately
    as well (`HasAns_`, `NoAns_`).
    """
    pairs = []
    for one, given in zip(questions, predictions, strict=True):
        # Answers that normalization empties do not count, as in SQuAD 2.0's script; without others, no answer is right.
        expected = [text for text, _ in one.answers or () if normalized(text)] or [""]
        is_exact = any(normalized(given) == normalized(text) for text in expected)
        pairs.append((float(is_exact), max(f1(given, text) for text in expected)))
    values = 100 * np.array(pairs)
    found = dict(zip(("exact_match", "f1"), values.mean(axis=0).tolist(), strict=True))
    has_answer = np.array([bool(one.answers) for one in questions])
    if not has_answer.all():
        for name, chosen in (("HasAns", has_answer), ("NoAns", ~has_answer)):
            if chosen.any():
                means = values[chosen].mean(axis=0).tolist()
                found |= {f"{name}_exact": means[0], f"{name}_f1": means[1]}
    return found


def baseline(questions: Sequence[Question], *, may_have_no_answer: bool) -> dict[str, float]:
    """Compute the scores of the best guess that ignores the question: the first words of each paragraph, or nothing.

    Which guess is best, by F1, is chosen on these very questions; nothing is one only with `may_have_no_answer`.
    """
    guesses = [[" ".join(one.context.split(None, num)[:num]) for one in questions] for num in NUM_FIRST_WORDS]
    if may_have_no_answer:
        guesses.append([""] * len(questions))
    return max((scores(questions, guess) for guess in guesses), key=lambda found: found["f1"])
