"""Rows of several texts of which one is right: those of SWAG, RACE and COPA, or of other columns."""

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finetuning.config.choice import ChoiceData
from finetuning.data.examples import texts_of
from finetuning.data.labels import is_missing
from finetuning.data.tables import Table
from mlm_common.errors import InputError

# COPA's questions, in the words of SuperGLUE (Wang et al. 2019).
QUESTIONS = {"cause": "What was the cause of this?", "effect": "What happened as a result?"}
# Where a question has it, each choice is put there.
BLANK = "_"


@dataclass(frozen=True)
class Columns:
    """The columns of a table: a context, the beginning of each choice, choices, and the right one."""

    context: str
    question: str | None
    choices: tuple[str, ...]
    label: str


KNOWN = (
    Columns("sent1", "sent2", ("ending0", "ending1", "ending2", "ending3"), "label"),  # SWAG
    Columns("article", "question", ("options",), "answer"),  # RACE
    Columns("premise", "question", ("choice1", "choice2"), "label"),  # COPA
)


@dataclass(frozen=True)
class Choices:
    """Contexts, and for each the texts to choose from, all rows the same number of them.

    name: of the table.
    labels: as in the table; None where it has none.
    """

    name: str
    contexts: Sequence[str]
    choices: Sequence[Sequence[str]]
    labels: Sequence[Any] | None

    @property
    def num_choices(self) -> int:
        return len(self.choices[0])


def columns_of(columns: Mapping[str, Any], name: str, data: ChoiceData) -> Columns:
    """Find out which columns of the table `name` are read as what: those of the flags, else those that are known.

    Raises:
        InputError: the flags leave columns open that are none of the known ones.
    """
    found = next((one for one in KNOWN if {one.context, *one.choices} <= columns.keys()), None)
    if found is None:
        if not data.context_column_name or not data.choice_column_names:
            raise InputError(
                f"--context-column-name and --choice-column-names must name columns of {name}, which are not those of "
                f"SWAG, RACE or COPA: {', '.join(columns)}."
            )
        found = Columns("", None, (), "label")
    context, label = data.context_column_name or found.context, data.label_column_name or found.label
    choices = tuple(data.choice_column_names) or found.choices
    return Columns(context, data.question_column_name or found.question, choices, label)


def read_choices(table: Table, columns: Columns, *, needs_labels: bool) -> Choices:
    """Read the rows of a table.

    Raises:
        InputError: a column is missing or holds something else, or rows differ in the number of their choices.
    """
    (contexts,) = texts_of(table, [columns.context], "--context-column-name")
    if len(columns.choices) == 1:
        lists = table.column(columns.choices[0], "--choice-column-names")
    else:
        lists = list(zip(*texts_of(table, columns.choices, "--choice-column-names"), strict=True))
    for row, choices in enumerate(lists, start=1):
        is_right = isinstance(choices, list | tuple) and all(isinstance(one, str) for one in choices)
        if not is_right or len(choices) < 2 or len(choices) != len(lists[0]):
            raise InputError(
                f"Column {columns.choices[0]} of {table.name} must hold lists of two or more texts, all of one length; "
                f"row {row:,} has {choices!r:.200}."
            )
    if columns.question is not None:
        (questions,) = texts_of(table, [columns.question], "--question-column-name")
        pairs = zip((QUESTIONS.get(one, one) for one in questions), lists, strict=True)
        lists = [[_joined(question, one) for one in row] for question, row in pairs]
    labels: Sequence[Any] | None = None
    if needs_labels or columns.label in table.columns:
        labels = table.column(columns.label, "--label-column-name")
    return Choices(table.name, contexts, lists, labels)


def _joined(question: str, choice: str) -> str:
    return question.replace(BLANK, choice) if BLANK in question else f"{question} {choice}"


def _name(label: Any) -> str:
    return str(int(label)) if isinstance(label, float) and label.is_integer() else str(label).strip()


def names_of(train: Choices, columns: Columns) -> tuple[str, ...]:
    """Name the choices as most labels to train on do: by numbers, letters, or columns."""
    number, labels = train.num_choices, [_name(one) for one in train.labels or ()]
    letters = tuple(string.ascii_uppercase[:number])
    forms = (places(number), letters, *([columns.choices] if len(columns.choices) > 1 else []))
    return max(forms, key=lambda one: sum(label in one for label in labels))


def places(number: int) -> tuple[str, ...]:
    return tuple(map(str, range(number)))


def check_number(choices: Choices, number: int) -> None:
    """Check that rows have the number of choices of training."""
    if choices.num_choices != number:
        raise InputError(
            f"Rows must have {number} choices, as in training; those of {choices.name} have {choices.num_choices}."
        )


def encode_labels(choices: Choices, names: Sequence[str], *, may_be_missing: bool) -> NDArray[np.int32]:
    """Make labels the numbers of choices, int32 (rows,); -1 where one is missing.

    Raises:
        InputError: a label is none of `names`, or is missing and may not be.
    """
    numbers = {name: number for number, name in enumerate(names)}
    encoded = np.full(len(choices.contexts), -1, np.int32)
    for row, label in enumerate(choices.labels or ()):
        name = _name(label)
        if name in numbers:
            encoded[row] = numbers[name]
        elif not may_be_missing or not (is_missing(label) or name in ("-1", "?")):
            raise InputError(
                f"Each label must be one of {', '.join(names)}; row {row + 1:,} of {choices.name} has {label!r:.200}. "
                "Number choices from 0, or use their letters or the names of their columns, in all rows alike."
            )
    return encoded
