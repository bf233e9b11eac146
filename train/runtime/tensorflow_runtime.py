"""The runtime that executes steps with TensorFlow: a strategy of `tf.distribute`, on any devices or several workers."""

import functools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from train import has_accelerator, keep_freed_memory
from train.runtime.machines import Cluster
from train.runtime.private import steps_per_execution, stop_tuning_device_buffers
from train.runtime.runtime import WAIT_NAME, Runtime, StoredVariable


class TensorFlowRuntime(Runtime):
    """The replicas of a `tf.distribute` strategy.

    Args:
        strategy: the strategy in whose scope models are built.
        cluster: the workers that the strategy spans.
    """

    def __init__(self, strategy: tf.distribute.Strategy, cluster: Cluster = Cluster()):  # noqa: B008 (frozen)
        self.strategy, self.cluster = strategy, cluster
        self.num_replicas = strategy.num_replicas_in_sync

    def scope(self) -> AbstractContextManager[Any]:
        return self.strategy.scope()

    def distribute(self, batches: Callable[[tf.distribute.InputContext], tf.data.Dataset]) -> Any:
        """Distribute a data set. Each input pipeline reads only the batches of its replicas.

        `experimental_distribute_dataset` would give every host the same rows, unless there is a file for each host.

        The data set declares infinite cardinality; callers must count batches. Otherwise workers would have to agree
        before each batch whether another batch exists, and the shape of batches would be unknown.
        """
        _keep_freed_memory_despite_iterators()
        stop_tuning_device_buffers()

        def endless_batches(context: tf.distribute.InputContext) -> tf.data.Dataset:
            return batches(context).apply(tf.data.experimental.assert_cardinality(tf.data.INFINITE_CARDINALITY))

        return self.strategy.distribute_datasets_from_function(endless_batches)

    def deal(self, array_of: Callable[[int], NDArray[Any]]) -> Any:
        num_replicas = self.num_local_replicas
        return self.strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(array_of(context.replica_id_in_sync_group % num_replicas))
        )

    def on_replicas(self, function: Callable[..., Any], *, jit_compile: bool) -> Callable[..., Any]:
        if jit_compile:
            function = tf.function(function, jit_compile=True)
        run = tf.function(lambda *arguments: self.strategy.run(function, args=arguments), autograph=False)
        local = self.strategy.experimental_local_results
        return lambda *arguments: tf.nest.map_structure(local, run(*arguments))

    def train_function(self, model: Any) -> Callable[[Iterator[Any]], dict[str, tf.Tensor]]:
        return build_train_function(model)

    def variable(self, variable: Any, axis: int | None = None) -> StoredVariable:
        return variable if axis is None else ShardedVariable(self, variable, axis)

    # Each replica has a copy of the means, and all copies are equal. TensorFlow would sum the copies to read them, and
    # divide to set them, and the division rounds for some numbers of replicas. So each copy is read and set on its
    # replica.

    def read(self, variables: Sequence[Any]) -> list[NDArray[Any]]:
        values = self.on_replicas(lambda: [variable.read_value() for variable in variables], jit_compile=False)()
        return [np.asarray(replicas[0].numpy()) for replicas in values]

    def write(self, variables: Sequence[Any], values: Sequence[NDArray[Any]]) -> None:
        def assign(values: Sequence[tf.Tensor]) -> None:
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)

        tf.function(self.strategy.run, autograph=False)(assign, args=([tf.constant(value) for value in values],))

    def wait(self, variable: Any) -> None:
        variable.numpy()

    def gather(self, values: NDArray[Any]) -> NDArray[Any]:
        row = tf.constant(values[np.newaxis])
        replicas = self.strategy.experimental_distribute_values_from_function(lambda _: row)
        gathered: NDArray[Any] = self.strategy.gather(replicas, axis=0).numpy()  # (replicas, …)
        return gathered[:: self.num_local_replicas]

    def start_profile(self, folder: str) -> None:
        tf.profiler.experimental.start(folder)

    def stop_profile(self) -> None:
        tf.profiler.experimental.stop()


@functools.cache
def _keep_freed_memory_despite_iterators() -> None:
    """Set malloc's options again after the first iterator of the process, because TensorFlow changes them.

    When a process makes its first iterator over the data set of a strategy or of a Python generator, TensorFlow sets
    M_MMAP_THRESHOLD to 128 KiB, to mitigate a memory leak of Python 3.11. Malloc then returns large tensors to Linux as
    soon as they are freed. After an evaluation, a step of the quick start's model took 1.2 times as long. TensorFlow
    changes the option only once per process, so it is set again after an iterator over a tiny data set.
    """
    if not has_accelerator():
        next(iter(tf.data.Dataset.from_generator(lambda: [0], tf.int32)))
        keep_freed_memory()


class ShardedVariable:
    """A variable that is sharded over the replicas, read and set as a single array, for checkpoints.

    Args:
        runtime: each replica of this runtime, including replicas of other workers, has a shard.
        variable: the variable, whose value on each replica is the replica's shard.
        axis: the axis along which the variable is divided.
    """

    def __init__(self, runtime: TensorFlowRuntime, variable: tf.Variable, axis: int):
        self._strategy, self._axis, self._num_shards = runtime.strategy, axis, runtime.num_replicas
        self._shards = runtime.strategy.experimental_local_results(variable)  # the shards of this worker
        self._first = runtime.cluster.index * len(self._shards)
        self.dtype, shape = variable.dtype, self._shards[0].shape
        self.shape = tuple(size * (self._num_shards if index == axis else 1) for index, size in enumerate(shape))

    def numpy(self) -> NDArray[Any]:
        """Join the shards of all workers. Call this on all workers."""
        if len(self._shards) == self._num_shards:
            return np.concatenate([shard.numpy() for shard in self._shards], self._axis)
        values = self._strategy.experimental_distribute_values_from_function(
            lambda context: self._shards[context.replica_id_in_sync_group - self._first].read_value()
        )
        whole: NDArray[Any] = self._strategy.gather(values, self._axis).numpy()
        return whole

    def assign(self, value: NDArray[Any]) -> None:
        parts = np.split(value, self._num_shards, self._axis)[self._first :]
        for shard, values in zip(self._shards, parts, strict=False):
            shard.assign(values)


def build_train_function(model: Any) -> Callable[[Any], dict[str, tf.Tensor]]:
    """Build the function that `fit` calls with an iterator of global batches: `model.train_step` on all replicas.

    The function resembles the result of tf_keras' `Model.make_train_function`, with a clock around the iterator. It
    returns {`WAIT_NAME`: seconds in which the host had no batch ready}, float64. On a TPU, earlier steps may still run
    during this time, so the device was idle for at most this time. With TF_DETERMINISTIC_OPS TensorFlow forbids clocks
    in a graph, and the seconds are NaN.

    If batches differ in length, a step is compiled for each length, and each call runs one step.
    """
    strategy = model.distribute_strategy
    train_step = model.train_step
    timestamp = tf.timestamp if _has_clock() else lambda: tf.constant(math.nan, tf.float64)
    if model.jit_compile:
        train_step = tf.function(train_step, jit_compile=True)

    def one_step(iterator: Any) -> tf.Tensor:
        asked_seconds = timestamp()
        with tf.control_dependencies([asked_seconds]):
            batch = next(iterator)
        with tf.control_dependencies(tf.nest.flatten(batch, expand_composites=True)):
            answered_seconds = timestamp()
        strategy.run(train_step, args=(batch,))
        return answered_seconds - asked_seconds

    num_steps = steps_per_execution(model)

    def execute_many(iterator: Any) -> dict[str, tf.Tensor]:
        end = num_steps.read_value()  # read only once, because it may be on the device
        _, wait_seconds = tf.while_loop(
            lambda step, _: step < end,
            lambda step, seconds: (step + 1, seconds + one_step(iterator)),
            (tf.zeros_like(end), tf.constant(0.0, tf.float64)),
        )
        return {WAIT_NAME: wait_seconds}

    def execute_one(iterator: Any) -> dict[str, tf.Tensor]:
        return {WAIT_NAME: one_step(iterator)}

    execute = execute_many if num_steps.numpy() > 1 else execute_one
    execute = tf.function(execute, autograph=False, reduce_retracing=True)
    step_on = tf.function(lambda batch: strategy.run(train_step, args=(batch,)), autograph=False)

    def execute_next(iterator: Any) -> dict[str, tf.Tensor]:
        asked_seconds = time.perf_counter()
        batch = next(iterator)
        wait_seconds = time.perf_counter() - asked_seconds
        step_on(batch)
        return {WAIT_NAME: tf.constant(wait_seconds, tf.float64)}

    return lambda iterator: (execute if _has_one_shape(iterator) else execute_next)(iterator)


def _has_clock() -> bool:
    """Return whether TensorFlow may read the clock in a graph, which TF_DETERMINISTIC_OPS forbids."""
    try:
        tf.timestamp()
    except tf.errors.FailedPreconditionError:
        return False
    return True


def _has_one_shape(iterator: Any) -> bool:
    specs = tf.nest.flatten(iterator.element_spec, expand_composites=True)
    return all(spec.shape.is_fully_defined() for spec in specs)
