"""Read and check questions in SQuAD's format, and compute exact match and F1 as SQuAD's script does."""

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
# Half of a surrogate pair, which can occur in JSON escapes but not in UTF-8.
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
# The baseline answers every question with the first words of its paragraph, for each of these numbers of words.
NUM_FIRST_WORDS = (1, 2, 3, 5, 10, 20)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class NotSquadError(InputError):
    """A file is not in SQuAD's format."""


@dataclass(frozen=True)
class Question:
    """A question about a paragraph.

    Attributes:
        id: the key of the question in the files of predictions.
        question: text of the question.
        context: the paragraph.
        answers: the right answers, each with the index of its first character in the paragraph. Empty if the paragraph
            has no answer, None if the answers are unknown.
    """

    id: str
    question: str
    context: str
    answers: tuple[tuple[str, int], ...] | None


def read_questions(data: QuestionData) -> dict[str, list[Question]]:
    """Read the questions of all splits, {"train", "validation" or "test": questions}.

    Raises:
        InputError: a file, a column or an answer is missing or malformed, an answer is not in its paragraph, or two
            questions of a validation or test split have the same id.
        HubAwayError: the Hub cannot be reached.
    """
    if data.dataset_name is None and str(data.train_file).endswith(SQUAD_ENDINGS):
        # The validation split is also predicted, so --do-predict does not need a test split.
        tables = read_tables(replace(data, do_predict=False), _read_squad)
    else:
        tables = read_tables(data)
    splits = {split: _questions(table, needs_answers=split != "test") for split, table in tables.items()}
    for split, questions in splits.items():
        if split != "train":
            _check_ids(questions, tables[split].name)
    _check_answered(splits, tables)
    return splits


def read_questions_to_predict(path: str, flag: str) -> list[Question]:
    """Read the questions of a file, with or without answers.

    Args:
        path: path of the file.
        flag: flag that names the file, used in error messages.

    Raises:
        NotSquadError: a .json file is not in SQuAD's format.
        InputError: the file cannot be read, or a question is malformed.
    """
    table = _read_squad(path, flag) if path.endswith(SQUAD_ENDINGS) else read_table(path, flag)
    questions = _questions(table, needs_answers=False)
    _check_ids(questions, path)
    return questions


def read_paragraphs(path: str, flag: str) -> list[dict[str, Any]]:
    """Read the paragraphs of a file in SQuAD's format.

    Args:
        path: path of the file.
        flag: flag that names the file, used in error messages.

    Returns:
        For each paragraph, {"context": text of the paragraph, "qas": its questions}.

    Raises:
        NotSquadError: the file has a different format.
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
            {"context": paragraph["context"], "qas": [dict(entry) for entry in paragraph.get("qas") or ()]}
            for article in articles
            for paragraph in article["paragraphs"]
        ]
    except (ValueError, KeyError, TypeError, AttributeError, OSError, EOFError, zlib.error) as error:
        raise NotSquadError(
            f"{flag} must be in SQuAD's format, with data, paragraphs and qas; {path} is not: {error!r}."
        ) from error
    for number, paragraph in enumerate(paragraphs, start=1):
        context = paragraph["context"]
        if not isinstance(context, str) or LONE_SURROGATE.search(context):
            raise InputError(
                f"The context must be text (Unicode); paragraph {number:,} of {path} has {short(context)}."
            )
    return paragraphs


def _read_squad(path: str, flag: str) -> Table:
    entries = [
        {**entry, "context": paragraph["context"]}
        for paragraph in read_paragraphs(path, flag)
        for entry in paragraph["qas"]
    ]
    if not entries:
        raise InputError(f"{flag} must name a file with questions; {path} has none.")
    return Table(path, {name: [entry.get(name) for entry in entries] for name in COLUMNS})


def _questions(table: Table, *, needs_answers: bool) -> list[Question]:
    names = [name for name in COLUMNS if name in table.columns]
    missing = [name for name in COLUMNS[:3] if name not in names]
    if missing:
        raise InputError(
            f"A table of questions must have the columns id, question, context and answers; {table.name} has "
            f"{', '.join(table.columns)}, but no {missing[0]}."
        )
    rows = zip(*(table.columns[name] for name in names), strict=True)
    entries = (dict(zip(names, row, strict=True)) for row in rows)
    return [_question(entry, number, table.name, needs_answers) for number, entry in enumerate(entries, start=1)]


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
        text_there = context[start : start + len(text)] if start >= 0 else ""
        if text_there != text:
            raise InputError(
                f"Each answer must be in the paragraph at its answer_start, which counts characters from 0; {place} "
                f"has {short(text)} at {start}, but the paragraph has {short(text_there)} there."
            )
    return Question(str(name), entry["question"].strip(), context, answers)


def _answers(entry: Mapping[str, Any], place: str) -> tuple[tuple[str, int], ...] | None:
    """Read the answers of an entry; None if the answers are unknown."""
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
    elif isinstance(answers, list) and all(isinstance(answer, Mapping) for answer in answers):
        pairs = [(answer.get("text"), answer.get("answer_start")) for answer in answers]
    if pairs is None or not all(isinstance(text, str) and type(start) is int for text, start in pairs):
        raise InputError(
            "answers must be a list of {text, answer_start}, or {text: [...], answer_start: [...]} with lists of equal "
            f"length, each text a string and each answer_start a whole number; {place} has {short(answers)}."
        )
    # An empty list means that the paragraph has no answer, unless `is_impossible` is false: then answers are unknown.
    return None if not pairs and is_impossible is not None else tuple(pairs)


def _check_ids(questions: Sequence[Question], source: str) -> None:
    numbers: dict[str, int] = {}
    for number, question in enumerate(questions, start=1):
        if question.id in numbers:
            raise InputError(
                f"Each id of {source} must be unique, because predictions are written by id; questions "
                f"{numbers[question.id]:,} and {number:,} both have {short(question.id)}."
            )
        numbers[question.id] = number


def _check_answered(splits: Mapping[str, Sequence[Question]], tables: Mapping[str, Table]) -> None:
    """Check that the training and validation splits have not been stripped of their answers."""
    if not any(question.answers for question in splits["train"]):
        raise InputError(f"Some questions to train on must have an answer; none of {tables['train'].name} has one.")
    has_all = all(question.answers for question in splits["train"])
    if has_all and "validation" in splits and not any(question.answers for question in splits["validation"]):
        raise InputError(
            f"No question of {tables['validation'].name} has an answer, but all of {tables['train'].name} have one. "
            "Use a file with answers to evaluate on."
        )


@functools.lru_cache(maxsize=1 << 16)
def normalized(text: str) -> str:
    """Return a text in lower case, without punctuation, articles and superfluous white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def f1(prediction: str, answer: str) -> float:
    """Compute F1 over words, the harmonic mean of the words' precision and recall."""
    predicted, expected = normalized(prediction).split(), normalized(answer).split()
    if not predicted or not expected:
        return float(predicted == expected)
    num_shared = sum((Counter(predicted) & Counter(expected)).values())
    if num_shared == 0:
        return 0.0
    precision, recall = num_shared / len(predicted), num_shared / len(expected)
    return 2 * precision * recall / (precision + recall)


def scores(questions: Sequence[Question], predictions: Sequence[str]) -> dict[str, float]:
    """Compute `exact_match` and `f1` in percent.

    Each prediction is compared with all right answers of its question, and the best score counts. If some questions
    have no answer, answerable and unanswerable questions are also scored separately (`HasAns_`, `NoAns_`).

    Args:
        questions: the questions, with their right answers.
        predictions: one prediction for each question, in the same order.
    """
    pairs = []
    for question, prediction in zip(questions, predictions, strict=True):
        # Answers that are empty once normalized do not count, as in SQuAD 2.0's script. If no answer remains, the empty
        # text is the right answer.
        expected = [text for text, _ in question.answers or () if normalized(text)] or [""]
        is_exact = any(normalized(prediction) == normalized(text) for text in expected)
        pairs.append((float(is_exact), max(f1(prediction, text) for text in expected)))
    values = 100 * np.array(pairs)
    metrics = dict(zip(("exact_match", "f1"), values.mean(axis=0).tolist(), strict=True))
    has_answer = np.array([bool(question.answers) for question in questions])
    if not has_answer.all():
        for name, chosen in (("HasAns", has_answer), ("NoAns", ~has_answer)):
            if chosen.any():
                means = values[chosen].mean(axis=0).tolist()
                metrics |= {f"{name}_exact": means[0], f"{name}_f1": means[1]}
    return metrics


def baseline(questions: Sequence[Question], *, may_have_no_answer: bool) -> dict[str, float]:
    """Compute the scores of the best guess that ignores the question.

    The guesses are the first words of each paragraph, and with `may_have_no_answer` also the empty text. The guess with
    the best F1 on these questions counts.
    """
    guesses = [[" ".join(question.context.split(None, num)[:num]) for question in questions] for num in NUM_FIRST_WORDS]
    if may_have_no_answer:
        guesses.append([""] * len(questions))
    return max((scores(questions, guess) for guess in guesses), key=lambda metrics: metrics["f1"])
