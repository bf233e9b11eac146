"""All uses of private APIs of TensorFlow and tf_keras, tested with versions 2.20 and 2.21 of both.

Uses of JAX's private API are in `train.runtime.jax_programs`.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.data.ops import multi_device_iterator_ops
from tensorflow.python.framework.ops import gradient_registry
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext
from tensorflow.python.ops.resource_variable_ops import BaseResourceVariable, get_eager_safe_handle_data
from tensorflow.python.profiler import trace
from tf_keras.src.mixed_precision.autocast_variable import enable_auto_cast_variables


def is_for_xla() -> bool:
    """Return whether XLA will compile the graph that is being traced, as on a TPU."""
    return bool(GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))


def in_float32() -> Any:
    """Return a context in which layers' weights are read in float32, without a cast to the layer's compute type."""
    return enable_auto_cast_variables(None)


def steps_per_execution(model: Any) -> tf.Variable:
    """Return the variable with the number of steps per execution, which tf_keras' `fit` reads before each execution."""
    return model._steps_per_execution


def variable_of(handle: tf.Tensor) -> Any:
    """Return the variable of a handle captured by a graph."""
    (value,) = get_eager_safe_handle_data(handle).shape_and_type
    return BaseResourceVariable(False, tf.TensorShape(value.shape), tf.as_dtype(value.dtype), handle)


def registered_gradients() -> dict[str, Any]:
    """Return TensorFlow's registry of the gradients of operations and functions, by name."""
    return gradient_registry._registry


@functools.cache
def stop_tuning_device_buffers() -> None:
    """Turn off autotuning in the data sets that buffer a strategy's batches on each device.

    A strategy makes these data sets itself, without the options of the data set that it distributes. The autotuner's
    thread can miss the end of its iterator, and then the end of `fit` waits for it, for as long as a minute.
    """
    create = multi_device_iterator_ops._create_device_dataset

    def create_without_tuning(*arguments: Any) -> tf.data.Dataset:
        options = tf.data.Options()
        options.autotune.enabled = False
        return create(*arguments).with_options(options)

    multi_device_iterator_ops._create_device_dataset = create_without_tuning


@contextmanager
def keeping_trace() -> Iterator[None]:
    """Restore `trace.enabled` on exit. JAX's profiler replaces this function with a value, as in a newer TensorFlow."""
    enabled = trace.enabled
    try:
        yield
    finally:
        trace.enabled = enabled
