"""The runtime that executes TensorFlow's steps with JAX, on TPUs and GPUs that TensorFlow does not support.

TensorFlow builds the model on the CPU, reads the data, and lowers each step once. JAX compiles the step and keeps the
variables on the devices. A variable is moved there when a program first uses it, and TensorFlow's copy is emptied.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import jax
import numpy as np
import tensorflow as tf
from jax.experimental import multihost_utils
from numpy.typing import NDArray

from train.runtime.jax_programs import (
    Program,
    Replicas,
    compile_program,
    host_copy,
    place,
    set_up_jax,
    sharding_over,
    values_of,
)
from train.runtime.lowering import Lowered, empty, give_memory_back, lower, set_value, value_of
from train.runtime.machines import Cluster
from train.runtime.private import keeping_trace, steps_per_execution
from train.runtime.runtime import WAIT_NAME, Runtime


class JaxRuntime(Runtime):
    """One replica on each of JAX's devices, on all hosts.

    Args:
        cluster: the hosts. If there are several, `jax.distributed` must be initialized.
        devices: the devices of all hosts, grouped by host, in the order of the replicas.
    """

    def __init__(self, cluster: Cluster, devices: Sequence[Any]):
        set_up_jax()
        # Hide the GPUs from TensorFlow, because JAX uses them, and a step lowered on a GPU would contain operations for
        # GPUs.
        tf.config.set_visible_devices([], "GPU")
        self.cluster, self.num_replicas, self._devices = cluster, len(devices), devices
        self._sharding = sharding_over(devices)
        # The keys of both dictionaries are the identities of the variables' handles.
        self._state: dict[int, Replicas] = {}
        self._variables: dict[int, tf.Variable] = {}

    def scope(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def distribute(self, batches: Callable[[tf.distribute.InputContext], tf.data.Dataset]) -> tf.data.Dataset:
        """Return the data set of this host's batches, whose tensors (replicas, rows, …) fit `on_replicas`."""
        context = tf.distribute.InputContext(self.cluster.num_workers, self.cluster.index, self.num_replicas)
        steps = batches(context).batch(self.num_local_replicas, drop_remainder=True)
        return steps.apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))

    def deal(self, array_of: Callable[[int], NDArray[Any]]) -> NDArray[Any]:
        return np.stack([array_of(number) for number in range(self.num_local_replicas)])

    def on_replicas(self, function: Callable[..., Any], *, jit_compile: bool = True) -> Callable[..., Any]:
        del jit_compile  # JAX compiles everything
        execute = self._program_of(function)

        def call(*arguments: Any) -> Any:
            lowered, results = execute(arguments)
            return tf.nest.pack_sequence_as(lowered.structure, [values_of(replicas) for replicas in results])

        return call

    def train_function(self, model: Any) -> Callable[[Iterator[Any]], dict[str, Any]]:
        execute = self._program_of(model.train_step)

        def train(iterator: Iterator[Any]) -> dict[str, Any]:
            wait_seconds = 0.0
            for _ in range(int(steps_per_execution(model).numpy())):
                asked_seconds = time.perf_counter()
                batch = next(iterator)
                wait_seconds += time.perf_counter() - asked_seconds
                execute((batch,))
            return {WAIT_NAME: wait_seconds}

        return train

    def variable(self, variable: Any, axis: int | None = None) -> "JaxVariable":
        return JaxVariable(self, variable, axis)

    def read(self, variables: Sequence[tf.Variable]) -> list[NDArray[Any]]:
        return [host_copy(values_of(self.replicas_of(variable))[0]) for variable in variables]

    def write(self, variables: Sequence[tf.Variable], values: Sequence[NDArray[Any]]) -> None:
        for variable, value in zip(variables, values, strict=True):
            self.set_replicas(variable, [np.asarray(value, variable.dtype.as_numpy_dtype)] * self.num_local_replicas)
        give_memory_back()

    def pull(self, variables: Iterable[tf.Variable]) -> None:
        for variable in variables:
            if (replicas := self._state.get(id(variable.handle))) is not None:
                set_value(variable, tf.constant(host_copy(values_of(replicas)[0])))

    def push(self, variables: Iterable[tf.Variable]) -> None:
        for variable in variables:
            if id(variable.handle) in self._state:
                self.set_replicas(variable, [value_of(variable)] * self.num_local_replicas)

    @contextmanager
    def on_host(self, variables: Sequence[tf.Variable]) -> Iterator[None]:
        self.pull(variables)
        try:
            yield
        finally:
            empty([variable for variable in variables if id(variable.handle) in self._state])
            give_memory_back()

    def wait(self, variable: tf.Variable) -> None:
        jax.block_until_ready(self.replicas_of(variable))

    def gather(self, values: NDArray[Any]) -> NDArray[Any]:
        if self.cluster.num_workers == 1:
            return values[np.newaxis]
        return np.asarray(multihost_utils.process_allgather(values))

    def start_profile(self, folder: str) -> None:
        with keeping_trace():
            jax.profiler.start_trace(folder)

    def stop_profile(self) -> None:
        with keeping_trace():
            jax.profiler.stop_trace()

    def release(self) -> None:
        self._state.clear()
        self._variables.clear()

    def replicas_of(self, variable: tf.Variable) -> Replicas:
        """Return a variable's values on the devices; move the variable there first if necessary."""
        key = id(variable.handle)
        if key not in self._state:
            self.set_replicas(variable, [value_of(variable)] * self.num_local_replicas)
        return self._state[key]

    def set_replicas(self, variable: tf.Variable, values: Sequence[NDArray[Any]]) -> None:
        key = id(variable.handle)
        self._state[key] = place(values, self._sharding, assigned=True)
        self._variables[key] = variable  # keep the handle alive, so that its identity is not reused
        empty([variable])

    def _program_of(self, function: Callable[..., Any]) -> Callable[[Any], tuple[Lowered, list[Replicas]]]:
        """Return a callable that executes a function on a structure of tensors, each (replicas of this host, …)."""
        programs: dict[tuple[Any, ...], tuple[Lowered, Program, list[int | Replicas]]] = {}

        def execute(arguments: Any) -> tuple[Lowered, list[Replicas]]:
            tensors = [np.asarray(tensor) for tensor in tf.nest.flatten(arguments)]
            shapes = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
            if shapes not in programs:
                programs[shapes] = self._compile(function, arguments, tensors)
            lowered, program, captured = programs[shapes]
            placed = [place(list(tensor), self._sharding) for tensor in tensors]
            captures = [self._state[key] if isinstance(key, int) else key for key in captured]
            results = program.execute([*placed, *captures])
            for result, parameter in program.assigned.items():
                key = captured[parameter - len(placed)]
                assert isinstance(key, int)
                self._state[key] = results[result]
            return lowered, results[: lowered.num_results]

        return execute

    def _compile(
        self, function: Callable[..., Any], arguments: Any, tensors: Sequence[NDArray[Any]]
    ) -> tuple[Lowered, Program, list[int | Replicas]]:
        specs = [tf.TensorSpec(tensor.shape[1:], tensor.dtype) for tensor in tensors]
        lowered = lower(function, tf.nest.pack_sequence_as(arguments, specs), self.num_replicas)
        captured: list[int | Replicas] = []  # keys of variables in `_state`, or values of tensors
        for value in lowered.captured:
            if isinstance(value, tf.Variable):
                self.replicas_of(value)
                captured.append(id(value.handle))
            else:
                captured.append(place([value.numpy()] * self.num_local_replicas, self._sharding))
        program = compile_program(lowered.stablehlo, self._devices)
        give_memory_back()
        return lowered, program, captured


class JaxVariable:
    """A variable on the devices of a `JaxRuntime`, read and set as a single array, for checkpoints.

    Args:
        runtime: the runtime.
        variable: TensorFlow's variable.
        axis: the axis along which the replicas of all hosts divide the variable; None if each replica has the whole
            variable.
    """

    def __init__(self, runtime: JaxRuntime, variable: tf.Variable, axis: int | None):
        self._runtime, self._variable, self._axis = runtime, variable, axis
        self.dtype = variable.dtype
        num_shards = runtime.num_replicas
        self.shape = tuple(size * (num_shards if index == axis else 1) for index, size in enumerate(variable.shape))

    def numpy(self) -> NDArray[Any]:
        """Copy the variable to the host. Call this on all hosts."""
        replicas = values_of(self._runtime.replicas_of(self._variable))
        if self._axis is None:
            return host_copy(replicas[0])
        shards = np.concatenate([host_copy(shard) for shard in replicas], self._axis)
        return np.concatenate(list(self._runtime.gather(shards)), self._axis)

    def assign(self, value: NDArray[Any]) -> None:
        runtime, num_local = self._runtime, self._runtime.num_local_replicas
        parts = [np.asarray(value)] * num_local
        if self._axis is not None:
            first = runtime.cluster.index * num_local
            parts = np.split(np.asarray(value), runtime.num_replicas, self._axis)[first : first + num_local]
        runtime.set_replicas(self._variable, parts)
