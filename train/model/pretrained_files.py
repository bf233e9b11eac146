"""The files of a saved model: its configuration and weights, found and checked before TensorFlow loads them."""

import json
import os
import textwrap
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError
from safetensors import safe_open
from transformers import CONFIG_MAPPING, PretrainedConfig, PreTrainedTokenizerFast
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from mlm_common.errors import InputError
from mlm_common.hub.retries import HubAwayError, hub_error, is_away
from mlm_common.storage import local_or_hub, open_folder
from mlm_common.storage.guard import guarded_read
from mlm_common.tokenizer import load_tokenizer, special_ids, vocabulary_size
from train.model.architectures import ARCHITECTURES
from train.model.configurations import load_config, make_config
from train.runtime.run_folder import RECORD_NAME, exported_model

# The names of TensorFlow's files in transformers 4.
TF2_WEIGHTS_NAME = "tf_model.h5"
TF2_WEIGHTS_INDEX_NAME = "tf_model.h5.index.json"
WEIGHTS_NAMES = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, TF2_WEIGHTS_NAME, TF2_WEIGHTS_INDEX_NAME)
WEIGHTS_SUFFIXES = (".safetensors", ".h5", ".bin")
# Descriptions of files, used in error messages.
A_CONFIGURATION = "the configuration of a model"
SAFETENSORS = "a whole safetensors file"
MAX_REASON_CHARACTERS = 300
# Settings whose types transformers does not check.
WHOLE_NUMBERS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"),
    *("max_position_embeddings", "type_vocab_size"),
)
FRACTIONS = ("hidden_dropout_prob", "attention_probs_dropout_prob", "layer_norm_eps", "norm_eps", "initializer_range")
TRUTH_VALUES = ("use_cache", "output_attentions", "output_hidden_states", "return_dict", "tie_word_embeddings")
MAX_NUMBER = 10**9
# Endings of the names of classes with a head for masked tokens.
MASKED_LM_CLASSES = ("ForMaskedLM", "ForPreTraining")


def read_config(folder_or_hub_id: str) -> PretrainedConfig:
    """Read the configuration of a checkpoint; raise an InputError or a HubAwayError if reading fails."""
    path = Path(folder_or_hub_id, CONFIG_NAME)
    if os.path.exists(path):  # noqa: PTH110  (`Path.exists` raises if a folder must not be entered)
        with guarded_read(path, A_CONFIGURATION):
            settings = json.loads(path.read_bytes())
            _check_settings(settings)
            if "model_type" not in settings:
                return make_config(settings | {"model_type": _model_type_in(Path(folder_or_hub_id).resolve().name)})
            return load_config(folder_or_hub_id)
    try:
        if not PretrainedConfig.get_config_dict(folder_or_hub_id)[0]:  # AutoConfig would guess the type from the name
            raise FileNotFoundError(f"it has no {CONFIG_NAME}")
        return load_config(folder_or_hub_id)
    except Exception as error:  # from the Hub or its client, or because a file is corrupt
        rule = "A model is a folder with config.json, or a model on the Hub"
        if subfolder := _model_within(folder_or_hub_id):
            raise InputError(f"{rule}; {folder_or_hub_id} has none. Did you mean {subfolder}?") from error
        reason = textwrap.shorten(str(error), MAX_REASON_CHARACTERS)
        raise hub_error(f"{rule}; {folder_or_hub_id} cannot be read: {reason}", error) from error


def _model_type_in(name: str) -> str:
    """Find the model type in a folder's name, as in Google's small BERTs. transformers would search the whole path."""
    model_type = max((kind for kind in CONFIG_MAPPING if kind in name), key=len, default=None)
    if model_type is None:
        raise ValueError("it has no model_type")
    return model_type


def _check_settings(settings: Any) -> None:
    """Raise a ValueError if a setting has a type or value that transformers would fail on."""
    if not isinstance(settings, dict):
        raise ValueError("it is not a JSON object")
    model_type = settings.get("model_type", "bert")  # if the type is missing, the folder's name may contain it
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise ValueError(f"its model_type is {model_type!r}, which transformers does not know")
    names = settings.get("architectures")
    if not (names is None or (isinstance(names, list) and all(isinstance(name, str) for name in names))):
        raise ValueError(f"its architectures must be a list of names of classes, but are {names!r}")
    for name in WHOLE_NUMBERS:
        _check_number(settings, name, (int,))
    for name in FRACTIONS:
        _check_number(settings, name, (int, float))
    for name, value in settings.items():
        if name.endswith("_token_id") and type(value) not in (int, list, type(None)):
            raise ValueError(f"its {name} must be the id of a token, but is {value!r}")
        if name in TRUTH_VALUES and type(value) not in (bool, int, type(None)):
            raise ValueError(f"its {name} must be true or false, but is {value!r}")
    labels = settings.get("id2label") or {}
    if not isinstance(labels, dict) or any(isinstance(label, list | dict) for label in labels.values()):
        raise ValueError(f"its id2label must name each label, but is {labels!r:.200}")


def _check_number(settings: dict[str, Any], name: str, kinds: tuple[type, ...]) -> None:
    value = settings.get(name, 0)
    if type(value) not in kinds or not 0 <= value <= MAX_NUMBER:
        what = "a number" if float in kinds else "a whole number"
        raise ValueError(f"its {name} must be {what} of at most {MAX_NUMBER:,}, but is {value!r}")


def _model_within(path: str) -> str | None:
    """Return the first subfolder of a local folder that is a run or a model; None without one."""
    for name in (RECORD_NAME, CONFIG_NAME):
        with suppress(OSError):
            if files := sorted(Path(path).glob(f"*/{name}")):
                return str(files[0].parent)
    return None


def class_name_of(config: PretrainedConfig) -> str:
    """Return the class that a configuration names, or an empty string: some of Google's models name no class."""
    return next(iter(config.architectures or ()), "")


def read_masked_lm_config(folder_or_hub_id: str, shown_name: str) -> PretrainedConfig:
    """Read the configuration of a masked language model; messages call it `shown_name`, as given with `--model`."""
    config = read_config(folder_or_hub_id)
    class_name = class_name_of(config)
    if class_name and not class_name.endswith(MASKED_LM_CLASSES):  # without a name, loading the weights will fail
        raise InputError(
            f"--model: {shown_name} is not a masked language model but a {class_name}. Use python "
            "finetuning/predict.py."
        )
    return config


def set_labels(config: PretrainedConfig, labels: Mapping[int, str]) -> None:
    """Set the labels of a model's head, {id: label}."""
    config.id2label = dict(labels)
    config.label2id = {label: index for index, label in labels.items()}


@dataclass(frozen=True)
class WeightsFile:
    """A local file of weights in PyTorch's or TensorFlow's layout, or the index of several such files (`is_index`)."""

    path: str
    layout: Literal["pytorch", "tensorflow"]
    is_index: bool


def find_weights(folder_or_hub_id: str) -> WeightsFile:
    """Find the file with the weights of a checkpoint, and download it if the checkpoint is on the Hub."""
    for name in WEIGHTS_NAMES:
        path = find_file(folder_or_hub_id, name)
        if path is not None:
            return WeightsFile(path, _layout(folder_or_hub_id, name, path), name.endswith(".json"))
    raise InputError(
        f"A model must hold {SAFE_WEIGHTS_NAME} or {TF2_WEIGHTS_NAME}; {folder_or_hub_id} does not. Weights in "
        "pytorch_model.bin need PyTorch to be read: save the model there with safe_serialization=True."
    )


def find_file(folder_or_hub_id: str, name: str) -> str | None:
    """Return the local path of a checkpoint's file; download it if it is on the Hub. None if there is no such file."""
    if Path(folder_or_hub_id).is_dir():
        path = Path(folder_or_hub_id, name)
        return str(path) if path.is_file() else None
    try:
        return hf_hub_download(folder_or_hub_id, name)
    except UnicodeEncodeError as error:
        raise hub_error(f"{name} of {folder_or_hub_id} cannot be requested: {error}", error) from error
    except (
        EntryNotFoundError,
        RepositoryNotFoundError,
    ) as error:  # also raised offline, for files that are not in the cache
        if is_away(error):
            raise HubAwayError(
                f"The Hub cannot be reached; {name} of {folder_or_hub_id} is not on this machine."
            ) from error
        return None


def _layout(folder_or_hub_id: str, name: str, path: str) -> Literal["pytorch", "tensorflow"]:
    if name in (TF2_WEIGHTS_NAME, TF2_WEIGHTS_INDEX_NAME):
        return "tensorflow"
    if name == SAFE_WEIGHTS_INDEX_NAME:
        return "pytorch"
    with guarded_read(path, SAFETENSORS), safe_open(path, framework="np") as weights:
        written_by = (weights.metadata() or {}).get("format", "pt")
    if written_by not in ("pt", "tf"):
        raise InputError(
            f"Weights must be PyTorch's or TensorFlow's; {folder_or_hub_id} has weights in the format {written_by}."
        )
    return "pytorch" if written_by == "pt" else "tensorflow"


def read_initial_config(folder_or_hub_id: str, tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    """Read the configuration of the checkpoint of `--init-from`, and check that it suits the shards' tokenizer."""
    folder_or_hub_id = exported_model(folder_or_hub_id, "--init-from")
    with local_or_hub(folder_or_hub_id, without=WEIGHTS_SUFFIXES) as name:
        try:
            config = read_config(name)
            config.name_or_path = folder_or_hub_id  # instead of the path of a local copy
        except InputError as error:
            raise InputError(f"--init-from: {error}") from error
        _check_vocabulary(folder_or_hub_id, load_tokenizer(name), tokenizer)
    if config.vocab_size < vocabulary_size(tokenizer):
        raise InputError(
            f"--init-from must have an embedding for each of the tokenizer's {vocabulary_size(tokenizer)} ids; "
            f"{folder_or_hub_id} has {config.vocab_size} embeddings. Use a checkpoint with the same vocabulary."
        )
    pad_id = special_ids(tokenizer)["pad"]
    architecture = ARCHITECTURES.get(config.model_type)
    if architecture and architecture.counts_positions and config.pad_token_id != pad_id:
        raise InputError(
            f"A {config.model_type} counts its positions from the padding id, so --init-from must have the padding id "
            f"of the shards' tokenizer, {pad_id}; {folder_or_hub_id} has pad_token_id {config.pad_token_id}."
        )
    _check_weights(folder_or_hub_id)
    return config


def _check_vocabulary(
    folder_or_hub_id: str, theirs: PreTrainedTokenizerFast, tokenizer: PreTrainedTokenizerFast
) -> None:
    rule = (
        "--init-from must have the vocabulary that the shards were made with, since its weights belong to those "
        f"ids; {folder_or_hub_id} "
    )
    hint = f"Prepare the shards with --tokenizer-name-or-path {folder_or_hub_id}."
    ids, their_ids = ({index: token for token, index in each.get_vocab().items()} for each in (tokenizer, theirs))
    differing = sorted(index for index in ids.keys() | their_ids.keys() if ids.get(index) != their_ids.get(index))
    if differing:
        first = differing[0]
        raise InputError(
            f"{rule}has {len(their_ids)} tokens, the shards' tokenizer has {len(ids)}; {len(differing)} ids "
            f"differ, the first is {first}: {their_ids.get(first)!r} instead of {ids.get(first)!r}. {hint}"
        )
    if special_ids(theirs) != special_ids(tokenizer):
        raise InputError(
            f"{rule}has special ids {special_ids(theirs)}, the shards' tokenizer has {special_ids(tokenizer)}. {hint}"
        )


def _check_weights(folder_or_hub_id: str) -> None:
    folder = open_folder(folder_or_hub_id)
    if folder.is_local:
        find_weights(folder_or_hub_id)
    elif not set(WEIGHTS_NAMES) & set(folder.list_files()):
        raise InputError(f"--init-from must hold one of {', '.join(WEIGHTS_NAMES)}; {folder_or_hub_id} does not.")
