"""Tasks with one answer for each row: a class, several of them, a number, or what a task of one's own makes of it."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from finetuning.data.rows import INDEX
from finetuning.scores.classification import COMBINED, is_degenerate
from finetuning.tasks.task import ExampleTask, shown_score, with_metric
from train.data.inputs import Feature
from train.tasks.task import Mean

if TYPE_CHECKING:
    import tensorflow as tf
    from transformers import PreTrainedTokenizerFast
# What the card says of the evaluation.
ON_ROWS = "On the {num_rows:,} validation rows, which also decided which checkpoint was kept."


class RowTask(ExampleTask):
    """Learns the label of each row; a subclass says by which outputs of a network, and how good these are.

    label: the feature that holds it.
    references: labels of the rows to evaluate on.
    metrics: names in `scores`.
    metric: of them or `loss`, by which checkpoints are compared.
    errors: the lower the better.
    guess: what a guess without the text would score, by metric.
    takes_pairs: whether each row is of two texts.
    """

    means: tuple[Mean, ...] = (Mean("loss", "loss", "num_rows"),)
    label: Feature
    references: NDArray[Any] | None
    metrics: tuple[str, ...]
    metric: str
    errors: tuple[str, ...] = ()
    guess: Mapping[str, float]
    takes_pairs = False

    @abstractmethod
    def outputs(self, network: Any, rows: dict[str, "tf.Tensor"], *, training: bool) -> "tf.Tensor":
        """Compute what the network says of each row, (rows, …)."""

    @abstractmethod
    def losses(self, outputs: "tf.Tensor", labels: "tf.Tensor") -> "tf.Tensor":
        """Compute the loss of each row, (rows,), of float32 outputs."""

    @abstractmethod
    def predict(self, outputs: NDArray[Any]) -> NDArray[Any]:
        """Make predictions of outputs (rows, …), in the form of the labels."""

    @abstractmethod
    def scores(self, predictions: NDArray[Any], labels: NDArray[Any]) -> dict[str, float]:
        """Compute {metric: figure} of predictions."""

    def counts(self, outputs: "tf.Tensor", labels: "tf.Tensor") -> dict[str, "tf.Tensor"]:  # noqa: ARG002
        """Compute what else of each row is added up for `means`, {name: (rows,)}."""
        return {}

    def shown(self, label: Any) -> str:
        """Write a label or a prediction: a number with all its digits, several divided by commas."""
        if np.ndim(label):
            return ",".join(map(self.shown, np.ravel(label)))
        # Nine significant digits tell all float32 numbers apart.
        return f"{label:.9g}" if isinstance(label, np.float32) else str(label)

    def features(self, length: int) -> dict[str, Feature]:
        """Name those of the text, and the label."""
        return {**self.text_features(length), "label": self.label}

    def sums(self, network: Any, rows: dict[str, "tf.Tensor"], *, training: bool) -> dict[str, "tf.Tensor"]:
        """Add up `loss`, `num_rows` and `counts`; keep the outputs of an evaluation."""
        import tensorflow as tf

        outputs = tf.cast(self.outputs(network, rows, training=training), tf.float32)
        is_row = tf.cast(rows[INDEX] >= 0, tf.float32)  # (rows,)
        of_rows = {"loss": self.losses(outputs, rows["label"]), **self.counts(outputs, rows["label"])}
        sums = {name: tf.reduce_sum(values * is_row) for name, values in of_rows.items()}
        sums["num_rows"] = tf.reduce_sum(is_row)
        return sums if training else sums | {"outputs": outputs, INDEX: rows[INDEX]}

    def predicted(self, network: Any, rows: dict[str, "tf.Tensor"]) -> dict[str, "tf.Tensor"]:
        """Keep the outputs of each row."""
        import tensorflow as tf

        return {"outputs": tf.cast(self.outputs(network, rows, training=False), tf.float32), INDEX: rows[INDEX]}

    def figures(self, sums: Mapping[str, Any]) -> dict[str, float]:
        """Compute loss and metrics of the rows to evaluate on, their number, and whether all are predicted alike."""
        assert self.references is not None
        return self.figures_of(sums, self.references)

    def figures_of(
        self, sums: Mapping[str, Any], references: NDArray[Any], is_labelled: NDArray[np.bool_] | None = None
    ) -> dict[str, float]:
        """Compute the same of rows with these labels; of the labelled ones without the loss, which is over all rows."""
        predictions, loss = self.predictions(sums), {"loss": super().figures(sums)["loss"]}
        if is_labelled is not None and not is_labelled.all():
            predictions, references, loss = predictions[is_labelled], references[is_labelled], {}
        figures = loss | self.scores(predictions, references)
        return figures | {"num_rows": len(predictions), "is_degenerate": int(is_degenerate(predictions))}

    def predictions(self, sums: Mapping[str, Any]) -> NDArray[Any]:
        """Make the predictions of all rows, in their order."""
        return self.predict(self.in_order(sums, "outputs"))

    def score(self, figures: Mapping[str, float]) -> float:
        """Compute by what checkpoints are compared."""
        value = figures[self.metric]
        return -value if self.metric in (*self.errors, "loss") else value

    def summarize(self, figures: Mapping[str, float]) -> str:
        """Summarize loss and the metric that checkpoints are compared by in a few words."""
        return with_metric(super().summarize(figures), figures, self.metric)

    def next_command(self, model: str) -> str:
        """Return the command that predicts a text, or a pair of texts."""
        texts = '--text "…" --text-pair "…"' if self.takes_pairs else '--text "…"'
        return f"{super().next_command(model)} {texts}"

    def describe(self, figures: Mapping[str, float]) -> dict[str, str]:
        """Describe loss and metrics, beside what a guess without the text would score."""
        rows = {"validation loss": f"{shown_score(figures['loss'])}, of {figures['num_rows']:,} rows"}
        for name in (*self.metrics, *((COMBINED,) if COMBINED in figures else ())):
            guess = f"; a guess without the text: {shown_score(self.guess[name])}" if name in self.guess else ""
            rows[name.replace("_", " ")] = f"{shown_score(figures[name])}{guess}"
        if figures["is_degenerate"]:
            rows["degenerate"] = "all rows have the same prediction: nothing was learned"
        return rows

    def describe_row(self, rows: dict[str, "tf.Tensor"], tokenizer: "PreTrainedTokenizerFast") -> dict[str, str]:
        """Show the first row with its label."""
        label = rows["label"][0].numpy()
        shown = str(label) if isinstance(label, np.floating) else self.shown(label) or "none"
        return {"first row": self.first_text(rows, tokenizer), "its label": shown}
