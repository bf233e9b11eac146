"""Names for parts of the train step, by which profiles and the preflight assign operations to parts."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

# Name of a branch that a healthy run hardly ever takes. The preflight does not count the branch.
RARELY = "rarely"


@contextmanager
def named(scope: str) -> Iterator[None]:
    """Name operations `scope/…`, as a context manager or a decorator. Results do not change."""
    with tf.name_scope(scope):
        yield


@contextmanager
def operations_named(scope: str) -> Iterator[None]:
    """Name operations `scope/…` in graphs only. A layer's first call is eager, so its weights' names lack the scope."""
    if tf.executing_eagerly():
        yield
        return
    with tf.name_scope(scope):
        yield


def custom_gradient(function: Callable[..., tuple[Any, Callable]]) -> Callable[..., Any]:
    """Apply `tf.custom_gradient`, and name the gradient's operations after the scope of the call."""

    @functools.wraps(function)
    def with_named_gradient(*args: Any) -> tuple[Any, Callable]:
        scope = tf.get_current_name_scope()
        outputs, gradient = function(*args)
        return outputs, named(f"gradient_tape/{scope}/")(gradient)

    return tf.custom_gradient(with_named_gradient)
