"""Weight-update sharding: each replica keeps a shard of the moments and updates only the matching shard of the weights.

This is stage 1 of ZeRO (Rajbhandari et al. 2019), in the form of Xu et al. 2020 for TPUs. Gradients are summed so that
each replica gets its shard of the sum, and then the updated shards of the weights are gathered. Every replica still has
the whole weights, activations and gradients.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops

# Variables with fewer elements are updated whole, because gathering them would take more time than sharding saves.
MIN_SHARDED_SIZE = 2**16
# TensorFlow has no operations for these collectives.
ALL_GATHER = '"stablehlo.all_gather"(%part) {{all_gather_dim = {axis} : i64, '
ALL_TO_ALL = (
    '"stablehlo.all_to_all"(%part) {{split_dimension = 0 : i64, concat_dimension = 0 : i64, '
    "split_count = {num_replicas} : i64, "
)
MODULE = """module @collective {{
  func.func public @main(%part: tensor<{part}>) -> tensor<{result}> {{
    %result = {operation}replica_groups = dense<[{replicas}]> : tensor<1x{num_replicas}xi64>
    }} : (tensor<{part}>) -> tensor<{result}>
    return %result : tensor<{result}>
  }}
}}"""


@dataclass(frozen=True)
class Sharding:
    """How variables are divided among replicas. Call methods that take tensors in a replica's context.

    Attributes:
        num_replicas: number of replicas.
        by_xla: use XLA's collectives, as on a TPU. Otherwise sums over the replicas replace them.
    """

    num_replicas: int
    by_xla: bool

    def axis(self, shape: Sequence[int]) -> int | None:
        """Return the first axis whose size is a multiple of the number of replicas; None for an unsharded variable."""
        if self.num_replicas == 1 or math.prod(shape) < MIN_SHARDED_SIZE:
            return None
        return next((axis for axis, size in enumerate(shape) if size % self.num_replicas == 0), None)

    def shard_shape(self, shape: Sequence[int]) -> list[int]:
        axis = self.axis(shape)
        return [size // self.num_replicas if index == axis else size for index, size in enumerate(shape)]

    def total(self, value: tf.Tensor) -> tf.Tensor:
        """Sum over the replicas."""
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, value)

    def sum_gradient(self, gradient: tf.Tensor) -> tf.Tensor:
        """Sum a gradient over the replicas, and return this replica's shard of the sum if the variable is sharded."""
        axis = self.axis(gradient.shape)
        if axis is None or not self.by_xla:
            return self.shard_of(self.total(gradient))
        all_replicas = tf.constant([list(range(self.num_replicas))])
        return gen_xla_ops.xla_reduce_scatter(gradient, all_replicas, tf.constant(axis), reduce_op="Add")

    def shard_of(self, tensor: tf.Tensor) -> tf.Tensor:
        """Cut this replica's shard out of a tensor that all replicas have; return an unsharded tensor whole."""
        axis, shape = self.axis(tensor.shape), self.shard_shape(tensor.shape)
        if axis is None:
            return tensor
        start = [replica_index() * shape[axis] if index == axis else 0 for index in range(len(shape))]
        return tf.ensure_shape(tf.slice(tensor, tf.stack(start), shape), shape)

    def gather(self, shard: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
        """Concatenate the shards of all replicas into a tensor of `shape`, which must be a sharded shape."""
        axis = self.axis(shape)
        assert axis is not None
        if not self.by_xla:
            return self.total(placed(shard, axis))
        return self._collective(ALL_GATHER.format(axis=axis), shard, shape)

    def exchange(self, parts: tf.Tensor) -> tf.Tensor:
        """Send part i to replica i, for all replicas (all-to-all).

        Args:
            parts: the parts to send, by receiver, (replicas, …).

        Returns:
            The parts that this replica receives, by sender, (replicas, …).
        """
        if self.by_xla:
            return self._collective(ALL_TO_ALL.format(num_replicas=self.num_replicas), parts, parts.shape)
        all_parts = self.total(placed(parts[tf.newaxis]))  # (sender, receiver, …)
        return all_parts[:, replica_index()]

    def _collective(self, operation: str, part: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
        """Call a StableHLO collective over all replicas; the result has `shape`."""
        element = {tf.float32: "f32", tf.bfloat16: "bf16"}[part.dtype]
        module = MODULE.format(
            operation=operation,
            part="x".join([*map(str, part.shape), element]),
            result="x".join([*map(str, shape), element]),
            replicas=list(range(self.num_replicas)),
            num_replicas=self.num_replicas,
        )
        (result,) = gen_xla_ops.xla_call_module(
            [part],
            version=9,
            module=module,
            Sout=[list(shape)],
            Tout=[part.dtype],
            dim_args_spec=[],
            platforms=["TPU"],
            function_list=[],
            has_token_input_output=False,
            disabled_checks=["platform"],
        )
        return tf.ensure_shape(result, shape)


def placed(part: tf.Tensor, axis: int = 0) -> tf.Tensor:
    """Return a tensor with room for every replica's part along `axis`: this replica's part in its position, else 0.

    Summed over the replicas, these tensors are the concatenation of all parts. Every kind of device can sum over
    replicas, but not every kind can concatenate.
    """
    num_replicas = tf.distribute.get_replica_context().num_replicas_in_sync
    shape = [1] * (part.shape.rank + 1)
    shape[axis] = num_replicas
    is_own_place = tf.reshape(tf.range(num_replicas) == replica_index(), shape)
    spread = tf.where(is_own_place, tf.expand_dims(part, axis), tf.zeros((), part.dtype))  # (…, replicas, part, …)
    return tf.reshape(spread, (*part.shape[:axis], -1, *part.shape[axis + 1 :]))


def replica_index() -> tf.Tensor:
    return tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.int32)
