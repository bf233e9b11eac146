"""Classification of texts or pairs of texts: one class, several classes, or a number."""

import csv
import io
import logging
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from finetuning.config.settings import ClassificationConfig, ClassificationData
from finetuning.data.examples import Examples, Splits, Table, read_table, read_tables, texts_of, warn_of_empty_texts
from finetuning.data.glue import GLUE_TASKS, read_glue
from finetuning.data.labels import LabelReading, Labels, find_labels, is_missing
from finetuning.data.shared_rows import check_shared_rows
from finetuning.loop.model import Start, open_start
from finetuning.loop.task import COMBINED, EVAL_NAME, ON_ROWS, RowTask, Split, class_loss, describe_loss, finetuned_card
from finetuning.loop.training import FinetuningJob
from finetuning.tasks.metrics import (
    DEFAULT_METRICS,
    ERRORS,
    MAX_PLOTTED_CLASSES,
    baseline,
    check_packages,
    chosen_metric,
    draw_confusion,
    predict,
    scores,
    with_mean,
)
from mlm_common.cli.settings import flag_of, require
from mlm_common.errors import InputError
from mlm_common.storage import Folder
from train.data.inputs import Feature
from train.loop.run import Run
from train.runtime.machines import Cluster
from train.runtime.run_folder import CONFUSION_NAME
from train.tasks.task import Mean

if TYPE_CHECKING:
    import tensorflow as tf

logger = logging.getLogger(__name__)

# Names of columns that are not read as text by default.
NO_TEXT = ("id", "idx", "index")
# Names of the column to which pandas writes its index: in a .csv file, in a .csv file that pandas read and wrote again,
# and in a .parquet file.
INDEX_OF_PANDAS = re.compile(r"|Unnamed: \d+|__index_level_\d+__")
# The Hub's names of metrics, if they differ from our names.
HUB_METRICS = {"f1_macro": "f1", "f1_micro": "f1", "pearson": "pearsonr"}
NAMES = {
    "single_label_classification": "text classifier",
    "multi_label_classification": "text classifier with several labels per text",
    "regression": "model that predicts a number for each text",
}
# Example texts in the model card's code, {number of texts per row: code}. `.format` is applied to the code later.
TEXTS = {1: '"A text to classify."', 2: '{{"text": "A first text.", "text_pair": "A second text."}}'}
CLASSES = """```python
from transformers import pipeline

classify = pipeline("text-classification", model={model}{revision})
for label in classify(TEXT, truncation=True, top_k=None):
    print(round(label["score"], 3), label["label"])
```"""
NUMBER = """```python
from transformers import pipeline

rate = pipeline("text-classification", model={model}{revision}, function_to_apply="none")
for number in rate([TEXT], truncation=True):
    print(number["score"])
```"""


class TextClassification(RowTask):
    """Learns the label of each row with transformers' classification head.

    Args:
        labels: the labels to learn.
        metrics: names of metrics in `finetuning.tasks.metrics.metric_functions`.
        metric: the metric by which checkpoints are compared; by default the first metric.
        num_texts: number of texts per row, 1 or 2.
        task_arguments: arguments of `ExampleTask`.

    Raises:
        InputError: the name of a class has tabs or several lines, so it cannot be written to the file of predictions.
    """

    model_class = "TFAutoModelForSequenceClassification"
    errors = ERRORS

    def __init__(
        self,
        labels: Labels,
        metrics: tuple[str, ...],
        metric: str | None = None,
        *,
        num_texts: int = 1,
        **task_arguments: Any,
    ):
        super().__init__(**task_arguments)
        for name in labels.names:
            is_one_field = "\t" not in name and len(name.splitlines()) == 1
            require(is_one_field, "must be one line without tabs (rename it)", "Each label", repr(name))
        self.labels = labels
        self.metrics = metrics
        self.metric = chosen_metric(with_mean(metrics), metric)
        self.takes_pairs = num_texts == 2
        self.is_one_class = labels.problem_type == "single_label_classification"
        shape = (len(labels.names),) if labels.problem_type == "multi_label_classification" else ()
        self.label = Feature(shape, dtype="int64" if self.is_one_class else "float32")
        if self.is_one_class:
            self.means = (*self.means, Mean("accuracy", "num_correct", "num_rows"))
        self.card = finetuned_card(
            NAMES[labels.problem_type],
            "Text classification",
            "text-classification",
            {name: HUB_METRICS.get(name, name) for name in metrics},
            tags=("text-classification",),
            usage=(NUMBER if labels.problem_type == "regression" else CLASSES).replace("TEXT", TEXTS[num_texts]),
            evaluation=ON_ROWS,
        )

    def outputs(self, network: Any, rows: dict[str, "tf.Tensor"], *, training: bool) -> "tf.Tensor":
        return network(self.network_inputs(rows), training=training).logits

    def losses(self, outputs: "tf.Tensor", labels: "tf.Tensor") -> "tf.Tensor":
        """Compute the loss of each row, (rows,), as transformers' PyTorch classes do."""
        import tensorflow as tf

        if self.is_one_class:
            return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, outputs)
        if self.labels.problem_type == "regression":
            return tf.square(outputs[:, 0] - labels)
        return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, outputs), axis=-1)

    def counts(self, outputs: "tf.Tensor", labels: "tf.Tensor") -> dict[str, "tf.Tensor"]:
        import tensorflow as tf

        if not self.is_one_class:
            return {}
        return {"num_correct": tf.cast(tf.argmax(outputs, axis=-1, output_type=tf.int32) == labels, tf.float32)}

    def predict(self, outputs: NDArray[Any]) -> NDArray[Any]:
        return predict(outputs, self.labels.problem_type)

    def scores(self, predictions: NDArray[Any], labels: NDArray[Any]) -> dict[str, float]:
        if labels.ndim > 1:  # classes that only the test split has are never predicted
            predictions = np.pad(predictions, ((0, 0), (0, labels.shape[1] - predictions.shape[1])))
        return scores(self.metrics, predictions, labels)

    def format_label(self, label: Any) -> str:
        """Format a label: a number, the name of a class, or the names of several classes as a line of a .csv file."""
        if self.is_one_class:
            return self.labels.names[int(label)]
        if self.labels.problem_type == "regression":
            return super().format_label(label)
        line = io.StringIO()
        names = [name for name, is_set in zip(self.labels.names, label, strict=True) if is_set]
        csv.writer(line, lineterminator="").writerow(names)
        return line.getvalue()

    def write_extra_files(self, folder: Folder, predictions: NDArray[Any], split: Split) -> None:
        """Plot the confusion matrix of the validation split, if rows have one class each and there are few classes."""
        names = self.labels.names
        if split is self.evaluated and self.is_one_class and len(names) <= MAX_PLOTTED_CLASSES:
            from sklearn.metrics import confusion_matrix

            counts = confusion_matrix(split.examples, predictions, labels=range(len(names)))
            folder.write_bytes(CONFUSION_NAME, draw_confusion(counts, names))


class ClassificationJob(FinetuningJob[ClassificationConfig]):
    """The job of `run_classification.py`."""

    def open_run(self, config: ClassificationConfig, cluster: Cluster) -> Run:
        check_packages("sklearn", "scipy")
        start, data = open_start(config), config.data
        splits = read_splits(data)
        check_shared_examples(splits.train, splits.validation, splits.tests)
        warn_of_empty_texts([splits.train, *splits.validation.values(), *splits.tests.values()])
        labels = _labels(data, splits.train, start)

        def make_split(examples: Examples, file: str = "", *, is_test: bool = False) -> Split:
            if examples.labels is not None and is_test:
                return make_scored_test_split(examples, examples.labels, file)
            is_scored = examples.labels is not None
            encoded = labels.zeros(examples.num_rows)
            if examples.labels is not None:
                encoded = labels.encode(examples.labels, examples.name)
            return Split(start.encode_texts(examples.texts, data.max_seq_length, encoded), encoded, file, is_scored)

        def make_scored_test_split(examples: Examples, values: Sequence[Any], file: str) -> Split:
            scored = labels.encode_to_score(values, examples.name)
            is_labelled, num_classes = scored.is_labelled, len(labels.names)
            if not is_labelled.all():
                counts = f"{len(is_labelled) - is_labelled.sum():,}", f"{len(is_labelled):,}"
                logger.warning("%s of %s rows of %s have no label and are not scored.", *counts, examples.name)
            if scored.unseen:
                others = f" and {len(scored.unseen) - 5:,} more" if len(scored.unseen) > 5 else ""
                names = ", ".join(map(repr, scored.unseen[:5])) + others
                logger.warning(
                    "%s has labels that the training split lacks; they count as wrong: %s.", examples.name, names
                )
            seen = scored.encoded
            if scored.unseen:  # the network has no output for these classes, and no loss is computed
                seen = np.where(seen < num_classes, seen, 0) if seen.ndim == 1 else seen[:, :num_classes]
            rows = start.encode_texts(examples.texts, data.max_seq_length, seen)
            has_loss = is_labelled.all() and not scored.unseen
            return Split(rows, scored.encoded, file, bool(is_labelled.any()), None if has_loss else is_labelled)

        train = make_split(splits.train)
        self.validation = {
            ending: make_split(examples, f"{EVAL_NAME}{ending}.txt") for ending, examples in splits.validation.items()
        }
        self.tests = [
            make_split(examples, f"predict_results_{name}.txt", is_test=True) for name, examples in splits.tests.items()
        ]
        validation = next(iter(self.validation.values()), None)
        metrics = GLUE_TASKS[data.task_name].metrics if data.task_name else DEFAULT_METRICS[labels.problem_type]
        metric = data.metric_name or (COMBINED if data.task_name and len(metrics) > 1 else None)
        task = TextClassification(labels, metrics, metric, num_texts=len(splits.text_columns), **start.task_arguments)
        if validation is not None:
            guess = baseline(labels, train.examples, validation.rows.num_rows)
            task.guess = scores(metrics, guess, validation.examples)
        plan_lines = splits.columns | labels.describe(train.examples)
        plan_lines["first label"] = task.format_label(train.examples[0]) or "none of the classes"
        run_info = {"text_columns": list(splits.text_columns)}
        for name in ("class_weights", "label_smoothing"):
            value = getattr(config.optimization, name)
            rule = f"needs one class per row; {splits.train.name} has a different kind of label ({labels.problem_type})"
            require(task.is_one_class or not value, rule, flag_of(name), value)
        if task.is_one_class:
            task.class_loss = class_loss(config.optimization, labels.names, train.examples)
            plan_lines |= describe_loss(task.class_loss, labels.names)
        about: dict[str, Any] = {"plan_lines": plan_lines, "run_info": run_info, "problem_type": labels.problem_type}
        return start.run(task, train.rows, validation, cluster, labels.by_id, **about)


def check_shared_examples(train: Examples, validation: Mapping[str, Examples], tests: Mapping[str, Examples]) -> None:
    """Check that the validation and test splits do not repeat the training split."""
    splits = {"train": train} | {f"eval{ending}": examples for ending, examples in validation.items()} | dict(tests)
    check_shared_rows(
        {split: list(zip(*examples.texts, strict=True)) for split, examples in splits.items()},
        {split: examples.name for split, examples in splits.items()},
        [split for split, examples in splits.items() if examples.labels is None],
    )


def _labels(data: ClassificationData, train: Examples, start: Start) -> Labels:
    assert train.labels is not None
    reading = LabelReading(
        data.problem_type, data.label_separator, data.decimal_separator, data.label_lists, data.similar_labels
    )
    if data.task_name is not None:
        task = GLUE_TASKS[data.task_name]
        reading = LabelReading("regression" if task.is_regression else "single_label_classification")
        if task.label_names:
            return Labels("single_label_classification", task.label_names)
    return find_labels(train.labels, train.name, reading, start.labels_of("SequenceClassification"))


def read_splits(data: ClassificationData) -> Splits:
    """Read the examples of the GLUE task, the files or the data set that the flags name."""
    if data.task_name is not None:
        return read_glue(data, GLUE_TASKS[data.task_name])
    tables = read_tables(data)
    # Check the label column first, because a label column with another name would be read as text.
    tables["train"].column(data.label_column_name, "--label-column-name")
    texts = data.text_column_names or _text_columns(tables["train"], data)
    left_out = [repr(name) for name in tables["train"].columns if name not in (*texts, data.label_column_name)]
    note = f"; not read: {', '.join(left_out)}" if left_out else ""
    columns = {"texts": " and ".join(texts) + note, "labels": f"{data.label_column_name} of {tables['train'].name}"}
    if forms := [f"{table.name}: {table.form}" for table in tables.values() if table.form]:
        columns["read as"] = "; ".join(forms)

    examples = {split: _examples(table, texts, data, needs_labels=split != "test") for split, table in tables.items()}
    validation = {"": examples["validation"]} if "validation" in examples else {}
    tests = {"test": examples["test"]} if "test" in examples else {}
    return Splits(examples["train"], columns, texts, validation, tests)


def read_examples_to_predict(path: str, data: ClassificationData) -> Examples:
    """Read the texts of a `--file` of `predict.py`, without labels."""
    table = read_table(path, "--file", delimiter=data.delimiter)
    return Examples(table.name, texts_of(table, data.text_column_names or _text_columns(table, data)), None)


def _text_columns(table: Table, data: ClassificationData) -> list[str]:
    names = [
        name
        for name in table.columns
        if name != data.label_column_name and name.lower() not in NO_TEXT and not INDEX_OF_PANDAS.fullmatch(name)
    ]
    require(
        1 <= len(names) <= 2,
        f"must name the one or two columns of text in {table.name}, because {len(names)} columns other than "
        f"{data.label_column_name} could be text",
        "--text-column-names",
        f"nothing, with the columns {', '.join(table.columns)}",
    )
    for name in names:
        if all(str(value).strip().isdecimal() for value in table.columns[name]):
            others = " ".join(other for other in names if other != name)
            otherwise = f"; if not, --text-column-names {others}." if others else "."
            raise InputError(
                f"Column {name} of {table.name} has only whole numbers, so it is probably not text. If it is text, use "
                f"--text-column-names {' '.join(names)}{otherwise}"
            )
    return names


def _examples(table: Table, texts: Sequence[str], data: ClassificationData, *, needs_labels: bool) -> Examples:
    labels: Sequence[Any] | None = None
    if needs_labels or data.label_column_name in table.columns:
        labels = table.column(data.label_column_name, "--label-column-name")
        if not needs_labels and all(map(is_missing, labels)):
            labels = None
    return Examples(table.name, texts_of(table, texts), labels)
