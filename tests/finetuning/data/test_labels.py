"""What stands in a column of labels, and what a model learns of it."""

import numpy as np
import pytest

from finetuning.data.labels import find_labels
from mlm_common.errors import InputError


@pytest.mark.parametrize(
    ("values", "problem_type", "names"),
    [
        (["b", "a", "b"], "single_label_classification", ("a", "b")),
        (["10", "9", "-1"], "single_label_classification", ("-1", "9", "10")),
        ([True, False], "single_label_classification", ("False", "True")),
        ([1.0, 0.0, None], "single_label_classification", ("0", "1")),
        (["0.5", "2"], "regression", ("score",)),
        ([1, 2.5], "regression", ("score",)),
        ([["x"], [], ["z", "x"]], "multi_label_classification", ("x", "z")),
    ],
)
def test_labels_are_found(values, problem_type, names) -> None:
    labels = find_labels(values, "a.csv", None)
    assert (labels.problem_type, labels.names) == (problem_type, names)


def test_labels_are_encoded() -> None:
    assert find_labels(["b", "a"], "", None).encode(["a", "b", "b"], "").tolist() == [0, 1, 1]
    assert find_labels([["x"], ["z"]], "", None).encode([["z", "x"], []], "").tolist() == [[1, 1], [0, 0]]
    numbers = find_labels(["0.5", "2"], "", None).encode(["1", "-0.25"], "")
    assert (numbers.tolist(), numbers.dtype) == ([1, -0.25], np.float32)


def test_the_order_of_a_model_that_knows_them_is_kept() -> None:
    known = {0: "entailment", 1: "contradiction"}
    assert find_labels(["contradiction", "entailment"], "", None, known).names == ("entailment", "contradiction")
    assert find_labels(["contradiction", "neutral"], "", None, known).names == ("contradiction", "neutral")


@pytest.mark.parametrize(
    ("values", "problem_type", "message"),
    [
        (["a", "a"], None, "all in a.csv are a"),
        ([None, ""], None, "all in a.csv are missing"),
        ([str(index) for index in range(1001)], None, "of at most 1000 classes; those in a.csv are of 1,001"),
    ],
)
def test_what_are_no_labels(values, problem_type, message) -> None:
    with pytest.raises(InputError, match=message):
        find_labels(values, "a.csv", problem_type)


@pytest.mark.parametrize(
    ("train", "values", "message"),
    [
        (["a", "b"], ["a", "c"], "must be one of the training part's: a, b; row 2 of b.csv has 'c'"),
        (["a", "b"], ["a", ""], "must have a label; row 2 of b.csv has none"),
        ([0.5, 1.5], [1.0, "x"], "must be a number; row 2 of b.csv has 'x'"),
        ([0.5, 1.5], [float("inf")], "must be a number; row 1"),
        ([["x"], ["y"]], [["q"]], "row 1 of b.csv has 'q'"),
    ],
)
def test_what_cannot_be_encoded(train, values, message) -> None:
    with pytest.raises(InputError, match=message):
        find_labels(train, "a.csv", None).encode(values, "b.csv")
