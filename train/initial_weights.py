"""Continued pretraining: the weights of a checkpoint, in the place of random ones."""

from contextlib import nullcontext
from typing import Any

import numpy as np

from tokenizer_training import storage
from tokenizer_training.command_line import InputError
from train.pretrained import load_masked_lm
from train.vocabulary_padding import cut_vocabulary, vocabulary_axis

POSITION_TABLE = "position_embeddings"


def start_from(model: Any, folder_or_hub_id: str, vocabulary_size: int) -> None:
    """Give a built TF…ForMaskedLM the weights of a checkpoint in a local or `gs://` folder, or on the Hub.

    The model may have more positions than the checkpoint; those keep the start they have. Of the vocabulary the first
    `vocabulary_size` ids are taken, and the model's padding is 0.

    Raises:
        InputError: the checkpoint cannot be read, or its weights are not those of this model.
    """
    is_remote = storage.is_remote(folder_or_hub_id)
    with storage.local_copy(folder_or_hub_id) if is_remote else nullcontext(folder_or_hub_id) as name:
        source = load_masked_lm(name)
    given, own = _by_name(source), _by_name(model)
    differing = sorted(given.keys() ^ own.keys())
    if differing:
        raise _other_model(folder_or_hub_id, f"{differing[0]} is in one of the two only")
    for weight_name, variable in own.items():
        axis = vocabulary_axis(weight_name, model.config.model_type)
        value = _fitted(given[weight_name].numpy(), variable, weight_name, axis, vocabulary_size)
        if value.shape != tuple(variable.shape):
            raise _other_model(folder_or_hub_id, f"{weight_name} is {value.shape}, here {tuple(variable.shape)}")
        variable.assign(value)


def _fitted(value: np.ndarray, variable: Any, name: str, axis: int | None, vocabulary_size: int) -> np.ndarray:
    """Return the value with the model's padding of the vocabulary, or with positions that it has more."""
    if axis is not None:
        value = cut_vocabulary(value, axis, vocabulary_size)
        padding = [(0, variable.shape[at] - vocabulary_size if at == axis else 0) for at in range(value.ndim)]
        return np.pad(value, padding)
    if POSITION_TABLE in name and len(value) < variable.shape[0]:
        return np.concatenate([value, variable.numpy()[len(value) :]])
    return value


def _by_name(model: Any) -> dict[str, Any]:
    """Return {name within the model: variable}."""
    return {
        variable.name[variable.name.index(f"{model.name}/") + len(model.name) :]: variable for variable in model.weights
    }


def _other_model(folder_or_hub_id: str, difference: str) -> InputError:
    return InputError(
        f"The weights of --init-from must be those of the model that is trained; of {folder_or_hub_id} {difference}. "
        "Leave out the --config-overrides that change the model's sizes."
    )
