"""What is private to TensorFlow and tf_keras, as checked with their versions 2.20 and 2.21.

What is private to JAX is in `train.runtime.jax_programs`, to transformers in `mlm_common.cli.imports`.
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
    """Return whether what is called now will be compiled by XLA, as on a TPU."""
    return bool(GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))


def in_float32() -> Any:
    """A context in which the weights of layers are read as they are, not in the type that the layer computes in."""
    return enable_auto_cast_variables(None)


def steps_per_execution(model: Any) -> tf.Variable:
    """Return the variable by which tf_keras' `fit` counts the steps of an execution; it reads it for each."""
    return model._steps_per_execution


def variable_of(handle: tf.Tensor) -> Any:
    """Return the variable of a handle that a graph has captured."""
    (value,) = get_eager_safe_handle_data(handle).shape_and_type
    return BaseResourceVariable(False, tf.TensorShape(value.shape), tf.as_dtype(value.dtype), handle)


def registered_gradients() -> dict[str, Any]:
    """Return TensorFlow's table of the gradients of operations and functions, by their names."""
    return gradient_registry._registry


@contextmanager
def keeping_trace() -> Iterator[None]:
    """Keep a function of TensorFlow that JAX's profiler replaces by whether it is on, as a newer TensorFlow has it."""
    enabled = trace.enabled
    try:
        yield
    finally:
        trace.enabled = enabled
