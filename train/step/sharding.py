"""Weight-update sharding: each replica keeps a shard of the moments, and updates that shard of the weights.

ZeRO's first stage (Rajbhandari et al. 2019), as Xu et al. 2020 have it for TPUs: gradients are summed so that each
replica gets its shard of the sum, and the updated shards of the weights are gathered. Weights, activations and
gradients stay whole on each replica.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops

# Elements below which a variable is updated as a whole: gathering it would take longer than it saves.
MIN_SHARDED_SIZE = 2**16
# What TensorFlow has no operations for.
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
    """How variables are divided among replicas. What computes with tensors is to be called in a replica's context.

    by_xla: with the operations that XLA has for it, as on a TPU; otherwise sums over the replicas do their work.
    """

    num_replicas: int
    by_xla: bool

    def axis(self, shape: Sequence[int]) -> int | None:
        """Find the first axis that the replicas share evenly; None for a variable that is updated as a whole."""
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
        """Sum a gradient over the replicas, for this replica's shard of it if the variable is divided."""
        axis = self.axis(gradient.shape)
        if axis is None or not self.by_xla:
            return self.shard_of(self.total(gradient))
        everyone = tf.constant([list(range(self.num_replicas))])
        return gen_xla_ops.xla_reduce_scatter(gradient, everyone, tf.constant(axis), reduce_op="Add")

    def shard_of(self, tensor: tf.Tensor) -> tf.Tensor:
        """Cut this replica's shard out of what all replicas have; all of it if it is not divided."""
        axis, shape = self.axis(tensor.shape), self.shard_shape(tensor.shape)
        if axis is None:
            return tensor
        start = [replica_index() * shape[axis] if index == axis else 0 for index in range(len(shape))]
        return tf.ensure_shape(tf.slice(tensor, tf.stack(start), shape), shape)

    def gather(self, shard: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
        """Put the shards of all replicas together to a tensor of that shape, which is divided."""
        axis = self.axis(shape)
        assert axis is not None
        if not self.by_xla:
            return self.total(placed(shard, axis))
        return self._collective(ALL_GATHER.format(axis=axis), shard, shape)

    def exchange(self, parts: tf.Tensor) -> tf.Tensor:
        """Give each replica the part of its number, (replicas, …), and return what this one is given, (replicas, …)."""
        if self.by_xla:
            return self._collective(ALL_TO_ALL.format(num_replicas=self.num_replicas), parts, parts.shape)
        of_all = self.total(placed(parts[tf.newaxis]))  # (from, to, …)
        return of_all[:, replica_index()]

    def _collective(self, operation: str, part: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
        """Call an operation of StableHLO over all replicas, with a result of that shape."""
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
    """Put this replica's part of a tensor at its place along the axis, with 0 elsewhere.

    Every kind of device can sum over replicas; not every kind can concatenate.
    """
    num_replicas = tf.distribute.get_replica_context().num_replicas_in_sync
    ones = [1] * (part.shape.rank + 1)
    ones[axis] = num_replicas
    is_mine = tf.reshape(tf.range(num_replicas) == replica_index(), ones)
    spread = tf.where(is_mine, tf.expand_dims(part, axis), tf.zeros((), part.dtype))  # (…, replicas, part, …)
    return tf.reshape(spread, (*part.shape[:axis], -1, *part.shape[axis + 1 :]))


def replica_index() -> tf.Tensor:
    return tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.int32)
