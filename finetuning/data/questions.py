"""Questions about paragraphs, as SQuAD has them, and the windows of paragraphs that a model reads."""

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from finetuning.config.settings import QuestionData
from finetuning.data.examples import SPLITS, own_tables
from finetuning.data.rows import INDEX, INPUT_IDS, TOKEN_TYPES, EncodedRows
from finetuning.data.tables import Table
from mlm_common.errors import InputError
from mlm_common.storage import folder_and_name, read_file

SQUAD_ENDINGS = (".json", ".json.gz")
# Questions that are encoded at once.
QUESTIONS_AT_ONCE = 1000
OUTSIDE = -1
START, END = "start_position", "end_position"


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


@dataclass(frozen=True)
class Windows:
    """Questions with what a model reads of their paragraphs.

    rows: a row for each window, with the tokens at which its answer begins and ends, `START` and `END`, which is token
        0 where it has none.
    question: int32 (rows,), the number of each window's question.
    begins, ends: int32 (tokens,), the characters of the paragraph that each token covers; `OUTSIDE` for others.
    """

    questions: Sequence[Question]
    rows: EncodedRows
    question: NDArray[np.int32]
    begins: NDArray[np.int32]
    ends: NDArray[np.int32]


def read_questions(data: QuestionData) -> dict[str, list[Question]]:
    """Read {train, validation or test: questions}, of those that are named.

    Raises:
        InputError: a file, a column or an answer is not there; an answer that is not in its paragraph.
        HubAwayError: the Hub cannot be reached.
    """
    files = {split: getattr(data, f"{split}_file") for split in SPLITS}
    limits = (data.max_train_samples, data.max_eval_samples, data.max_predict_samples)
    if data.dataset_name is None and str(files["train"]).endswith(SQUAD_ENDINGS):
        named = {split: path for split, path in files.items() if path is not None}
        parts = {split: _read_squad(path, f"--{split}-file") for split, path in named.items()}
    else:
        parts = {split: _of_table(table) for split, table in own_tables(data).items()}
    parts = {split: parts[split][:limit] for split, limit in zip(SPLITS, limits, strict=True) if split in parts}
    for split, questions in parts.items():
        for one in questions:
            _check(one, needs_answers=split != "test")
    return parts


def _read_squad(path: str, flag: str) -> list[Question]:
    folder, name = folder_and_name(path)
    if not (path.endswith(SQUAD_ENDINGS) and folder.exists(name)):
        raise InputError(f"{flag} must name a file of SQuAD's form, .json or .json.gz, as --train-file does; {path}.")
    content = read_file(path)
    try:
        articles = json.loads(gzip.decompress(content) if path.endswith(".gz") else content)["data"]
        questions = [
            Question(str(one["id"]), one["question"].strip(), paragraph["context"], _answers(one))
            for article in articles
            for paragraph in article["paragraphs"]
            for one in paragraph["qas"]
        ]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise InputError(f"{flag} must be of SQuAD's form, data, paragraphs, qas; {path}: {error!r}.") from error
    if not questions:
        raise InputError(f"{flag} must name a file with questions; {path} has none.")
    return questions


def _answers(question: Mapping[str, Any]) -> tuple[tuple[str, int], ...] | None:
    if question.get("is_impossible"):
        return ()
    answers = question.get("answers")
    return None if answers is None else tuple((one["text"], int(one["answer_start"])) for one in answers)


def _of_table(table: Table) -> list[Question]:
    ids, questions, contexts = (table.column(name, "The data set") for name in ("id", "question", "context"))
    answers: list[tuple[tuple[str, int], ...] | None] = [None] * table.num_rows
    if "answers" in table.columns:
        answers = [tuple(zip(one["text"], one["answer_start"], strict=True)) for one in table.columns["answers"]]
    return [Question(str(one), *rest) for one, *rest in zip(ids, questions, contexts, answers, strict=True)]


def _check(question: Question, *, needs_answers: bool) -> None:
    if question.answers is None and needs_answers:
        raise InputError(f"Each question to train or evaluate on must have answers; {question.id} has none.")
    for text, start in question.answers or ():
        if question.context[start : start + len(text)] != text or not text.strip():
            raise InputError(
                f"Each answer must stand at its answer_start in the paragraph; question {question.id} has "
                f"{text[:60]!r} at {start}, where {question.context[start : start + len(text)][:60]!r} stands."
            )


def make_windows(
    tokenizer: PreTrainedTokenizerFast, questions: Sequence[Question], data: QuestionData, *, token_types: bool
) -> Windows:
    """Make the windows of all questions: the question and as much of the paragraph as fits, again and again.

    Raises:
        InputError: a question that leaves no room for its paragraph.
    """
    columns: dict[str, list[NDArray[np.int32]]] = {name: [] for name in (INPUT_IDS, TOKEN_TYPES, "begins", "ends")}
    of_questions: list[int] = []
    positions: list[tuple[int, int]] = []
    for first in range(0, len(questions), QUESTIONS_AT_ONCE):
        some = questions[first : first + QUESTIONS_AT_ONCE]
        for number, encoding in _encodings(tokenizer, some, data):
            is_context = np.array([one == 1 for one in encoding.sequence_ids])
            offsets = np.where(is_context[:, np.newaxis], np.array(encoding.offsets), OUTSIDE).astype(np.int32)
            columns[INPUT_IDS].append(np.array(encoding.ids, np.int32))
            columns[TOKEN_TYPES].append(np.array(encoding.type_ids, np.int32))
            columns["begins"].append(offsets[:, 0])
            columns["ends"].append(offsets[:, 1])
            of_questions.append(first + number)
            positions.append(answer_tokens(some[number], offsets[:, 0], offsets[:, 1]))
    starts = np.concatenate([[0], np.cumsum([len(row) for row in columns[INPUT_IDS]])]).astype(np.int64)
    joined = {name: np.concatenate(rows) for name, rows in columns.items()}
    begins, ends = joined.pop("begins"), joined.pop("ends")
    if not token_types:
        joined.pop(TOKEN_TYPES)
    start, end = np.array(positions, np.int32).T
    of_rows = {START: start, END: end, INDEX: np.arange(len(starts) - 1, dtype=np.int32)}
    return Windows(questions, EncodedRows(starts, joined, of_rows), np.array(of_questions, np.int32), begins, ends)


def _encodings(
    tokenizer: PreTrainedTokenizerFast, questions: Sequence[Question], data: QuestionData
) -> Iterator[tuple[int, Any]]:
    """Yield (number of the question, encoding of one of its windows)."""
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    alone = backend.encode_batch([(one.question, "") for one in questions])
    rooms = [data.max_seq_length - len(encoding.ids) for encoding in alone]
    shared = data.doc_stride if data.doc_stride_is == "overlap" else 0
    for one, room in zip(questions, rooms, strict=True):
        if room <= shared:
            raise InputError(
                f"--max-seq-length {data.max_seq_length} must leave room beside each question for more of a paragraph "
                f"than the {shared} tokens that windows share; that of {one.id} leaves {max(0, room)}. Raise it, or "
                "lower --doc-stride."
            )
    pairs = [(one.question, one.context) for one in questions]
    if data.doc_stride_is == "overlap":
        backend.enable_truncation(data.max_seq_length, stride=shared, strategy="only_second")
        encodings = backend.encode_batch(pairs)
    else:
        encodings = []
        for pair, room in zip(pairs, rooms, strict=True):
            backend.enable_truncation(
                data.max_seq_length, stride=max(0, room - data.doc_stride), strategy="only_second"
            )
            encodings.append(backend.encode(*pair))
    backend.no_truncation()
    for number, encoding in enumerate(encodings):
        for window in (encoding, *encoding.overflowing):
            yield number, window


def answer_tokens(question: Question, begins: NDArray[np.int32], ends: NDArray[np.int32]) -> tuple[int, int]:
    """Find the first and the last token of the first answer in a window; (0, 0) where it is not wholly in it."""
    if not question.answers:
        return 0, 0
    text, start = question.answers[0]
    end = start + len(text)
    tokens = np.flatnonzero(begins != OUTSIDE)
    if not len(tokens) or begins[tokens[0]] > start or ends[tokens[-1]] < end:
        return 0, 0
    of_answer = tokens[(ends[tokens] > start) & (begins[tokens] < end)]
    return (int(of_answer[0]), int(of_answer[-1])) if len(of_answer) else (0, 0)
