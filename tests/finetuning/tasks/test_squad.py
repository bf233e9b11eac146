"""Exact match and F1 against SQuAD's script; answers chosen of logits that are written down."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetuning.data.inputs import EncodedRows
from finetuning.tasks.squad import Question, scores
from finetuning.tasks.windows import Windows, choose_answers
from tests.fixtures.squad_script import squad_evaluate

PIECES = st.lists(st.sampled_from(["the", "A", "U.S.", "cat", "dog", "-", "1999", "é"]), max_size=4).map(" ".join)


@settings(max_examples=60)
@given(st.lists(st.tuples(PIECES, st.lists(PIECES, max_size=3)), min_size=1, max_size=5))
def test_scores_are_those_of_the_script(cases):
    answers = [tuple((text, 0) for text in texts) for _, texts in cases]
    questions = [Question(str(number), "", "", gold_answers) for number, gold_answers in enumerate(answers)]
    predictions = {str(number): prediction for number, (prediction, _) in enumerate(cases)}
    entries = [
        {"id": question.id, "answers": [{"text": text} for text, _ in question.answers or ()]} for question in questions
    ]
    theirs = squad_evaluate(entries, predictions)
    ours = scores(questions, [prediction for prediction, _ in cases])
    assert ours["exact_match"] == pytest.approx(theirs["exact"])
    assert ours["f1"] == pytest.approx(theirs["f1"])
    for name in ("HasAns_f1", "NoAns_exact"):
        if name in ours:
            assert ours[name] == pytest.approx(theirs[name])


# [CLS] ? [SEP] one two three [SEP], the paragraph in two windows of which the second lacks its first word.
BEGINS = np.array([-1, -1, -1, 0, 3, 7, -1, -1, -1, -1, 3, 7, -1], np.int32)
ENDS = np.array([-1, -1, -1, 3, 7, 13, -1, -1, -1, -1, 7, 13, -1], np.int32)
WINDOWS = Windows(
    [Question("q", "?", "one two three", None)],
    EncodedRows(np.array([0, 7, 13]), {}, {}),
    np.array([0, 0], np.int32),
    BEGINS,
    ENDS,
)


def logits(*high: tuple[int, int, float]) -> np.ndarray:
    values = np.zeros((2, 8), np.float32)
    for row, token, value in high:
        values[row, token] = value
    return values


def chosen(start: np.ndarray, end: np.ndarray, null_threshold: float | None = None, length: int = 30):
    (answer,) = choose_answers(WINDOWS, start, end, num_best=3, max_answer_length=length, null_threshold=null_threshold)
    return answer


def test_the_best_span_of_all_windows():
    answer = chosen(logits((0, 3, 2.0), (1, 3, 3.0)), logits((0, 5, 1.0), (1, 4, 2.5)))
    assert answer.text == "two three"
    assert [span["text"] for span in answer.best] == ["two three", "one two three", "two"]
    assert answer.best[0]["start_logit"] + answer.best[0]["end_logit"] == 5.5
    assert sum(span["probability"] for span in answer.best) == pytest.approx(1.0)


def test_answers_have_an_order_and_a_longest_length():
    start, end = logits((0, 5, 9.0), (0, 3, 5.0)), logits((0, 3, 9.0), (0, 5, 5.0))
    assert {span["text"] for span in chosen(start, end).best} == {"one", "one two three", "three"}
    assert "one two three" not in {span["text"] for span in chosen(start, end, length=2).best}
    assert not any("?" in span["text"] for span in chosen(logits((0, 1, 99.0)), logits((0, 2, 99.0))).best)


def test_no_answer():
    """Its score is the lowest of all windows, since an answer may be in one of them."""
    start, end = logits((0, 0, 9.0), (1, 0, 4.0), (1, 3, 2.0)), logits((1, 3, 1.0))
    assert chosen(start, end).text == "two"
    answer = chosen(start, end, null_threshold=0.0)
    assert (answer.text, answer.null_odds) == ("", pytest.approx(4.0 - 3.0))
    assert chosen(start, end, null_threshold=1.5).text == "two"
