"""Rows of several texts of which one is right: columns that are known, columns of flags, labels, and bad rows."""

import re
from typing import Any

import numpy as np
import pytest

from finetuning.config.settings import ChoiceData
from finetuning.data.examples import Table
from finetuning.tasks.choice import Choices, check_num_choices, columns_of, encode_labels, names_of, read_choices
from mlm_common.errors import InputError

SWAG = {
    "sent1": ["He opens it."], "sent2": ["She"], "label": ["2"], "startphrase": ["He opens it. She"],
    **{f"ending{place}": [f"does {place}."] for place in range(4)},
}  # fmt: skip
RACE = {
    "example_id": ["h1"], "article": ["A text."], "question": ["It is _ ."], "options": [["a", "b", "c"]],
    "answer": ["B"],
}  # fmt: skip
COPA = {"choice1": ["It broke."], "choice2": ["It sang."], "question": ["effect"], "label": [0]}
COPA["premise"] = ["It fell."]
OTHER = {"body": ["A text."], "options": [["x", "y"]], "right": [1]}
NAMED = {"context_column_name": "body", "choice_column_names": ["options"], "label_column_name": "right"}
RENAMED = {"question_column_name": "startphrase", "choice_column_names": ["ending1", "ending0"]}
RENAMED["label_column_name"] = "other"


def read(table: dict[str, Any], **settings: Any) -> tuple[Choices, tuple[str, ...]]:
    data = ChoiceData(**settings)
    columns = columns_of(table, "t", data)
    choices = read_choices(Table("t", table), columns, needs_labels=True)
    return choices, names_of(choices, columns)


@pytest.mark.parametrize(
    ("table", "settings", "context", "choices", "names", "label"),
    [
        (SWAG, {}, "He opens it.", [f"She does {place}." for place in range(4)], "0123", 2),
        (RACE, {}, "A text.", ["It is a .", "It is b .", "It is c ."], "ABC", 1),
        (COPA, {}, "It fell.", [f"What happened as a result? It {verb}." for verb in ("broke", "sang")], "01", 0),
        (COPA | {"label": ["choice2"]}, {}, "It fell.", None, ("choice1", "choice2"), 1),
        (OTHER, NAMED, "A text.", ["x", "y"], "01", 1),
        (SWAG, RENAMED, "He opens it.", ["He opens it. She does 1.", "He opens it. She does 0."], "01", 1),
    ],
)
def test_columns_become_choices(table, settings, context, choices, names, label):
    parsed, parsed_names = read(table | {"other": [1]}, **settings)
    assert list(parsed.contexts) == [context]
    if choices is not None:
        assert [list(row) for row in parsed.choices] == [choices]
    assert parsed_names == tuple(names)
    assert encode_labels(parsed, parsed_names, may_be_missing=False).tolist() == [label]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (OTHER, "t must have the columns of SWAG, RACE or COPA, or of --context-column-name and --choice-column-names"),
        (RACE | {"options": [["a"]]}, "must hold lists of two or more texts, the same number in each row; row 1 has"),
        (RACE | {"options": [["a", 1]]}, "must hold lists of two or more texts"),
        (RACE | {"answer": ["D"]}, "Each label must be one of 0, 1, 2; row 1 of t has 'D'. In all rows, either"),
        (RACE | {"article": [None]}, "Column article of t must hold text; row 1 has None"),
        ({name: values for name, values in SWAG.items() if name != "label"}, "--label-column-name must name a column"),
    ],
)
def test_what_is_no_choice_is_one_line(table, message):
    with pytest.raises(InputError, match=message):
        encode_labels(*read(table), may_be_missing=False)


@pytest.mark.parametrize(
    ("question", "joined"),
    [
        ("He said ____ yesterday.", "He said yes yesterday."),
        ("__ it is.", "yes it is."),
        ("file_name is", "file_name is yes"),
        ("_ and _", "yes and _"),
    ],
)
def test_a_blank_is_underscores_that_are_no_part_of_a_word(question, joined):
    choices, _ = read(RACE | {"question": [question], "options": [["yes", "n\\1o"]]})
    assert list(choices.choices[0]) == [joined, re.sub(r"\byes\b", lambda _: "n\\1o", joined)]


@pytest.mark.parametrize("labels", [[1, 2, 3], ["1", "3", "2", "1"], [2] * 5])
def test_choices_that_seem_to_be_numbered_from_one_are_refused(labels):
    table = {name: values * len(labels) for name, values in SWAG.items()} | {"label": labels}
    with pytest.raises(InputError, match=r"choices of t must be numbered from 0; its labels are .* letters, A to D"):
        read(table)
    assert read(table | {"label": [0, *labels[1:]]})[1] == tuple("0123")


def test_a_zero_in_validation_shows_that_few_choices_are_numbered_from_zero():
    table = {name: values * 3 for name, values in SWAG.items()} | {"label": [1, 2, 3]}
    columns = columns_of(table, "t", ChoiceData())
    choices = read_choices(Table("t", table), columns, needs_labels=True)
    assert names_of(choices, columns, ["2", 0.0]) == tuple("0123")
    with pytest.raises(InputError, match="must be numbered from 0"):
        names_of(choices, columns, [1, 2, 3])


def test_rows_have_one_number_of_choices():
    rows = {name: values * 2 for name, values in RACE.items()}
    with pytest.raises(InputError, match="the same number in each row; row 2 has"):
        read(rows | {"options": [["a", "b", "c"], ["a", "b"]]})
    choices, names = read(rows)
    check_num_choices(choices, 3)
    with pytest.raises(InputError, match="Rows must have 4 choices, as in training; rows of t have 3"):
        check_num_choices(choices, 4)
    assert names == ("A", "B", "C")


def test_a_label_may_be_missing_in_what_is_predicted():
    labels = ["1", -1, None, "", "?", "0", float("nan"), 1.0]
    choices = Choices("t", ["c"] * 8, [["a", "b"]] * 8, labels)
    encoded = encode_labels(choices, ("0", "1"), may_be_missing=True)
    np.testing.assert_array_equal(encoded, [1, -1, -1, -1, -1, 0, -1, 1])
    with pytest.raises(InputError, match="Each label must be one of 0, 1; row 2 of t has -1"):
        encode_labels(choices, ("0", "1"), may_be_missing=False)
    with pytest.raises(InputError, match="row 1 of t has 'B'"):
        encode_labels(Choices("t", ["c"], [["a", "b"]], ["B"]), ("0", "1"), may_be_missing=True)
