"""Tasks with one answer for each row of text, such as a class or a number."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from finetuning.data.inputs import INDEX
from finetuning.loop.task import ExampleTask, Part
from finetuning.tasks.class_loss import ClassLoss
from finetuning.tasks.metrics import is_degenerate
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
    takes_pairs: whether each row is of two texts.
    class_loss: that of training, where it is not `losses`.
    """

    means: tuple[Mean, ...] = (Mean("loss", "loss", "total_weight"),)
    label: Feature
    takes_pairs = False
    class_loss: ClassLoss | None = None

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
        # Nine significant digits distinguish all float32 numbers.
        return f"{label:.9g}" if isinstance(label, np.float32) else str(label)

    def features(self, length: int) -> dict[str, Feature]:
        return {**self.text_features(length), "label": self.label}

    def sums(self, network: Any, rows: dict[str, "tf.Tensor"], *, training: bool) -> dict[str, "tf.Tensor"]:
        """Add up `loss`, `total_weight`, `num_rows` and `counts`; keep the outputs of an evaluation."""
        import tensorflow as tf

        outputs = tf.cast(self.outputs(network, rows, training=training), tf.float32)
        is_row = tf.cast(rows[INDEX] >= 0, tf.float32)  # (rows,)
        losses, weights = self.losses(outputs, rows["label"]), tf.ones_like(is_row)
        if training and self.class_loss is not None:
            losses, weights = self.class_loss.losses(outputs, rows["label"])
        of_rows = {"loss": losses, "total_weight": weights, **self.counts(outputs, rows["label"])}
        sums = {name: tf.reduce_sum(values * is_row) for name, values in of_rows.items()}
        sums["num_rows"] = tf.reduce_sum(is_row)
        return sums if training else sums | {"outputs": outputs, INDEX: rows[INDEX]}

    def predicted(self, network: Any, rows: dict[str, "tf.Tensor"]) -> dict[str, "tf.Tensor"]:
        import tensorflow as tf

        return {"outputs": tf.cast(self.outputs(network, rows, training=False), tf.float32), INDEX: rows[INDEX]}

    def predictions(self, sums: Mapping[str, Any], part: Part) -> NDArray[Any]:  # noqa: ARG002
        return self.predict(self.in_order(sums, "outputs"))

    def scores_of(self, sums: Mapping[str, Any], predictions: NDArray[Any], part: Part) -> dict[str, float]:  # noqa: ARG002
        labels = part.examples
        if part.is_labelled is not None:
            predictions, labels = predictions[part.is_labelled], labels[part.is_labelled]
        counts = {"num_rows": len(predictions), "is_degenerate": int(is_degenerate(predictions))}
        return self.scores(predictions, labels) | counts

    def text_of(self, predictions: Iterable[Any], part: Part) -> str:  # noqa: ARG002
        """Format a header, and a line `index<TAB>prediction` for each row."""
        lines = [f"{index}\t{self.shown(one)}\n" for index, one in enumerate(predictions)]
        return "index\tprediction\n" + "".join(lines)

    def next_command(self, model: str) -> str:
        texts = '--text "…" --text-pair "…"' if self.takes_pairs else '--text "…"'
        return f"{super().next_command(model)} {texts}"

    def describe_row(self, rows: dict[str, "tf.Tensor"], tokenizer: "PreTrainedTokenizerFast") -> dict[str, str]:
        label = rows["label"][0].numpy()
        shown = str(label) if isinstance(label, np.floating) else self.shown(label) or "none"
        weight = f", of weight {self.class_loss.weights[label]:.4g}" if self.class_loss is not None else ""
        return {"first row": self.first_text(rows, tokenizer), "its label": f"{shown}{weight}"}
