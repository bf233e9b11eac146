"""Start a larger model from a smaller one of the same family: its weights tiled over the larger shapes.

As ModernBERT-large was started from ModernBERT-base (Warner et al. 2024, arXiv:2412.13663): each axis has the
smaller one in its middle and wraps around it, and layers are repeated. Here a weight is also divided by the number of
copies of its input (Net2Net, Chen et al. 2016, arXiv:1511.05641), so that a model of twice the width computes what the
small one does; and the copies get noise, since equal ones would have equal gradients forever.
"""

import logging
import re
from collections.abc import Callable, Mapping

import numpy as np
from transformers import PretrainedConfig

from mlm_common.errors import InputError
from train.model.architectures import ARCHITECTURES, SIZES

logger = logging.getLogger(__name__)

# Of the noise of copies, relative to the weights of its array.
NOISE_DEVIATION = 0.1
LAYER = re.compile(r"(?<=layers_\._|.layer_\._)\d+")


def check_growth(small: PretrainedConfig, large: PretrainedConfig) -> None:
    """Check that the weights of a model of `small` can be tiled over those of `large`.

    Raises:
        InputError: another family, one whose layers are not known, a smaller size, or heads of another width.
    """
    known = [name for name, one in ARCHITECTURES.items() if one.is_ours]
    if small.model_type != large.model_type or large.model_type not in known:
        raise InputError(
            f"--grow needs two models of one type, of {', '.join(known)}; --init-from is a {small.model_type}, the "
            f"model to train a {large.model_type}. Give another --preset or --pretrained-model-config."
        )
    for name in SIZES:
        before, after = (getattr(one, name, 0) for one in (small, large))
        if after < before:
            raise InputError(f"--grow needs a model at least as large; {name} is {after}, of --init-from {before}.")
    widths = [one.hidden_size // one.num_attention_heads for one in (small, large)]
    if widths[0] != widths[1]:
        raise InputError(
            f"--grow needs heads of the same width, hidden_size / num_attention_heads; it is {widths[1]}, of "
            f"--init-from {widths[0]}. Give --config-overrides num_attention_heads={large.hidden_size // widths[0]}."
        )


def wrapped(size: int, larger: int, unit: int) -> tuple[np.ndarray, np.ndarray]:
    """Find which of `size` each of `larger` is, int (larger,), and which are in the middle, bool (larger,).

    The middle has all in their order, and others wrap around it. It begins at a multiple of `unit`, the width of a
    head, so that no head is cut.
    """
    from_middle = np.arange(larger) - (larger - size) // 2 // unit * unit
    return from_middle % size, (from_middle >= 0) & (from_middle < size)


def tiled(
    value: np.ndarray, shape: tuple[int, ...], unit: int, seed: int, *, is_input: bool, num_parts: int = 1
) -> np.ndarray:
    """Tile an array over a larger shape.

    Args:
        value: as TensorFlow has it, inputs first.
        shape: of the result.
        unit: width of a head.
        seed: of the noise.
        is_input: whether the first axis is that of inputs, of which copies share the weight.
        num_parts: matrices that the array has side by side.
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
    """Make the weights of a larger model from those of a smaller one, and log what fraction of them was taken.

    Layer i of t is a copy of layer i * s // t of s.

    Args:
        given: {name: array} of the smaller model.
        wanted: of the larger one as it was initialized; what the smaller one lacks stays so.
        small, large: their configurations.
        seed: of the noise.
        kept_axis: the axis of a weight, by its name, that runs over ids or positions, and is not tiled.
        is_of_head: whether a weight is of the head, whose last layer is the embedding: its norm is an input of that.
    """
    unit, weights, fresh, num_taken, num_weights = small.hidden_size // small.num_attention_heads, {}, [], 0, 0
    share, fused = (small.num_hidden_layers, large.num_hidden_layers), ARCHITECTURES[large.model_type].fused
    for number, (name, start) in enumerate(wanted.items()):
        value = given.get(LAYER.sub(lambda found: str(int(found[0]) * share[0] // share[1]), name))
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
    rest = f"; initialized randomly: {', '.join(fresh)}" if fresh else ""
    logger.info(
        "tiled from --init-from: %.2f %% of %s weights%s", 100 * num_taken / num_weights, f"{num_weights:,}", rest
    )
    return weights
