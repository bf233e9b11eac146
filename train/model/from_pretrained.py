"""Continued pretraining: the weights of a checkpoint, in the place of random ones."""

import json
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors import safe_open
from safetensors.tensorflow import load_file
from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerFast, TFAutoModelForMaskedLM
from transformers.modeling_tf_pytorch_utils import load_pytorch_state_dict_in_tf2_model
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    TF2_WEIGHTS_INDEX_NAME,
    TF2_WEIGHTS_NAME,
    cached_file,
)

from mlm_common.errors import InputError
from mlm_common.storage import files as storage
from tokenizer_training.tokenizer import load_tokenizer, special_ids, vocabulary_size
from train.model.architectures import ARCHITECTURES, HEAD_BIAS, align_padding_positions, check_architecture, renamed
from train.model.vocabulary_padding import cut_vocabulary, vocabulary_axis

WEIGHTS_NAMES = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, TF2_WEIGHTS_NAME, TF2_WEIGHTS_INDEX_NAME)
WEIGHTS_SUFFIXES = (".safetensors", ".h5", ".bin")


@dataclass(frozen=True)
class WeightsFile:
    """A local file of weights, or the index of several (`is_index`), in PyTorch's or TensorFlow's layout."""

    path: str
    layout: Literal["pytorch", "tensorflow"]
    is_index: bool


def read_config(folder_or_hub_id: str) -> PretrainedConfig:
    """Return the configuration of a checkpoint.

    Raises:
        InputError: there is none, or none that transformers knows.
    """
    try:
        return AutoConfig.from_pretrained(folder_or_hub_id)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"A model is a folder with config.json, or a model on the Hub; {folder_or_hub_id} cannot be read: "
            f"{' '.join(str(error).split())[:300]}"
        ) from error


def find_weights(folder_or_hub_id: str) -> WeightsFile:
    """Return the file with the weights of a checkpoint, fetched from the Hub if it is there.

    Raises:
        InputError: there is none in a format that can be read without PyTorch.
    """
    for name in WEIGHTS_NAMES:
        path = find_file(folder_or_hub_id, name)
        if path is not None:
            return WeightsFile(path, _layout(folder_or_hub_id, name, path), name.endswith(".json"))
    raise InputError(
        f"A model must hold {SAFE_WEIGHTS_NAME} or {TF2_WEIGHTS_NAME}; {folder_or_hub_id} does not. Weights in "
        "pytorch_model.bin need PyTorch to be read: save the model there with safe_serialization=True."
    )


def find_file(folder_or_hub_id: str, name: str) -> str | None:
    """Return the local path of a checkpoint's file, fetched from the Hub if it is there; None without one."""
    return cached_file(folder_or_hub_id, name, _raise_exceptions_for_missing_entries=False)


@contextmanager
def without_weights(folder_or_hub_id: str) -> Iterator[str]:
    """Give what transformers reads configuration and tokenizer from: of a `gs://` folder a copy without the weights."""
    if not storage.is_remote(folder_or_hub_id):
        yield folder_or_hub_id
        return
    with tempfile.TemporaryDirectory() as local_folder:
        for name in storage.list_files(folder_or_hub_id):
            if not name.endswith(WEIGHTS_SUFFIXES):
                Path(local_folder, name).write_bytes(storage.read_bytes(storage.join(folder_or_hub_id, name)))
        yield local_folder


def _layout(folder_or_hub_id: str, name: str, path: str) -> Literal["pytorch", "tensorflow"]:
    if name in (TF2_WEIGHTS_NAME, TF2_WEIGHTS_INDEX_NAME):
        return "tensorflow"
    if name == SAFE_WEIGHTS_INDEX_NAME:
        return "pytorch"
    with safe_open(path, framework="np") as weights:
        written_by = (weights.metadata() or {}).get("format", "pt")
    if written_by not in ("pt", "tf"):
        raise InputError(f"Weights must be PyTorch's or TensorFlow's; those of {folder_or_hub_id} are {written_by}'s.")
    return "pytorch" if written_by == "pt" else "tensorflow"


# In PyTorch checkpoints, besides what the TF classes themselves leave out: buffers, and the head's weights once more.
NOT_IN_TENSORFLOW = re.compile(r"\.(position_ids|token_type_ids)$|\.decoder\.(weight|bias)$")


def load_masked_lm(folder_or_hub_id: str) -> Any:
    """Return the TF…ForMaskedLM with the weights of an export, or of any checkpoint in safetensors or TensorFlow's h5.

    Raises:
        InputError: no such folder or model, no such weights in it, an architecture that is not supported, or weights
            that are not those of its masked-LM class.
    """
    config = read_config(folder_or_hub_id)
    check_architecture(config)
    weights = find_weights(folder_or_hub_id)
    load = _load_pytorch if weights.layout == "pytorch" else _load_tensorflow
    model, found = load(folder_or_hub_id, config, weights)
    wrong_shape = {name: f"{name} {tuple(shape)}, not {tuple(own)}" for name, shape, own in found["mismatched_keys"]}
    head_bias = HEAD_BIAS.get(config.model_type, ())
    wrong = {
        "missing": found["missing_keys"],
        "of another shape": list(wrong_shape.values()),
        "unexpected": sorted(
            name
            for name in set(found["unexpected_keys"]) - set(wrong_shape) - set(head_bias)
            if not NOT_IN_TENSORFLOW.search(name)
        ),
    }
    if any(wrong.values()):
        raise InputError(
            f"The weights must be those of a {config.model_type} with a masked-LM head; in {folder_or_hub_id} are "
            + "; ".join(f"{kind}: {', '.join(names)}" for kind, names in wrong.items() if names)
        )
    return model


def _load_tensorflow(folder_or_hub_id: str, config: PretrainedConfig, _: WeightsFile) -> tuple[Any, dict[str, Any]]:
    model, found = TFAutoModelForMaskedLM.from_pretrained(
        folder_or_hub_id, config=config, ignore_mismatched_sizes=True, output_loading_info=True
    )
    align_padding_positions(model)
    return model, found


def _load_pytorch(folder_or_hub_id: str, config: PretrainedConfig, weights: WeightsFile) -> tuple[Any, dict[str, Any]]:
    model = TFAutoModelForMaskedLM.from_config(config)
    align_padding_positions(model)
    head_bias = HEAD_BIAS.get(config.model_type, ())
    return load_pytorch_state_dict_in_tf2_model(
        model,
        _read_shards(folder_or_hub_id, weights.path) if weights.is_index else load_file(weights.path),
        allow_missing_keys=True,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
        tf_to_pt_weight_rename=lambda name: head_bias if name in head_bias else (renamed(config.model_type, name),),
        skip_logger_warnings=True,
    )


def _read_shards(folder_or_hub_id: str, index_path: str) -> dict[str, Any]:
    """Return {name: tensor} of all files that an index names."""
    shard_names = set(json.loads(Path(index_path).read_text(encoding="utf-8"))["weight_map"].values())
    weights: dict[str, Any] = {}
    for name in sorted(shard_names):
        shard_path = find_file(folder_or_hub_id, name)
        if shard_path is None:
            raise InputError(f"{folder_or_hub_id} lacks {name}, which its {Path(index_path).name} names.")
        weights |= load_file(shard_path)
    return weights


def checked_initial_config(folder_or_hub_id: str, tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    """Return the configuration of the checkpoint of `--init-from`, once it is known to suit the shards' tokenizer.

    Raises:
        InputError: it cannot be read, or its rows of the embedding are not those of the tokenizer's ids.
    """
    with without_weights(folder_or_hub_id) as name:
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
    if not storage.is_remote(folder_or_hub_id):
        find_weights(folder_or_hub_id)
    elif not set(WEIGHTS_NAMES) & set(storage.list_files(folder_or_hub_id)):
        raise InputError(f"--init-from must hold one of {', '.join(WEIGHTS_NAMES)}; {folder_or_hub_id} does not.")


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
