"""Weights of a checkpoint, in PyTorch's or TensorFlow's layout, read into transformers' TF classes without torch.

transformers 4.57 itself fails at the former: https://github.com/huggingface/transformers/issues/40028.
"""

import json
import re
from pathlib import Path
from typing import Any

from safetensors.tensorflow import load_file
from transformers import PretrainedConfig, TFAutoModelForMaskedLM
from transformers.modeling_tf_pytorch_utils import load_pytorch_state_dict_in_tf2_model

from tokenizer_training.command_line import InputError
from train.architectures import align_padding_positions, check_architecture
from train.checkpoint_files import WeightsFile, find_file, find_weights, read_config
from train.pytorch_export import HEAD_BIAS, renamed

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
