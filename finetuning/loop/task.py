"""What fine-tuning asks of a task, in addition to `train.tasks.task`: predictions, their scores, and their files."""

import shlex
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from finetuning.data.inputs import ATTENTION_MASK, INDEX, INPUT_IDS, TOKEN_TYPES, EncodedRows
from mlm_common.storage import Folder
from train.data.inputs import Feature
from train.tasks.task import CardFigure, Task, TaskCard

if TYPE_CHECKING:
    import tensorflow as tf
    from transformers import PreTrainedTokenizerFast

# The file with the predictions of the validation part, without its ending.
EVAL_NAME = "eval_predictions"
# The mean of a task's metrics, where it has several.
COMBINED = "combined_score"


@dataclass(frozen=True)
class Part:
    """Examples to evaluate or to predict.

    rows: as the model takes them.
    examples: by which the task scores them: labels, `Sentences` or `Windows`.
    file: of their predictions.
    is_scored: whether the right predictions are known.
    is_labelled: bool (rows,), for which rows they are known; None for all.
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
            rows[name.replace("_", " ")] = f"{shown_score(figures[name])}{guess}"
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
