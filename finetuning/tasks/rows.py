"""What tasks share: rows of text and a new head; and tasks with one answer for each row, with their results."""

import logging
import shlex
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from finetuning.config.settings import Settings
from finetuning.data.rows import ATTENTION_MASK, INDEX, INPUT_IDS, TOKEN_TYPES, EncodedRows
from finetuning.loop.results import EVAL_NAME, named, shown_score, train_results, write_results
from finetuning.loop.training import FinetuningJob, Predict
from finetuning.tasks.metrics import COMBINED, is_degenerate
from mlm_common.storage import Folder
from train.data.inputs import Feature
from train.tasks.task import Mean, Task

if TYPE_CHECKING:
    import tensorflow as tf
    from transformers import PreTrainedTokenizerFast

    from train.loop.trainer import Trainer

# What the card says of the evaluation.
ON_ROWS = "On the {num_rows:,} validation rows, which also decided which checkpoint was kept."


def with_metric(summary: str, figures: Mapping[str, float], metric: str) -> str:
    """Add a metric to the summary of an evaluation, unless that is the loss, which is there."""
    return summary if metric == "loss" else f"{summary}  {metric.replace('_', ' ')} {shown_score(figures[metric])}"


class ExampleTask(Task):
    """Learns from rows of `finetuning.data.rows`.

    Args:
        pad_token_id: of the tokenizer.
        token_types: whether the rows have them.
    """

    allows_new_head = True

    def __init__(self, *, pad_token_id: int, token_types: bool):
        self.pad_token_id = pad_token_id
        self.token_types = token_types

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

    @abstractmethod
    def predicted(self, network: Any, rows: dict[str, "tf.Tensor"]) -> dict[str, "tf.Tensor"]:
        """Run the network on rows without labels, and keep what the prediction of each row needs, (rows, …)."""

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
        # Nine significant digits distinguish all float32 numbers.
        return f"{label:.9g}" if isinstance(label, np.float32) else str(label)

    def features(self, length: int) -> dict[str, Feature]:
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
        import tensorflow as tf

        return {"outputs": tf.cast(self.outputs(network, rows, training=False), tf.float32), INDEX: rows[INDEX]}

    def figures(self, sums: Mapping[str, Any]) -> dict[str, float]:
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
        return self.predict(self.in_order(sums, "outputs"))

    def score(self, figures: Mapping[str, float]) -> float:
        value = figures[self.metric]
        return -value if self.metric in (*self.errors, "loss") else value

    def summarize(self, figures: Mapping[str, float]) -> str:
        return with_metric(super().summarize(figures), figures, self.metric)

    def next_command(self, model: str) -> str:
        texts = '--text "…" --text-pair "…"' if self.takes_pairs else '--text "…"'
        return f"{super().next_command(model)} {texts}"

    def describe(self, figures: Mapping[str, float]) -> dict[str, str]:
        rows = {"validation loss": f"{shown_score(figures['loss'])}, of {figures['num_rows']:,} rows"}
        for name in (*self.metrics, *((COMBINED,) if COMBINED in figures else ())):
            guess = f"; a guess without the text: {shown_score(self.guess[name])}" if name in self.guess else ""
            rows[name.replace("_", " ")] = f"{shown_score(figures[name])}{guess}"
        if figures["is_degenerate"]:
            rows["degenerate"] = "all rows have the same prediction: nothing was learned"
        return rows

    def describe_row(self, rows: dict[str, "tf.Tensor"], tokenizer: "PreTrainedTokenizerFast") -> dict[str, str]:
        label = rows["label"][0].numpy()
        shown = str(label) if isinstance(label, np.floating) else self.shown(label) or "none"
        return {"first row": self.first_text(rows, tokenizer), "its label": shown}


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Part:
    """Examples as the model takes them, and their labels; None where they have none.

    is_labelled: bool (rows,), which of them have one; None where all have.
    """

    rows: EncodedRows
    labels: NDArray[Any] | None
    is_labelled: NDArray[np.bool_] | None = None


class RowsJob(FinetuningJob[Settings]):
    """The job of such a run; `open_run` sets what else there is than the rows to train on.

    validation: {ending of the names of the figures: part}; the first is the one that checkpoints are chosen by.
    tests: {name of the predictions: part}.
    """

    validation: dict[str, Part]
    tests: dict[str, Part]

    def write_results(self, trainer: "Trainer", step: int, predict: Predict) -> dict[str, float] | None:
        """Predict the validation and test parts; write the predictions and, where there are labels, their scores."""
        run, task = trainer.run, trainer.phase.task
        assert isinstance(task, RowTask)
        train = train_results(trainer, step)
        predictions: dict[str, NDArray[Any]] = {}

        def figures_of(name: str, part: Part) -> dict[str, float]:
            totals = predict(part.rows)
            predictions[name] = task.predictions(totals)
            return task.figures_of(totals, part.labels, part.is_labelled) if part.labels is not None else {}

        validation = {ending: figures_of(f"{EVAL_NAME}{ending}", part) for ending, part in self.validation.items()}
        evaluated = {
            f"{name}{ending}": value for ending, part in validation.items() for name, value in named(part).items()
        }
        if evaluated:
            evaluated |= {f"guess_{name}": value for name, value in task.guess.items()} | {"epoch": train["epoch"]}
        predicted: dict[str, Any] = {}
        for name, part in self.tests.items():
            predicted |= named(figures_of(f"predict_results_{name}", part))
        first = validation.get("")
        if not run.cluster.is_chief:
            return first
        for name, of_part in predictions.items():
            run.folder.files.write_text(f"{name}.txt", predictions_text(map(task.shown, of_part)))
        if first:
            self.write_more(run.folder.files, task, predictions[EVAL_NAME])
        write_results(run.folder.files, {"train": train, "eval": evaluated, "predict": predicted})
        if first and first["is_degenerate"]:
            logger.warning("All validation rows have the same prediction: nothing was learned.")
        return first

    def write_more(self, folder: Folder, task: Any, predictions: NDArray[Any]) -> None:
        """Write what else shows the predictions of the validation part; by default nothing."""


def predictions_text(predictions: Iterable[str]) -> str:
    """Format predictions: a header, and a line `index<TAB>prediction` for each row, in their order."""
    lines = [f"{index}\t{prediction}\n" for index, prediction in enumerate(predictions)]
    return "index\tprediction\n" + "".join(lines)
