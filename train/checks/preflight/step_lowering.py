"""The train step as StableHLO, the compiler's input, made by TensorFlow on a machine without a TPU."""

import ctypes
import re
import sys
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops

from train.data.pipeline import batch_spec
from train.step.train_step import PretrainingModel


class ReplicaOfSlice(tf.distribute.ReplicaContext):
    """One of `num_replicas` replicas as XLA sees it: sums over all of them, and its number, are operations.

    TPUStrategy would give the same ones, but needs a TPU to be made. To be entered while a step is traced.
    """

    def __init__(self, num_replicas: int):
        super().__init__(tf.distribute.get_strategy(), replica_id_in_sync_group=0)
        self._num_replicas = num_replicas

    @property
    def num_replicas_in_sync(self) -> int:
        return self._num_replicas

    @property
    def replica_id_in_sync_group(self) -> tf.Tensor:
        """This replica's number, int32 scalar, known when the program runs."""
        return gen_xla_ops.xla_replica_id()

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:  # noqa: ARG002
        """Sum the structure of tensors `value` over all replicas; each comes out dense. There is no other reduction."""
        if reduce_op != tf.distribute.ReduceOp.SUM:
            raise ValueError(f"Only sums over replicas can be lowered; received {reduce_op}.")
        everyone = tf.constant([list(range(self._num_replicas))])

        def add_up(tensor: tf.Tensor) -> tf.Tensor:
            dense = tf.convert_to_tensor(tensor)  # as TPUStrategy makes of IndexedSlices
            return gen_xla_ops.xla_all_reduce(dense, everyone, reduce_op="Add", mode="CrossReplica")

        return tf.nest.map_structure(add_up, value)


def lower_train_step(model: PretrainingModel, *, num_rows: int, length: int, num_replicas: int) -> str:
    """Lower `model.train_step` on rows of `length` tokens, the part of one of `num_replicas`, to StableHLO text.

    Variables are arguments, and results that take the argument's memory where the step assigns them. The values of the
    model's are lost: the compiler that runs next needs the memory.
    """
    variables = [*model.variables, *model.optimizer.variables]
    spec = batch_spec(model.task.features(length), num_rows)

    @tf.function(jit_compile=True, autograph=False)
    def step(*features: tf.Tensor) -> dict[str, tf.Tensor]:
        with ReplicaOfSlice(num_replicas):
            return model.train_step(dict(zip(spec, features, strict=True)))

    for variable in variables:
        _assign(variable, variable.shape)  # lowering looks at the shape of the value
    try:
        return lowered(step, *spec.values())
    finally:
        for variable in variables:
            _assign(variable, ())
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)  # gives the system what was freed


def _assign(variable: tf.Variable, shape: Sequence[int]) -> None:
    """Replace the value by zeros; its memory is freed."""
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=tf.zeros(shape, variable.dtype))


def lowered(function: Any, *arguments: Any) -> str:
    """Lower a `tf.function` with `jit_compile=True`, traced with these arguments, to StableHLO that libtpu takes."""
    text = function.experimental_get_compiler_ir(*arguments)(stage="stablehlo")
    # TensorFlow's dialect has a copy that libtpu's lacks: an identity, as a reshape to the same shape is.
    return re.sub(r"mhlo\.copy (%[\w#]+) : (tensor<[^>]*>)", r"stablehlo.reshape \1 : (\2) -> \2", text)
