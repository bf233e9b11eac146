"""Evaluate the current model on every validation row once."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from train.runtime import supervisor
from train.runtime.preemption import InFlight, StopRequest
from train.step.train_step import PretrainingModel, Sums

# The figures of an evaluation, or None after a shutdown request.
Evaluator = Callable[[StopRequest], dict[str, float] | None]
# The input of `Task.figures`.
Totals = dict[str, NDArray[Any]]
# Adds them up, or returns None after a shutdown request.
Adder = Callable[[StopRequest], Totals | None]


def build_evaluator(model: PretrainingModel, add_up: Adder | None) -> Evaluator | None:
    """Build a function that evaluates the current model; None where there is nothing to evaluate.

    It returns None after a shutdown request before its last batch.
    """
    if add_up is None:
        return None

    def evaluate(stop: StopRequest) -> dict[str, float] | None:
        totals = add_up(stop)
        return None if totals is None else model.task.figures(totals)

    return evaluate


def build_adder(
    model: PretrainingModel, batches: Any, num_batches: int, strategy: tf.distribute.Strategy, *, jit_compile: bool
) -> Adder:
    """Build a function that adds up the task's sums over all rows, and collects its values for each row.

    It returns None after a shutdown request before its last batch.

    Args:
        batches: of `evaluation_batches`, distributed by `distribute_batches`; read again at each call.
        num_batches: how many there are for each replica.
    """
    evaluation_step = model.evaluation_step
    if jit_compile:
        evaluation_step = tf.function(evaluation_step, jit_compile=True)

    @tf.function(autograph=False)
    def step(rows: Any) -> Sums:
        sums = strategy.run(evaluation_step, args=(rows,))
        # Every replica holds those of all.
        return {name: strategy.experimental_local_results(value)[0] for name, value in sums.items()}

    def add_up(stop: StopRequest) -> Totals | None:
        # Reading a figure from the device waits for it, so all are read at the end.
        sums: list[Sums] = []
        in_flight = InFlight(lambda: [value.numpy() for value in sums[-1].values()], stop)
        for rows in itertools.islice(batches, num_batches):
            if stop.is_agreed:
                return None
            supervisor.report("evaluate", len(sums))
            sums.append(step(rows))
            in_flight.add(1)
        return {name: _joined([one[name].numpy() for one in sums]) for name in sums[0]}

    return add_up


def _joined(values: list[NDArray[Any]]) -> NDArray[Any]:
    """Add up the sums of the batches in float64; concatenate the values for each row."""
    return np.concatenate(values) if values[0].ndim else np.asarray(sum(np.asarray(values, np.float64)))
