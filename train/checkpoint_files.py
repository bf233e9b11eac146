"""The files of a checkpoint in transformers' formats: where its weights are, and in whose layout; no TensorFlow."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from safetensors import safe_open
from transformers import AutoConfig, PretrainedConfig
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    TF2_WEIGHTS_INDEX_NAME,
    TF2_WEIGHTS_NAME,
    cached_file,
)

from tokenizer_training import storage
from tokenizer_training.command_line import InputError

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
