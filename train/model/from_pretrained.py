"""A saved model read into TensorFlow, and `--init-from`, which starts a run with its configuration and weights.

It is an export, or any checkpoint of a folder or the Hub; torch is not needed.
"""

import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
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
from train.model.architectures import (
    ARCHITECTURES,
    OWN_HEAD,
    align_padding_positions,
    architecture_of,
    check_architecture,
    cut_vocabulary,
    vocabulary_axis,
)
from train.model.auto_classes import auto_class
from train.runtime.run_folder import exported_model

logger = logging.getLogger(__name__)

WEIGHTS_NAMES = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, TF2_WEIGHTS_NAME, TF2_WEIGHTS_INDEX_NAME)
WEIGHTS_SUFFIXES = (".safetensors", ".h5", ".bin")
# In the names of tables of positions; the second is that of rotations.
POSITION_TABLES = ("position_embeddings", "embed_positions")
# In PyTorch checkpoints, besides what the TF classes themselves leave out: buffers, the head's weights once more, and
# the head for pairs, where the class has none.
NOT_IN_TENSORFLOW = re.compile(
    r"\.(position_ids|token_type_ids)$|(^|\.)decoder\.(weight|bias)$|(^|\.)(seq_relationship|sop_classifier)\."
)


def load_model(
    folder_or_hub_id: str,
    model_class: str = "TFAutoModelForMaskedLM",
    *,
    head_labels: Mapping[int, str] | None = None,
    adapt_network: Callable[[Any], Any] = lambda network: network,
) -> Any:
    """Load a TF model with the weights of an export, or of any checkpoint in safetensors or TensorFlow's h5.

    Args:
        folder_or_hub_id: a local folder, or a model on the Hub.
        model_class: the auto class of transformers that has the checkpoint's head.
        head_labels: {id: label} of a head that the checkpoint may lack, or have in another shape; it starts at random,
            and what else the checkpoint has of heads is left out. By default it must have the head.
        adapt_network: changes the model in place: a head of a task's own is put on it.

    Raises:
        InputError: no such folder or model, no such weights in it, an architecture that is not supported, or weights
            that are not those of its class.
    """
    config = read_config(folder_or_hub_id)
    check_architecture(config)
    their_labels = dict(config.id2label or {})
    if head_labels is not None:
        set_labels(config, head_labels)
    weights = find_weights(folder_or_hub_id)
    if weights.layout == "pytorch":
        network = auto_class(model_class).from_config(config)
        align_padding_positions(network)
        model, found = _load_pytorch(folder_or_hub_id, weights, adapt_network(network))
    else:
        model, found = _load_tensorflow(folder_or_hub_id, config, auto_class(model_class))
        adapt_network(model)
        if hasattr(model, OWN_HEAD):
            found["missing_keys"] += [weight.name for weight in getattr(model, OWN_HEAD).weights]
    if head_labels is not None:
        found = _without_heads(folder_or_hub_id, model, found, their_labels)
    _check_found(folder_or_hub_id, model, found)
    return model


def set_labels(config: PretrainedConfig, labels: Mapping[int, str]) -> None:
    """Set {id: label} of what a model's head tells apart."""
    config.id2label = dict(labels)
    config.label2id = {label: index for index, label in labels.items()}


def _without_heads(
    folder_or_hub_id: str, model: Any, found: dict[str, Any], their_labels: Mapping[int, str]
) -> dict[str, Any]:
    """Leave out of what was found all that belongs to a head, and log whether the head of the checkpoint is kept.

    A pooler, which an MLM has no use for, belongs to the head.
    """

    def is_of_base(name: str) -> bool:
        return name.startswith((f"{model.base_model_prefix}.", f"{model.name}/{model.base_model_prefix}/")) and (
            "pooler" not in name
        )

    wrong_shape = found["mismatched_keys"]
    fresh = [*found["missing_keys"], *(name for name, *_ in wrong_shape)]
    fresh = sorted(name for name in fresh if not is_of_base(name))
    labels = (model.config.id2label, their_labels)
    names, their_names = (", ".join(one[index] for index in sorted(one)) for one in labels)
    if fresh:
        logger.info("%s lacks these weights, which are initialized randomly: %s", folder_or_hub_id, ", ".join(fresh))
    elif names == their_names:
        logger.info("The head of %s is kept.", folder_or_hub_id)
    else:
        logger.warning(
            "The head of %s is kept, which was trained for other labels: %.200s; those of this task are %.200s.",
            *(folder_or_hub_id, their_names, names),
        )
    return {
        "missing_keys": [name for name in found["missing_keys"] if is_of_base(name)],
        "mismatched_keys": [shapes for shapes in wrong_shape if is_of_base(shapes[0])],
        "unexpected_keys": [name for name in found["unexpected_keys"] if is_of_base(name)],
    }


def read_config(folder_or_hub_id: str) -> PretrainedConfig:
    """Read the configuration of a checkpoint.

    Raises:
        InputError: there is none, or none that transformers knows.
        HubAwayError: the Hub cannot be reached.
    """
    try:
        return AutoConfig.from_pretrained(folder_or_hub_id)
    except (OSError, ValueError, KeyError) as error:
        rule = "A model is a folder with config.json, or a model on the Hub"
        reason = " ".join(str(error).split())[:300]
        raise hub_error(f"{rule}; {folder_or_hub_id} cannot be read: {reason}", error) from error


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


def _load_tensorflow(folder_or_hub_id: str, config: PretrainedConfig, model_class: Any) -> tuple[Any, dict[str, Any]]:
    """Load a model, and what was found of its weights, from TensorFlow's layout."""
    model, found = model_class.from_pretrained(
        folder_or_hub_id, config=config, ignore_mismatched_sizes=True, output_loading_info=True
    )
    align_padding_positions(model)
    return model, found


def _load_pytorch(folder_or_hub_id: str, weights: WeightsFile, model: Any) -> tuple[Any, dict[str, Any]]:
    """Load a model, and what was found of its weights, from PyTorch's layout."""
    from safetensors.tensorflow import load_file  # imports TensorFlow
    from transformers.modeling_tf_pytorch_utils import load_pytorch_state_dict_in_tf2_model

    architecture = architecture_of(model.config)
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


def read_initial_config(folder_or_hub_id: str, tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    """Read the configuration of the checkpoint of `--init-from`, and check that it suits the shards' tokenizer.

    Raises:
        InputError: it cannot be read, has no weights, or its rows of the embedding are not those of the tokenizer's
            ids.
    """
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


def load_initial_weights(
    model: Any,
    folder_or_hub_id: str,
    vocabulary_size: int,
    model_class: str = "TFAutoModelForMaskedLM",
    *,
    adapt_network: Callable[[Any], Any] | None = None,
) -> None:
    """Give a built TF model the weights of a checkpoint in a local or `gs://` folder, of a run, or on the Hub.

    The model may have more positions than the checkpoint; those keep the start they have. Of the vocabulary the first
    `vocabulary_size` ids are taken, and the model's padding is 0. `model_class` is the auto class of both. With
    `adapt_network`, which made the model of one of that class, what the checkpoint lacks of the head starts at random,
    by TensorFlow's seed.

    Raises:
        InputError: the checkpoint cannot be read, or its weights are not those of this model.
    """
    folder_or_hub_id = exported_model(folder_or_hub_id, "--init-from")
    with local_or_hub(folder_or_hub_id) as name:
        anew = {"head_labels": model.config.id2label, "adapt_network": adapt_network} if adapt_network else {}
        source = load_model(name, model_class, **anew)
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


def _by_name(model: Any) -> dict[str, Any]:
    """Map each variable's name within the model to the variable."""
    return {
        variable.name[variable.name.index(f"{model.name}/") + len(model.name) :]: variable for variable in model.weights
    }


def _fitted(value: np.ndarray, variable: Any, name: str, axis: int | None, vocabulary_size: int) -> np.ndarray:
    """Fill a value up with the model's padding of the vocabulary, or with positions that it has more."""
    if axis is not None:
        value = cut_vocabulary(value, axis, vocabulary_size)
        padding = [(0, variable.shape[at] - vocabulary_size if at == axis else 0) for at in range(value.ndim)]
        return np.pad(value, padding)
    if any(table in name for table in POSITION_TABLES) and len(value) < variable.shape[0]:
        return np.concatenate([value, variable.numpy()[len(value) :]])
    return value


def _other_model(folder_or_hub_id: str, difference: str) -> InputError:
    return InputError(
        f"The weights of --init-from must be those of the model that is trained; of {folder_or_hub_id} {difference}. "
        "Leave out the --config-overrides that change the model's sizes."
    )
