"""Prove on the first rows of a run that a sharded step and a whole one are the same on its devices.

They differ in how gradients are summed and in that weights are divided and put together again, so this is compared.
"""

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from train.model.tpu_layers import LOST_ERRORS, describe_failure

if TYPE_CHECKING:
    from train.step.train_step import PretrainingModel

logger = logging.getLogger(__name__)

# Relative to a variable's gradient: both are sums of the same float32 numbers, in any order.
GRADIENT_TOLERANCE = 1e-3


def prove_sharding(model: "PretrainingModel", batch: Any, strategy: tf.distribute.Strategy) -> bool:
    """Return whether a sharded step does on these devices what a whole one does; log what was found.

    Args:
        model: its optimizer is sharded.
        batch: one global batch, distributed over the replicas.
    """
    divided_squares = model.divided_squares
    if model.jit_compile:
        divided_squares = tf.function(divided_squares, jit_compile=True)
    try:
        results = tf.function(lambda batch: strategy.run(divided_squares, args=(batch,)), autograph=False)(batch)
        norms = [np.sqrt(values.numpy()) for values in strategy.experimental_local_results(results)]
    except LOST_ERRORS:
        raise
    except Exception as error:  # of TensorFlow's tracing, or of the device's compiler, whatever that raises
        reason = f"does not compile here: {describe_failure(error)}"
    else:
        whole, by_shards, _, weights = np.linalg.norm(norms[0], axis=1).tolist()
        figures = f"gradient norm {by_shards:.6g}, of the whole step {whole:.6g}; the weights differ by {weights:.2g}"
        reason = "" if all(map(agree, norms)) else f"is another one on the first rows: {figures}"
        if not reason:
            logger.info("The optimizer is sharded; on the first rows it makes the same step: %s.", figures)
            return True
    logger.warning(
        "The run trains WITHOUT --shard-optimizer: a sharded step %s. The optimizer is whole on each replica.", reason
    )
    return False


def agree(norms: np.ndarray) -> bool:
    """Return whether the norms of `PretrainingModel.divided_squares`, of one replica, are those of the same step."""
    whole, by_shards, gradient_difference, weight_difference = norms
    difference = np.maximum(np.abs(by_shards - whole), gradient_difference)
    return bool(np.all((difference <= GRADIENT_TOLERANCE * whole) & (weight_difference == 0)))
