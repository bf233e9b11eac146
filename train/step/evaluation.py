"""Evaluate the current model on every validation row once."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from train.data.inputs import Inputs
from train.runtime import supervisor
from train.runtime.plan import Plan
from train.runtime.preemption import InFlight, StopRequest
from train.runtime.strategy import distribute_batches
from train.step.train_step import PretrainingModel, Sums

# The input of `Task.figures`.
Totals = dict[str, NDArray[Any]]
# Adds them up, or returns None after a shutdown request before its last batch.
Adder = Callable[[StopRequest], Totals | None]


def build_adder(inputs: Inputs, model: PretrainingModel, plan: Plan, *, jit_compile: bool) -> Adder | None:
    """Build what adds up the task's sums over the rows to evaluate on, and collects its values for each row.

    Returns:
        None where there are no such rows.
    """
    strategy, evaluation_step = model.distribute_strategy, model.evaluation_step
    global_batch_rows = plan.global_batch_rows // model.num_micro_batches
    num_batches = inputs.num_evaluation_batches(global_batch_rows)
    if not num_batches:
        return None
    batches_of = functools.partial(
        inputs.evaluation_batches,
        model.task.features(plan.max_length),
        model.task.prepare_row,
        global_batch_rows=global_batch_rows,
    )
    batches = distribute_batches(strategy, batches_of)
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
