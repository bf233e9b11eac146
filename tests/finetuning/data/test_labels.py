"""What a column of labels contains, and what a model learns of it."""

import re
import tracemalloc

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from finetuning.data.labels import LabelReading, find_labels
from mlm_common.errors import InputError


@pytest.mark.parametrize(
    ("values", "problem_type", "names", "encoded"),
    [
        (["b", "a", "b"], "single_label_classification", ("a", "b"), [1, 0, 1]),
        (["10", "9", "-1"], "single_label_classification", ("-1", "9", "10"), [2, 1, 0]),
        ([1.0, 0.0], "single_label_classification", ("0", "1"), [1, 0]),
        (["0.5", "2"], "regression", ("score",), [0.5, 2]),
        ([["x"], [], ["z", "x"]], "multi_label_classification", ("x", "z"), [[1, 0], [0, 0], [1, 1]]),
    ],
)
def test_labels_are_found_and_encoded(values, problem_type, names, encoded):
    labels = find_labels(values, "a.csv", LabelReading())
    assert (labels.problem_type, labels.names) == (problem_type, names)
    targets = labels.encode(values, "a.csv")
    dtype = np.int32 if problem_type == "single_label_classification" else np.float32
    assert (targets.tolist(), targets.dtype) == (encoded, dtype)


def test_the_order_of_a_model_that_knows_them_is_kept():
    id2label = {0: "entailment", 1: "contradiction"}
    assert find_labels([*id2label.values()], "", LabelReading(), id2label).names == ("entailment", "contradiction")
    assert find_labels(["contradiction", "neutral"], "", LabelReading(), id2label).names == ("contradiction", "neutral")


MULTI: dict = {"problem_type": "multi_label_classification"}
SINGLE: dict = {"problem_type": "single_label_classification"}


@pytest.mark.parametrize(
    ("train", "values", "message", "settings"),
    [
        (["a", "a"], [], "all in a.csv are a", {}),
        ([None, ""], [], "all in a.csv are missing", {}),
        (
            ["a", "b"],
            ["a", "c"],
            "Label 'c' in row 2 of b.csv does not occur in the training split, which has a, b",
            {},
        ),
        ([1.0, 0.0, None], [1, None], "must have a label; row 2 of b.csv has none", {}),
        ([1e39, 0.5], [1e39], r"must be a 32-bit number; row 1 of b.csv has 1e\+39", {}),
        ([["a"], None], [], "must be a list, or a string.*; row 2 of a.csv has none", MULTI),
    ],
)
def test_what_are_no_labels(train, values, message, settings):
    with pytest.raises(InputError, match=message):
        find_labels(train, "a.csv", LabelReading(**settings)).encode(values, "b.csv")


@pytest.mark.parametrize(
    ("values", "message", "settings", "expected"),
    [
        (["a,b", "b"], "may each contain several labels. Use --problem-type multi_label", MULTI, [[1, 1], [0, 1]]),
        (["a;b", "b;c"], "--label-separator ';'", {**MULTI, "label_separator": ";"}, [[1, 1, 0], [0, 1, 1]]),
        (["['a']", "b"], "are lists written as text", SINGLE, [0, 1]),
        ([[0, 1, 0], [1, 0, 0]], "Use --label-lists vectors", {"label_lists": "vectors"}, [[0, 1, 0], [1, 0, 0]]),
        ([[0, 1], [1, 0]], "or --label-lists names", {"label_lists": "names"}, [[1, 1], [1, 1]]),
        ([["a"], "b"], "Either all labels must be lists, or none", MULTI, [[1, 0], [0, 1]]),
        (["3,5", "4,0"], "--decimal-separator ',' for numbers", {"decimal_separator": ","}, [3.5, 4.0]),
        (["3,5", "4,0"], "may be numbers with a decimal comma", SINGLE, [0, 1]),
        (["1", "0", "nan"], "are numbers, except for 'nan' in row 3. Correct", SINGLE, [1, 0, 2]),
        (["0.5", "#N/A", "0.25", "n/a"], "are numbers, except for '#N/A' in row 2 and 1 more", SINGLE, [2, 0, 1, 3]),
        (["1'234.5", "3.5"], 'such as "1\'234.5" look like formatted numbers', SINGLE, [0, 1]),
        (["1\u202f234.50", "1\u202f000.25"], "without thousands separators", SINGLE, [1, 0]),
        (["x", " x", "X", "y"], r"differ only in white space, case", {"similar_labels": "merge"}, [0, 0, 0, 1]),
        (["1", "1.0", "0"], "the form of a number: ", {"similar_labels": "merge"}, [1, 1, 0]),
    ],
)
def test_labels_with_two_readings_need_a_flag(values, message, settings, expected):
    with pytest.raises(InputError, match=message):
        find_labels(values, "a.csv", LabelReading())
    labels = find_labels(values, "a.csv", LabelReading(**settings))
    assert labels.encode(values, "a.csv").tolist() == expected


def test_names_that_look_like_numbers_or_lists_are_classes():
    for values in (["--1", "x"], ["1_0", "2"], ["01", "1"], ["New York, NY", "Boston, MA"]):
        assert set(find_labels(values, "", LabelReading()).names) == set(values)


def test_labels_of_rows_to_predict_may_be_unknown():
    labels = find_labels(["a", "b"], "a.csv", LabelReading())
    scored = labels.encode_to_score(["b", "-1", None, "new", "a", "?", "newer", "new"], "b.csv")
    assert scored.is_labelled.tolist() == [True, False, False, True, True, False, True, True]
    assert scored.encoded[scored.is_labelled].tolist() == [1, 2, 0, 3, 2]
    assert scored.unseen == ("new", "newer")
    with pytest.raises(InputError, match=r"row 2 of b\.csv has 'B', but the training split has 'b'"):
        labels.encode_to_score(["a", "B"], "b.csv")


def test_several_unseen_labels_of_rows_to_predict_are_more_columns():
    labels = find_labels([["a"], ["b"]], "a.csv", LabelReading())
    scored = labels.encode_to_score([["a", "new"], [], None, ["b"], ["?"]], "b.csv")
    assert scored.is_labelled.tolist() == [True, True, False, True, False]
    assert scored.encoded.tolist() == [[1, 0, 1], [0, 0, 0], [0, 0, 0], [0, 1, 0], [0, 0, 0]]


def test_numbers_of_rows_to_predict_may_be_missing_but_not_wrong():
    labels = find_labels([0.5, 1.5], "a.csv", LabelReading())
    scored = labels.encode_to_score(["2.5", "n/a", None, "-1"], "b.csv")
    assert (scored.encoded.tolist(), scored.is_labelled.tolist()) == ([2.5, 0, 0, -1], [True, False, False, True])
    with pytest.raises(InputError, match=r"must be a 32-bit number; row 2 of b\.csv has 'x'"):
        labels.encode_to_score(["1", "x"], "b.csv")


ODD = ("#N/A", "inf", "missing", ".", "#DIV/0!", "n/a", "k.A.", "?", "12 EUR", "see note", "Infinity")


@given(
    numbers=st.lists(st.floats(-100, 100).map(lambda number: f"{number:.2f}"), min_size=4, max_size=30),
    odd=st.sampled_from(ODD),
    place=st.integers(0, 100),
    has_comma=st.booleans(),
)
def test_one_odd_value_among_numbers_is_refused_with_its_row(numbers, odd, place, has_comma):
    values = [number.replace(".", ",") for number in numbers] if has_comma else list(numbers)
    assume(any(not float(number).is_integer() for number in numbers))
    row = place % (len(values) + 1)
    values.insert(row, odd)
    reading = LabelReading(decimal_separator="," if has_comma else ".")
    with pytest.raises(InputError, match=f"except for {re.escape(repr(odd))} in row {row + 1}\\."):
        find_labels(values, "a.csv", reading)


def test_many_classes_are_encoded_in_little_memory():
    names = [str(index) for index in range(1000)]
    labels = find_labels([names], "", LabelReading(**MULTI))
    values = [[names[row % 1000]] for row in range(2000)]
    tracemalloc.start()
    encoded = labels.encode(values, "")
    assert tracemalloc.get_traced_memory()[1] < 1.1 * encoded.nbytes
    tracemalloc.stop()
    assert encoded.argmax(axis=1).tolist() == [row % 1000 for row in range(2000)]
