"""What all tasks of fine-tuning share: rows of text, each with a number, and a head that starts anew."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from finetuning.data.rows import INDEX, INPUT_IDS, TOKEN_TYPES
from train.data.features import Feature
from train.tasks.task import Task

if TYPE_CHECKING:
    import tensorflow as tf


class ExampleTask(Task):
    """Learns from rows of `finetuning.data.rows`.

    Args:
        pad_token_id: of the tokenizer.
        token_types: whether the rows have them.
    """

    starts_head_anew = True

    def __init__(self, *, pad_token_id: int, token_types: bool):
        self.pad_token_id = pad_token_id
        self.token_types = token_types

    def text_features(self, length: int) -> dict[str, Feature]:
        """Name ids, token types where there are any, and the number of the row, -1 in padding."""
        token_types = {TOKEN_TYPES: Feature((length,))} if self.token_types else {}
        return {INPUT_IDS: Feature((length,), padding=self.pad_token_id), **token_types, INDEX: Feature(padding=-1)}

    def network_inputs(self, rows: dict[str, "tf.Tensor"]) -> dict[str, "tf.Tensor"]:
        """Make what a network takes, (rows, length) each: ids, which of them are no padding, and token types."""
        import tensorflow as tf

        ids = rows[INPUT_IDS]
        token_types = {TOKEN_TYPES: rows[TOKEN_TYPES]} if self.token_types else {}
        return {INPUT_IDS: ids, "attention_mask": tf.cast(ids != self.pad_token_id, tf.int32), **token_types}

    @staticmethod
    def in_order(sums: Mapping[str, Any], name: str) -> NDArray[Any]:
        """Put what an evaluation kept of each row under a name, (rows, …), in the order of the rows."""
        index = sums[INDEX]
        return sums[name][np.argsort(index, kind="stable")[np.count_nonzero(index < 0) :]]
