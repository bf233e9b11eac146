"""`--init-from`: a run that starts with the configuration and weights of a checkpoint, in the place of random ones."""

from typing import Any

import numpy as np
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from mlm_common.errors import InputError
from mlm_common.storage import local_or_hub, open_folder
from tokenizer_training.tokenizer import load_tokenizer, special_ids, vocabulary_size
from train.model.architectures import ARCHITECTURES
from train.model.from_pretrained import WEIGHTS_NAMES, find_weights, load_model, read_config
from train.model.vocabulary_padding import cut_vocabulary, vocabulary_axis

WEIGHTS_SUFFIXES = (".safetensors", ".h5", ".bin")
# In the name of a table of positions.
POSITION_TABLE = "position_embeddings"


def read_initial_config(folder_or_hub_id: str, tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    """Read the configuration of the checkpoint of `--init-from`, and check that it suits the shards' tokenizer.

    Raises:
        InputError: it cannot be read, has no weights, or its rows of the embedding are not those of the tokenizer's
            ids.
    """
    with local_or_hub(folder_or_hub_id, without=WEIGHTS_SUFFIXES) as name:
        try:
            config = read_config(name)
        except InputError as error:
            raise InputError(f"--init-from: {error}") from error
        _check_vocabulary(folder_or_hub_id, load_tokenizer(name), tokenizer)
    if config.vocab_size < vocabulary_size(tokenizer):
        raise InputError(
            f"--init-from must have an embedding for each of the tokenizer's {vocabulary_size(tokenizer)} ids; "
            f"{folder_or_hub_id} has {config.vocab_size}. Use a checkpoint of the same vocabulary."
        )
    pad_id = special_ids(tokenizer)["pad"]
    architecture = ARCHITECTURES.get(config.model_type)
    if architecture and architecture.counts_positions and config.pad_token_id != pad_id:
        raise InputError(
            f"A {config.model_type} counts its positions from the padding id: --init-from must have the tokenizer's "
            f"{pad_id}; {folder_or_hub_id} has pad_token_id {config.pad_token_id}."
        )
    _check_weights(folder_or_hub_id)
    return config


def _check_vocabulary(
    folder_or_hub_id: str, theirs: PreTrainedTokenizerFast, tokenizer: PreTrainedTokenizerFast
) -> None:
    rule = (
        "--init-from must have the vocabulary that the shards were made with, since what was learned belongs to the "
        f"ids; {folder_or_hub_id} "
    )
    cure = f"Prepare the shards with --tokenizer-name-or-path {folder_or_hub_id}."
    ids, their_ids = ({index: token for token, index in one.get_vocab().items()} for one in (tokenizer, theirs))
    differing = sorted(index for index in ids.keys() | their_ids.keys() if ids.get(index) != their_ids.get(index))
    if differing:
        first = differing[0]
        raise InputError(
            f"{rule}has {len(their_ids)} tokens and the shards' tokenizer {len(ids)}, of which {len(differing)} ids "
            f"differ, the first {first}: {their_ids.get(first)!r} there, {ids.get(first)!r} here. {cure}"
        )
    if special_ids(theirs) != special_ids(tokenizer):
        raise InputError(
            f"{rule}has special ids {special_ids(theirs)}, the shards' tokenizer {special_ids(tokenizer)}. {cure}"
        )


def _check_weights(folder_or_hub_id: str) -> None:
    folder = open_folder(folder_or_hub_id)
    if folder.is_local:
        find_weights(folder_or_hub_id)
    elif not set(WEIGHTS_NAMES) & set(folder.list_files()):
        raise InputError(f"--init-from must hold one of {', '.join(WEIGHTS_NAMES)}; {folder_or_hub_id} does not.")


def load_initial_weights(
    model: Any, folder_or_hub_id: str, vocabulary_size: int, model_class: str = "TFAutoModelForMaskedLM"
) -> None:
    """Give a built TF model the weights of a checkpoint in a local or `gs://` folder, or on the Hub.

    The model may have more positions than the checkpoint; those keep the start they have. Of the vocabulary the first
    `vocabulary_size` ids are taken, and the model's padding is 0. `model_class` is the auto class of both.

    Raises:
        InputError: the checkpoint cannot be read, or its weights are not those of this model.
    """
    with local_or_hub(folder_or_hub_id) as name:
        source = load_model(name, model_class)
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


def _by_name(model: Any) -> dict[str, Any]:
    """Map each variable's name within the model to the variable."""
    return {
        variable.name[variable.name.index(f"{model.name}/") + len(model.name) :]: variable for variable in model.weights
    }


def _fitted(value: np.ndarray, variable: Any, name: str, axis: int | None, vocabulary_size: int) -> np.ndarray:
    """Fill a value up with the model's padding of the vocabulary, or with positions that it has more."""
    if axis is not None:
        value = cut_vocabulary(value, axis, vocabulary_size)
        padding = [(0, variable.shape[at] - vocabulary_size if at == axis else 0) for at in range(value.ndim)]
        return np.pad(value, padding)
    if POSITION_TABLE in name and len(value) < variable.shape[0]:
        return np.concatenate([value, variable.numpy()[len(value) :]])
    return value


def _other_model(folder_or_hub_id: str, difference: str) -> InputError:
    return InputError(
        f"The weights of --init-from must be those of the model that is trained; of {folder_or_hub_id} {difference}. "
        "Leave out the --config-overrides that change the model's sizes."
    )
