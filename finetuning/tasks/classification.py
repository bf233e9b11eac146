"""Classification of texts or pairs of texts: one of some classes, several of them, or a number."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from finetuning.data.labels import Labels
from finetuning.data.rows import INDEX, INPUT_IDS, TOKEN_TYPES
from finetuning.scores.classification import COMBINED, ERRORS, chosen_metric, is_degenerate, predict, scores
from train.data.features import Feature
from train.tasks.task import CardFigure, Mean, Task, TaskCard

if TYPE_CHECKING:
    import tensorflow as tf
    from transformers import PreTrainedTokenizerFast

# The Hub's words for metrics.
HUB_METRICS = {"f1_macro": "f1", "f1_micro": "f1", "pearson": "pearsonr"}
NAMES = {"single_label_classification": "classifier of texts", "multi_label_classification": "classifier of texts with "
         "several labels each", "regression": "model that gives texts a number"}  # fmt: skip


class TextClassification(Task):
    """Learns what stands on the first token of a row, or on what the model pools.

    Args:
        labels: what is told apart.
        references: labels of the rows to evaluate on, as `Labels.encode` makes them.
        metrics: names in `finetuning.scores.classification.METRICS`.
        metric: by which checkpoints are compared; by default the first, or of several of GLUE's their mean.
        pad_token_id: of the tokenizer.
        token_types: whether the rows have them.
        guess: what a guess without the text would score, by metric.
        name: of the data, for the card.
    """

    model_class = "TFAutoModelForSequenceClassification"
    starts_head_anew = True

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
        name: str = "texts and labels of its author's",
    ):
        self.labels = labels
        self.references = references
        self.metrics = metrics
        self.metric = chosen_metric(metrics, metric)
        self.guess: Mapping[str, float] = {} if guess is None else guess
        self.pad_token_id = pad_token_id
        self.token_types = token_types
        self.is_one_class = labels.problem_type == "single_label_classification"
        accuracy = (Mean("accuracy", "num_correct", "num_rows"),) if self.is_one_class else ()
        self.means = (Mean("loss", "loss", "num_rows"), *accuracy)
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
            evaluation=f"Over the {{num_rows:,}} rows to evaluate on of {name}, by which this checkpoint was chosen.",
        )

    def features(self, length: int) -> dict[str, Feature]:
        """Name ids, token types where there are any, the label, and the number of the row, -1 in padding."""
        token_types = {TOKEN_TYPES: Feature((length,))} if self.token_types else {}
        several = self.labels.problem_type == "multi_label_classification"
        label = Feature((len(self.labels.names),) if several else (), dtype="int64" if self.is_one_class else "float32")
        ids = Feature((length,), padding=self.pad_token_id)
        return {INPUT_IDS: ids, **token_types, "label": label, INDEX: Feature(padding=-1)}

    def sums(self, network: Any, rows: dict[str, "tf.Tensor"], *, training: bool) -> dict[str, "tf.Tensor"]:
        """Add up `loss` and `num_rows`, of classes also `num_correct`; keep the logits of an evaluation."""
        import tensorflow as tf

        ids, labels = rows[INPUT_IDS], rows["label"]
        inputs = {INPUT_IDS: ids, "attention_mask": tf.cast(ids != self.pad_token_id, tf.int32)}
        if self.token_types:
            inputs[TOKEN_TYPES] = rows[TOKEN_TYPES]
        logits = tf.cast(network(inputs, training=training).logits, tf.float32)  # (rows, labels)
        is_row = tf.cast(rows[INDEX] >= 0, tf.float32)  # (rows,)
        sums = {"loss": tf.reduce_sum(self._losses(logits, labels) * is_row), "num_rows": tf.reduce_sum(is_row)}
        if self.is_one_class:
            is_right = tf.cast(tf.argmax(logits, axis=-1, output_type=tf.int32) == labels, tf.float32)
            sums["num_correct"] = tf.reduce_sum(is_right * is_row)
        return sums if training else sums | {"logits": logits, INDEX: rows[INDEX]}

    def _losses(self, logits: "tf.Tensor", labels: "tf.Tensor") -> "tf.Tensor":
        """Compute the loss of each row, (rows,), as the PyTorch classes of transformers do."""
        import tensorflow as tf

        if self.is_one_class:
            return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        if self.labels.problem_type == "regression":
            return tf.square(logits[:, 0] - labels)
        return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, logits), axis=-1)

    def figures(self, sums: Mapping[str, Any]) -> dict[str, float]:
        """Compute loss and metrics of the rows to evaluate on, their number, and whether all are predicted alike."""
        assert self.references is not None
        return self.figures_of(sums, self.references)

    def figures_of(self, sums: Mapping[str, Any], references: NDArray[Any]) -> dict[str, float]:
        """Compute the same of rows with these labels."""
        predictions = self.predictions(sums)
        figures = {"loss": super().figures(sums)["loss"]} | scores(self.metrics, predictions, references)
        return figures | {"num_rows": len(predictions), "is_degenerate": int(is_degenerate(predictions))}

    def predictions(self, sums: Mapping[str, Any]) -> NDArray[Any]:
        """Make the predictions of all rows, in their order; see `finetuning.scores.classification.predict`."""
        index = sums[INDEX]
        order = np.argsort(index, kind="stable")[np.count_nonzero(index < 0) :]
        return predict(sums["logits"][order], self.labels.problem_type)

    def score(self, figures: Mapping[str, float]) -> float:
        """Compute by what checkpoints are compared."""
        value = figures[self.metric]
        return -value if self.metric in (*ERRORS, "loss") else value

    def describe(self, figures: Mapping[str, float]) -> dict[str, str]:
        """Describe loss and metrics for people, beside what a guess without the text would score."""
        rows = {"validation loss": f"{figures['loss']:.4f}, of {figures['num_rows']:,} rows"}
        for name in (*self.metrics, *((COMBINED,) if COMBINED in figures else ())):
            guess = f"; a guess without the text: {self.guess[name]:.4f}" if name in self.guess else ""
            rows[name.replace("_", " ")] = f"{figures[name]:.4f}{guess}"
        if figures["is_degenerate"]:
            rows["degenerate"] = "all rows are predicted alike: nothing was learned"
        return rows

    def describe_row(self, rows: dict[str, "tf.Tensor"], tokenizer: "PreTrainedTokenizerFast") -> dict[str, str]:
        """Show the first row with its label."""
        label = rows["label"][0].numpy()
        if self.is_one_class:
            label = self.labels.names[int(label)]
        elif self.labels.problem_type == "multi_label_classification":
            label = ", ".join(name for name, holds in zip(self.labels.names, label, strict=True) if holds) or "none"
        ids = rows[INPUT_IDS][0].numpy()
        return {"first row": tokenizer.decode(ids[ids != self.pad_token_id]), "its label": str(label)}
