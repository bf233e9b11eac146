"""Names for parts of the train step, by which profiles and the preflight tell what an operation belongs to."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

# For the branch of a conditional that a healthy run hardly takes: the preflight leaves it out.
RARELY = "rarely"


@contextmanager
def named(scope: str) -> Iterator[None]:
    """Name operations `scope/…`, those within it or of the function that it decorates; their values stay the same."""
    with tf.name_scope(scope):
        yield


@contextmanager
def operations_named(scope: str) -> Iterator[None]:
    """Name operations `scope/…` in a graph, but no weights, which layers make when they are first called eagerly."""
    if tf.executing_eagerly():
        yield
        return
    with tf.name_scope(scope):
        yield


def custom_gradient(function: Callable[..., tuple[Any, Callable]]) -> Callable[..., Any]:
    """Apply `tf.custom_gradient`, with the gradient's operations named after the place of the call."""

    @functools.wraps(function)
    def with_named_gradient(*args: Any) -> tuple[Any, Callable]:
        scope = tf.get_current_name_scope()
        outputs, gradient = function(*args)
        return outputs, named(f"gradient_tape/{scope}/")(gradient)

    return tf.custom_gradient(with_named_gradient)
