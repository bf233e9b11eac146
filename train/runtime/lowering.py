"""Lower TensorFlow functions to StableHLO for one of several replicas, without needing the devices.

The preflight passes the result to the TPU's compiler; the JAX runtime passes it to JAX's client of the device.
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

# A long constant of booleans in StableHLO's text.
BOOLEANS = re.compile(r'(%\w+) = stablehlo\.constant dense<"0x([0-9A-F]+)"> : tensor<([\dx]+)xi1>')


class Lowered(NamedTuple):
    """A function that was lowered for one replica.

    The program's parameters are the arguments of the function, then the captured variables and tensors. The program's
    results are the function's returned values, in the order of `tf.nest.flatten`, then the variables that the function
    assigns.

    Attributes:
        stablehlo: the program's text.
        captured: variables and tensors that the function uses in addition to its arguments.
        structure: structure of the returned value; its leaves have no meaning.
    """

    stablehlo: str
    captured: list[Any]
    structure: Any

    @property
    def num_results(self) -> int:
        return len(tf.nest.flatten(self.structure))


class ReplicaOfSlice(tf.distribute.ReplicaContext):
    """The context of one of `num_replicas` replicas, in which sums over replicas and the replica's number are XLA ops.

    TPUStrategy would create the same operations, but needs a TPU. Enter the context while a step is traced.
    """

    def __init__(self, num_replicas: int):
        super().__init__(tf.distribute.get_strategy(), replica_id_in_sync_group=0)
        self._num_replicas = num_replicas

    @property
    def num_replicas_in_sync(self) -> int:
        return self._num_replicas

    @property
    def replica_id_in_sync_group(self) -> tf.Tensor:
        """This replica's number, an int32 scalar that is known only when the program runs."""
        return gen_xla_ops.xla_replica_id()

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:  # noqa: ARG002
        """Sum a structure of tensors over all replicas; the results are dense. No other reduction is supported."""
        if reduce_op != tf.distribute.ReduceOp.SUM:
            raise ValueError(f"Only sums over replicas can be lowered; received {reduce_op}.")
        all_replicas = tf.constant([list(range(self._num_replicas))])

        def add_up(tensor: tf.Tensor) -> tf.Tensor:
            dense = tf.convert_to_tensor(tensor)  # TPUStrategy also makes IndexedSlices dense
            return gen_xla_ops.xla_all_reduce(dense, all_replicas, reduce_op="Add", mode="CrossReplica")

        return tf.nest.map_structure(add_up, value)


def lower(function: Callable[..., Any], specs: Any, num_replicas: int) -> Lowered:
    """Lower a function for one of `num_replicas` replicas.

    Args:
        function: takes tensors and returns any structure of tensors.
        specs: the arguments, a structure of `tf.TensorSpec` of one replica's part of a batch.
        num_replicas: number of replicas over which the function may sum.
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
        by_handle[id(tensor)] if id(tensor) in by_handle else _variable_or_tensor(tensor)
        for tensor in concrete.captured_inputs
    ]
    _forget_gradients(concrete.graph)
    with shaped([value for value in captured if isinstance(value, tf.Variable)]):
        return Lowered(lowered_text(program, *flat), captured, structures[0])


def _variable_or_tensor(captured: Any) -> Any:
    """Return the variable of a handle; return any other tensor unchanged.

    The graph's list of variables lacks a variable that the graph only assigns and that the mixed-precision policy may
    cast.
    """
    return variable_of(captured) if captured.dtype == tf.resource else captured


def _forget_gradients(graph: tf.Graph) -> None:
    """Unregister the gradients of functions with `tf.custom_gradient`, because each keeps the graph in memory.

    TensorFlow registers a gradient for each call and never removes it. Gradients inside functions that the graph calls
    stay registered, because they may still be needed.
    """
    registered = registered_gradients()
    for operation in graph.get_operations():
        if operation.type == "IdentityN":
            with suppress(ValueError):  # the operation has no custom gradient
                registered.pop(operation.get_attr("_gradient_op_type").decode(), None)


def lowered_text(function: Any, *arguments: Any) -> str:
    """Lower a `tf.function` with `jit_compile=True`, traced with these arguments, to StableHLO that libtpu accepts."""
    text = function.experimental_get_compiler_ir(*arguments)(stage="stablehlo")
    # libtpu does not know TensorFlow's copy operation. The operation is an identity, like a reshape to the same shape.
    text = re.sub(r"mhlo\.copy (%[\w#]+) : (tensor<[^>]*>)", r"stablehlo.reshape \1 : (\2) -> \2", text)
    # TensorFlow numbers the functions of a process. The names must not depend on these numbers, or compilers would not
    # find programs in their cache.
    names = {
        name: f"@part_{number}" for number, name in enumerate(re.findall(r"(?:module|func private) (@[\w.]+)", text))
    }
    text = re.sub(r"@[\w.]+", lambda name: names.get(name[0], name[0]), text)
    return BOOLEANS.sub(_as_bytes, text)


def _as_bytes(constant: re.Match[str]) -> str:
    """Write a constant of booleans with one boolean per byte.

    JAX 0.11 and later cannot read boolean constants that TensorFlow packs eight to a byte.
    """
    name, packed, shape = constant.groups()
    num_values = math.prod(int(size) for size in shape.split("x"))
    values = np.unpackbits(np.frombuffer(bytes.fromhex(packed), np.uint8), count=num_values, bitorder="little")
    return (
        f'{name}_bytes = stablehlo.constant dense<"0x{values.tobytes().hex().upper()}"> : tensor<{shape}xi8>\n    '
        f"{name} = stablehlo.convert {name}_bytes : (tensor<{shape}xi8>) -> tensor<{shape}xi1>"
    )


@contextmanager
def shaped(variables: Sequence[tf.Variable]) -> Iterator[None]:
    """During the context, give variables emptied with `empty` a value, because lowering reads the value's shape."""
    emptied = [
        variable
        for variable in variables
        if tf.raw_ops.VariableShape(input=variable.handle).shape != (variable.shape.rank,)
    ]
    zeros: dict[tuple[Any, ...], tf.Tensor] = {}  # variables of the same shape and type share memory
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
    """Free the memory of variables, and discard their values."""
    for variable in variables:
        set_value(variable, tf.zeros((), variable.dtype))


def give_memory_back() -> None:
    """Return freed memory to the operating system."""
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


def value_of(variable: tf.Variable) -> np.ndarray:
    return np.asarray(variable.read_value().numpy())


def set_value(variable: tf.Variable, value: tf.Tensor) -> None:
    """Set a variable that may be empty; `tf.Variable.assign` would fail on an empty one."""
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)
