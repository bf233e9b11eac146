"""Resolve the model's configuration: the architecture from a preset, folder or the Hub, the rest from the data."""

from contextlib import nullcontext

from transformers import PretrainedConfig, PreTrainedTokenizerFast

from mlm_common.errors import InputError
from mlm_common.storage import check_folder_or_hub
from mlm_common.storage.guard import guarded_read
from mlm_common.tokenizer import special_ids, vocabulary_size
from tfrecord_prep.manifest import SEPARATED_CHUNKINGS
from train.config.learning import ModelConfig
from train.config.presets import read_preset
from train.config.settings import RunSettings
from train.data.inputs import Inputs
from train.data.shards import TrainingInputs
from train.model.architectures import (
    ARCHITECTURES,
    SIZES,
    check_architecture,
    check_computable,
    check_tensorflow_classes,
    learns_positions,
    max_positions,
    position_offset,
    uses_token_types,
)
from train.model.configurations import make_config

# The tokenizer and the shards determine these settings; a model with other values would not fit them.
DECIDED_BY_DATA = ("model_type", "vocab_size", "pad_token_id", "bos_token_id", "eos_token_id", "mask_token_id")


def resolve_model_config(config: ModelConfig, inputs: Inputs, max_length: int | None = None) -> PretrainedConfig:
    """Build the configuration to train: with a padded vocabulary, and special ids and positions that fit the data.

    A preset gets positions for rows of `max_length` tokens; other configurations keep their number of positions.

    Args:
        max_length: length of the longest rows of all phases, in tokens; by default that of `inputs`.

    Raises:
        InputError: the model does not fit tokenizer or shards, or could not be trained and exported correctly.
    """
    source = config.init_from or config.pretrained_model_config
    with guarded_read(source, "a model with a valid config.json") if source else nullcontext():
        return _resolve(config, inputs, max_length or inputs.max_length)


def _resolve(config: ModelConfig, inputs: Inputs, max_length: int) -> PretrainedConfig:
    model_config = _read(config, inputs.tokenizer)
    overrides = parse_overrides(config.config_overrides)
    sizes = {name: getattr(model_config, name, None) for name in SIZES if name != "num_attention_heads"}
    _override(model_config, overrides, config.config_overrides)
    for name, size in sizes.items():
        if config.init_from is not None and not config.grow and size != (now := getattr(model_config, name, None)):
            raise InputError(
                f"--config-overrides must not change {name} of --init-from, which is {size}; "
                f"received {now}. Leave it out, or make the model larger with --grow."
            )
    ids = special_ids(inputs.tokenizer)
    model_config.update(
        {
            "vocab_size": padded_vocabulary_size(vocabulary_size(inputs.tokenizer), config.pad_vocab_to_multiple_of),
            "pad_token_id": ids["pad"],
            "bos_token_id": ids["cls"],
            "eos_token_id": ids["sep"],
            "cls_token_id": ids["cls"],
            "sep_token_id": ids["sep"],
            "mask_token_id": ids["mask"],
        }
    )
    check_architecture(model_config)
    if config.grow and config.init_from is not None:
        from train.model.growing import check_growth  # for this flag alone
        from train.model.pretrained_files import read_initial_config

        check_folder_or_hub(config.init_from, "--init-from")
        check_growth(read_initial_config(config.init_from, inputs.tokenizer), model_config)
    if config.block_attention and isinstance(inputs, TrainingInputs):
        _check_block_attention(model_config.model_type, inputs)
    if config.objective != "mlm":
        _check_pair_head(config.objective, model_config)
    if config.dropout is not None:
        _set_dropout(model_config, config.dropout, overrides)
    is_preset = config.pretrained_model_config is None and (config.init_from is None or config.grow)
    if is_preset and "max_position_embeddings" not in overrides:
        model_config.update({"max_position_embeddings": max_length + position_offset(model_config)})
    positions = max_positions(model_config)
    if positions is not None and positions < max_length:
        needed = max_length + position_offset(model_config)
        raise InputError(
            f"Rows must fit the model's positions; the shards' have {max_length} tokens, the model takes "
            f"{positions}. Give --config-overrides max_position_embeddings={needed}, or prepare shorter rows."
        )
    if config.position_init == "sinusoidal" and not learns_positions(model_config):
        raise InputError(
            f"--position-init sinusoidal needs a table of learned positions; a {model_config.model_type} as configured "
            "has none. Give --position-init random."
        )
    check_computable(model_config)
    return model_config


def check_reference_layers(config: RunSettings, model_config: PretrainedConfig) -> None:
    """Check that transformers' TensorFlow classes can compute the model, if --reference-layers asks for them."""
    if not config.hardware.reference_layers:
        return
    check_tensorflow_classes("--reference-layers")
    if model_config.model_type == "modernbert":
        raise InputError(
            "--reference-layers needs a model that transformers has a TensorFlow class for, such as bert or roberta; "
            "received modernbert. Leave the flag out."
        )
    if config.model.block_attention:
        raise InputError(
            "--reference-layers cannot be combined with --block-attention: in transformers' TensorFlow classes, tokens "
            "attend to the whole row. Leave out one."
        )


def _read(config: ModelConfig, tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    if (config.init_from is None or config.grow) and config.pretrained_model_config is None:
        return make_config(read_preset(config.preset)["model"])
    from train.model.pretrained_files import read_config, read_initial_config  # for these flags alone

    if config.init_from is not None and not config.grow:
        if config.pretrained_model_config is not None:
            raise InputError(
                "--init-from brings its own configuration; received --pretrained-model-config "
                f"{config.pretrained_model_config} as well. Leave it out."
            )
        check_folder_or_hub(config.init_from, "--init-from")
        return read_initial_config(config.init_from, tokenizer)
    assert config.pretrained_model_config is not None
    check_folder_or_hub(config.pretrained_model_config, "--pretrained-model-config")
    try:
        return read_config(config.pretrained_model_config)
    except InputError as error:
        raise InputError(f"--pretrained-model-config: {error}") from error


def parse_overrides(text: str | None) -> dict[str, str]:
    """Parse `name=value,name=value` of --config-overrides into {name: value}."""
    pairs = [pair.partition("=") for pair in (text or "").split(",") if pair.strip()]
    overrides = {name.strip(): value.strip() for name, _, value in pairs}
    malformed = [name for name, equals, value in pairs if not (name.strip() and equals and value.strip())]
    if malformed:
        raise InputError(f"--config-overrides must be name=value,name=value; received {text}.")
    decided = [name for name in overrides if name in DECIDED_BY_DATA]
    if decided:
        raise InputError(f"--config-overrides must not set {decided[0]}: it is decided by the tokenizer or the preset.")
    return overrides


def _override(model_config: PretrainedConfig, overrides: dict[str, str], text: str | None) -> None:
    if not overrides:
        return
    try:
        model_config.update_from_string(",".join(f"{name}={value}" for name, value in overrides.items()))
    except ValueError as error:
        names = ", ".join(sorted(model_config.to_dict()))
        raise InputError(f"--config-overrides {text}: {error}. A {model_config.model_type} has: {names}.") from error


def _check_block_attention(model_type: str, inputs: TrainingInputs) -> None:
    types = [name for name, architecture in ARCHITECTURES.items() if architecture.is_ours]
    if model_type not in types:
        raise InputError(
            f"--block-attention needs one of {', '.join(types)}; the model is a {model_type}. Leave the flag out, or "
            "give another --preset or --pretrained-model-config."
        )
    for folder, chunking in inputs.chunkings():
        if chunking not in SEPARATED_CHUNKINGS:
            raise InputError(
                "--block-attention needs shards in which a [SEP] ends each document: --chunking "
                f"{', '.join(SEPARATED_CHUNKINGS)}; that of {folder} is {chunking}. Leave the flag out, or "
                "prepare the shards with prepare_tfrecord_shards.py."
            )


def _check_pair_head(objective: str, model_config: PretrainedConfig) -> None:
    types = [name for name, architecture in ARCHITECTURES.items() if architecture.has_pair_head]
    if model_config.model_type not in types:
        raise InputError(
            f"--objective {objective} needs one of {', '.join(types)}; the model is a {model_config.model_type}. Give "
            "--objective mlm, or another --preset or --pretrained-model-config."
        )
    if not uses_token_types(model_config):
        raise InputError(
            f"--objective {objective} needs a model that distinguishes two segments; type_vocab_size is "
            f"{model_config.type_vocab_size}. Give --config-overrides type_vocab_size=2."
        )


def _set_dropout(model_config: PretrainedConfig, rate: float, overrides: dict[str, str]) -> None:
    names = ARCHITECTURES[model_config.model_type].dropouts
    twice = [name for name in names if name in overrides]
    if twice:
        raise InputError(f"--dropout {rate} and --config-overrides {twice[0]} must not both be given; leave out one.")
    model_config.update(dict.fromkeys(names, rate))


def padded_vocabulary_size(vocabulary_size: int, multiple: int) -> int:
    """Round the size of a vocabulary up to a multiple, so that it divides evenly among lanes and cores of a TPU.

    On one core the TPU's compiler pads to 128 lanes itself, at the same modelled cost. The added ids change no result:
    no text contains them, their probability is 0 (`train.tasks.heads`), and saved models do not have them.
    """
    return -(-vocabulary_size // multiple) * multiple
