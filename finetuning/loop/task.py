"""What fine-tuning asks of a task, in addition to `train.tasks.task`: predictions, their scores, and their files.

Most tasks have one answer for each row of text, such as a class or a number: a `RowTask`. For classes, the loss of
training may have weights and smoothed labels.
"""

import shlex
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from finetuning.config.optimization import BALANCED, SmoothedOptimization
from finetuning.data.inputs import ATTENTION_MASK, INDEX, INPUT_IDS, TOKEN_TYPES, EncodedRows
from mlm_common.cli.settings import require
from mlm_common.storage import Folder
from train.data.inputs import Feature
from train.tasks.task import CardFigure, Mean, Task, TaskCard

if TYPE_CHECKING:
    import tensorflow as tf
    from transformers import PreTrainedTokenizerFast

# The file with the predictions of the validation part, without its ending.
EVAL_NAME = "eval_predictions"
# The mean of a task's metrics, where it has several.
COMBINED = "combined_score"
# What the card says of the evaluation.
ON_ROWS = "On the {num_rows:,} validation rows, which also decided which checkpoint was kept."


@dataclass(frozen=True)
class Part:
    """Examples to evaluate or to predict.

    rows: as the model takes them.
    examples: by which the task scores them: labels, `Sentences` or `Windows`.
    file: of their predictions.
    is_scored: whether the right predictions are known.
    is_labelled: bool (rows,), for which rows they are known; None for all. If it is given, no loss is computed.
    """

    rows: EncodedRows
    examples: Any
    file: str = ""
    is_scored: bool = True
    is_labelled: NDArray[np.bool_] | None = None


class ExampleTask(Task):
    """Learns from rows of `finetuning.data.inputs`.

    metrics: names in `scores_of`; those in `errors` are the lower the better.
    metric: of them or `loss`, by which checkpoints are compared.
    evaluated: the part that decides which checkpoint is best.
    """

    allows_new_head = True
    metrics: tuple[str, ...]
    evaluated: Part | None = None

    def __init__(self, *, pad_token_id: int, token_types: bool):
        self.pad_token_id = pad_token_id
        self.token_types = token_types

    @abstractmethod
    def predicted(self, network: Any, rows: dict[str, "tf.Tensor"]) -> dict[str, "tf.Tensor"]:
        """Run the network on rows without labels, and keep what the prediction of each row needs, (rows, …)."""

    @abstractmethod
    def predictions(self, sums: Mapping[str, Any], part: Part) -> Any:
        """Make the predictions of a part, in its order, of what `sums` or `predicted` kept of all its rows."""

    @abstractmethod
    def scores_of(self, sums: Mapping[str, Any], predictions: Any, part: Part) -> dict[str, float]:
        """Compute the scores of predictions, and counts such as `num_rows`."""

    @abstractmethod
    def text_of(self, predictions: Any, part: Part) -> str:
        """Format predictions as the content of a file."""

    def write_more(self, folder: Folder, predictions: Any, part: Part) -> None:
        """Write what else shows the predictions of a part; by default nothing."""

    def figures(self, sums: Mapping[str, Any]) -> dict[str, float]:
        assert self.evaluated is not None
        return self.figures_of(sums, self.predictions(sums, self.evaluated), self.evaluated)

    def figures_of(self, sums: Mapping[str, Any], predictions: Any, part: Part) -> dict[str, float]:
        """Compute loss and scores; where some rows have no label without the loss, which is over all rows."""
        loss = {"loss": super().figures(sums)["loss"]} if part.is_labelled is None else {}
        return loss | self.scores_of(sums, predictions, part)

    def score(self, figures: Mapping[str, float]) -> float:
        value = figures[self.metric]
        return -value if self.metric in (*self.errors, "loss") else value

    def summarize(self, figures: Mapping[str, float]) -> str:
        summary, name = super().summarize(figures), self.metric.replace("_", " ")
        return summary if self.metric == "loss" else f"{summary}  {name} {shown_score(figures[self.metric])}"

    def describe(self, figures: Mapping[str, float]) -> dict[str, str]:
        rows = {"validation loss": f"{shown_score(figures['loss'])}, of {figures['num_rows']:,} rows"}
        for name in (*self.metrics, *((COMBINED,) if COMBINED in figures else ())):
            guess = f"; a guess without the text: {shown_score(self.guess[name])}" if name in self.guess else ""
            title = f"mean of {len(self.metrics)} scores" if name == COMBINED else name.replace("_", " ")
            rows[title] = f"{shown_score(figures[name])}{guess}"
        if figures["is_degenerate"]:
            rows["degenerate"] = "all predictions are the same: nothing was learned"
        return rows

    def next_command(self, model: str) -> str:
        """Return the command that predicts with the model, up to what it is to predict."""
        return f"python finetuning/predict.py --model {shlex.quote(model)}"

    def text_features(self, length: int) -> dict[str, Feature]:
        """Name ids, mask, token types where there are any, and the number of the row, -1 in padding."""
        ids, mask, index = Feature((length,), padding=self.pad_token_id), Feature((length,)), Feature(padding=-1)
        token_types = {TOKEN_TYPES: Feature((length,))} if self.token_types else {}
        return {INPUT_IDS: ids, ATTENTION_MASK: mask, **token_types, INDEX: index}

    def predicted_features(self, length: int) -> dict[str, Feature]:
        """Name what `predicted` reads of each row: the features without those of its label."""
        return self.text_features(length)

    def network_inputs(self, rows: dict[str, "tf.Tensor"]) -> dict[str, "tf.Tensor"]:
        """Make what a network takes, (rows, length) each: ids, which of them are no padding, and token types."""
        names = (INPUT_IDS, ATTENTION_MASK, *((TOKEN_TYPES,) if self.token_types else ()))
        return {name: rows[name] for name in names}

    @staticmethod
    def first_text(rows: dict[str, "tf.Tensor"], tokenizer: "PreTrainedTokenizerFast") -> str:
        ids, mask = rows[INPUT_IDS][0].numpy(), rows[ATTENTION_MASK][0].numpy()
        return str(tokenizer.decode(ids[mask > 0]))

    @staticmethod
    def in_order(sums: Mapping[str, Any], name: str) -> NDArray[Any]:
        """Put what an evaluation kept of each row under a name, (rows, …), in the order of the rows."""
        index = sums[INDEX]
        return sums[name][np.argsort(index, kind="stable")[np.count_nonzero(index < 0) :]]


def finetuned_card(
    model_kind: str, task_name: str, pipeline_tag: str, metrics: Mapping[str, str], **more: Any
) -> TaskCard:
    """Make the card of a fine-tuned model, with the loss and {metric: the Hub's word for it}."""
    figures = [CardFigure(name, name.replace("_", " "), word, name) for name, word in metrics.items()]
    return TaskCard(
        model_kind,
        task_name,
        pipeline_tag,
        (CardFigure("loss", "loss", "loss", "Loss"), *figures),
        training_verb="fine-tuned",
        start_words="from",
        **more,
    )


def shown_score(value: float) -> str:
    """Write a score with four decimals, or four significant digits where it is so small that these would say little."""
    return f"{value:.4f}" if value == 0 or abs(value) >= 0.001 else f"{value:.4g}"


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

    Raises:
        InputError: weights of other classes, or `balanced` and a class without labels.
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


def is_degenerate(predictions: NDArray[Any]) -> bool:
    """Return whether all rows have the same prediction: nothing was learned."""
    return len(predictions) > 1 and bool((predictions == predictions[0]).all())


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
