"""Load the weights of an export, or of any checkpoint in a folder or on the Hub, into TensorFlow, without torch."""

import json
import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from safetensors.tensorflow import load_file
from transformers.modeling_tf_pytorch_utils import load_pytorch_state_dict_in_tf2_model
from transformers.utils import CONFIG_NAME

from mlm_common.errors import InputError
from mlm_common.storage import local_or_hub
from mlm_common.storage.guard import guarded_read
from train.model.architectures import (
    OWN_HEAD,
    align_padding_positions,
    architecture_of,
    check_architecture,
    cut_vocabulary,
    vocabulary_axis,
)
from train.model.build import auto_class
from train.model.pretrained_files import (
    A_CONFIGURATION,
    SAFETENSORS,
    SHARD_INDEX,
    WeightsFile,
    find_file,
    find_weights,
    read_config,
    set_labels,
)
from train.runtime.run_folder import exported_model

logger = logging.getLogger(__name__)

# In the names of tables of positions; the second is that of rotations.
POSITION_TABLES = ("position_embeddings", "embed_positions")
# In PyTorch checkpoints, beyond what the TF classes themselves leave out: buffers, copies of the head's weights, and
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
        adapt_network: changes the model in place: adds the head of a custom task.

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
        with guarded_read(Path(folder_or_hub_id, CONFIG_NAME), A_CONFIGURATION):
            network = auto_class(model_class, config).from_config(config)
        align_padding_positions(network)
        model, found = _load_pytorch(folder_or_hub_id, weights, adapt_network(network))
    else:
        with guarded_read(weights.path, "weights of TensorFlow's h5 format"):
            model, found = auto_class(model_class, config).from_pretrained(
                folder_or_hub_id, config=config, ignore_mismatched_sizes=True, output_loading_info=True
            )
        align_padding_positions(model)
        adapt_network(model)
        if hasattr(model, OWN_HEAD):
            found["missing_keys"] += [weight.name for weight in getattr(model, OWN_HEAD).weights]
    if head_labels is not None:
        found = _without_heads(folder_or_hub_id, model, found, their_labels)
    _check_found(folder_or_hub_id, model, found)
    _check_finite(weights.path, model)
    return model


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
    if type(model).__name__.endswith("Model") and not hasattr(model, OWN_HEAD):
        pass  # there is no head, and a pooler is not used
    elif fresh:
        text = "New layers, which %s does not have, start with random weights: %s"
        logger.info(text, folder_or_hub_id, ", ".join(fresh))
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


def _load_pytorch(folder_or_hub_id: str, weights: WeightsFile, model: Any) -> tuple[Any, dict[str, Any]]:
    architecture = architecture_of(model.config)
    head_bias = architecture.head_bias or ()
    if weights.is_index:
        arrays = _read_shards(folder_or_hub_id, weights.path)
    else:
        with guarded_read(weights.path, SAFETENSORS):
            arrays = load_file(weights.path)
    return load_pytorch_state_dict_in_tf2_model(
        model,
        arrays,
        allow_missing_keys=True,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
        tf_to_pt_weight_rename=lambda name: head_bias if name in head_bias else (architecture.pytorch_name(name),),
        skip_logger_warnings=True,
    )


def _read_shards(folder_or_hub_id: str, index_path: str) -> dict[str, Any]:
    with guarded_read(index_path, SHARD_INDEX):
        shard_names = set(json.loads(Path(index_path).read_bytes())["weight_map"].values())
        if not shard_names or any(Path(name).name != name for name in shard_names):
            raise ValueError("its weight_map names no files beside it")
    weights: dict[str, Any] = {}
    for name in sorted(shard_names):
        shard_path = find_file(folder_or_hub_id, name)
        if shard_path is None:
            raise InputError(f"{folder_or_hub_id} lacks {name}, which its {Path(index_path).name} names.")
        with guarded_read(shard_path, SAFETENSORS):
            weights |= load_file(shard_path)
    return weights


def _check_found(folder_or_hub_id: str, model: Any, found: dict[str, Any]) -> None:
    """Refuse weights that are not exactly those of the model, given what transformers found of them."""
    wrong_shape = {name: f"{name} {tuple(shape)}, not {tuple(ours)}" for name, shape, ours in found["mismatched_keys"]}
    known = {*wrong_shape, *(architecture_of(model.config).head_bias or ())}
    if not hasattr(model, OWN_HEAD):  # of a custom task, beside a head that transformers knows
        known |= {name for name in found["unexpected_keys"] if name.startswith(f"{OWN_HEAD}.")}
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


def _check_finite(path: str, model: Any) -> None:
    """Refuse weights of which some are NaN or infinite: everything that a model computes would be NaN."""
    for variable in model.weights:
        if variable.dtype.is_floating and not bool(tf.reduce_all(tf.math.is_finite(variable))):
            raise InputError(
                f"Weights must be finite numbers; {variable.name} in {path} has NaN or infinity, as after a training "
                "that diverged. Use an earlier checkpoint."
            )


def load_initial_weights(
    model: Any,
    folder_or_hub_id: str,
    vocabulary_size: int,
    model_class: str = "TFAutoModelForMaskedLM",
    *,
    adapt_network: Callable[[Any], Any] | None = None,
    grow_seed: int | None = None,
) -> None:
    """Give a built TF model the weights of a checkpoint in a local or `gs://` folder, of a run, or on the Hub.

    The model may have more positions than the checkpoint; those keep the start they have. Of the vocabulary the first
    `vocabulary_size` ids are taken, and the model's padding is 0. `model_class` is the auto class of both. With
    `adapt_network`, which made the model of one of that class, what the checkpoint lacks of the head starts at random,
    by TensorFlow's seed. With `grow_seed` the checkpoint is of a smaller model, and is tiled (`train.model.growing`).

    Raises:
        InputError: the checkpoint cannot be read, or its weights are not those of this model.
    """
    folder_or_hub_id = exported_model(folder_or_hub_id, "--init-from")
    with local_or_hub(folder_or_hub_id) as name:
        new_head = {"head_labels": model.config.id2label, "adapt_network": adapt_network} if adapt_network else {}
        source = load_model(name, model_class, **new_head)
    wanted = _by_name(model)
    given = {name: variable.numpy() for name, variable in _by_name(source).items()}
    if grow_seed is not None:
        given = _grown(given, wanted, source, model, vocabulary_size, grow_seed)
    differing = sorted(given.keys() ^ wanted.keys())
    if differing:
        raise _other_model(folder_or_hub_id, f"{differing[0]} is in one of the two only")
    for weight_name, variable in wanted.items():
        axis = vocabulary_axis(weight_name, model.config.model_type)
        value = _fitted(given[weight_name], variable, weight_name, axis, vocabulary_size)
        if value.shape != tuple(variable.shape):
            raise _other_model(folder_or_hub_id, f"{weight_name} is {value.shape}, here {tuple(variable.shape)}")
        variable.assign(value)


def _grown(
    given: dict[str, np.ndarray], wanted: dict[str, Any], source: Any, model: Any, vocabulary_size: int, seed: int
) -> dict[str, np.ndarray]:
    from train.model.growing import grown  # for a flag alone

    model_type, prefix = model.config.model_type, f"/{model.base_model_prefix}/"

    def kept_axis(name: str) -> int | None:
        return 0 if _is_position_table(name) else vocabulary_axis(name, model_type)

    def cut(name: str, value: np.ndarray) -> np.ndarray:
        value = cut_vocabulary(value, vocabulary_axis(name, model_type), vocabulary_size)
        return value[: wanted[name].shape[0]] if _is_position_table(name) else value

    starts = {name: cut(name, variable.numpy()) for name, variable in wanted.items()}
    given = {name: cut(name, value) for name, value in given.items()}
    is_of_head = lambda name: not name.startswith(prefix)  # noqa: E731
    return grown(given, starts, source.config, model.config, seed, kept_axis=kept_axis, is_of_head=is_of_head)


def _is_position_table(name: str) -> bool:
    return any(table in name for table in POSITION_TABLES)


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
    if _is_position_table(name) and len(value) < variable.shape[0]:
        return np.concatenate([value, variable.numpy()[len(value) :]])
    return value


def _other_model(folder_or_hub_id: str, difference: str) -> InputError:
    return InputError(
        f"The weights of --init-from must be those of the model that is trained; of {folder_or_hub_id} {difference}. "
        "Leave out the --config-overrides that change the model's sizes, or make it larger with --grow."
    )
