"""Split paragraphs into the windows that a model reads, and choose answers from the model's logits."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from finetuning.config.settings import QuestionData
from finetuning.data.inputs import INPUT_IDS, TOKEN_TYPES, EncodedRows, join_rows
from finetuning.tasks.squad import Question
from mlm_common.errors import InputError

# Number of questions that the tokenizer encodes per call.
QUESTIONS_AT_ONCE = 1000
# Offset of tokens that are not in the paragraph.
OUTSIDE = -1
START, END = "start_position", "end_position"


@dataclass(frozen=True)
class Windows:
    """Questions, and the windows of their paragraphs that the model reads.

    Attributes:
        questions: all questions.
        rows: one row per window. The features `START` and `END` are the first and the last token of the answer, both 0
            if the window does not contain the answer.
        question: int32 (rows,), the index of each window's question.
        begins, ends: int32 (tokens,), the characters of the paragraph that each token covers; `OUTSIDE` for tokens that
            are not in the paragraph.
        too_long: ids of questions that are so long that no token is left for the paragraph; they have no window.
        not_found: ids of questions whose answer is in no window.
    """

    questions: Sequence[Question]
    rows: EncodedRows
    question: NDArray[np.int32]
    begins: NDArray[np.int32]
    ends: NDArray[np.int32]
    too_long: Sequence[str] = ()
    not_found: Sequence[str] = ()


def make_windows(
    tokenizer: PreTrainedTokenizerFast,
    questions: Sequence[Question],
    data: QuestionData,
    *,
    token_types: bool,
    to_train: bool = False,
) -> Windows:
    """Make the windows of all questions. Each window has the question and a section of the paragraph.

    Args:
        tokenizer: encodes questions and paragraphs.
        questions: all questions.
        data: settings of the windows.
        token_types: whether the model has token type ids.
        to_train: leave out questions whose answer is in no window, because such questions would teach that there is no
            answer.

    Raises:
        InputError: `--max-seq-length` leaves no room for any paragraph, or no window is left.
    """
    columns: dict[str, list[Any]] = {name: [] for name in (INPUT_IDS, TOKEN_TYPES, "begins", "ends")}
    question_numbers: list[int] = []
    positions: list[tuple[int, int]] = []
    too_long, not_found = [], []
    # Use a copy, because padding and truncation are part of the tokenizer's state.
    backend = copy.deepcopy(tokenizer.backend_tokenizer)
    for first in range(0, len(questions), QUESTIONS_AT_ONCE):
        chunk = questions[first : first + QUESTIONS_AT_ONCE]
        for number, encodings in enumerate(_encodings(backend, chunk, data), start=first):
            question = questions[number]
            offsets = [_paragraph_offsets(encoding) for encoding in encodings]
            positions_in_windows = answer_positions(question, offsets)
            if not encodings:
                too_long.append(question.id)
            elif question.answers and not any(end for _, end in positions_in_windows):
                not_found.append(question.id)
                if to_train:
                    continue
            for encoding, window, position in zip(encodings, offsets, positions_in_windows, strict=True):
                columns[INPUT_IDS].append(np.array(encoding.ids, np.int32))
                columns[TOKEN_TYPES].append(np.array(encoding.type_ids, np.int32))
                columns["begins"].append(window[:, 0])
                columns["ends"].append(window[:, 1])
                question_numbers.append(number)
                positions.append(position)
    if not positions:
        raise InputError(
            f"None of {len(questions):,} questions can be used: {len(too_long):,} are too long for --max-seq-length "
            f"{data.max_seq_length} with --doc-stride {data.stride}, and the answers of {len(not_found):,} do not fit "
            "into a window. Raise --max-seq-length, or lower --doc-stride."
        )
    begins, ends = (np.concatenate(columns.pop(name)) for name in ("begins", "ends"))
    if not token_types:
        columns.pop(TOKEN_TYPES)
    start, end = np.array(positions, np.int32).T
    rows = join_rows(columns, {START: start, END: end})
    return Windows(questions, rows, np.array(question_numbers, np.int32), begins, ends, too_long, not_found)


def _encodings(backend: Any, questions: Sequence[Question], data: QuestionData) -> Iterator[list[Any]]:
    """Yield for each question the encodings of its windows; an empty list if there is no room for its paragraph.

    Args:
        backend: a tokenizer of the library `tokenizers`. This function changes the tokenizer's truncation and padding.
        questions: questions to encode.
        data: settings of the windows.
    """
    backend.no_truncation()
    backend.no_padding()  # otherwise each question would be padded to the longest question
    shared = data.stride if data.doc_stride_is == "overlap" else 0
    alone = backend.encode_batch([(question.question, "") for question in questions])
    rooms = [data.max_seq_length - len(encoding.ids) for encoding in alone]
    if data.max_seq_length - len(backend.encode("", "").ids) <= shared:
        room = min(rooms)
        hint = "no tokens are left for the paragraph. Raise --max-seq-length."
        if room >= 2:
            hint = f"only {room} tokens are left for the paragraph. Try --doc-stride {max(1, room // 3)}."
        rule = f"--doc-stride {data.stride} is too large for --max-seq-length {data.max_seq_length}"
        raise InputError(f"{rule}: after the longest question {hint}")
    fitting = [
        ((question.question, question.context), room)
        for question, room in zip(questions, rooms, strict=True)
        if room > shared
    ]
    if data.doc_stride_is == "overlap":
        backend.enable_truncation(data.max_seq_length, stride=shared, strategy="only_second")
        encodings = backend.encode_batch([pair for pair, _ in fitting])
    else:
        encodings = []
        for pair, room in fitting:
            backend.enable_truncation(data.max_seq_length, stride=max(0, room - data.stride), strategy="only_second")
            encodings.append(backend.encode(*pair))
    next_encodings = iter(encodings)
    for room in rooms:
        encoding = next(next_encodings) if room > shared else None
        yield [] if encoding is None else [encoding, *encoding.overflowing]


def _paragraph_offsets(encoding: Any) -> NDArray[np.int32]:
    """Return the characters of the paragraph that each token covers, (tokens, 2); `OUTSIDE` for other tokens."""
    is_context = np.array([sequence == 1 for sequence in encoding.sequence_ids])
    return np.where(is_context[:, np.newaxis], np.array(encoding.offsets), OUTSIDE).astype(np.int32)


def answer_positions(question: Question, windows: Sequence[NDArray[np.int32]]) -> list[tuple[int, int]]:
    """Find the question's first answer in each window.

    At the ends of the answer, white space and characters that no token covers are ignored.

    Args:
        question: the question, with its answers.
        windows: for each window, the characters of the paragraph that its tokens cover, (tokens, 2).

    Returns:
        For each window, the first and the last token of the answer; (0, 0) if the window does not contain the whole
        answer.
    """
    not_found = [(0, 0)] * len(windows)
    if not question.answers or not windows:
        return not_found
    text, start = question.answers[0]
    start, end = start + len(text) - len(text.lstrip()), start + len(text.rstrip())
    tokens = np.concatenate(windows)
    tokens = tokens[_covering(tokens, start, end)]
    if not len(tokens):
        return not_found
    # A tokenizer may drop characters, such as accents and zero-width characters.
    start, end = max(start, int(tokens[:, 0].min())), min(end, int(tokens[:, 1].max()))
    positions = []
    for offsets in windows:
        inside = np.flatnonzero(_covering(offsets, start, end))
        is_whole = len(inside) and offsets[inside[0], 0] <= start and offsets[inside[-1], 1] >= end
        positions.append((int(inside[0]), int(inside[-1])) if is_whole else (0, 0))
    return positions


def _covering(offsets: NDArray[np.int32], start: int, end: int) -> NDArray[np.bool_]:
    """Return which tokens cover a character between `start` and `end`, bool (tokens,)."""
    return (offsets[:, 0] != OUTSIDE) & (offsets[:, 1] > start) & (offsets[:, 0] < end)


@dataclass(frozen=True)
class Answer:
    """The answer to a question.

    Attributes:
        text: text of the answer; empty if the model decides that the paragraph has no answer.
        best: the best answers, {text, probability, start_logit, end_logit}, by descending score.
        null_odds: score of "no answer" minus the score of the best text.
    """

    text: str
    best: list[dict[str, Any]]
    null_odds: float


def choose_answers(
    windows: Windows,
    start_logits: NDArray[np.float32],
    end_logits: NDArray[np.float32],
    *,
    num_best: int,
    max_answer_length: int,
    null_threshold: float | None,
) -> list[Answer]:
    """Choose the best answer to each question among all of its windows; the empty text if it has no window.

    Args:
        windows: windows of all questions.
        start_logits, end_logits: (rows, length), in the order of the windows.
        num_best: number of tokens per window that may begin an answer, and number that may end an answer; also the
            number of answers to return per question.
        max_answer_length: maximum number of tokens of an answer.
        null_threshold: choose "no answer" if `null_odds` exceeds it; None to always answer with a text.
    """
    question_rows: list[list[int]] = [[] for _ in windows.questions]
    for row, question in enumerate(windows.question):
        question_rows[question].append(row)
    answers = []
    for question, rows in zip(windows.questions, question_rows, strict=True):
        null = min((float(start_logits[row, 0] + end_logits[row, 0]) for row in rows), default=0.0)
        spans: list[tuple[float, float, str]] = []
        for row in rows:
            tokens = slice(*windows.rows.starts[row : row + 2])
            begins, ends = windows.begins[tokens], windows.ends[tokens]
            context_tokens = np.flatnonzero(begins != OUTSIDE)
            starts, stops = (
                context_tokens[np.argsort(-logits[context_tokens], kind="stable")[:num_best]]
                for logits in (start_logits[row], end_logits[row])
            )
            for start in starts:
                for stop in stops[(stops >= start) & (stops < start + max_answer_length)]:
                    # Some tokenizers' tokens include the space before the word.
                    text = question.context[begins[start] : ends[stop]].strip()
                    if text:
                        spans.append((float(start_logits[row, start]), float(end_logits[row, stop]), text))
        spans.sort(key=lambda span: -(span[0] + span[1]))
        best: dict[str, tuple[float, float]] = {}
        for start, end, text in spans:
            best.setdefault(text, (start, end))
        candidates = [(text, *logits) for text, logits in best.items()][:num_best] or [("", 0.0, 0.0)]
        odds = null - candidates[0][1] - candidates[0][2]
        has_none = null_threshold is not None and odds > null_threshold
        scores = np.array([start + end for _, start, end in candidates])
        probabilities = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
        listed = [
            {"text": text, "probability": float(probability), "start_logit": start, "end_logit": end}
            for (text, start, end), probability in zip(candidates, probabilities, strict=True)
        ]
        answers.append(Answer("" if has_none else candidates[0][0], listed, odds))
    return answers
