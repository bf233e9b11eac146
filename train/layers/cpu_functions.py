"""How TensorFlow computes where no XLA joins operations: one by one, on a CPU by oneDNN."""

import os

import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

# What TensorFlow would also compute in bfloat16, beside products; sums would lose most of their terms.
FLOAT32_OPERATIONS = (
    *("Add", "AddN", "AddV2", "BiasAdd", "BiasAddGrad", "BiasAddV1", "Elu", "EluGrad", "Erf", "Erfc", "FloorDiv"),
    *("FusedBatchNormV2", "FusedBatchNormGradV2", "FusedBatchNormV3", "FusedBatchNormGradV3", "Inv", "LeakyRelu"),
    *("LeakyReluGrad", "Log", "Log1p", "LogSoftmax", "Mean", "Mul", "Prod", "RealDiv", "Reciprocal", "Rsqrt", "Selu"),
    *("SeluGrad", "Sigmoid", "SigmoidGrad", "Softmax", "Softplus", "SoftplusGrad", "Softsign", "SoftsignGrad", "Sqrt"),
    *("Square", "SquaredDifference", "Sub", "Sum", "Tanh", "TanhGrad"),
)


def runs_unfused() -> bool:
    """Return whether what is called now runs operation by operation: neither on a TPU nor compiled by XLA."""
    return not GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())


def multiply_in_bfloat16(is_wanted: bool) -> None:
    """Let functions called from now on, in this process, round factors and results of matrix products to bfloat16.

    Sums within a product and all other operations stay in float32. For a CPU with instructions for bfloat16, on which
    oneDNN multiplies twice as fast; what XLA compiles is not affected.
    """
    if is_wanted:
        os.environ["TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_INFERLIST_REMOVE"] = ",".join(FLOAT32_OPERATIONS)
    tf.config.optimizer.set_experimental_options({"auto_mixed_precision_onednn_bfloat16": is_wanted})
