"""Evaluate the current model on every validation row once."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from train.data.inputs import Inputs
from train.runtime import supervisor
from train.runtime.plan import Plan
from train.runtime.preemption import InFlight, StopRequest
from train.step.train_step import PretrainingModel
from train.tasks.task import SOURCE_LOSS, Mean

# The input of `Task.figures`.
Totals = dict[str, NDArray[Any]]
# Adds them up, or returns None after a shutdown request before its last batch.
Adder = Callable[[StopRequest], Totals | None]


def build_adder(inputs: Inputs, model: PretrainingModel, plan: Plan, *, jit_compile: bool) -> Adder | None:
    """Build what adds up the task's sums over the rows to evaluate on, and collects its values for each row.

    The sources of a mixture are read one after the other, and their losses, `loss_NAME`, are among the totals.

    Returns:
        None where there are no such rows.
    """
    runtime = model.runtime
    global_batch_rows = plan.global_batch_rows // model.num_micro_batches
    sources = {}
    for name, (one, weight) in inputs.evaluated().items():
        batches_of = functools.partial(
            one.evaluation_batches,
            model.task.features(plan.max_length),
            model.task.prepare_row,
            global_batch_rows=global_batch_rows,
        )
        num_batches = one.num_evaluation_batches(global_batch_rows)
        sources[name] = runtime.distribute(batches_of), num_batches, weight
    if not sources:
        return None
    step = runtime.on_replicas(model.evaluation_step, jit_compile=jit_compile)

    def add_up_batches(batches: Any, num_batches: int, stop: StopRequest) -> Totals | None:
        # Reading a figure from the device waits for it, so all are read at the end.
        sums: list[Any] = []
        in_flight = InFlight(lambda: [np.asarray(value) for value in sums[-1].values()], stop)
        for rows in itertools.islice(batches, num_batches):
            if stop.is_agreed:
                return None
            supervisor.report("evaluate", len(sums))
            # Every replica holds those of all.
            sums.append({name: replicas[0] for name, replicas in step(rows).items()})
            in_flight.add(1)
        return {name: _joined([np.asarray(one[name]) for one in sums]) for name in sums[0]}

    def add_up(stop: StopRequest) -> Totals | None:
        totals: dict[str, tuple[Totals, float]] = {}
        for name, (batches, num_batches, weight) in sources.items():
            found = add_up_batches(batches, num_batches, stop)
            if found is None:
                return None
            totals[name] = found, weight
        apart = {f"{SOURCE_LOSS}{name}": model.task.figures(one)["loss"] for name, (one, _) in totals.items() if name}
        return _mixed(model.task.means, list(totals.values())) | {name: np.asarray(one) for name, one in apart.items()}

    return add_up


def _mixed(means: tuple[Mean, ...], totals: list[tuple[Totals, float]]) -> Totals:
    """Add up the totals of several sources, so that each mean becomes the weighted mean of theirs."""
    if len(totals) == 1:
        return totals[0][0]
    mixed = {name: np.asarray(sum(one[name] for one, _ in totals)) for name in totals[0][0]}
    for _, total, weight in means:
        counted = [(one, share) for one, share in totals if one[weight]]
        if counted:
            mean = math.fsum(share * float(one[total] / one[weight]) for one, share in counted)
            mixed[total] = np.asarray(mixed[weight] * mean / math.fsum(share for _, share in counted))
    return mixed


def _joined(values: list[NDArray[Any]]) -> NDArray[Any]:
    """Add up the sums of the batches in float64; concatenate the values for each row."""
    return np.concatenate(values) if values[0].ndim else np.asarray(sum(np.asarray(values, np.float64)))
