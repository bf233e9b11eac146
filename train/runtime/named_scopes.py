"""Names for parts of the train step, by which profiles and the preflight tell what an operation belongs to."""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import tensorflow as tf

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
# For the branch of a conditional that a healthy run hardly takes: the preflight leaves it out.
RARELY = "rarely"


def named(scope: str) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Decorate a function so that its operations bear the name `scope/…`; their values stay the same."""

    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        @functools.wraps(function)
        def within_scope(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            with tf.name_scope(scope):
                return function(*args, **kwargs)

        return within_scope

    return decorate


def custom_gradient(function: Callable[..., tuple[Any, Callable]]) -> Callable[..., Any]:
    """Apply `tf.custom_gradient`, with the gradient's operations named after the place of the call."""

    @functools.wraps(function)
    def with_named_gradient(*args: Any) -> tuple[Any, Callable]:
        scope = tf.get_current_name_scope()
        outputs, gradient = function(*args)

        def named_gradient(*by_outputs: tf.Tensor) -> Any:
            with tf.name_scope(f"gradient_tape/{scope}/"):
                return gradient(*by_outputs)

        return outputs, named_gradient

    return tf.custom_gradient(with_named_gradient)
