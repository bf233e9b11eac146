"""Tasks with one answer for each row of text, such as a class or a number, and the loss of classes in training."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from finetuning.config.optimization import BALANCED, SmoothedOptimization
from finetuning.data.inputs import INDEX
from finetuning.loop.task import ExampleTask, Part
from finetuning.tasks.metrics import is_degenerate
from mlm_common.cli.settings import require
from train.data.inputs import Feature
from train.tasks.task import Mean

if TYPE_CHECKING:
    import tensorflow as tf
    from transformers import PreTrainedTokenizerFast
# What the card says of the evaluation.
ON_ROWS = "On the {num_rows:,} validation rows, which also decided which checkpoint was kept."


@dataclass(frozen=True)
class ClassLoss:
    """Cross-entropy as PyTorch's `CrossEntropyLoss`; evaluations are without it, so that runs compare.

    weights: of the classes, by id.
    smoothing: the fraction of a label that is divided equally among all classes (Szegedy et al. 2015).
    """

    weights: tuple[float, ...]
    smoothing: float = 0.0

    def losses(self, logits: "tf.Tensor", labels: "tf.Tensor") -> tuple["tf.Tensor", "tf.Tensor"]:
        """Compute the loss of each label and its weight; a mean is the sum of losses divided by that of weights.

        Args:
            logits: float32 (…, classes).
            labels: class ids, int32 (…).
        """
        import tensorflow as tf

        num_classes, weights = len(self.weights), tf.constant(self.weights, tf.float32)
        targets = (1 - self.smoothing) * tf.one_hot(labels, num_classes) + self.smoothing / num_classes
        return -tf.reduce_sum(targets * weights * tf.nn.log_softmax(logits), axis=-1), tf.gather(weights, labels)


def class_loss(settings: SmoothedOptimization, names: Sequence[str], labels: NDArray[np.int32]) -> ClassLoss | None:
    """Make the loss that the flags ask for, by the names of the classes and the labels to train on; None without any.

    `balanced` weighs each class by the mean number of labels of a class divided by the number of its labels, as
    scikit-learn does.
    """
    given: Any = getattr(settings, "class_weights", [])
    if not given:
        return ClassLoss((1.0,) * len(names), settings.label_smoothing) if settings.label_smoothing else None
    if given != [BALANCED]:
        rule = f"must be {BALANCED} or {len(names)} numbers, for {', '.join(names)[:200]}"
        require(len(given) == len(names), rule, "--class-weights", " ".join(given))
        return ClassLoss(tuple(map(float, given)), settings.label_smoothing)
    counts = np.bincount(labels, minlength=len(names))
    absent = ", ".join(name for name, count in zip(names, counts, strict=True) if not count)
    rule = f"needs labels of each class to train on, or numbers instead of {BALANCED}"
    require(not absent, rule, "--class-weights", f"none of {absent[:200]}")
    return ClassLoss(tuple((len(labels) / (len(names) * counts)).tolist()), settings.label_smoothing)


def describe_loss(loss: ClassLoss | None, names: Sequence[str]) -> dict[str, str]:
    """Describe weights of classes in the plan of a run."""
    if loss is None or len(set(loss.weights)) == 1:
        return {}
    listed = [f"{name} {weight:.4g}" for name, weight in zip(names, loss.weights, strict=True)]
    return {"class weights": ", ".join(listed)[:500]}


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
