"""A vocabulary filled up inside the model, so that its tables and logits divide evenly over lanes and cores of a TPU.

On one core the TPU's compiler fills up the last 128 lanes by itself, at the same modelled cost.
No text holds the ids added, their logits are pushed out of the softmax (`train.tasks.masked_lm_loss`), and they are cut
off before a model is saved; so results are those without them.
"""

import re
from typing import Any

import numpy as np

from train.model.architectures import ARCHITECTURES

# Weights with one entry per id, by the end of their name in the TF or in the PyTorch class.
VOCABULARY_WEIGHT = re.compile(
    r"(word_embeddings[./]weight|(predictions|lm_head|vocab_projector)([./]decoder)?[./](bias|weight))(:0)?$"
)


def padded_vocabulary_size(vocabulary_size: int, multiple: int) -> int:
    """Round the size of a vocabulary up to a multiple of `multiple`."""
    return -(-vocabulary_size // multiple) * multiple


def vocabulary_axis(name: str, model_type: str) -> int | None:
    """Find the axis of a weight that runs over the ids, or None; `name` is that in the TF or the PyTorch class."""
    if VOCABULARY_WEIGHT.search(name):
        return 0
    transposed = ARCHITECTURES[model_type].transposed_vocabulary
    return 1 if transposed and re.search(transposed, name) else None


def cut_vocabulary(array: np.ndarray, axis: int | None, vocabulary_size: int) -> np.ndarray:
    """Keep of an array the first `vocabulary_size` ids along `axis`; all of it where that is None."""
    return array if axis is None else array.take(np.arange(vocabulary_size), axis)


def clear_padding(model: Any, vocabulary_size: int) -> None:
    """Set what a TF…ForMaskedLM holds for ids from `vocabulary_size` on to 0.

    They get no gradient, so they stay 0 and add nothing to a norm, such as LAMB's of each weight.
    """
    for variable in model.weights:
        axis = vocabulary_axis(variable.name, model.config.model_type)
        if axis is not None and variable.shape[axis] > vocabulary_size:
            is_real = np.arange(variable.shape[axis]) < vocabulary_size
            variable.assign(variable.numpy() * np.expand_dims(is_real, tuple(set(range(variable.shape.rank)) - {axis})))
