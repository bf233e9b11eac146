"""Compare a step whose update is sharded with one whose update is whole, on the first rows of a run.

Both start from the same gradients and change nothing. The whole step takes moments that are gathered for it, one
variable after the other, so a model whose whole moments would not fit can be checked, too.
"""

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from train.model.tpu_layers import GRADIENT_TOLERANCE, LOST_ERRORS, describe_failure

if TYPE_CHECKING:
    from train.step.train_step import PretrainingModel

logger = logging.getLogger(__name__)

# How far a step may be off, relative to it: Adam's first steps have the size of the rate wherever a gradient is not 0,
# and rounding decides its sign where it nearly is. Another shard's gradients, or weights, would be off by 1.4.
STEP_TOLERANCE = 3e-2
# Relative to the weights: a float32 is rounded to 1.2e-7, and steps of a warmup are not much larger.
WEIGHT_TOLERANCE = 2e-7


def prove_sharding(model: "PretrainingModel", batch: Any, strategy: tf.distribute.Strategy) -> bool:
    """Return whether a sharded step does on these devices what a whole one does; log what was found.

    Args:
        model: its optimizer is sharded.
        batch: one global batch, distributed over the replicas.
    """
    sharded_squares = model.sharded_squares
    if model.jit_compile:
        sharded_squares = tf.function(sharded_squares, jit_compile=True)
    try:
        results = tf.function(lambda batch: strategy.run(sharded_squares, args=(batch,)), autograph=False)(batch)
        squares = [values.numpy() for values in strategy.experimental_local_results(results)]
    except LOST_ERRORS:
        raise
    except Exception as error:  # of TensorFlow's tracing, or of the device's compiler, whatever that raises
        reason = f"does not compile here: {describe_failure(error)}"
    else:
        reason = "" if all(map(agree, squares)) else f"is another one on the first rows: {describe(squares[0])}"
        if not reason:
            logger.info("The optimizer is sharded; on the first rows it makes the same step: %s.", describe(squares[0]))
            return True
    logger.warning(
        "The run trains WITHOUT --shard-optimizer: a sharded step %s. The optimizer is whole on each replica.", reason
    )
    return False


def agree(squares: np.ndarray) -> bool:
    """Return whether the norms of `PretrainingModel.sharded_squares`, of one replica, are those of the same step."""
    by_shards, whole, weights, step, difference = np.sqrt(squares)
    same_gradient = np.abs(by_shards - whole) <= GRADIENT_TOLERANCE * whole
    return bool(np.all(same_gradient & (difference <= STEP_TOLERANCE * step + WEIGHT_TOLERANCE * weights)))


def describe(squares: np.ndarray) -> str:
    by_shards, whole, _, step, difference = np.sqrt(squares.sum(axis=1)).tolist()
    off = difference / step if step else difference
    return f"gradient norm {by_shards:.6g}, of the whole step {whole:.6g}; the weights differ by {off:.2g} of the step"
