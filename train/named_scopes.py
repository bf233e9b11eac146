"""Names for parts of the train step, by which profiles and the preflight tell what an operation belongs to."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import tensorflow as tf

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def named(scope: str) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Return a decorator by which a function's operations bear the name `scope/…`; their values stay the same."""

    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        @functools.wraps(function)
        def within_scope(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            with tf.name_scope(scope):
                return function(*args, **kwargs)

        return within_scope

    return decorate
