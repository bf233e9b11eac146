"""Classification of texts or pairs of texts: one of some classes, several of them, or a number."""

import csv
import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from finetuning.data.labels import Labels
from finetuning.scores.classification import ERRORS, chosen_metric, predict, scores, with_mean
from finetuning.tasks.rows import ON_ROWS, RowTask
from mlm_common.cli.settings import require
from train.data.inputs import Feature
from train.tasks.task import CardFigure, Mean, TaskCard

if TYPE_CHECKING:
    import tensorflow as tf

# The Hub's words for metrics.
HUB_METRICS = {"f1_macro": "f1", "f1_micro": "f1", "pearson": "pearsonr"}
NAMES = {
    "single_label_classification": "text classifier",
    "multi_label_classification": "text classifier with several labels per text",
    "regression": "model that rates texts with a number",
}
# Lines that use the model, {how many texts a row has: lines}; `.format` is applied to them later.
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
    """Learns what stands on the first token of a row, or on what the model pools.

    Args:
        labels: what is told apart.
        references: labels of the rows to evaluate on, as `Labels.encode` makes them.
        metrics: names in `finetuning.scores.classification.METRICS`.
        metric: by which checkpoints are compared; by default the first, or of several of GLUE's their mean.
        pad_token_id: of the tokenizer.
        token_types: whether the rows have them.
        guess: what a guess without the text would score, by metric.
        num_texts: of each row, 1 or 2, for the card.

    Raises:
        InputError: a class whose name does not fit on one line of the predictions.
    """

    model_class = "TFAutoModelForSequenceClassification"
    errors = ERRORS

    def __init__(
        self,
        labels: Labels,
        references: NDArray[Any] | None,
        metrics: tuple[str, ...],
        metric: str | None = None,
        *,
        pad_token_id: int,
        token_types: bool,
        guess: Mapping[str, float] | None = None,
        num_texts: int = 1,
    ):
        super().__init__(pad_token_id=pad_token_id, token_types=token_types)
        for one in labels.names:
            is_one_field = "\t" not in one and len(one.splitlines()) == 1
            require(is_one_field, "must be one line without tabs (rename it)", "Each label", repr(one))
        self.labels = labels
        self.references = references
        self.metrics = metrics
        self.metric = chosen_metric(with_mean(metrics), metric)
        self.guess = {} if guess is None else guess
        self.is_one_class = labels.problem_type == "single_label_classification"
        several = labels.problem_type == "multi_label_classification"
        self.label = Feature((len(labels.names),) if several else (), dtype="int64" if self.is_one_class else "float32")
        if self.is_one_class:
            self.means = (*self.means, Mean("accuracy", "num_correct", "num_rows"))
        shown = [CardFigure("loss", "loss", "loss", "Loss")]
        shown += [CardFigure(one, one.replace("_", " "), HUB_METRICS.get(one, one), one) for one in metrics]
        self.card = TaskCard(
            model_kind=NAMES[labels.problem_type],
            task_name="Text classification",
            pipeline_tag="text-classification",
            figures=tuple(shown),
            tags=("text-classification",),
            training_verb="fine-tuned",
            start_words="from",
            usage=(NUMBER if labels.problem_type == "regression" else CLASSES).replace("TEXT", TEXTS[num_texts]),
            evaluation=ON_ROWS,
        )

    def outputs(self, network: Any, rows: dict[str, "tf.Tensor"], *, training: bool) -> "tf.Tensor":
        """Compute the logits, (rows, labels)."""
        return network(self.network_inputs(rows), training=training).logits

    def losses(self, outputs: "tf.Tensor", labels: "tf.Tensor") -> "tf.Tensor":
        """Compute the loss of each row, (rows,), as the PyTorch classes of transformers do."""
        import tensorflow as tf

        if self.is_one_class:
            return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, outputs)
        if self.labels.problem_type == "regression":
            return tf.square(outputs[:, 0] - labels)
        return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, outputs), axis=-1)

    def counts(self, outputs: "tf.Tensor", labels: "tf.Tensor") -> dict[str, "tf.Tensor"]:
        """Count, of classes, `num_correct`."""
        import tensorflow as tf

        if not self.is_one_class:
            return {}
        return {"num_correct": tf.cast(tf.argmax(outputs, axis=-1, output_type=tf.int32) == labels, tf.float32)}

    def predict(self, outputs: NDArray[Any]) -> NDArray[Any]:
        """Make predictions; see `finetuning.scores.classification.predict`."""
        return predict(outputs, self.labels.problem_type)

    def scores(self, predictions: NDArray[Any], labels: NDArray[Any]) -> dict[str, float]:
        """Compute the metrics, and with several their mean."""
        return scores(self.metrics, predictions, labels)

    def shown(self, label: Any) -> str:
        """Write a label: a number, the name of a class, or those of several as a line of a .csv file."""
        if self.is_one_class:
            return self.labels.names[int(label)]
        if self.labels.problem_type == "regression":
            return super().shown(label)
        line = io.StringIO()
        names = [name for name, holds in zip(self.labels.names, label, strict=True) if holds]
        csv.writer(line, lineterminator="").writerow(names)
        return line.getvalue()
