"""Resolve the model's configuration: the architecture from a preset, folder or the Hub, the rest from the data."""

from contextlib import nullcontext

from transformers import PretrainedConfig, PreTrainedTokenizerFast

from mlm_common.errors import InputError
from mlm_common.storage import check_folder_or_hub
from mlm_common.storage.guard import guarded_read
from mlm_common.tokenizer import special_ids, vocabulary_size
from tfrecord_prep.manifest import SEPARATED_CHUNKINGS
from train.config.learning import ModelConfig, PretrainedModel
from train.config.presets import read_preset
from train.config.settings import RunSettings, TrainingConfig
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

READABLE_MODEL = "a model with a valid config.json"
# The tokenizer and the shards determine these settings. A model with different values would not fit the data.
DECIDED_BY_DATA = ("model_type", "vocab_size", "pad_token_id", "bos_token_id", "eos_token_id", "mask_token_id")


def resolve_model_config(settings: PretrainedModel, inputs: Inputs, max_length: int | None = None) -> PretrainedConfig:
    """Build the configuration for pretraining: with a padded vocabulary, and special ids and positions for the data.

    A preset gets positions for rows of `max_length` tokens; other configurations keep their number of positions.

    Args:
        max_length: length of the longest rows of all phases, in tokens; by default the length of the rows of `inputs`.

    Raises:
        InputError: the model does not fit tokenizer or shards, or could not be trained and exported correctly.
    """
    length = max_length or inputs.max_length
    source = settings.init_from or settings.pretrained_model_config
    with guarded_read(source, READABLE_MODEL) if source else nullcontext():
        model_config = _read(settings, inputs.tokenizer)
        has_weights = settings.init_from is not None and not settings.grow
        _apply(settings, model_config, inputs.tokenizer, settings.pad_vocab_to_multiple_of, has_weights=has_weights)
        if settings.grow and settings.init_from is not None:
            from train.model.growing import check_growth  # only needed with --grow

            check_growth(_read_initial(settings.init_from, inputs.tokenizer), model_config)
        if settings.block_attention and isinstance(inputs, TrainingInputs):
            _check_block_attention(model_config.model_type, inputs)
        if settings.objective != "mlm":
            _check_pair_head(settings.objective, model_config)
        is_preset = settings.pretrained_model_config is None and not has_weights
        if is_preset and "max_position_embeddings" not in parse_overrides(settings.config_overrides):
            model_config.update({"max_position_embeddings": length + position_offset(model_config)})
        _check_rows(model_config, length)
        if settings.position_init == "sinusoidal" and not learns_positions(model_config):
            raise InputError(
                f"--position-init sinusoidal needs a table of learned positions; a {model_config.model_type} with "
                "this configuration has none. Give --position-init random."
            )
    return model_config


def resolve_finetuned_config(settings: ModelConfig, inputs: Inputs) -> PretrainedConfig:
    """Build the configuration for fine-tuning: the weights' configuration, with special ids that fit the tokenizer.

    Raises:
        InputError: the model does not fit the tokenizer or the rows, or could not be trained and exported correctly.
    """
    source = str(settings.init_from)
    with guarded_read(source, READABLE_MODEL):
        model_config = _read_initial(source, inputs.tokenizer)
        _apply(settings, model_config, inputs.tokenizer, has_weights=True)
        _check_rows(model_config, inputs.max_length)
    return model_config


def _apply(
    settings: ModelConfig,
    model_config: PretrainedConfig,
    tokenizer: PreTrainedTokenizerFast,
    vocabulary_multiple: int = 1,
    *,
    has_weights: bool,
) -> None:
    """Apply overrides, dropout and the tokenizer's ids to a configuration.

    If the model gets the weights of --init-from (`has_weights`), the overrides must not change its sizes.
    """
    overrides = parse_overrides(settings.config_overrides)
    sizes = {name: getattr(model_config, name, None) for name in SIZES if name != "num_attention_heads"}
    _override(model_config, overrides, settings.config_overrides)
    for name, size in sizes.items():
        if has_weights and size != (now := getattr(model_config, name, None)):
            raise InputError(
                f"--config-overrides must not change {name} of --init-from, which is {size}; "
                f"received {now}. Leave it out, or make the model larger with --grow."
            )
    ids = special_ids(tokenizer)
    model_config.update(
        {
            "vocab_size": padded_vocabulary_size(vocabulary_size(tokenizer), vocabulary_multiple),
            "pad_token_id": ids["pad"],
            "bos_token_id": ids["cls"],
            "eos_token_id": ids["sep"],
            "cls_token_id": ids["cls"],
            "sep_token_id": ids["sep"],
            "mask_token_id": ids["mask"],
        }
    )
    check_architecture(model_config)
    if settings.dropout is not None:
        _set_dropout(model_config, settings.dropout, overrides)


def _check_rows(model_config: PretrainedConfig, max_length: int) -> None:
    """Check that the model can process rows of this length."""
    positions = max_positions(model_config)
    if positions is not None and positions < max_length:
        needed = max_length + position_offset(model_config)
        raise InputError(
            f"Rows must fit the model's positions; the longest have {max_length} tokens, but the model takes at most "
            f"{positions}. Give --config-overrides max_position_embeddings={needed}, or prepare shorter rows."
        )
    check_computable(model_config)


def check_reference_layers(config: RunSettings, model_config: PretrainedConfig) -> None:
    """Check that transformers' TensorFlow classes can compute the model, if --reference-layers is given."""
    if not config.hardware.reference_layers:
        return
    check_tensorflow_classes("--reference-layers")
    if model_config.model_type == "modernbert":
        raise InputError(
            "--reference-layers needs a model that transformers has a TensorFlow class for, such as bert or roberta; "
            "received modernbert. Leave the flag out."
        )
    if isinstance(config, TrainingConfig) and config.model.block_attention:
        raise InputError(
            "--reference-layers cannot be combined with --block-attention: in transformers' TensorFlow classes, tokens "
            "attend to the whole row. Leave out one."
        )


def _read(settings: PretrainedModel, tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    name = settings.pretrained_model_config
    if settings.init_from is not None and not settings.grow:
        if name is not None:
            raise InputError(
                f"--init-from brings its own configuration; received --pretrained-model-config {name} as well. Leave "
                "it out."
            )
        return _read_initial(settings.init_from, tokenizer)
    if name is None:
        return make_config(read_preset(settings.preset)["model"])
    from train.model.pretrained_files import read_config  # not needed with a preset

    check_folder_or_hub(name, "--pretrained-model-config")
    try:
        return read_config(name)
    except InputError as error:
        raise InputError(f"--pretrained-model-config: {error}") from error


def _read_initial(init_from: str, tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    from train.model.pretrained_files import read_initial_config  # only needed with --init-from

    check_folder_or_hub(init_from, "--init-from")
    return read_initial_config(init_from, tokenizer)


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
                "--block-attention needs shards in which a [SEP] ends each document (--chunking "
                f"{', '.join(SEPARATED_CHUNKINGS)}); the chunking of {folder} is {chunking}. Leave the flag out, or "
                "prepare the shards again with prepare_tfrecord_shards.py and such a --chunking."
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
    """Round the size of a vocabulary up to a multiple, so that it divides evenly among the lanes and cores of a TPU.

    On one core, the TPU's compiler itself pads to 128 lanes, and its cost estimate is the same. The added ids change no
    result: texts do not contain them, their probability is 0 (`train.tasks.heads`), and saved models leave them out.
    """
    return -(-vocabulary_size // multiple) * multiple
