"""Prove on the first rows of a run that what computes a step in another way makes the same step on its devices.

TPU-optimized layers are compared with the reference layers. A sharded step is compared with a whole one: they differ in
how gradients are summed, and in that weights are divided and put together again.
"""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from train.layers import reference_layers
from train.model.build import use_tpu_layers
from train.model.networks import Network
from train.runtime.device_errors import is_lost
from train.step.train_step import PretrainingModel

logger = logging.getLogger(__name__)

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
# Of a sharded step, relative to a variable's gradient: both are sums of the same float32 numbers, in any order.
SHARDED_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Figures:
    """The results of a forward and a backward pass.

    gradient_norms: of the summed loss by each variable, by its name.
    """

    loss: float
    gradient_norms: dict[str, float]

    @property
    def grad_norm(self) -> float:
        return math.hypot(*self.gradient_norms.values())

    def describe(self) -> str:
        return f"loss {self.loss:.6g}, gradient norm {self.grad_norm:.6g}"


def prove_tpu_layers(model: PretrainingModel, batch: Any) -> bool:
    """Return whether TPU-optimized layers compute what the reference layers do; the network has what does."""

    def figures() -> Figures:
        sums, squares = _on_replicas(model, model.gradient_sums, batch)
        loss, names = model.task.means[0], [variable.name for variable in model.network.trainable_variables]
        norms = dict(zip(names, np.sqrt(squares[0]).tolist(), strict=True))
        # Every replica holds the global sums.
        return Figures(float(sums[loss.total][0] / sums[loss.weight][0]), norms)

    with _reference_layers(model.network):
        expected = figures()
    use_tpu_layers(model.network)
    try:
        found = figures()
    except Exception as error:  # of TensorFlow's tracing, or of the device's compiler, whatever that raises
        if is_lost(error):
            raise
        reason = f"do not compile here: {_describe_failure(error)}"
    else:
        if figures_agree(found, expected):
            logger.info(
                "The TPU-optimized layers are used; on the first rows they give %s, the reference layers %s.",
                *(found.describe(), expected.describe()),
            )
            return True
        reason = f"give {found.describe()} on the first rows, and the reference layers {expected.describe()}"
    model.network.encoder.functions = reference_layers
    logger.warning("The run trains with the REFERENCE LAYERS: the TPU-optimized ones %s. %s", reason, HINT)
    return False


def figures_agree(found: Figures, expected: Figures) -> bool:
    """Return whether figures are equal up to rounding; those that are not finite are not."""
    floor = GRADIENT_FLOOR * expected.grad_norm
    are_near = (
        abs(found.gradient_norms[name] - norm) <= GRADIENT_TOLERANCE * (norm + floor)
        for name, norm in expected.gradient_norms.items()
        if not name.endswith(WITHOUT_GRADIENT)
    )
    return abs(found.loss - expected.loss) <= LOSS_TOLERANCE * abs(expected.loss) and all(are_near)


def prove_sharding(model: PretrainingModel, batch: Any) -> bool:
    """Return whether a sharded step does on these devices what a whole one does; log what was found."""
    try:
        norms = [np.sqrt(squares) for squares in _on_replicas(model, model.divided_squares, batch)]
    except Exception as error:  # as above
        if is_lost(error):
            raise
        reason = f"does not compile here: {_describe_failure(error)}"
    else:
        whole, by_shards, _, weights = np.linalg.norm(norms[0], axis=1).tolist()
        figures = f"gradient norm {by_shards:.6g}, of the whole step {whole:.6g}; the weights differ by {weights:.2g}"
        if all(map(norms_agree, norms)):
            logger.info("The optimizer is sharded; on the first rows it makes the same step: %s.", figures)
            return True
        reason = f"is another one on the first rows: {figures}"
    logger.warning(
        "The run trains WITHOUT --shard-optimizer: a sharded step %s. The optimizer is whole on each replica.", reason
    )
    return False


def norms_agree(norms: np.ndarray) -> bool:
    """Return whether the norms of `PretrainingModel.divided_squares`, of one replica, are those of the same step."""
    whole, by_shards, gradient_difference, weight_difference = norms
    difference = np.maximum(np.abs(by_shards - whole), gradient_difference)
    return bool(np.all((difference <= SHARDED_TOLERANCE * whole) & (weight_difference == 0)))


def _on_replicas(model: PretrainingModel, function: Callable[[Any], Any], batch: Any) -> Any:
    """Compute a function of a batch as the step is computed; return NumPy's results of this worker's replicas."""
    return tf.nest.map_structure(np.asarray, model.runtime.on_replicas(function, jit_compile=model.jit_compile)(batch))


def _describe_failure(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


@contextmanager
def _reference_layers(network: Network) -> Iterator[None]:
    """A context with the reference layers, whose attention drops what that of the TPU-optimized ones drops."""
    encoder, dropouts = network.encoder, [layer.probability_dropout for layer in network.encoder.layer]
    functions, encoder.functions = encoder.functions, reference_layers
    for dropout in dropouts:
        dropout.drops_heads = True
    try:
        yield
    finally:
        encoder.functions = functions
        for dropout in dropouts:
            dropout.drops_heads = False
