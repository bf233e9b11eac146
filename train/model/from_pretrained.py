"""Load the weights of an export, or of any checkpoint in a folder or on the Hub, into TensorFlow, without torch."""

import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from transformers.utils import CONFIG_NAME

from mlm_common.errors import InputError
from mlm_common.storage import local_or_hub
from mlm_common.storage.guard import guarded_read
from train.model.architectures import (
    ARCHITECTURES,
    OWN_HEAD,
    check_architecture,
    cut_vocabulary,
    not_in_pytorch,
    pytorch_class_of,
    vocabulary_axis,
    with_both_biases,
)
from train.model.build import new_network
from train.model.pretrained_files import A_CONFIGURATION, find_weights, read_config, set_labels
from train.model.weight_files import read_weights
from train.model.weight_names import pytorch_name, to_pytorch, to_tensorflow, variables_within
from train.runtime.run_folder import exported_model

logger = logging.getLogger(__name__)

# Parts of the names of position tables; the second part is in the name of RoFormer's table of rotations.
POSITION_TABLES = ("position_embeddings", "embed_positions")
# Weights that a checkpoint may have and a network may lack: buffers, copies of the token table, poolers, heads for
# pairs.
NEVER_NEEDED = re.compile(
    r"\.(position_ids|token_type_ids)$|(^|\.)decoder\.(weight|bias)$|(^|\.)generator_lm_head\.weight$|(^|\.)pooler\.|"
    r"(^|\.)(seq_relationship|sop_classifier)\."
)
# The weights of the head for masked tokens. Networks with another head do not load them.
MASKED_LM_HEAD = re.compile(r"^((cls\.)?predictions|lm_head)\.")


@dataclass
class Differences:
    """The differences between a checkpoint and a network, by names in PyTorch.

    Attributes:
        missing: weights that only the network has.
        unexpected: weights that only the checkpoint has.
        wrong_shape: {name: (shape in the checkpoint, shape in the network)}.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    wrong_shape: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)


def load_model(
    folder_or_hub_id: str,
    model_class: str = "TFAutoModelForMaskedLM",
    *,
    head_labels: Mapping[int, str] | None = None,
    adapt_network: Callable[[Any], Any] = lambda network: network,
) -> Any:
    """Build a network with the weights of an export, or of any checkpoint in safetensors or TensorFlow's h5.

    Args:
        folder_or_hub_id: a local folder, or a model on the Hub.
        model_class: the auto class of transformers that has the checkpoint's head.
        head_labels: {id: label} of a head that the checkpoint may lack, or have in another shape. Such a head is
            initialized randomly, and other heads of the checkpoint are ignored. By default the checkpoint must have the
            head.
        adapt_network: changes the network in place, to add the head of a custom task.

    Raises:
        InputError: the model or its weights do not exist, the architecture is not supported, or the weights do not
            match the class.
    """
    config = read_config(folder_or_hub_id)
    check_architecture(config)
    their_labels = dict(config.id2label or {})
    if head_labels is not None:
        set_labels(config, head_labels)
    weights = find_weights(folder_or_hub_id)
    with guarded_read(Path(folder_or_hub_id, CONFIG_NAME), A_CONFIGURATION):
        model = adapt_network(new_network(model_class, config))
    differences = _take_weights(model, read_weights(folder_or_hub_id, weights, config.model_type))
    if head_labels is not None:
        _leave_out_heads(folder_or_hub_id, model, differences, their_labels)
    _check_differences(folder_or_hub_id, model, differences)
    _check_finite(weights.path, model)
    return model


def _take_weights(model: Any, arrays: dict[str, np.ndarray]) -> Differences:
    """Assign the weights of a checkpoint, {name in PyTorch: array in PyTorch's layout}, and return the differences."""
    model_type = model.config.model_type
    variables = {
        pytorch_name(tf_name, model_type): (tf_name, variable) for tf_name, variable in variables_within(model).items()
    }
    arrays = _with_prefix(arrays, f"{model.base_model_prefix}.", variables)
    arrays = with_both_biases(arrays, model_type)
    differences, only_here = Differences(), not_in_pytorch(pytorch_class_of(model), model.config)
    for name, (tf_name, variable) in variables.items():
        shape = tuple(variable.shape)
        expected = to_pytorch(tf_name, np.empty(shape, bool), model_type).shape
        if name not in arrays:
            differences.missing += [] if name.startswith(only_here) else [name]
        elif arrays[name].shape != expected:
            differences.wrong_shape[name] = arrays[name].shape, expected
        else:
            array = to_tensorflow(tf_name, arrays[name], shape, model_type)
            variable.assign(array.astype(variable.dtype.as_numpy_dtype, copy=False))
    has_masked_lm_head = any(map(MASKED_LM_HEAD.match, variables))
    differences.unexpected = sorted(
        name
        for name in arrays.keys() - {*variables, *ARCHITECTURES[model_type].head_bias}
        if not NEVER_NEEDED.search(name) and (has_masked_lm_head or not MASKED_LM_HEAD.match(name))
    )
    return differences


def _with_prefix(arrays: dict[str, np.ndarray], prefix: str, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Prepend the encoder's prefix to names without it, because PyTorch models without a head leave it out."""
    if any(name.startswith(prefix) for name in arrays):
        return arrays
    parts = {name.removeprefix(prefix).partition(".")[0] for name in names if name.startswith(prefix)}
    return {prefix + name if name.partition(".")[0] in parts else name: array for name, array in arrays.items()}


def _leave_out_heads(
    folder_or_hub_id: str, model: Any, differences: Differences, their_labels: Mapping[int, str]
) -> None:
    """Remove the weights of heads from the differences, and log whether the checkpoint's head is kept.

    A pooler counts as part of the head, because a masked language model does not use it.
    """
    prefix = f"{model.base_model_prefix}."

    def is_of_head(name: str) -> bool:
        return not name.startswith(prefix) or "pooler" in name

    fresh = sorted(filter(is_of_head, [*differences.missing, *differences.wrong_shape]))
    labels = (model.config.id2label, their_labels)
    names, their_names = (", ".join(of_id[index] for index in sorted(of_id)) for of_id in labels)
    if pytorch_class_of(model).endswith("Model") and not hasattr(model, OWN_HEAD):
        pass  # the network has no head, and does not use the pooler
    elif fresh:
        text = "Layers that %s lacks are initialized randomly: %s"
        logger.info(text, folder_or_hub_id, ", ".join(fresh))
    elif names == their_names:
        logger.info("The head of %s is kept: its labels are those of this task.", folder_or_hub_id)
    else:
        logger.warning(
            "The head of %s is kept, although it was trained for other labels: %.200s; this task has %.200s.",
            *(folder_or_hub_id, their_names, names),
        )
    differences.missing = [name for name in differences.missing if not is_of_head(name)]
    differences.unexpected = [name for name in differences.unexpected if not is_of_head(name)]
    for name in filter(is_of_head, list(differences.wrong_shape)):
        del differences.wrong_shape[name]


def _check_differences(folder_or_hub_id: str, model: Any, differences: Differences) -> None:
    """Raise an InputError unless the weights are exactly the model's weights."""
    is_custom = hasattr(model, OWN_HEAD)  # otherwise the checkpoint may contain the head of a custom task
    wrong = {
        "missing": differences.missing,
        "of the wrong shape": [
            f"{name} {theirs}, not {ours}" for name, (theirs, ours) in differences.wrong_shape.items()
        ],
        "unexpected": [name for name in differences.unexpected if is_custom or not name.startswith(f"{OWN_HEAD}.")],
    }
    if any(wrong.values()):
        raise InputError(
            f"The weights must be those of a {pytorch_class_of(model)}; {folder_or_hub_id} has weights that are "
            + "; ".join(f"{kind}: {', '.join(names)}" for kind, names in wrong.items() if names)
        )


def _check_finite(path: str, model: Any) -> None:
    """Raise an InputError if a weight is NaN or infinite, since all results would be NaN."""
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
    """Assign the weights of a checkpoint to a model.

    If the model has more positions than the checkpoint, the additional positions keep their values.

    Args:
        model: a built network.
        folder_or_hub_id: a local or `gs://` folder with a model or a run, or a model on the Hub.
        vocabulary_size: number of ids to take from the checkpoint; the weights of further ids become 0.
        model_class: the auto class of model and checkpoint.
        adapt_network: the function that added the head of a custom task to the model. Weights of the head that the
            checkpoint lacks are initialized randomly, from TensorFlow's seed.
        grow_seed: tile the weights of a smaller model (`train.model.growing`), with this seed.

    Raises:
        InputError: the checkpoint cannot be read, or its weights do not match this model.
    """
    folder_or_hub_id = exported_model(folder_or_hub_id, "--init-from")
    with local_or_hub(folder_or_hub_id) as name:
        new_head = {"head_labels": model.config.id2label, "adapt_network": adapt_network} if adapt_network else {}
        source = load_model(name, model_class, **new_head)
    wanted = variables_within(model)
    given = {name: variable.numpy() for name, variable in variables_within(source).items()}
    if grow_seed is not None:
        given = _grown(given, wanted, source, model, vocabulary_size, grow_seed)
    differing = sorted(given.keys() ^ wanted.keys())
    if differing:
        raise _other_model(folder_or_hub_id, f"{differing[0]} is in only one of the two")
    for weight_name, variable in wanted.items():
        axis = vocabulary_axis(weight_name, model.config.model_type)
        value = _fitted(given[weight_name], variable, weight_name, axis, vocabulary_size)
        if value.shape != tuple(variable.shape):
            raise _other_model(folder_or_hub_id, f"{weight_name} is {value.shape}, here {tuple(variable.shape)}")
        variable.assign(value)


def _grown(
    given: dict[str, np.ndarray], wanted: dict[str, Any], source: Any, model: Any, vocabulary_size: int, seed: int
) -> dict[str, np.ndarray]:
    from train.model.growing import grown  # only needed with --grow

    model_type, prefix = model.config.model_type, f"{model.base_model_prefix}/"

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


def _fitted(value: np.ndarray, variable: Any, name: str, axis: int | None, vocabulary_size: int) -> np.ndarray:
    """Extend an array to the size of the model's padded vocabulary, or to its larger number of positions."""
    if axis is not None:
        value = cut_vocabulary(value, axis, vocabulary_size)
        padding = [(0, variable.shape[at] - vocabulary_size if at == axis else 0) for at in range(value.ndim)]
        return np.pad(value, padding)
    if _is_position_table(name) and len(value) < variable.shape[0]:
        return np.concatenate([value, variable.numpy()[len(value) :]])
    return value


def _other_model(folder_or_hub_id: str, difference: str) -> InputError:
    return InputError(
        f"The weights of --init-from must be those of the trained model; in {folder_or_hub_id}, {difference}. "
        "Leave out the --config-overrides that change the model's sizes, or make it larger with --grow."
    )
