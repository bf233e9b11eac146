"""Evaluation: every validation row once, as its task prepares it, so that the figures of any two runs compare."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from train.runtime import heartbeat
from train.train_step import PretrainingModel, Sums

# The figures of an evaluation, or None where it gave up.
Evaluator = Callable[[Callable[[], bool]], dict[str, float] | None]


def build_evaluator(
    model: PretrainingModel, batches: Any, num_batches: int, strategy: tf.distribute.Strategy, *, jit_compile: bool
) -> Evaluator:
    """Build a function that evaluates the model as it is when called.

    It is called with one that tells whether to give up, which is asked before each batch; it returns None then.

    Args:
        batches: of `evaluation_batches`, distributed by `distribute_batches`; read anew at each call.
        num_batches: how many there are for each replica.
    """
    evaluation_step = model.evaluation_step
    if jit_compile:
        evaluation_step = tf.function(evaluation_step, jit_compile=True)

    @tf.function
    def step(rows: Any) -> Sums:
        sums = strategy.run(evaluation_step, args=(rows,))
        # Every replica holds the global sums.
        return {name: strategy.experimental_local_results(value)[0] for name, value in sums.items()}

    def evaluate(gives_up: Callable[[], bool] = lambda: False) -> dict[str, float] | None:
        # Reading a figure from the device waits for it, so all are read at the end.
        sums: list[Sums] = []
        for rows in itertools.islice(batches, num_batches):
            if gives_up():
                return None
            heartbeat.report("evaluate", len(sums))
            sums.append(step(rows))
        return model.task.figures({name: sum(np.asarray(one[name], np.float64) for one in sums) for name in sums[0]})

    return evaluate
