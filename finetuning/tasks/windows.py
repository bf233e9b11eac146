"""Windows of paragraphs, which a model reads to answer questions, and the answers chosen from its logits."""

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

# Questions that are encoded at once.
QUESTIONS_AT_ONCE = 1000
OUTSIDE = -1
START, END = "start_position", "end_position"


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


def make_windows(
    tokenizer: PreTrainedTokenizerFast,
    questions: Sequence[Question],
    data: QuestionData,
    *,
    token_types: bool,
    to_train: bool = False,
) -> Windows:
    """Make the windows of all questions: each has the question and a stretch of the paragraph.

    Windows of questions whose answer is in none are left out with `to_train`, since they would teach that there is
    none.

    Raises:
        InputError: --max-seq-length leaves no room for any paragraph, or no window is left.
    """
    columns: dict[str, list[Any]] = {name: [] for name in (INPUT_IDS, TOKEN_TYPES, "begins", "ends")}
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
    begins, ends = (np.concatenate(columns.pop(name)) for name in ("begins", "ends"))
    if not token_types:
        columns.pop(TOKEN_TYPES)
    start, end = np.array(positions, np.int32).T
    rows = join_rows(columns, {START: start, END: end})
    return Windows(questions, rows, np.array(of_questions, np.int32), begins, ends, too_long, not_found)


def _encodings(backend: Any, questions: Sequence[Question], data: QuestionData) -> Iterator[list[Any]]:
    """Yield the encodings of the windows of each question; none where it leaves no room for its paragraph.

    Truncation and padding of the backend, a tokenizer of `tokenizers`, are changed.
    """
    backend.no_truncation()
    backend.no_padding()  # else each question would be as long as the longest
    shared = data.stride if data.doc_stride_is == "overlap" else 0
    alone = backend.encode_batch([(one.question, "") for one in questions])
    rooms = [data.max_seq_length - len(encoding.ids) for encoding in alone]
    if data.max_seq_length - len(backend.encode("", "").ids) <= shared:
        room = min(rooms)
        hint = "no tokens are left for the paragraph. Raise --max-seq-length."
        if room >= 2:
            hint = f"only {room} tokens are left for the paragraph. Try --doc-stride {max(1, room // 3)}."
        rule = f"--doc-stride {data.stride} is too large for --max-seq-length {data.max_seq_length}"
        raise InputError(f"{rule}: after the longest question {hint}")
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


def _paragraph_offsets(encoding: Any) -> NDArray[np.int32]:
    """Find the characters of the paragraph that each token covers, (tokens, 2); `OUTSIDE` for others."""
    is_context = np.array([one == 1 for one in encoding.sequence_ids])
    return np.where(is_context[:, np.newaxis], np.array(encoding.offsets), OUTSIDE).astype(np.int32)


def answer_positions(question: Question, windows: Sequence[NDArray[np.int32]]) -> list[tuple[int, int]]:
    """Find the first and the last token of the first answer in each window; (0, 0) where it is not wholly in it.

    White space at both ends of the answer, and characters there that no token of the paragraph covers, do not count.
    Each window is (tokens, 2): where the tokens begin and end in the paragraph.
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


@dataclass(frozen=True)
class Answer:
    """What is answered to one question.

    text: empty where the paragraph is said to have no answer.
    best: the best answers, {text, probability, start_logit, end_logit}, by falling score.
    null_odds: how much higher the score of no answer is than that of the best text.
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
    """Choose an answer for each question, of all its windows together; the empty text for one without a window.

    Args:
        start_logits, end_logits: (rows, length), in the order of the windows.
        num_best: of the tokens where an answer may begin, and end, and of the answers that are kept.
        max_answer_length: in tokens.
        null_threshold: there is no answer where `null_odds` exceeds it; None where there always is one.
    """
    of_question: list[list[int]] = [[] for _ in windows.questions]
    for row, question in enumerate(windows.question):
        of_question[question].append(row)
    answers = []
    for question, rows in zip(windows.questions, of_question, strict=True):
        null = min((float(start_logits[row, 0] + end_logits[row, 0]) for row in rows), default=0.0)
        spans: list[tuple[float, float, str]] = []
        for row in rows:
            tokens = slice(*windows.rows.starts[row : row + 2])
            begins, ends = windows.begins[tokens], windows.ends[tokens]
            of_context = np.flatnonzero(begins != OUTSIDE)
            starts, stops = (
                of_context[np.argsort(-logits[of_context], kind="stable")[:num_best]]
                for logits in (start_logits[row], end_logits[row])
            )
            for start in starts:
                for stop in stops[(stops >= start) & (stops < start + max_answer_length)]:
                    # A token of some tokenizers begins at the space before it.
                    text = question.context[begins[start] : ends[stop]].strip()
                    if text:
                        spans.append((float(start_logits[row, start]), float(end_logits[row, stop]), text))
        spans.sort(key=lambda one: -(one[0] + one[1]))
        best: dict[str, tuple[float, float]] = {}
        for start, end, text in spans:
            best.setdefault(text, (start, end))
        kept = [(text, *logits) for text, logits in best.items()][:num_best] or [("", 0.0, 0.0)]
        odds = null - kept[0][1] - kept[0][2]
        has_none = null_threshold is not None and odds > null_threshold
        scores = np.array([start + end for _, start, end in kept])
        probabilities = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
        listed = [
            {"text": text, "probability": float(probability), "start_logit": start, "end_logit": end}
            for (text, start, end), probability in zip(kept, probabilities, strict=True)
        ]
        answers.append(Answer("" if has_none else kept[0][0], listed, odds))
    return answers
