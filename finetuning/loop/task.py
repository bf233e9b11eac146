"""The interface of a fine-tuning task: `train.tasks.task` plus predictions, the scores of predictions, and files.

Most tasks predict one value for each row of text, such as a class or a number. These tasks are subclasses of `RowTask`.
For classes, the training loss can have class weights and label smoothing.
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

# Name of the file with the predictions of the validation split, without its ending.
EVAL_NAME = "eval_predictions"
# Name of the mean of a task's metrics, if it has several.
COMBINED = "combined_score"
# Sentence about the evaluation in the model card.
ON_ROWS = "On the {num_rows:,} validation rows, which also decided which checkpoint was kept."


@dataclass(frozen=True)
class Split:
    """Examples to evaluate or to predict.

    Attributes:
        rows: the encoded rows.
        examples: the data that the task needs to score predictions: labels, `Sentences`, `Windows` or `Judged`.
        file: name of the file for their predictions.
        is_scored: whether the right predictions are known for at least some rows.
        is_labelled: bool (rows,), whether the right prediction of each row is known; None if all are known. If it is
            not None, no loss is computed.
    """

    rows: EncodedRows
    examples: Any
    file: str = ""
    is_scored: bool = True
    is_labelled: NDArray[np.bool_] | None = None


class ExampleTask(Task):
    """A task that learns from rows of `finetuning.data.inputs`.

    Attributes:
        metrics: names of the scores that `compute_scores` returns. For the scores in `errors`, lower is better.
        metric: the metric by which checkpoints are compared, one of `metrics` or `loss`.
        evaluated: the split that decides which checkpoint is best.
    """

    allows_new_head = True
    metrics: tuple[str, ...]
    evaluated: Split | None = None

    def __init__(self, *, pad_token_id: int, token_types: bool):
        self.pad_token_id = pad_token_id
        self.token_types = token_types

    @abstractmethod
    def prediction_outputs(self, network: Any, rows: dict[str, "tf.Tensor"]) -> dict[str, "tf.Tensor"]:
        """Run the network on rows without labels, and return the values that `predictions` needs, (rows, …)."""

    @abstractmethod
    def predictions(self, sums: Mapping[str, Any], split: Split) -> Any:
        """Return the predictions of a split, in the order of its examples.

        Args:
            sums: the results of `sums` in an evaluation, or of `prediction_outputs`, over all rows of the split.
        """

    @abstractmethod
    def compute_scores(self, sums: Mapping[str, Any], predictions: Any, split: Split) -> dict[str, float]:
        """Compute the scores of predictions, and counts such as `num_rows`."""

    @abstractmethod
    def format_predictions(self, predictions: Any, split: Split) -> str:
        """Format predictions as the content of a file."""

    def write_extra_files(self, folder: Folder, predictions: Any, split: Split) -> None:
        """Write additional files about the predictions of a split, such as a plot. By default, write none."""

    def figures(self, sums: Mapping[str, Any]) -> dict[str, float]:
        assert self.evaluated is not None
        return self.compute_figures(sums, self.predictions(sums, self.evaluated), self.evaluated)

    def compute_figures(self, sums: Mapping[str, Any], predictions: Any, split: Split) -> dict[str, float]:
        """Compute loss and scores. If some rows have no label, leave out the loss, because it covers all rows."""
        loss = {"loss": super().figures(sums)["loss"]} if split.is_labelled is None else {}
        return loss | self.compute_scores(sums, predictions, split)

    def score(self, figures: Mapping[str, float]) -> float:
        value = figures[self.metric]
        return -value if self.metric in (*self.errors, "loss") else value

    def summarize(self, figures: Mapping[str, float]) -> str:
        summary, name = super().summarize(figures), self.metric.replace("_", " ")
        return summary if self.metric == "loss" else f"{summary}  {name} {format_score(figures[self.metric])}"

    def describe(self, figures: Mapping[str, float]) -> dict[str, str]:
        rows = {"validation loss": f"{format_score(figures['loss'])}, of {figures['num_rows']:,} rows"}
        for name in (*self.metrics, *((COMBINED,) if COMBINED in figures else ())):
            guess = f"; a guess without the text: {format_score(self.guess[name])}" if name in self.guess else ""
            title = f"mean of {len(self.metrics)} scores" if name == COMBINED else name.replace("_", " ")
            rows[title] = f"{format_score(figures[name])}{guess}"
        if figures["is_degenerate"]:
            rows["degenerate"] = "all predictions are the same: nothing was learned"
        return rows

    def next_command(self, model: str) -> str:
        """Return the command that predicts with the model, without the texts to predict."""
        return f"python finetuning/predict.py --model {shlex.quote(model)}"

    def text_features(self, length: int) -> dict[str, Feature]:
        """Return the features of a text: ids, attention mask, token types if the model has them, and the row number.

        The row number is -1 for rows of padding.
        """
        ids, mask, index = Feature((length,), padding=self.pad_token_id), Feature((length,)), Feature(padding=-1)
        token_types = {TOKEN_TYPES: Feature((length,))} if self.token_types else {}
        return {INPUT_IDS: ids, ATTENTION_MASK: mask, **token_types, INDEX: index}

    def prediction_features(self, length: int) -> dict[str, Feature]:
        """Return the features that `prediction_outputs` reads: all features except the label."""
        return self.text_features(length)

    def network_inputs(self, rows: dict[str, "tf.Tensor"]) -> dict[str, "tf.Tensor"]:
        """Select the network's inputs, (rows, length) each: ids, attention mask and, for some models, token types."""
        names = (INPUT_IDS, ATTENTION_MASK, *((TOKEN_TYPES,) if self.token_types else ()))
        return {name: rows[name] for name in names}

    @staticmethod
    def first_text(rows: dict[str, "tf.Tensor"], tokenizer: "PreTrainedTokenizerFast") -> str:
        """Decode the first row."""
        ids, mask = rows[INPUT_IDS][0].numpy(), rows[ATTENTION_MASK][0].numpy()
        return str(tokenizer.decode(ids[mask > 0]))

    @staticmethod
    def in_order(sums: Mapping[str, Any], name: str) -> NDArray[Any]:
        """Return the values `sums[name]`, (rows, …), in the order of the split's rows and without rows of padding."""
        index = sums[INDEX]
        return sums[name][np.argsort(index, kind="stable")[np.count_nonzero(index < 0) :]]


def finetuned_card(
    model_kind: str, task_name: str, pipeline_tag: str, metrics: Mapping[str, str], **fields: Any
) -> TaskCard:
    """Make the card of a fine-tuned model, which lists its loss and metrics.

    Args:
        metrics: {name of a metric: name on the Hub}.
        fields: additional fields of `TaskCard`.
    """
    figures = [CardFigure(name, name.replace("_", " "), word, name) for name, word in metrics.items()]
    return TaskCard(
        model_kind,
        task_name,
        pipeline_tag,
        (CardFigure("loss", "loss", "loss", "Loss"), *figures),
        training_verb="fine-tuned",
        start_words="from",
        **fields,
    )


def format_score(value: float) -> str:
    """Format a score with four decimals, or with four significant digits if it is below 0.001."""
    return f"{value:.4f}" if value == 0 or abs(value) >= 0.001 else f"{value:.4g}"


@dataclass(frozen=True)
class ClassLoss:
    """Weighted and smoothed cross-entropy, equal to PyTorch's `CrossEntropyLoss`.

    This loss is used in training only, so that evaluation losses of different runs are comparable.

    Attributes:
        weights: the weight of each class, by id.
        smoothing: the fraction of a label that is divided equally among all classes (Szegedy et al. 2015).
    """

    weights: tuple[float, ...]
    smoothing: float = 0.0

    def losses(self, logits: "tf.Tensor", labels: "tf.Tensor") -> tuple["tf.Tensor", "tf.Tensor"]:
        """Compute the loss and the weight of each label; the mean loss is the sum of losses over the sum of weights.

        Args:
            logits: float32 (…, classes).
            labels: class ids, int32 (…).
        """
        import tensorflow as tf

        num_classes, weights = len(self.weights), tf.constant(self.weights, tf.float32)
        targets = (1 - self.smoothing) * tf.one_hot(labels, num_classes) + self.smoothing / num_classes
        return -tf.reduce_sum(targets * weights * tf.nn.log_softmax(logits), axis=-1), tf.gather(weights, labels)


def class_loss(settings: SmoothedOptimization, names: Sequence[str], labels: NDArray[np.int32]) -> ClassLoss | None:
    """Make the training loss of `--class-weights` and `--label-smoothing`; None if neither flag is given.

    With `balanced`, the weight of a class is the mean number of labels per class divided by the number of labels of
    this class, as in scikit-learn.

    Args:
        names: names of the classes, by id.
        labels: class ids to train on, (rows,).

    Raises:
        InputError: the number of weights is wrong, or `balanced` is given and a class has no labels.
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
    rule = f"needs training examples of every class, or numbers instead of {BALANCED}"
    require(not absent, rule, "--class-weights", f"none of {absent[:200]}")
    return ClassLoss(tuple((len(labels) / (len(names) * counts)).tolist()), settings.label_smoothing)


def describe_loss(loss: ClassLoss | None, names: Sequence[str]) -> dict[str, str]:
    """Describe the class weights for the printed plan, {title: text}; empty if all weights are equal."""
    if loss is None or len(set(loss.weights)) == 1:
        return {}
    listed = [f"{name} {weight:.4g}" for name, weight in zip(names, loss.weights, strict=True)]
    return {"class weights": ", ".join(listed)[:500]}


def is_degenerate(predictions: NDArray[Any]) -> bool:
    """Return whether all rows have the same prediction, which means that the model has learned nothing."""
    return len(predictions) > 1 and bool((predictions == predictions[0]).all())


class RowTask(ExampleTask):
    """A task that learns one label per row. Subclasses define outputs, loss, predictions and scores.

    Attributes:
        label: the feature with the label.
        takes_pairs: whether each row has two texts.
        class_loss: the training loss; None if it is `losses`.
    """

    means: tuple[Mean, ...] = (Mean("loss", "loss", "total_weight"),)
    label: Feature
    takes_pairs = False
    class_loss: ClassLoss | None = None

    @abstractmethod
    def outputs(self, network: Any, rows: dict[str, "tf.Tensor"], *, training: bool) -> "tf.Tensor":
        """Compute the outputs of the network for each row, (rows, …), such as logits."""

    @abstractmethod
    def losses(self, outputs: "tf.Tensor", labels: "tf.Tensor") -> "tf.Tensor":
        """Compute the loss of each row, (rows,), from float32 outputs."""

    @abstractmethod
    def predict(self, outputs: NDArray[Any]) -> NDArray[Any]:
        """Convert outputs (rows, …) to predictions, which have the form of the labels."""

    @abstractmethod
    def scores(self, predictions: NDArray[Any], labels: NDArray[Any]) -> dict[str, float]:
        """Compute the scores of predictions, {metric: value}."""

    def counts(self, outputs: "tf.Tensor", labels: "tf.Tensor") -> dict[str, "tf.Tensor"]:  # noqa: ARG002
        """Compute additional values of each row, {name: (rows,)}, whose sums `means` uses."""
        return {}

    def format_label(self, label: Any) -> str:
        """Format a label or a prediction. Numbers have all digits; several values are separated by commas."""
        if np.ndim(label):
            return ",".join(map(self.format_label, np.ravel(label)))
        # Nine significant digits distinguish all float32 numbers.
        return f"{label:.9g}" if isinstance(label, np.float32) else str(label)

    def features(self, length: int) -> dict[str, Feature]:
        return {**self.text_features(length), "label": self.label}

    def sums(self, network: Any, rows: dict[str, "tf.Tensor"], *, training: bool) -> dict[str, "tf.Tensor"]:
        """Add up `loss`, `total_weight`, `num_rows` and `counts`. In an evaluation, also return the outputs."""
        import tensorflow as tf

        outputs = tf.cast(self.outputs(network, rows, training=training), tf.float32)
        is_row = tf.cast(rows[INDEX] >= 0, tf.float32)  # (rows,)
        losses, weights = self.losses(outputs, rows["label"]), tf.ones_like(is_row)
        if training and self.class_loss is not None:
            losses, weights = self.class_loss.losses(outputs, rows["label"])
        row_values = {"loss": losses, "total_weight": weights, **self.counts(outputs, rows["label"])}
        sums = {name: tf.reduce_sum(values * is_row) for name, values in row_values.items()}
        sums["num_rows"] = tf.reduce_sum(is_row)
        return sums if training else sums | {"outputs": outputs, INDEX: rows[INDEX]}

    def prediction_outputs(self, network: Any, rows: dict[str, "tf.Tensor"]) -> dict[str, "tf.Tensor"]:
        import tensorflow as tf

        return {"outputs": tf.cast(self.outputs(network, rows, training=False), tf.float32), INDEX: rows[INDEX]}

    def predictions(self, sums: Mapping[str, Any], split: Split) -> NDArray[Any]:  # noqa: ARG002
        return self.predict(self.in_order(sums, "outputs"))

    def compute_scores(self, sums: Mapping[str, Any], predictions: NDArray[Any], split: Split) -> dict[str, float]:  # noqa: ARG002
        labels = split.examples
        if split.is_labelled is not None:
            predictions, labels = predictions[split.is_labelled], labels[split.is_labelled]
        counts = {"num_rows": len(predictions), "is_degenerate": int(is_degenerate(predictions))}
        return self.scores(predictions, labels) | counts

    def format_predictions(self, predictions: Iterable[Any], split: Split) -> str:  # noqa: ARG002
        """Format a header, and a line `index<TAB>prediction` for each row."""
        lines = [f"{index}\t{self.format_label(prediction)}\n" for index, prediction in enumerate(predictions)]
        return "index\tprediction\n" + "".join(lines)

    def next_command(self, model: str) -> str:
        texts = '--text "…" --text-pair "…"' if self.takes_pairs else '--text "…"'
        return f"{super().next_command(model)} {texts}"

    def describe_row(self, rows: dict[str, "tf.Tensor"], tokenizer: "PreTrainedTokenizerFast") -> dict[str, str]:
        label = rows["label"][0].numpy()
        shown = str(label) if isinstance(label, np.floating) else self.format_label(label) or "none"
        weight = f", of weight {self.class_loss.weights[label]:.4g}" if self.class_loss is not None else ""
        return {"first row": self.first_text(rows, tokenizer), "its label": f"{shown}{weight}"}
