"""Compare the TPU-optimized layers with the reference layers on the first rows of a run, on untested hardware."""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from train.layers.random_bits import dropout_mask, fold_in
from train.model.tpu_layers import attention_layers, use_reference_layers, use_tpu_layers

logger = logging.getLogger(__name__)

# Rows of each replica: the height of a TPU's vectors; more would take longer without showing more.
NUM_ROWS = 8
HINT = (
    "--tpu-layers off trains with the reference layers, --tpu-layers on with the TPU-optimized ones, without a check."
)
# How far loss and the norm of a variable's gradient may be off, relative. Rounding to bfloat16 moves them by 0.0001 and
# 0.006 on a CPU, scores scaled by 1.1 the gradients of new queries and keys by 0.08. The same for float32, where a TPU
# rounds the factors of products of matrices to bfloat16, too.
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 2e-3, 3e-2
# Fraction of the whole gradient's norm that is added to a variable's: a norm near 0 is all rounding.
GRADIENT_FLOOR = 1e-4
# Attention does not depend on the biases of keys: their gradient is all rounding.
WITHOUT_GRADIENT = "/key/bias:0"
# Errors of a device that was lost, for which the layers are not to blame.
LOST_ERRORS = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
)


@dataclass(frozen=True)
class Figures:
    """The results of a forward and a backward pass.

    loss: mean over what is predicted.
    gradient_norms: of the summed loss by each variable, by its name.
    """

    loss: float
    gradient_norms: dict[str, float]

    @property
    def grad_norm(self) -> float:
        return math.hypot(*self.gradient_norms.values())

    def describe(self) -> str:
        return f"loss {self.loss:.6g}, gradient norm {self.grad_norm:.6g}"


def prove_tpu_layers(network: Any, figures: Callable[[], Figures]) -> bool:
    """Give the network the TPU-optimized layers if they compute what the reference layers do; log which it has.

    Args:
        network: a TF model whose layers are known.
        figures: computes with the layers that the network has when it is called, which drop by keys or not at all.
    """
    with _reference_layers(network):
        expected = figures()
    use_tpu_layers(network)
    try:
        found = figures()
    except LOST_ERRORS:
        raise
    except Exception as error:  # of TensorFlow's tracing, or of the device's compiler, whatever that raises
        reason = f"do not compile here: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    else:
        if agree(found, expected):
            logger.info(
                "The TPU-optimized layers are used; on the first rows they give %s, the reference layers %s.",
                *(found.describe(), expected.describe()),
            )
            return True
        reason = f"give {found.describe()} on the first rows, and the reference layers {expected.describe()}"
    use_reference_layers(network)
    logger.warning("The run trains with the REFERENCE LAYERS: the TPU-optimized ones %s. %s", reason, HINT)
    return False


def agree(found: Figures, expected: Figures) -> bool:
    """Return whether figures are equal up to rounding; those that are not finite are not."""
    floor = GRADIENT_FLOOR * expected.grad_norm
    are_near = (
        abs(found.gradient_norms[name] - norm) <= GRADIENT_TOLERANCE * (norm + floor)
        for name, norm in expected.gradient_norms.items()
        if not name.endswith(WITHOUT_GRADIENT)
    )
    return abs(found.loss - expected.loss) <= LOSS_TOLERANCE * abs(expected.loss) and all(are_near)


@contextmanager
def _reference_layers(network: Any) -> Iterator[None]:
    """A context with the reference layers, whose attention drops what that of the TPU-optimized ones drops."""
    use_reference_layers(network)
    attentions = attention_layers(network)
    calls = [layer.dropout.call for layer in attentions]
    for layer in attentions:
        layer.dropout.call = _dropping_by_heads(layer.dropout)
    try:
        yield
    finally:
        for layer, call in zip(attentions, calls, strict=True):
            layer.dropout.call = call


def _dropping_by_heads(layer: Any) -> Callable[..., tf.Tensor]:
    """Make the `call` of a layer that drops probabilities as `tpu_functions.attend` does: each head by its key."""
    keyed = layer.call

    def call(inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
        """Drop of (batch, heads, queries, keys), or of blocks, (batch, blocks, heads, queries, keys)."""
        rate = float(layer.rate) if training else 0.0
        keys = keyed.next_keys() if rate else None
        if keys is None:
            return inputs
        for size in inputs.shape[1:-2]:
            keys = fold_in(keys[..., tf.newaxis, :], tf.range(size))
        falls = tf.linalg.matrix_transpose(dropout_mask(keys, inputs.shape[:-3:-1], rate))
        return tf.where(falls, tf.zeros((), inputs.dtype), inputs / (1 - rate))

    return call
