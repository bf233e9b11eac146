"""Answers chosen of logits, and how good they are: exact match and F1 as SQuAD's own script computes them."""

import functools
import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finetuning.data.questions import OUTSIDE, Question, Windows

_ARTICLES = re.compile(r"\b(a|an|the)\b")
# Words at the beginning of a paragraph that a guess answers with, whatever the question.
NUM_FIRST_WORDS = (1, 2, 3, 5, 10, 20)
_PUNCTUATION = str.maketrans("", "", string.punctuation)


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
    """Choose an answer for each question, of all its windows together.

    Args:
        windows: of the questions.
        start_logits, end_logits: (rows, length), in the order of the windows.
        num_best: of the tokens where an answer may begin, and end, and of the answers that are kept.
        max_answer_length: in tokens.
        null_threshold: there is no answer where `null_odds` exceeds it; None where there always is one.

    Returns:
        An answer to each question, in their order; the empty text for one without a window.
    """
    of_question: list[list[int]] = [[] for _ in windows.questions]
    for row, question in enumerate(windows.question):
        of_question[question].append(row)
    answers = []
    for question, rows in zip(windows.questions, of_question, strict=True):
        null = min((float(start_logits[row, 0] + end_logits[row, 0]) for row in rows), default=0.0)
        found: list[tuple[float, float, str]] = []
        for row in rows:
            found += _spans(windows, row, start_logits[row], end_logits[row], question, num_best, max_answer_length)
        found.sort(key=lambda one: -(one[0] + one[1]))
        best: dict[str, tuple[float, float]] = {}
        for start, end, text in found:
            best.setdefault(text, (start, end))
        kept = [(text, *logits) for text, logits in best.items()][:num_best] or [("", 0.0, 0.0)]
        odds = null - kept[0][1] - kept[0][2]
        has_none = null_threshold is not None and odds > null_threshold
        scores = np.array([start + end for _, start, end in kept])
        shares = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
        listed = [
            {"text": text, "probability": float(share), "start_logit": start, "end_logit": end}
            for (text, start, end), share in zip(kept, shares, strict=True)
        ]
        answers.append(Answer("" if has_none else kept[0][0], listed, odds))
    return answers


def _spans(
    windows: Windows,
    row: int,
    start_logits: NDArray[np.float32],
    end_logits: NDArray[np.float32],
    question: Question,
    num_best: int,
    max_answer_length: int,
) -> list[tuple[float, float, str]]:
    """List (start logit, end logit, text) of the likely spans of one window."""
    tokens = slice(*windows.rows.starts[row : row + 2])
    begins, ends = windows.begins[tokens], windows.ends[tokens]
    of_context = np.flatnonzero(begins != OUTSIDE)
    starts, stops = (
        of_context[np.argsort(-logits[of_context], kind="stable")[:num_best]] for logits in (start_logits, end_logits)
    )
    spans = []
    for start in starts:
        for stop in stops[(stops >= start) & (stops < start + max_answer_length)]:
            # A token of some tokenizers begins at the space before it.
            text = question.context[begins[start] : ends[stop]].strip()
            if text:
                spans.append((float(start_logits[start]), float(end_logits[stop]), text))
    return spans


@functools.lru_cache(maxsize=1 << 16)
def normalized(text: str) -> str:
    """Write a text in lower case, without punctuation, articles and superfluous white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, answer: str) -> float:
    """Compute 1 where both are the same but for case, punctuation, articles and white space, else 0."""
    return float(normalized(prediction) == normalized(answer))


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

    Each question counts by the best of its answers.

    Of questions of which some have no answer, also of those that have one (`HasAns_`) and those that have none.
    """
    pairs = []
    for one, given in zip(questions, predictions, strict=True):
        # An answer of which nothing is left is left out, as in SQuAD 2.0's script; without one, no answer is right.
        expected = [text for text, _ in one.answers or () if normalized(text)] or [""]
        pairs.append((max(exact_match(given, text) for text in expected), max(f1(given, text) for text in expected)))
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

    Which guess is best, by F1, is chosen on these very questions.

    Args:
        questions: with their answers.
        may_have_no_answer: whether nothing is a guess as well.
    """
    guesses = [[" ".join(one.context.split(None, num)[:num]) for one in questions] for num in NUM_FIRST_WORDS]
    if may_have_no_answer:
        guesses.append([""] * len(questions))
    return max((scores(questions, guess) for guess in guesses), key=lambda found: found["f1"])
