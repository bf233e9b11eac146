"""A model evaluated as it is, on every validation row once."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from train.runtime import heartbeat
from train.runtime.preemption import InFlight, StopRequest
from train.step.train_step import PretrainingModel, Sums

# The figures of an evaluation, or None where it was asked to stop.
Evaluator = Callable[[StopRequest], dict[str, float] | None]


def build_evaluator(
    model: PretrainingModel, batches: Any, num_batches: int, strategy: tf.distribute.Strategy, *, jit_compile: bool
) -> Evaluator:
    """Build a function that evaluates the model as it is when called, on every validation row once.

    It returns None where it is asked to stop before its last batch.

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

    def evaluate(stop: StopRequest) -> dict[str, float] | None:
        # Reading a figure from the device waits for it, so all are read at the end.
        sums: list[Sums] = []
        in_flight = InFlight(lambda: [value.numpy() for value in sums[-1].values()], stop)
        for rows in itertools.islice(batches, num_batches):
            if stop.is_agreed:
                return None
            heartbeat.report("evaluate", len(sums))
            sums.append(step(rows))
            in_flight.add(1)
        return model.task.figures({name: sum(np.asarray(one[name], np.float64) for one in sums) for name in sums[0]})

    return evaluate
