"""Weights in PyTorch layout, read into transformers' TF classes, without torch.

transformers 4.57 itself fails at this: https://github.com/huggingface/transformers/issues/40028.
"""

import json
from pathlib import Path
from typing import Any

from safetensors.tensorflow import load_file
from transformers import AutoConfig, TFAutoModelForMaskedLM
from transformers.modeling_tf_pytorch_utils import load_pytorch_state_dict_in_tf2_model
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from tokenizer_training.command_line import InputError
from train.architectures import align_padding_positions, check_architecture
from train.export import HEAD_BIAS, renamed


def load_masked_lm(folder_or_hub_id: str) -> Any:
    """Return the TF…ForMaskedLM with the weights of an export, or of any safetensors checkpoint in PyTorch layout.

    Raises:
        InputError: no such folder or model, no safetensors in it, an architecture that is not supported, or weights
            that are not those of its masked-LM class.
    """
    try:
        config = AutoConfig.from_pretrained(folder_or_hub_id)
    except (OSError, ValueError) as error:
        raise InputError(
            f"A model is a folder with config.json, or a model on the Hub; {folder_or_hub_id} cannot be read: "
            f"{' '.join(str(error).split())}"
        ) from error
    check_architecture(config)
    weights = _read_weights(folder_or_hub_id)
    model = TFAutoModelForMaskedLM.from_config(config)
    align_padding_positions(model)
    head_bias = HEAD_BIAS.get(config.model_type, ())
    _, found = load_pytorch_state_dict_in_tf2_model(
        model,
        weights,
        allow_missing_keys=True,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
        tf_to_pt_weight_rename=lambda name: head_bias if name in head_bias else (renamed(config.model_type, name),),
        skip_logger_warnings=True,
    )
    wrong_shape = {name: f"{name} {tuple(shape)}, not {tuple(own)}" for name, shape, own in found["mismatched_keys"]}
    wrong = {
        "missing": found["missing_keys"],
        "of another shape": list(wrong_shape.values()),
        "unexpected": sorted(set(found["unexpected_keys"]) - set(wrong_shape) - set(head_bias)),
    }
    if any(wrong.values()):
        raise InputError(
            f"The weights must be those of a {config.model_type} with a masked-LM head; in {folder_or_hub_id} are "
            + "; ".join(f"{kind}: {', '.join(names)}" for kind, names in wrong.items() if names)
        )
    return model


def _read_weights(folder_or_hub_id: str) -> dict[str, Any]:
    """Return {name: tensor} of the one file of weights, or of all shards that its index names."""
    path = _find(folder_or_hub_id, SAFE_WEIGHTS_NAME)
    if path is not None:
        return load_file(path)
    index_path = _find(folder_or_hub_id, SAFE_WEIGHTS_INDEX_NAME)
    if index_path is None:
        raise InputError(f"A model must hold {SAFE_WEIGHTS_NAME}; {folder_or_hub_id} does not.")
    shard_names = set(json.loads(Path(index_path).read_text(encoding="utf-8"))["weight_map"].values())
    weights: dict[str, Any] = {}
    for name in sorted(shard_names):
        shard_path = _find(folder_or_hub_id, name)
        if shard_path is None:
            raise InputError(f"{folder_or_hub_id} lacks {name}, which its {SAFE_WEIGHTS_INDEX_NAME} names.")
        weights |= load_file(shard_path)
    return weights


def _find(folder_or_hub_id: str, name: str) -> str | None:
    return cached_file(folder_or_hub_id, name, _raise_exceptions_for_missing_entries=False)
