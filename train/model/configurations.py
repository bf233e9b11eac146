"""Configurations that are the same in transformers 4 and 5. They use version 4's names, which both versions can read.

Version 5 renamed settings of ModernBERT: `rope_parameters` contains the bases of the rotations, and `layer_types` says
for each layer whether its attention is global.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import CONFIG_NAME

from train.model.architectures import ARCHITECTURES

GLOBAL, LOCAL = "full_attention", "sliding_attention"
BASES = {"global_rope_theta": GLOBAL, "local_rope_theta": LOCAL}
EVERY = "global_attn_every_n_layers"
# {name in version 4: default value in version 4}.
NAMES_OF_4 = {"global_rope_theta": 160_000.0, "local_rope_theta": 10_000.0, EVERY: 3, "repad_logits_with_grad": False}
# Values that version 5 writes and version 4 leaves out.
UNWRITTEN: dict[str, Any] = {"tie_word_embeddings": True, "is_decoder": False, "add_cross_attention": False}
UNWRITTEN |= {f"{name}_token_id": None for name in ("pad", "bos", "eos", "cls", "sep")}
# Version 5 of transformers lacks this setting, because it supports only one value.
POSITIONS = "position_embedding_type"
NAMES_OF_5 = ("rope_parameters", "layer_types")


def make_config(settings: Mapping[str, Any]) -> PretrainedConfig:
    """Make a configuration from settings with the names of version 4 or 5; they must include `model_type`."""
    given = dict(settings)
    model_type = given.pop("model_type")
    if model_type != "modernbert":
        return CONFIG_MAPPING[model_type](**given)
    ours = _names_of_4(given)
    # Version 5 refuses a configuration without layers, so their number is set later.
    if (num_layers := given.pop("num_hidden_layers", None)) is not None:
        ours["num_hidden_layers"] = num_layers
    config = CONFIG_MAPPING[model_type](**{name: value for name, value in given.items() if name not in NAMES_OF_5})
    for name in NAMES_OF_5:
        vars(config).pop(name, None)
    config.update(ours)
    return config


def load_config(folder_or_hub_id: str) -> PretrainedConfig:
    """Load the configuration of a model, and set `_commit_hash` to its commit on the Hub."""
    config = make_config(PretrainedConfig.get_config_dict(folder_or_hub_id)[0])
    config.name_or_path = folder_or_hub_id
    if not Path(folder_or_hub_id).is_dir():  # version 5 does not set `_commit_hash`
        cached_path = try_to_load_from_cache(folder_or_hub_id, CONFIG_NAME)
        if isinstance(cached_path, str):
            config._commit_hash = Path(cached_path).parent.name
    return config


def settings_of(config: PretrainedConfig) -> dict[str, Any]:
    """Return the settings that identify an architecture, as version 4 writes them, without the version number."""
    settings = config.to_diff_dict()
    settings.pop("transformers_version", None)
    architecture = ARCHITECTURES.get(config.model_type)
    if architecture and POSITIONS in architecture.required:
        settings.setdefault(POSITIONS, architecture.required[POSITIONS])
    return {name: value for name, value in settings.items() if name not in UNWRITTEN or value != UNWRITTEN[name]}


def _names_of_4(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that version 5 renamed under their names in version 4, with defaults for missing ones."""
    ours = {name: settings.get(name, default) for name, default in NAMES_OF_4.items()}
    rotations = settings.get("rope_parameters") or {}
    ours |= {name: rotations[kind]["rope_theta"] for name, kind in BASES.items() if kind in rotations}
    layers = settings.get("layer_types")
    if layers and layers != _layer_types(ours[EVERY], len(layers)):
        ours[EVERY] = layers.index(GLOBAL, 1) if GLOBAL in layers[1:] else len(layers)
        if layers != _layer_types(ours[EVERY], len(layers)):
            raise ValueError(f"its layer_types must have {GLOBAL} first and at equal distances; they are {layers}")
    return ours


def _layer_types(global_every: int, num_layers: int) -> list[str]:
    return [LOCAL if index % global_every else GLOBAL for index in range(num_layers)]
