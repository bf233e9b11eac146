"""All uses of private APIs of TensorFlow and tf_keras, tested with versions 2.20 and 2.21 of both.

Uses of JAX's private API are in `train.runtime.jax_programs`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
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


@contextmanager
def keeping_trace() -> Iterator[None]:
    """Restore `trace.enabled` on exit. JAX's profiler replaces this function with a value, as in a newer TensorFlow."""
    enabled = trace.enabled
    try:
        yield
    finally:
        trace.enabled = enabled
