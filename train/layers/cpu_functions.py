"""Functions for TensorFlow without XLA, which on a CPU executes operations one by one with oneDNN.

Each operation is then a pass over memory; these functions need fewer passes.
"""

import os
from collections.abc import Callable

import tensorflow as tf
import tf_keras

from train.runtime.named_scopes import custom_gradient
from train.runtime.private import is_for_xla

# Operations that TensorFlow would compute in bfloat16 together with the products. In bfloat16, most terms of a long sum
# are lost.
FLOAT32_OPERATIONS = (
    *("Add", "AddN", "AddV2", "BiasAdd", "BiasAddGrad", "BiasAddV1", "Elu", "EluGrad", "Erf", "Erfc", "FloorDiv"),
    *("FusedBatchNormV2", "FusedBatchNormGradV2", "FusedBatchNormV3", "FusedBatchNormGradV3", "Inv", "LeakyRelu"),
    *("LeakyReluGrad", "Log", "Log1p", "LogSoftmax", "Mean", "Mul", "Prod", "RealDiv", "Reciprocal", "Rsqrt", "Selu"),
    *("SeluGrad", "Sigmoid", "SigmoidGrad", "Softmax", "Softplus", "SoftplusGrad", "Softsign", "SoftsignGrad", "Sqrt"),
    *("Square", "SquaredDifference", "Sub", "Sum", "Tanh", "TanhGrad"),
)


def runs_unfused() -> bool:
    """Return whether operations called now run one by one: neither on a TPU nor compiled by XLA."""
    return not is_for_xla()


def cross_entropy_and_correct(logits: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Compute losses in nats, and 1 if `argmax` of the logits is the label, else 0; both are float32 (…).

    Args:
        logits: float32 (…, vocabulary).
        labels: int32 (…).
    """
    predicted = tf.argmax(logits, axis=-1, output_type=labels.dtype)

    @custom_gradient
    def compute(logits: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        probabilities = tf.nn.softmax(logits)
        # Unlike the label's probability, the largest probability never underflows.
        losses = _at(logits, predicted) - _at(logits, labels) - tf.math.log(_at(probabilities, predicted))

        def gradient(by_losses: tf.Tensor) -> tf.Tensor:
            sizes = tf.unstack(tf.shape(labels))
            places = tf.stack([*tf.meshgrid(*map(tf.range, sizes), indexing="ij"), labels], axis=-1)
            return tf.tensor_scatter_nd_sub(probabilities * by_losses[..., tf.newaxis], places, by_losses)

        return losses, gradient

    return compute(logits), tf.cast(predicted == labels, tf.float32)


def _at(values: tf.Tensor, columns: tf.Tensor) -> tf.Tensor:
    return tf.gather(values, columns, batch_dims=columns.shape.rank)


def split_dense(layer: tf_keras.layers.Dense, inputs: tf.Tensor, num_parts: int) -> list[tf.Tensor]:
    """Compute `tf.split(layer(inputs), num_parts, axis=-1)` without copying the outputs or their gradients."""
    if not runs_unfused():
        return tf.split(layer(inputs), num_parts, axis=-1)
    if not layer.built:
        with tf.name_scope(layer.name):
            layer.build(inputs.shape)
    kernels = tf.split(layer.kernel, num_parts, axis=-1)
    outputs = [tf.tensordot(inputs, kernel, 1) for kernel in kernels]
    if layer.bias is None:
        return outputs
    biases = tf.split(layer.bias, num_parts)
    return [tf.nn.bias_add(output, bias) for output, bias in zip(outputs, biases, strict=True)]


def multiply_in_bfloat16(is_wanted: bool) -> None:
    """Round factors and results of matrix products to bfloat16, in all functions that this process calls from now on.

    Sums within a product and all other operations stay in float32. On a CPU with instructions for bfloat16, oneDNN
    then multiplies twice as fast. Code compiled by XLA is not affected.
    """
    if is_wanted:
        os.environ["TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_INFERLIST_REMOVE"] = ",".join(FLOAT32_OPERATIONS)
    tf.config.optimizer.set_experimental_options({"auto_mixed_precision_onednn_bfloat16": is_wanted})
