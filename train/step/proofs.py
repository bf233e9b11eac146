"""Check, on the first rows of a run, that the fast variants of a step match the reference on these devices.

TPU-optimized layers are compared with the reference layers. A step with a sharded optimizer is compared with an
unsharded step, because the sharded step sums gradients in another way, and divides and gathers the weights.
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
# Allowed relative difference of the loss, and of the norm of a variable's gradient. On a CPU, rounding to bfloat16
# changes loss and norm by 0.0001 and 0.006; a fault that scales attention scores by 1.1 changes the gradients of newly
# initialized queries and keys by 0.08. The tolerances also hold for float32, because a TPU rounds the factors of matrix
# products to bfloat16.
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 2e-3, 3e-2
# This fraction of the whole gradient's norm is added to each variable's norm, because a norm near 0 is only rounding.
GRADIENT_FLOOR = 1e-4
# Attention does not depend on the biases of keys, so their gradient is only rounding.
WITHOUT_GRADIENT = "/key/bias:0"
# Allowed difference of a sharded step, relative to a variable's gradient. Sharded and unsharded steps sum the same
# float32 numbers in different orders.
SHARDED_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Figures:
    """The results of a forward and a backward pass.

    Attributes:
        loss: mean loss, in nats.
        gradient_norms: norm of the summed loss's gradient with respect to each variable, {variable name: norm}.
    """

    loss: float
    gradient_norms: dict[str, float]

    @property
    def grad_norm(self) -> float:
        return math.hypot(*self.gradient_norms.values())

    def describe(self) -> str:
        return f"loss {self.loss:.6g}, gradient norm {self.grad_norm:.6g}"


def prove_tpu_layers(model: PretrainingModel, batch: Any) -> bool:
    """Return whether the TPU-optimized layers match the reference layers on `batch`, and log the result.

    Afterwards the network uses the TPU-optimized layers if they match, else the reference layers.
    """

    def compute_figures() -> Figures:
        sums, squares = _on_replicas(model, model.gradient_sums, batch)
        loss, names = model.task.means[0], [variable.name for variable in model.network.trainable_variables]
        norms = dict(zip(names, np.sqrt(squares[0]).tolist(), strict=True))
        # Every replica has the sums over all replicas.
        return Figures(float(sums[loss.total][0] / sums[loss.weight][0]), norms)

    with _reference_layers(model.network):
        expected = compute_figures()
    use_tpu_layers(model.network)
    try:
        actual = compute_figures()
    except Exception as error:  # from TensorFlow's tracing or the device's compiler, which may raise anything
        if is_lost(error):
            raise
        reason = f"do not compile here: {_describe_failure(error)}"
    else:
        if figures_agree(actual, expected):
            logger.info(
                "The TPU-optimized layers are used; on the first rows they give %s, the reference layers %s.",
                *(actual.describe(), expected.describe()),
            )
            return True
        reason = f"give {actual.describe()} on the first rows, the reference layers {expected.describe()}"
    model.network.encoder.functions = reference_layers
    logger.warning("The run trains with the REFERENCE LAYERS: the TPU-optimized ones %s. %s", reason, HINT)
    return False


def figures_agree(actual: Figures, expected: Figures) -> bool:
    """Return whether two results are equal up to rounding; results that are not finite are never equal."""
    floor = GRADIENT_FLOOR * expected.grad_norm
    are_near = (
        abs(actual.gradient_norms[name] - norm) <= GRADIENT_TOLERANCE * (norm + floor)
        for name, norm in expected.gradient_norms.items()
        if not name.endswith(WITHOUT_GRADIENT)
    )
    return abs(actual.loss - expected.loss) <= LOSS_TOLERANCE * abs(expected.loss) and all(are_near)


def prove_sharding(model: PretrainingModel, batch: Any) -> bool:
    """Return whether a sharded step matches an unsharded step on `batch`, and log the result."""
    try:
        norms = [np.sqrt(squares) for squares in _on_replicas(model, model.divided_squares, batch)]
    except Exception as error:  # from TensorFlow's tracing or the device's compiler
        if is_lost(error):
            raise
        reason = f"does not compile here: {_describe_failure(error)}"
    else:
        whole, by_shards, _, weights = np.linalg.norm(norms[0], axis=1).tolist()
        figures = f"gradient norm {by_shards:.6g}, unsharded {whole:.6g}; gathered weights differ by {weights:.2g}"
        if all(map(norms_agree, norms)):
            logger.info("The optimizer is sharded; on the first rows it takes the same step: %s.", figures)
            return True
        reason = f"differs on the first rows: {figures}"
    logger.warning(
        "The run trains WITHOUT --shard-optimizer: a sharded step %s. Each replica keeps the whole optimizer.", reason
    )
    return False


def norms_agree(norms: np.ndarray) -> bool:
    """Return whether a replica's sharded step matches its unsharded step.

    Args:
        norms: the square roots of `PretrainingModel.divided_squares`, (4, variables).
    """
    whole, by_shards, gradient_difference, weight_difference = norms
    difference = np.maximum(np.abs(by_shards - whole), gradient_difference)
    return bool(np.all((difference <= SHARDED_TOLERANCE * whole) & (weight_difference == 0)))


def _on_replicas(model: PretrainingModel, function: Callable[[Any], Any], batch: Any) -> Any:
    """Call a function with a batch, compiled like the step; return the results of this worker's replicas as NumPy."""
    return tf.nest.map_structure(np.asarray, model.runtime.on_replicas(function, jit_compile=model.jit_compile)(batch))


def _describe_failure(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


@contextmanager
def _reference_layers(network: Network) -> Iterator[None]:
    """Use the reference layers during the context, with the attention dropout of the TPU-optimized layers.

    Both kinds of layers then draw the same dropout masks.
    """
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
