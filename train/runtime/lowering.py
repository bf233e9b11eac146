"""Functions of TensorFlow lowered to StableHLO for one of several replicas, on a machine without their devices.

The TPU's compiler takes it in the preflight, and JAX's client of the device where that is the runtime.
"""

import ctypes
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops

from train.runtime.private import registered_gradients, variable_of

# A constant of truth values in StableHLO's text, where it is long.
TRUTH_VALUES = re.compile(r'(%\w+) = stablehlo\.constant dense<"0x([0-9A-F]+)"> : tensor<([\dx]+)xi1>')


class Lowered(NamedTuple):
    """A function as lowered for one replica.

    Its parameters are the tensors that it is called with, then those that it captures. Its results are what it
    returns, in the order of `tf.nest.flatten`, then the variables that it assigns.

    captured: what it uses beside its arguments: variables, or tensors.
    structure: of what it returns, with any values.
    """

    stablehlo: str
    captured: list[Any]
    structure: Any

    @property
    def num_results(self) -> int:
        return len(tf.nest.flatten(self.structure))


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


def lower(function: Callable[..., Any], specs: Any, num_replicas: int) -> Lowered:
    """Lower a function for one of `num_replicas` replicas.

    Args:
        function: of tensors, in any structure.
        specs: its arguments, as a structure of `tf.TensorSpec` of one replica's part of a batch.
        num_replicas: over which it may sum.
    """
    structures: list[Any] = []

    @tf.function(jit_compile=True, autograph=False)
    def program(*parts: tf.Tensor) -> list[tf.Tensor]:
        with ReplicaOfSlice(num_replicas):
            results = function(*tf.nest.pack_sequence_as(specs, parts))
        structures.append(tf.nest.map_structure(lambda _: None, results))
        return list(tf.nest.flatten(results))

    flat = tf.nest.flatten(specs)
    concrete = program.get_concrete_function(*flat)
    by_handle = {id(variable.handle): variable for variable in concrete.variables}
    captured = [
        by_handle[id(one)] if id(one) in by_handle else _variable_or_tensor(one) for one in concrete.captured_inputs
    ]
    _forget_gradients(concrete.graph)
    with shaped([one for one in captured if isinstance(one, tf.Variable)]):
        return Lowered(lowered_text(program, *flat), captured, structures[0])


def _variable_or_tensor(captured: Any) -> Any:
    """Return the variable of a handle: a graph does not list those that a policy may cast and it only assigns."""
    return variable_of(captured) if captured.dtype == tf.resource else captured


def _forget_gradients(graph: tf.Graph) -> None:
    """Forget the gradients of functions with `tf.custom_gradient`, each of which would keep the graph in memory.

    TensorFlow registers one for each call, and never removes it. Those of functions that the graph calls may be needed.
    """
    registered = registered_gradients()
    for operation in graph.get_operations():
        if operation.type == "IdentityN":
            with suppress(ValueError):  # it has none of its own
                registered.pop(operation.get_attr("_gradient_op_type").decode(), None)


def lowered_text(function: Any, *arguments: Any) -> str:
    """Lower a `tf.function` with `jit_compile=True`, traced with these arguments, to StableHLO that libtpu takes."""
    text = function.experimental_get_compiler_ir(*arguments)(stage="stablehlo")
    # TensorFlow's dialect has a copy that libtpu's lacks: an identity, as a reshape to the same shape is.
    text = re.sub(r"mhlo\.copy (%[\w#]+) : (tensor<[^>]*>)", r"stablehlo.reshape \1 : (\2) -> \2", text)
    # TensorFlow counts the functions of a process; a compiler's cache knows a program by all of its names.
    names = {
        name: f"@part_{number}" for number, name in enumerate(re.findall(r"(?:module|func private) (@[\w.]+)", text))
    }
    text = re.sub(r"@[\w.]+", lambda name: names.get(name[0], name[0]), text)
    return TRUTH_VALUES.sub(_as_bytes, text)


def _as_bytes(constant: re.Match[str]) -> str:
    """Write a constant's truth values as bytes: TensorFlow packs eight into one, what JAX has since 0.11 does not."""
    name, packed, shape = constant.groups()
    num_values = math.prod(int(size) for size in shape.split("x"))
    values = np.unpackbits(np.frombuffer(bytes.fromhex(packed), np.uint8), count=num_values, bitorder="little")
    return (
        f'{name}_bytes = stablehlo.constant dense<"0x{values.tobytes().hex().upper()}"> : tensor<{shape}xi8>\n    '
        f"{name} = stablehlo.convert {name}_bytes : (tensor<{shape}xi8>) -> tensor<{shape}xi1>"
    )


@contextmanager
def shaped(variables: Sequence[tf.Variable]) -> Iterator[None]:
    """Give the variables that `empty` has emptied a value within it: lowering looks at the shape of the value."""
    emptied = [one for one in variables if tf.raw_ops.VariableShape(input=one.handle).shape != (one.shape.rank,)]
    zeros: dict[tuple[Any, ...], tf.Tensor] = {}  # of which variables of one shape share the memory
    for variable in emptied:
        key = (*variable.shape, variable.dtype)
        if key not in zeros:
            zeros[key] = tf.zeros(variable.shape, variable.dtype)
        set_value(variable, zeros[key])
    try:
        yield
    finally:
        empty(emptied)


def empty(variables: Sequence[tf.Variable]) -> None:
    """Replace the values of variables by nothing; their memory is freed, and their values are lost."""
    for variable in variables:
        set_value(variable, tf.zeros((), variable.dtype))


def give_memory_back() -> None:
    """Give the system what was freed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


def value_of(variable: tf.Variable) -> np.ndarray:
    return np.asarray(variable.read_value().numpy())


def set_value(variable: tf.Variable, value: tf.Tensor) -> None:
    """Set a variable that may be empty, which its own `assign` does not."""
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)
