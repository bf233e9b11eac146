"""Multiple choice: which of several texts follows another, answers a question or completes a sentence."""

import re
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from finetuning.config.settings import ChoiceConfig, ChoiceData
from finetuning.data.examples import Table, read_tables, texts_of
from finetuning.data.inputs import ATTENTION_MASK, INDEX, INPUT_IDS, EncodedRows
from finetuning.data.labels import Labels, is_missing
from finetuning.data.shared_rows import check_shared_rows
from finetuning.loop.model import ReadModel, open_start
from finetuning.loop.task import EVAL_NAME, ON_ROWS, Part, class_loss, finetuned_card
from finetuning.loop.training import FinetuningJob
from finetuning.tasks.classification import TextClassification
from finetuning.tasks.metrics import baseline, check_packages, scores
from mlm_common.errors import InputError
from mlm_common.storage import Folder
from train.data.inputs import Feature
from train.loop.run import Run
from train.runtime.machines import Cluster

if TYPE_CHECKING:
    import tensorflow as tf
    from transformers import PreTrainedTokenizerFast

# COPA's questions, in the words of SuperGLUE (Wang et al. 2019).
QUESTIONS = {"cause": "What was the cause of this?", "effect": "What happened as a result?"}
# Underscores that stand for a word: where a question has some, each choice is put there.
BLANK = re.compile(r"(?<!\w)_+(?!\w)")
METRICS = ("accuracy",)
# Of fewer labels, none may be of the first choice by chance.
MIN_LABELS = 5
USAGE = """```python
import torch
from transformers import AutoModelForMultipleChoice, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({model}{revision})
model = AutoModelForMultipleChoice.from_pretrained({model}{revision})
context, choices = "The cup fell.", ["It broke.", "It sang."]
rows = tokenizer([context] * len(choices), choices, padding=True, truncation=True, return_tensors="pt")
with torch.no_grad():
    logits = model(**{{name: row.unsqueeze(0) for name, row in rows.items()}}).logits
print(choices[int(logits.argmax())])
```"""


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
                f"{name} must have the columns of SWAG, RACE or COPA, or of --context-column-name and "
                f"--choice-column-names of run_multiple_choice.py; it has {', '.join(columns)}."
            )
        found = Columns("", None, (), "label")
    context, label = data.context_column_name or found.context, data.label_column_name or found.label
    choices = tuple(data.choice_column_names) or found.choices
    return Columns(context, data.question_column_name or found.question, choices, label)


def read_choices(table: Table, columns: Columns, *, needs_labels: bool) -> Choices:
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
    filled, num_blanks = BLANK.subn(lambda _: choice, question, count=1)
    return filled if num_blanks else f"{question} {choice}"


def _name(label: Any) -> str:
    return str(int(label)) if isinstance(label, float) and label.is_integer() else str(label).strip()


def names_of(train: Choices, columns: Columns, validation_labels: Iterable[Any] = ()) -> tuple[str, ...]:
    """Name the choices as most labels to train on do: by numbers, letters, or columns.

    Raises:
        InputError: numbers seem to begin with 1: neither training nor validation has a 0.
    """
    number, labels = train.num_choices, [_name(one) for one in train.labels or ()]
    letters = tuple(string.ascii_uppercase[:number])
    forms = (places(number), letters, *([columns.choices] if len(columns.choices) > 1 else []))
    found = max(forms, key=lambda one: sum(label in one for label in labels))
    has_zero = "0" in labels or "0" in map(_name, validation_labels)
    if found == places(number) and not has_zero and (len(labels) >= MIN_LABELS or len(set(labels)) > 1):
        raise InputError(
            f"The choices of {train.name} must be numbered from 0; its labels are {', '.join(sorted(set(labels)))}. "
            f"Write letters, A to {letters[-1]}, or subtract 1 if they are numbered from 1."
        )
    return found


def places(number: int) -> tuple[str, ...]:
    return tuple(map(str, range(number)))


def check_number(choices: Choices, number: int) -> None:
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


class MultipleChoice(TextClassification):
    """Learns which choice of a row is right, by one number for each choice; rows are (choices, length)."""

    model_class = "TFAutoModelForMultipleChoice"

    def __init__(self, names: Sequence[str], metric: str | None = None, **of_rows: Any):
        labels = Labels("single_label_classification", tuple(names))
        super().__init__(labels, METRICS, metric, **of_rows)
        self.card = finetuned_card(
            "model that chooses one of several texts",
            "Multiple choice",
            "multiple-choice",
            {"accuracy": "accuracy"},
            tags=("multiple-choice",),
            usage=USAGE,
            evaluation=ON_ROWS,
        )

    def text_features(self, length: int) -> dict[str, Feature]:
        """Name what `TextClassification` does, of each choice."""
        shape = (len(self.labels.names), length)
        return {
            name: replace(one, shape=shape) if one.shape else one for name, one in super().text_features(length).items()
        }

    def outputs(self, network: Any, rows: dict[str, "tf.Tensor"], *, training: bool) -> "tf.Tensor":
        from train.layers.random_bits import dropping_out_texts

        with dropping_out_texts(range(len(self.labels.names))):
            return super().outputs(network, rows, training=training)  # (rows, choices)

    def write_more(self, folder: Folder, predictions: NDArray[Any], part: Part) -> None:
        """Write nothing: which place is taken for which says little."""

    def next_command(self, model: str) -> str:
        return f'{super().next_command(model)} --choices "…" "…"'

    def describe_row(self, rows: dict[str, "tf.Tensor"], tokenizer: "PreTrainedTokenizerFast") -> dict[str, str]:
        names = (INPUT_IDS, ATTENTION_MASK)
        texts = {
            f"choice {name}": self.first_text({key: rows[key][:, place] for key in names}, tokenizer)
            for place, name in enumerate(self.labels.names)
        }
        return texts | {"right": self.shown(rows["label"][0].numpy())}


def encode_choices(model: ReadModel, choices: Choices, max_length: int, labels: NDArray[np.int32]) -> EncodedRows:
    """Encode each choice after its context, as a pair of texts; rows have one label each."""
    contexts = [context for context, row in zip(choices.contexts, choices.choices, strict=True) for _ in row]
    texts = model.encode_texts((contexts, [one for row in choices.choices for one in row]), max_length)
    of_rows: Mapping[str, NDArray[Any]] = {"label": labels, INDEX: np.arange(len(labels), dtype=np.int32)}
    return replace(texts, of_rows=of_rows, texts_per_row=choices.num_choices)


class ChoiceJob(FinetuningJob[ChoiceConfig]):
    """The job of `run_multiple_choice.py`."""

    def open_run(self, config: ChoiceConfig, cluster: Cluster) -> Run:
        check_packages("sklearn")
        start, data = open_start(config), config.data
        tables = read_tables(data)
        columns = columns_of(tables["train"].columns, tables["train"].name, data)
        parts = {split: read_choices(one, columns, needs_labels=split != "test") for split, one in tables.items()}
        check_shared_rows(
            {
                split: [(one, *map(str, row)) for one, row in zip(part.contexts, part.choices, strict=True)]
                for split, part in parts.items()
            },
            {split: part.name for split, part in parts.items()},
            [split for split, part in parts.items() if part.labels is None],
        )
        validation_labels = parts["validation"].labels if "validation" in parts else None
        names = names_of(parts["train"], columns, validation_labels or ())

        def part(split: str, file: str = "") -> Part:
            one = parts[split]
            check_number(one, len(names))
            labels = encode_labels(one, names, may_be_missing=split == "test")
            is_labelled = labels >= 0
            rows = encode_choices(start, one, data.max_seq_length, np.maximum(labels, 0))
            return Part(rows, labels, file, bool(is_labelled.any()), None if is_labelled.all() else is_labelled)

        train = part("train")
        self.validation = {"": part("validation", f"{EVAL_NAME}.txt")} if "validation" in parts else {}
        self.tests = [part("test", "predict_results_test.txt")] if "test" in parts else []
        validation = self.validation.get("")
        task = MultipleChoice(names, data.metric_name, **start.of_rows)
        task.class_loss = class_loss(config.optimization, names, train.examples)
        if validation is not None:
            guess = baseline(task.labels, train.examples, validation.rows.num_rows)
            task.guess = scores(METRICS, guess, validation.examples)
        read_as = (columns.context, *([columns.question] if columns.question else []), *columns.choices)
        described = {"texts": ", ".join(read_as), "labels": f"{columns.label} of {parts['train'].name}"}
        described |= {"choices": ", ".join(names), "first label": task.shown(train.examples[0])}
        return start.run(task, train.rows, validation, cluster, task.labels.by_id, described=described)
