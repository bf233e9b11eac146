"""A saved model read into TensorFlow: an export, or any checkpoint of a folder or the Hub; torch is not needed."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import transformers
from safetensors import safe_open
from transformers import AutoConfig, PretrainedConfig
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    TF2_WEIGHTS_INDEX_NAME,
    TF2_WEIGHTS_NAME,
    cached_file,
)

from mlm_common.errors import InputError
from train.model.architectures import align_padding_positions, architecture_of, check_architecture

WEIGHTS_NAMES = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, TF2_WEIGHTS_NAME, TF2_WEIGHTS_INDEX_NAME)
# In PyTorch checkpoints, besides what the TF classes themselves leave out: buffers, and the head's weights once more.
NOT_IN_TENSORFLOW = re.compile(r"\.(position_ids|token_type_ids)$|\.decoder\.(weight|bias)$")


def load_model(folder_or_hub_id: str, model_class: str = "TFAutoModelForMaskedLM") -> Any:
    """Load a TF model with the weights of an export, or of any checkpoint in safetensors or TensorFlow's h5.

    Args:
        folder_or_hub_id: a local folder, or a model on the Hub.
        model_class: the auto class of transformers that has the checkpoint's head.

    Raises:
        InputError: no such folder or model, no such weights in it, an architecture that is not supported, or weights
            that are not those of its class.
    """
    config = read_config(folder_or_hub_id)
    check_architecture(config)
    weights = find_weights(folder_or_hub_id)
    auto_class = getattr(transformers, model_class)
    if weights.layout == "pytorch":
        model, found = _load_pytorch(folder_or_hub_id, config, weights, auto_class)
    else:
        model, found = _load_tensorflow(folder_or_hub_id, config, auto_class)
    _check_found(folder_or_hub_id, model, found)
    return model


def read_config(folder_or_hub_id: str) -> PretrainedConfig:
    """Read the configuration of a checkpoint.

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


@dataclass(frozen=True)
class WeightsFile:
    """A local file of weights, or the index of several (`is_index`), in PyTorch's or TensorFlow's layout."""

    path: str
    layout: Literal["pytorch", "tensorflow"]
    is_index: bool


def find_weights(folder_or_hub_id: str) -> WeightsFile:
    """Find the file with the weights of a checkpoint, fetched from the Hub if it is there.

    Raises:
        InputError: there is none in a format that can be read without PyTorch.
    """
    for name in WEIGHTS_NAMES:
        path = _find_file(folder_or_hub_id, name)
        if path is not None:
            return WeightsFile(path, _layout(folder_or_hub_id, name, path), name.endswith(".json"))
    raise InputError(
        f"A model must hold {SAFE_WEIGHTS_NAME} or {TF2_WEIGHTS_NAME}; {folder_or_hub_id} does not. Weights in "
        "pytorch_model.bin need PyTorch to be read: save the model there with safe_serialization=True."
    )


def _find_file(folder_or_hub_id: str, name: str) -> str | None:
    """Find the local path of a checkpoint's file, fetched from the Hub if it is there; None without one."""
    return cached_file(folder_or_hub_id, name, _raise_exceptions_for_missing_entries=False)


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


def _load_tensorflow(folder_or_hub_id: str, config: PretrainedConfig, auto_class: Any) -> tuple[Any, dict[str, Any]]:
    """Load a model, and what was found of its weights, from TensorFlow's layout."""
    model, found = auto_class.from_pretrained(
        folder_or_hub_id, config=config, ignore_mismatched_sizes=True, output_loading_info=True
    )
    align_padding_positions(model)
    return model, found


def _load_pytorch(
    folder_or_hub_id: str, config: PretrainedConfig, weights: WeightsFile, auto_class: Any
) -> tuple[Any, dict[str, Any]]:
    """Load a model, and what was found of its weights, from PyTorch's layout."""
    from safetensors.tensorflow import load_file  # imports TensorFlow
    from transformers.modeling_tf_pytorch_utils import load_pytorch_state_dict_in_tf2_model

    model = auto_class.from_config(config)
    align_padding_positions(model)
    architecture = architecture_of(config)
    head_bias = architecture.head_bias or ()
    return load_pytorch_state_dict_in_tf2_model(
        model,
        _read_shards(folder_or_hub_id, weights.path) if weights.is_index else load_file(weights.path),
        allow_missing_keys=True,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
        tf_to_pt_weight_rename=lambda name: head_bias if name in head_bias else (architecture.pytorch_name(name),),
        skip_logger_warnings=True,
    )


def _read_shards(folder_or_hub_id: str, index_path: str) -> dict[str, Any]:
    """Read {name: tensor} of all files that an index names."""
    from safetensors.tensorflow import load_file

    shard_names = set(json.loads(Path(index_path).read_text(encoding="utf-8"))["weight_map"].values())
    weights: dict[str, Any] = {}
    for name in sorted(shard_names):
        shard_path = _find_file(folder_or_hub_id, name)
        if shard_path is None:
            raise InputError(f"{folder_or_hub_id} lacks {name}, which its {Path(index_path).name} names.")
        weights |= load_file(shard_path)
    return weights


def _check_found(folder_or_hub_id: str, model: Any, found: dict[str, Any]) -> None:
    """Refuse weights that are not exactly those of the model, given what transformers found of them."""
    wrong_shape = {name: f"{name} {tuple(shape)}, not {tuple(own)}" for name, shape, own in found["mismatched_keys"]}
    known = {*wrong_shape, *(architecture_of(model.config).head_bias or ())}
    wrong = {
        "missing": found["missing_keys"],
        "of another shape": list(wrong_shape.values()),
        "unexpected": sorted(
            name for name in set(found["unexpected_keys"]) - known if not NOT_IN_TENSORFLOW.search(name)
        ),
    }
    if any(wrong.values()):
        raise InputError(
            f"The weights must be those of a {type(model).__name__.removeprefix('TF')}; in {folder_or_hub_id} are "
            + "; ".join(f"{kind}: {', '.join(names)}" for kind, names in wrong.items() if names)
        )
