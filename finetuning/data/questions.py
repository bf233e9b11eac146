"""Questions about paragraphs, as SQuAD has them, and the windows of paragraphs that a model reads."""

import copy
import gzip
import json
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from finetuning.config.settings import QuestionData
from finetuning.data.examples import SPLITS, num_samples, your_tables
from finetuning.data.rows import INDEX, INPUT_IDS, TOKEN_TYPES, EncodedRows
from finetuning.data.tables import Table, check_data_file, read_table
from mlm_common.errors import InputError
from mlm_common.storage import read_file

SQUAD_ENDINGS = (".json", ".json.gz")
COLUMNS = ("id", "question", "context", "answers", "is_impossible")
# No UTF-8 file can have them; JSON's escapes can.
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
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
    too_long: ids of the questions that leave no room for their paragraph, and have no window.
    not_found: ids of the questions whose answer is in no window.
    """

    questions: Sequence[Question]
    rows: EncodedRows
    question: NDArray[np.int32]
    begins: NDArray[np.int32]
    ends: NDArray[np.int32]
    too_long: Sequence[str] = ()
    not_found: Sequence[str] = ()


def read_questions(data: QuestionData) -> dict[str, list[Question]]:
    """Read {train, validation or test: questions} of the parts that are given.

    Raises:
        InputError: a file, a column or an answer is missing or malformed; an answer that is not in its paragraph; two
            questions with the same id in a part that is evaluated or predicted.
        HubAwayError: the Hub cannot be reached.
    """
    files = {split: getattr(data, f"{split}_file") for split in SPLITS}
    if data.dataset_name is None and str(files["train"]).endswith(SQUAD_ENDINGS):
        sources = {split: path for split, path in files.items() if path is not None}
        entries = {split: _squad_entries(path, f"--{split}-file") for split, path in sources.items()}
    else:
        tables = your_tables(data)
        sources = {split: table.name for split, table in tables.items()}
        entries = {split: _table_entries(table) for split, table in tables.items()}
    limits, parts = num_samples(data), {}
    for split, source in sources.items():
        some = enumerate(entries[split][: limits[split]], start=1)
        parts[split] = [_question(one, number, source, needs_answers=split != "test") for number, one in some]
        if split != "train":
            _check_ids(parts[split], source)
    _check_answered(parts, sources)
    return parts


def read_questions_to_predict(path: str, flag: str) -> list[Question]:
    """Read the questions of a file, which `flag` names, with or without answers.

    Raises:
        InputError: as `read_questions`.
    """
    entries = _squad_entries(path, flag) if path.endswith(SQUAD_ENDINGS) else _table_entries(read_table(path, flag))
    questions = [_question(one, number, path, needs_answers=False) for number, one in enumerate(entries, start=1)]
    _check_ids(questions, path)
    return questions


def _squad_entries(path: str, flag: str) -> list[Mapping[str, Any]]:
    check_data_file(path, flag)
    if not path.endswith(SQUAD_ENDINGS):
        raise InputError(
            f"{flag} must be a file in SQuAD's format, .json or .json.gz, like --train-file; received {path}."
        )
    content = read_file(path)
    try:
        articles = json.loads(gzip.decompress(content) if path.endswith(".gz") else content)["data"]
        entries: list[Mapping[str, Any]] = [
            {**one, "context": paragraph["context"]}
            for article in articles
            for paragraph in article["paragraphs"]
            for one in paragraph["qas"]
        ]
    except (ValueError, KeyError, TypeError, OSError, EOFError, zlib.error) as error:
        raise InputError(f"{flag} must be of SQuAD's form, data, paragraphs, qas; {path}: {error!r}.") from error
    if not entries:
        raise InputError(f"{flag} must name a file with questions; {path} has none.")
    return entries


def _table_entries(table: Table) -> list[Mapping[str, Any]]:
    names = [name for name in COLUMNS if name in table.columns]
    missing = [name for name in COLUMNS[:3] if name not in names]
    if missing:
        raise InputError(
            f"A table of questions needs the columns id, question, context and answers; {table.name} has no "
            f"{missing[0]}, only {', '.join(table.columns)}."
        )
    rows = zip(*(table.columns[name] for name in names), strict=True)
    return [dict(zip(names, row, strict=True)) for row in rows]


def _question(entry: Mapping[str, Any], number: int, source: str, *, needs_answers: bool) -> Question:
    """Make a question of an entry in either form."""
    name = entry.get("id")
    if not isinstance(name, str | int) or isinstance(name, bool) or LONE_SURROGATE.search(str(name)):
        raise InputError(f"Each id must be text or a whole number; question {number:,} of {source} has {_short(name)}.")
    place = f"question {_short(name)} of {source}"
    for key in ("question", "context"):
        if not isinstance(entry.get(key), str) or LONE_SURROGATE.search(entry[key]):
            raise InputError(f"The {key} must be text (Unicode); {place} has {_short(entry.get(key))}.")
    context, answers = entry["context"], _answers(entry, place)
    if answers is None and needs_answers:
        raise InputError(f"Each question to train or evaluate on must have answers; {place} has none.")
    for text, start in answers or ():
        if not text.strip():
            raise InputError(
                f"Each answer must have text; {place} has {text!r}. If the paragraph has no answer, leave the list of "
                "answers empty."
            )
        there = context[start : start + len(text)] if start >= 0 else ""
        if there != text:
            raise InputError(
                f"Each answer must be in the paragraph at its answer_start, which counts characters from 0; {place} "
                f"has {_short(text)} at {start}, but the paragraph has {_short(there)} there."
            )
    return Question(str(name), entry["question"].strip(), context, answers)


def _answers(entry: Mapping[str, Any], place: str) -> tuple[tuple[str, int], ...] | None:
    """Read the answers of an entry; None where they are not known."""
    answers, is_impossible = entry.get("answers"), entry.get("is_impossible")
    if is_impossible not in (None, False, True):
        raise InputError(f"is_impossible must be true or false; {place} has {_short(is_impossible)}.")
    if is_impossible:
        return ()
    if answers is None:
        return None
    pairs = _pairs(answers)
    if pairs is None or not all(isinstance(text, str) and type(start) is int for text, start in pairs):
        raise InputError(
            "answers must be a list of {text, answer_start}, or {text: [...], answer_start: [...]} with lists of equal "
            f"length, each text a string and each answer_start a whole number; {place} has {_short(answers)}."
        )
    # An empty list means that the paragraph has no answer, unless the entry says that it has one.
    return None if not pairs and is_impossible is not None else tuple(pairs)


def _pairs(answers: Any) -> list[tuple[Any, Any]] | None:
    """List (text, answer_start) of answers in either form; None where they have neither form."""
    if isinstance(answers, Mapping):
        texts, starts = answers.get("text"), answers.get("answer_start")
        if isinstance(texts, list) and isinstance(starts, list) and len(texts) == len(starts):
            return list(zip(texts, starts, strict=True))
    if isinstance(answers, list) and all(isinstance(one, Mapping) for one in answers):
        return [(one.get("text"), one.get("answer_start")) for one in answers]
    return None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


def _check_ids(questions: Sequence[Question], source: str) -> None:
    first: dict[str, int] = {}
    for number, one in enumerate(questions, start=1):
        if one.id in first:
            raise InputError(
                f"Each id of {source} must be unique, since predictions are written by id; questions {first[one.id]:,} "
                f"and {number:,} both have {_short(one.id)}."
            )
        first[one.id] = number


def _check_answered(parts: Mapping[str, Sequence[Question]], sources: Mapping[str, str]) -> None:
    """Check that no part to train or evaluate on is one whose answers were taken out."""
    if not any(one.answers for one in parts["train"]):
        raise InputError(f"Some questions to train on must have an answer; none of {sources['train']} has one.")
    has_all = all(one.answers for one in parts["train"])
    if has_all and "validation" in parts and not any(one.answers for one in parts["validation"]):
        raise InputError(
            f"Some questions to evaluate on must have an answer, as all of {sources['train']} have; none of "
            f"{sources['validation']} has one."
        )


def make_windows(
    tokenizer: PreTrainedTokenizerFast,
    questions: Sequence[Question],
    data: QuestionData,
    *,
    token_types: bool,
    to_train: bool = False,
) -> Windows:
    """Make the windows of all questions: each has the question and a stretch of the paragraph.

    Args:
        tokenizer: of the model.
        questions: with ids that need not be unique.
        data: length and overlap of the windows.
        token_types: keep whether a token is of the question or of the paragraph.
        to_train: leave out the windows of questions whose answer is in none, since they would teach that there is none.

    Raises:
        InputError: --max-seq-length leaves no room for any paragraph, or no window is left.
    """
    columns: dict[str, list[NDArray[np.int32]]] = {name: [] for name in (INPUT_IDS, TOKEN_TYPES, "begins", "ends")}
    of_questions: list[int] = []
    positions: list[tuple[int, int]] = []
    too_long, not_found = [], []
    # A copy: padding and truncation are a part of the tokenizer's state.
    backend = copy.deepcopy(tokenizer.backend_tokenizer)
    for first in range(0, len(questions), QUESTIONS_AT_ONCE):
        some = questions[first : first + QUESTIONS_AT_ONCE]
        for number, encodings in enumerate(_encodings(backend, some, data), start=first):
            question = questions[number]
            offsets = [_paragraph_offsets(one) for one in encodings]
            found = answer_positions(question, offsets)
            if not encodings:
                too_long.append(question.id)
            elif question.answers and not any(end for _, end in found):
                not_found.append(question.id)
                if to_train:
                    continue
            for encoding, window, position in zip(encodings, offsets, found, strict=True):
                columns[INPUT_IDS].append(np.array(encoding.ids, np.int32))
                columns[TOKEN_TYPES].append(np.array(encoding.type_ids, np.int32))
                columns["begins"].append(window[:, 0])
                columns["ends"].append(window[:, 1])
                of_questions.append(number)
                positions.append(position)
    if not positions:
        raise InputError(
            f"None of {len(questions):,} questions can be used: {len(too_long):,} are too long for --max-seq-length "
            f"{data.max_seq_length} with --doc-stride {data.stride}, and {len(not_found):,} have an answer that is in "
            "no window. Raise --max-seq-length, or lower --doc-stride."
        )
    starts = np.concatenate([[0], np.cumsum([len(row) for row in columns[INPUT_IDS]])]).astype(np.int64)
    joined = {name: np.concatenate(rows) for name, rows in columns.items()}
    begins, ends = joined.pop("begins"), joined.pop("ends")
    if not token_types:
        joined.pop(TOKEN_TYPES)
    start, end = np.array(positions, np.int32).T
    of_rows = {START: start, END: end, INDEX: np.arange(len(starts) - 1, dtype=np.int32)}
    rows = EncodedRows(starts, joined, of_rows)
    return Windows(questions, rows, np.array(of_questions, np.int32), begins, ends, too_long, not_found)


def _encodings(backend: Any, questions: Sequence[Question], data: QuestionData) -> Iterator[list[Any]]:
    """Yield the encodings of the windows of each question; none where it leaves no room for its paragraph.

    Args:
        backend: a tokenizer of `tokenizers`, whose truncation and padding are changed.
        questions: to encode.
        data: length and overlap of the windows.

    Raises:
        InputError: not even an empty question leaves room.
    """
    backend.no_truncation()
    backend.no_padding()  # else each question would be as long as the longest
    shared = data.stride if data.doc_stride_is == "overlap" else 0
    alone = backend.encode_batch([(one.question, "") for one in questions])
    rooms = [data.max_seq_length - len(encoding.ids) for encoding in alone]
    if data.max_seq_length - len(backend.encode("", "").ids) <= shared:
        raise InputError(_no_room(data, min(rooms)))
    fitting = [((one.question, one.context), room) for one, room in zip(questions, rooms, strict=True) if room > shared]
    if data.doc_stride_is == "overlap":
        backend.enable_truncation(data.max_seq_length, stride=shared, strategy="only_second")
        encodings = backend.encode_batch([pair for pair, _ in fitting])
    else:
        encodings = []
        for pair, room in fitting:
            backend.enable_truncation(data.max_seq_length, stride=max(0, room - data.stride), strategy="only_second")
            encodings.append(backend.encode(*pair))
    found = iter(encodings)
    for room in rooms:
        encoding = next(found) if room > shared else None
        yield [] if encoding is None else [encoding, *encoding.overflowing]


def _no_room(data: QuestionData, room: int) -> str:
    """Explain that windows cannot share that many tokens, where `room` are left after the longest question."""
    rule = f"--doc-stride {data.stride} is too large for --max-seq-length {data.max_seq_length}: after the longest"
    if room < 2:
        return f"{rule} question no tokens are left for the paragraph. Raise --max-seq-length."
    return f"{rule} question only {room} tokens are left for the paragraph. Try --doc-stride {max(1, room // 3)}."


def _paragraph_offsets(encoding: Any) -> NDArray[np.int32]:
    """Find the characters of the paragraph that each token covers, (tokens, 2); `OUTSIDE` for others."""
    is_context = np.array([one == 1 for one in encoding.sequence_ids])
    return np.where(is_context[:, np.newaxis], np.array(encoding.offsets), OUTSIDE).astype(np.int32)


def answer_positions(question: Question, windows: Sequence[NDArray[np.int32]]) -> list[tuple[int, int]]:
    """Find the first and the last token of the first answer in each window.

    Args:
        question: with its answers.
        windows: all windows of the question, (tokens, 2) each: where the tokens begin and end in the paragraph.

    Returns:
        (first, last) for each window, (0, 0) where the answer is not wholly in it. White space at both ends of the
        answer, and characters there that no token of the paragraph covers, do not count.
    """
    none = [(0, 0)] * len(windows)
    if not question.answers or not windows:
        return none
    text, start = question.answers[0]
    start, end = start + len(text) - len(text.lstrip()), start + len(text.rstrip())
    tokens = np.concatenate(windows)
    tokens = tokens[_covering(tokens, start, end)]
    if not len(tokens):
        return none
    # A tokenizer may drop characters, such as accents and those of no width.
    start, end = max(start, int(tokens[:, 0].min())), min(end, int(tokens[:, 1].max()))
    found = []
    for offsets in windows:
        inside = np.flatnonzero(_covering(offsets, start, end))
        is_whole = len(inside) and offsets[inside[0], 0] <= start and offsets[inside[-1], 1] >= end
        found.append((int(inside[0]), int(inside[-1])) if is_whole else (0, 0))
    return found


def _covering(offsets: NDArray[np.int32], start: int, end: int) -> NDArray[np.bool_]:
    return (offsets[:, 0] != OUTSIDE) & (offsets[:, 1] > start) & (offsets[:, 0] < end)
