"""What all tasks of fine-tuning share: rows of text, each with a number, and a head that starts anew."""

import shlex
from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from finetuning.data.rows import ATTENTION_MASK, INDEX, INPUT_IDS, TOKEN_TYPES
from train.data.inputs import Feature
from train.tasks.task import Task

if TYPE_CHECKING:
    import tensorflow as tf
    from transformers import PreTrainedTokenizerFast


def shown_score(value: float) -> str:
    """Write a score with four decimals, or four significant digits where it is so small that these would say little."""
    return f"{value:.4f}" if value == 0 or abs(value) >= 0.001 else f"{value:.4g}"


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
        """Run the network on rows without labels, and keep of each row what its prediction is made of, (rows, …)."""

    def network_inputs(self, rows: dict[str, "tf.Tensor"]) -> dict[str, "tf.Tensor"]:
        """Make what a network takes, (rows, length) each: ids, which of them are no padding, and token types."""
        names = (INPUT_IDS, ATTENTION_MASK, *((TOKEN_TYPES,) if self.token_types else ()))
        return {name: rows[name] for name in names}

    @staticmethod
    def first_text(rows: dict[str, "tf.Tensor"], tokenizer: "PreTrainedTokenizerFast") -> str:
        """Decode the tokens of the first row."""
        ids, mask = rows[INPUT_IDS][0].numpy(), rows[ATTENTION_MASK][0].numpy()
        return str(tokenizer.decode(ids[mask > 0]))

    @staticmethod
    def in_order(sums: Mapping[str, Any], name: str) -> NDArray[Any]:
        """Put what an evaluation kept of each row under a name, (rows, …), in the order of the rows."""
        index = sums[INDEX]
        return sums[name][np.argsort(index, kind="stable")[np.count_nonzero(index < 0) :]]
