"""Initialize a larger model from a smaller model of the same family, by tiling the weights over the larger shapes.

ModernBERT-large was initialized like this from ModernBERT-base (Warner et al. 2024, arXiv:2412.13663): the smaller
weight is in the middle of each axis and wraps around its ends, and layers are repeated. Here a weight is also divided
by the number of copies of its input (Net2Net, Chen et al. 2016, arXiv:1511.05641), so a model of twice the width
computes the same results as the small model. Noise is added to the copies, because equal copies would keep equal
gradients.
"""

import logging
import re
from collections.abc import Callable, Mapping

import numpy as np
from transformers import PretrainedConfig

from mlm_common.errors import InputError
from train.model.architectures import ARCHITECTURES, SIZES

logger = logging.getLogger(__name__)

# Standard deviation of the noise, relative to the standard deviation of the array's weights.
NOISE_DEVIATION = 0.1
LAYER = re.compile(r"(?<=layers_\._|.layer_\._)\d+")


def check_growth(small: PretrainedConfig, large: PretrainedConfig) -> None:
    """Check that the weights of a model with configuration `small` can be tiled over the weights of `large`.

    Raises:
        InputError: the types differ or are not ours, a size is smaller, or the heads have another width.
    """
    supported = [name for name, architecture in ARCHITECTURES.items() if architecture.is_ours]
    if small.model_type != large.model_type or large.model_type not in supported:
        raise InputError(
            f"--grow needs two models of the same type, one of {', '.join(supported)}; --init-from is a "
            f"{small.model_type}, the model to train a {large.model_type}. Give another --preset or "
            "--pretrained-model-config."
        )
    for name in SIZES:
        before, after = (getattr(config, name, 0) for config in (small, large))
        if after < before:
            raise InputError(f"--grow needs a model at least as large; {name} is {after}, and {before} in --init-from.")
    widths = [config.hidden_size // config.num_attention_heads for config in (small, large)]
    if widths[0] != widths[1]:
        raise InputError(
            f"--grow needs heads of the same width, hidden_size / num_attention_heads; it is {widths[1]}, and "
            f"{widths[0]} in --init-from. Give --config-overrides num_attention_heads={large.hidden_size // widths[0]}."
        )


def wrapped(size: int, larger: int, unit: int) -> tuple[np.ndarray, np.ndarray]:
    """Wrap `size` entries around an axis of length `larger`.

    The middle contains all entries in order, and further copies surround it. The middle begins at a multiple of
    `unit`, the width of a head, so that no head is cut.

    Returns:
        The index of the entry at each place, int (larger,), and which places are in the middle, bool (larger,).
    """
    from_middle = np.arange(larger) - (larger - size) // 2 // unit * unit
    return from_middle % size, (from_middle >= 0) & (from_middle < size)


def tiled(
    value: np.ndarray, shape: tuple[int, ...], unit: int, seed: int, *, is_input: bool, num_parts: int = 1
) -> np.ndarray:
    """Tile an array over a larger shape.

    Args:
        value: in TensorFlow's layout, inputs first.
        shape: shape of the result.
        unit: width of a head.
        seed: seed of the noise.
        is_input: the first axis runs over inputs; copies of an input share its weight.
        num_parts: number of matrices side by side in the array.
    """
    is_copy, first_axis = np.zeros((1,) * value.ndim, bool), value.shape[0]
    for axis, (size, larger) in enumerate(zip(value.shape, shape, strict=True)):
        if size == larger:
            continue
        parts = num_parts if axis == value.ndim - 1 else 1
        of_part, is_middle = wrapped(size // parts, larger // parts, unit)
        index = np.concatenate([of_part + part * (size // parts) for part in range(parts)])
        value = value.take(index, axis)
        is_copy = is_copy | ~np.tile(is_middle, parts).reshape([-1 if at == axis else 1 for at in range(value.ndim)])
        if is_input and axis == 0:
            value = value / np.bincount(index, minlength=first_axis)[index].reshape([-1, *[1] * (value.ndim - 1)])
    noise = np.random.default_rng(seed).normal(0, NOISE_DEVIATION * value.std(), value.shape) * is_copy
    return (value + noise).astype(np.float32)


def grown(
    given: Mapping[str, np.ndarray],
    wanted: Mapping[str, np.ndarray],
    small: PretrainedConfig,
    large: PretrainedConfig,
    seed: int,
    *,
    kept_axis: Callable[[str], int | None],
    is_of_head: Callable[[str], bool],
) -> dict[str, np.ndarray]:
    """Make the weights of a larger model from a smaller model's weights, and log the fraction of weights made this way.

    If the models have s and t layers, layer i of the larger model is a copy of layer i * s // t of the smaller model.

    Args:
        given: {name: array} of the smaller model.
        wanted: {name: array} of the larger model's fresh weights, which are kept if the smaller model has no such
            weight.
        small, large: the configurations of the two models.
        seed: seed of the noise.
        kept_axis: returns the axis of a weight, by its name, that runs over ids or positions and is not tiled.
        is_of_head: returns whether a weight, by its name, is the head's. The embedding is the head's last layer, and
            the head's norm computes the inputs of that layer.
    """
    unit, weights, fresh, num_taken, num_weights = small.hidden_size // small.num_attention_heads, {}, [], 0, 0
    share, fused = (small.num_hidden_layers, large.num_hidden_layers), ARCHITECTURES[large.model_type].fused
    for number, (name, start) in enumerate(wanted.items()):
        value = given.get(LAYER.sub(lambda number: str(int(number[0]) * share[0] // share[1]), name))
        num_weights += start.size
        if value is None:
            weights[name] = start
            fresh.append(name)
            continue
        axis = kept_axis(name)
        shape = tuple(value.shape[at] if at == axis else size for at, size in enumerate(start.shape))
        is_input = name.endswith("/kernel:0") or (is_of_head(name) and name.endswith(("/gamma:0", "/beta:0")))
        num_parts = fused.get(name.split("/")[-2], 1)
        weights[name] = tiled(value, shape, unit, seed + number, is_input=is_input, num_parts=num_parts)
        num_taken += weights[name].size
        if axis is not None and shape[axis] < start.shape[axis]:
            fresh.append(f"{name} from {shape[axis]:,} on")
    initialized = f"; initialized randomly: {', '.join(fresh)}" if fresh else ""
    percentage = 100 * num_taken / num_weights
    logger.info("tiled from --init-from: %.2f%% of %s weights%s", percentage, f"{num_weights:,}", initialized)
    return weights
