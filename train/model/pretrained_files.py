"""The files of a saved model: its configuration and weights, found and checked before TensorFlow loads them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError
from safetensors import safe_open
from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerFast
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    TF2_WEIGHTS_INDEX_NAME,
    TF2_WEIGHTS_NAME,
)

from mlm_common.errors import InputError
from mlm_common.hub.retries import HubAwayError, hub_error, is_away
from mlm_common.storage import local_or_hub, open_folder
from mlm_common.tokenizer import load_tokenizer, special_ids, vocabulary_size
from train.model.architectures import ARCHITECTURES
from train.runtime.run_folder import exported_model

WEIGHTS_NAMES = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, TF2_WEIGHTS_NAME, TF2_WEIGHTS_INDEX_NAME)
WEIGHTS_SUFFIXES = (".safetensors", ".h5", ".bin")
# How the names of classes with a head for masked tokens end.
MASKED_LM_CLASSES = ("ForMaskedLM", "ForPreTraining")


def read_config(folder_or_hub_id: str) -> PretrainedConfig:
    """Read the configuration of a checkpoint; InputError or HubAwayError where that fails."""
    try:
        return AutoConfig.from_pretrained(folder_or_hub_id)
    except (OSError, ValueError, KeyError) as error:
        rule = "A model is a folder with config.json, or a model on the Hub"
        reason = " ".join(str(error).split())[:300]
        raise hub_error(f"{rule}; {folder_or_hub_id} cannot be read: {reason}", error) from error


def read_masked_lm_config(folder_or_hub_id: str, shown_name: str) -> PretrainedConfig:
    """Read the configuration of a masked language model, which `--model` named as `shown_name`."""
    config = read_config(folder_or_hub_id)
    (class_name, *_) = config.architectures or ("",)
    if not class_name.endswith(MASKED_LM_CLASSES):
        raise InputError(
            f"--model: {shown_name} is not a masked language model but a {class_name or config.model_type}. Use python "
            "finetuning/predict.py."
        )
    return config


def set_labels(config: PretrainedConfig, labels: Mapping[int, str]) -> None:
    """Set {id: label} of what a model's head tells apart."""
    config.id2label = dict(labels)
    config.label2id = {label: index for index, label in labels.items()}


@dataclass(frozen=True)
class WeightsFile:
    """A local file of weights, or the index of several (`is_index`), in PyTorch's or TensorFlow's layout."""

    path: str
    layout: Literal["pytorch", "tensorflow"]
    is_index: bool


def find_weights(folder_or_hub_id: str) -> WeightsFile:
    """Find the file with the weights of a checkpoint, fetched from the Hub if it is there."""
    for name in WEIGHTS_NAMES:
        path = find_file(folder_or_hub_id, name)
        if path is not None:
            return WeightsFile(path, _layout(folder_or_hub_id, name, path), name.endswith(".json"))
    raise InputError(
        f"A model must hold {SAFE_WEIGHTS_NAME} or {TF2_WEIGHTS_NAME}; {folder_or_hub_id} does not. Weights in "
        "pytorch_model.bin need PyTorch to be read: save the model there with safe_serialization=True."
    )


def find_file(folder_or_hub_id: str, name: str) -> str | None:
    """Find the local path of a checkpoint's file, fetched from the Hub if it is there; None without one."""
    if Path(folder_or_hub_id).is_dir():
        path = Path(folder_or_hub_id, name)
        return str(path) if path.is_file() else None
    try:
        return hf_hub_download(folder_or_hub_id, name)
    except (
        EntryNotFoundError,
        RepositoryNotFoundError,
    ) as error:  # also what is not at hand while the Hub is away, or not to be asked
        if is_away(error):
            raise HubAwayError(f"The Hub is away, and {name} of {folder_or_hub_id} is not on this machine.") from error
        return None


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


def read_initial_config(folder_or_hub_id: str, tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    """Read the configuration of the checkpoint of `--init-from`, and check that it suits the shards' tokenizer."""
    folder_or_hub_id = exported_model(folder_or_hub_id, "--init-from")
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
    hint = f"Prepare the shards with --tokenizer-name-or-path {folder_or_hub_id}."
    ids, their_ids = ({index: token for token, index in one.get_vocab().items()} for one in (tokenizer, theirs))
    differing = sorted(index for index in ids.keys() | their_ids.keys() if ids.get(index) != their_ids.get(index))
    if differing:
        first = differing[0]
        raise InputError(
            f"{rule}has {len(their_ids)} tokens and the shards' tokenizer {len(ids)}, of which {len(differing)} ids "
            f"differ, the first {first}: {their_ids.get(first)!r} there, {ids.get(first)!r} here. {hint}"
        )
    if special_ids(theirs) != special_ids(tokenizer):
        raise InputError(
            f"{rule}has special ids {special_ids(theirs)}, the shards' tokenizer {special_ids(tokenizer)}. {hint}"
        )


def _check_weights(folder_or_hub_id: str) -> None:
    folder = open_folder(folder_or_hub_id)
    if folder.is_local:
        find_weights(folder_or_hub_id)
    elif not set(WEIGHTS_NAMES) & set(folder.list_files()):
        raise InputError(f"--init-from must hold one of {', '.join(WEIGHTS_NAMES)}; {folder_or_hub_id} does not.")
