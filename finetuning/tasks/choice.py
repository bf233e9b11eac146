"""Multiple choice: choose which of several texts continues a text, answers a question or completes a sentence."""

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
from finetuning.loop.task import EVAL_NAME, ON_ROWS, Split, class_loss, finetuned_card
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

# COPA's questions, as worded by SuperGLUE (Wang et al. 2019).
QUESTIONS = {"cause": "What was the cause of this?", "effect": "What happened as a result?"}
# A blank in a question, written as underscores, which is replaced with each choice.
BLANK = re.compile(r"(?<!\w)_+(?!\w)")
METRICS = ("accuracy",)
# With fewer labels, the first choice may be wrong in all rows by chance.
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
    """Names of the columns with the context, the beginning of each choice, the choices, and the label."""

    context: str
    question: str | None
    choices: tuple[str, ...]
    label: str


KNOWN_COLUMNS = (
    Columns("sent1", "sent2", ("ending0", "ending1", "ending2", "ending3"), "label"),  # SWAG
    Columns("article", "question", ("options",), "answer"),  # RACE
    Columns("premise", "question", ("choice1", "choice2"), "label"),  # COPA
)


@dataclass(frozen=True)
class Choices:
    """Contexts, and the texts to choose from for each context. All rows have the same number of choices.

    Attributes:
        name: name of the table, used in error messages.
        contexts: one context per row.
        choices: the texts to choose from, for each row.
        labels: one label per row, as in the table; None if the table has no labels.
    """

    name: str
    contexts: Sequence[str]
    choices: Sequence[Sequence[str]]
    labels: Sequence[Any] | None

    @property
    def num_choices(self) -> int:
        return len(self.choices[0])


def columns_of(columns: Mapping[str, Any], name: str, data: ChoiceData) -> Columns:
    """Decide which columns to read: the columns that flags name, or else the columns of SWAG, RACE or COPA.

    Args:
        columns: columns of the table.
        name: name of the table, used in error messages.
        data: the flags.

    Raises:
        InputError: the flags do not name all columns, and the table does not have the columns of SWAG, RACE or COPA.
    """
    defaults = next((kind for kind in KNOWN_COLUMNS if {kind.context, *kind.choices} <= columns.keys()), None)
    if defaults is None:
        if not data.context_column_name or not data.choice_column_names:
            raise InputError(
                f"{name} must have the columns of SWAG, RACE or COPA, or of --context-column-name and "
                f"--choice-column-names of run_multiple_choice.py; it has {', '.join(columns)}."
            )
        defaults = Columns("", None, (), "label")
    context, label = data.context_column_name or defaults.context, data.label_column_name or defaults.label
    choices = tuple(data.choice_column_names) or defaults.choices
    return Columns(context, data.question_column_name or defaults.question, choices, label)


def read_choices(table: Table, columns: Columns, *, needs_labels: bool) -> Choices:
    """Read contexts, choices and labels of a table; raise InputError if a column is missing or has invalid values."""
    (contexts,) = texts_of(table, [columns.context], "--context-column-name")
    if len(columns.choices) == 1:
        lists = table.column(columns.choices[0], "--choice-column-names")
    else:
        lists = list(zip(*texts_of(table, columns.choices, "--choice-column-names"), strict=True))
    for row, choices in enumerate(lists, start=1):
        are_texts = isinstance(choices, list | tuple) and all(isinstance(choice, str) for choice in choices)
        if not are_texts or len(choices) < 2 or len(choices) != len(lists[0]):
            raise InputError(
                f"Column {columns.choices[0]} of {table.name} must hold lists of two or more texts, the same number in "
                f"each row; row {row:,} has {choices!r:.200}."
            )
    if columns.question is not None:
        (questions,) = texts_of(table, [columns.question], "--question-column-name")
        pairs = zip((QUESTIONS.get(question, question) for question in questions), lists, strict=True)
        lists = [[_joined(question, choice) for choice in row] for question, row in pairs]
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
    """Return the names of the choices in the form that most training labels use: numbers, letters, or names of columns.

    Raises:
        InputError: the labels seem to be numbered from 1, because neither training nor validation labels have a 0.
    """
    num_choices, labels = train.num_choices, [_name(label) for label in train.labels or ()]
    letters = tuple(string.ascii_uppercase[:num_choices])
    forms = (numbers_from_0(num_choices), letters, *([columns.choices] if len(columns.choices) > 1 else []))
    names = max(forms, key=lambda form: sum(label in form for label in labels))
    has_zero = "0" in labels or "0" in map(_name, validation_labels)
    if names == numbers_from_0(num_choices) and not has_zero and (len(labels) >= MIN_LABELS or len(set(labels)) > 1):
        raise InputError(
            f"The choices of {train.name} must be numbered from 0; its labels are {', '.join(sorted(set(labels)))}. "
            f"Write letters, A to {letters[-1]}, or subtract 1 if they are numbered from 1."
        )
    return names


def numbers_from_0(num_choices: int) -> tuple[str, ...]:
    """Return the names of choices numbered from 0."""
    return tuple(map(str, range(num_choices)))


def check_num_choices(choices: Choices, num_choices: int) -> None:
    """Check that rows have the number of choices that the model was trained with."""
    if choices.num_choices != num_choices:
        raise InputError(
            f"Rows must have {num_choices} choices, as in training; rows of {choices.name} have {choices.num_choices}."
        )


def encode_labels(choices: Choices, names: Sequence[str], *, may_be_missing: bool) -> NDArray[np.int32]:
    """Convert labels to the numbers of the choices, int32 (rows,); -1 for missing labels.

    Raises:
        InputError: a label is not one of `names`, or is missing although `may_be_missing` is false.
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
                "In all rows, either number the choices from 0, or use their letters, or the names of their columns."
            )
    return encoded


class MultipleChoice(TextClassification):
    """Learns which choice of a row is right. The network gives each choice a logit; rows are (choices, length)."""

    model_class = "TFAutoModelForMultipleChoice"

    def __init__(self, names: Sequence[str], metric: str | None = None, **task_arguments: Any):
        labels = Labels("single_label_classification", tuple(names))
        super().__init__(labels, METRICS, metric, **task_arguments)
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
        """Return the features of `TextClassification`, with a row of tokens for each choice."""
        shape = (len(self.labels.names), length)
        return {
            name: replace(feature, shape=shape) if feature.shape else feature
            for name, feature in super().text_features(length).items()
        }

    def outputs(self, network: Any, rows: dict[str, "tf.Tensor"], *, training: bool) -> "tf.Tensor":
        from train.layers.random_bits import dropping_out_texts

        with dropping_out_texts(range(len(self.labels.names))):
            return super().outputs(network, rows, training=training)  # (rows, choices)

    def write_extra_files(self, folder: Folder, predictions: NDArray[Any], split: Split) -> None:
        """Do not write a confusion matrix, because the positions of choices carry no meaning."""

    def next_command(self, model: str) -> str:
        return f'{super().next_command(model)} --choices "…" "…"'

    def describe_row(self, rows: dict[str, "tf.Tensor"], tokenizer: "PreTrainedTokenizerFast") -> dict[str, str]:
        names = (INPUT_IDS, ATTENTION_MASK)
        texts = {
            f"choice {name}": self.first_text({key: rows[key][:, number] for key in names}, tokenizer)
            for number, name in enumerate(self.labels.names)
        }
        return texts | {"right": self.format_label(rows["label"][0].numpy())}


def encode_choices(model: ReadModel, choices: Choices, max_length: int, labels: NDArray[np.int32]) -> EncodedRows:
    """Encode each context with each of its choices as a pair of texts. A row has the texts of all its choices."""
    contexts = [context for context, row in zip(choices.contexts, choices.choices, strict=True) for _ in row]
    texts = model.encode_texts((contexts, [choice for row in choices.choices for choice in row]), max_length)
    row_values: Mapping[str, NDArray[Any]] = {"label": labels, INDEX: np.arange(len(labels), dtype=np.int32)}
    return replace(texts, row_values=row_values, texts_per_row=choices.num_choices)


class ChoiceJob(FinetuningJob[ChoiceConfig]):
    """The job of `run_multiple_choice.py`."""

    def open_run(self, config: ChoiceConfig, cluster: Cluster) -> Run:
        check_packages("sklearn")
        start, data = open_start(config), config.data
        tables = read_tables(data)
        columns = columns_of(tables["train"].columns, tables["train"].name, data)
        choices = {split: read_choices(table, columns, needs_labels=split != "test") for split, table in tables.items()}
        check_shared_rows(
            {
                split: [(context, *map(str, row)) for context, row in zip(read.contexts, read.choices, strict=True)]
                for split, read in choices.items()
            },
            {split: read.name for split, read in choices.items()},
            [split for split, read in choices.items() if read.labels is None],
        )
        validation_labels = choices["validation"].labels if "validation" in choices else None
        names = names_of(choices["train"], columns, validation_labels or ())

        def make_split(split: str, file: str = "") -> Split:
            check_num_choices(choices[split], len(names))
            labels = encode_labels(choices[split], names, may_be_missing=split == "test")
            is_labelled = labels >= 0
            rows = encode_choices(start, choices[split], data.max_seq_length, np.maximum(labels, 0))
            return Split(rows, labels, file, bool(is_labelled.any()), None if is_labelled.all() else is_labelled)

        train = make_split("train")
        self.validation = {"": make_split("validation", f"{EVAL_NAME}.txt")} if "validation" in choices else {}
        self.tests = [make_split("test", "predict_results_test.txt")] if "test" in choices else []
        validation = self.validation.get("")
        task = MultipleChoice(names, data.metric_name, **start.task_arguments)
        task.class_loss = class_loss(config.optimization, names, train.examples)
        if validation is not None:
            guess = baseline(task.labels, train.examples, validation.rows.num_rows)
            task.guess = scores(METRICS, guess, validation.examples)
        text_columns = (columns.context, *([columns.question] if columns.question else []), *columns.choices)
        plan_lines = {"texts": ", ".join(text_columns), "labels": f"{columns.label} of {choices['train'].name}"}
        plan_lines |= {"choices": ", ".join(names), "first label": task.format_label(train.examples[0])}
        return start.run(task, train.rows, validation, cluster, task.labels.by_id, plan_lines=plan_lines)
