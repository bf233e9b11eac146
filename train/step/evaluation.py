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

# Input of `Task.figures`: sums over all rows, and values for each row.
Totals = dict[str, NDArray[Any]]
# A function that evaluates all rows and returns the totals; None if a shutdown was requested before the last batch.
Adder = Callable[[StopRequest], Totals | None]


def build_adder(inputs: Inputs, model: PretrainingModel, plan: Plan, *, jit_compile: bool) -> Adder | None:
    """Build the function that evaluates all validation rows.

    The function adds up the task's sums and collects the values for each row. The sources of a mixture are read one
    after another, and their losses are added to the totals as `loss_NAME`.

    Returns:
        None if there are no validation rows.
    """
    runtime = model.runtime
    global_batch_rows = plan.global_batch_rows // model.num_micro_batches
    sources = {}
    for name, (source, weight) in inputs.evaluated().items():
        batches_of = functools.partial(
            source.evaluation_batches,
            model.task.features(plan.max_length),
            model.task.prepare_row,
            global_batch_rows=global_batch_rows,
        )
        num_batches = source.num_evaluation_batches(global_batch_rows)
        sources[name] = runtime.distribute(batches_of), num_batches, weight
    if not sources:
        return None
    step = runtime.on_replicas(model.evaluation_step, jit_compile=jit_compile)

    def add_up_batches(batches: Any, num_batches: int, stop: StopRequest) -> Totals | None:
        # Reading a value waits for the device, so all values are read at the end.
        sums: list[Any] = []
        in_flight = InFlight(lambda: [np.asarray(value) for value in sums[-1].values()], stop)
        for rows in itertools.islice(batches, num_batches):
            if stop.is_agreed():
                return None
            supervisor.report("evaluate", len(sums))
            # Every replica has the sums over all replicas.
            sums.append({name: replicas[0] for name, replicas in step(rows).items()})
            in_flight.add(1)
        return {name: _joined([np.asarray(batch_sums[name]) for batch_sums in sums]) for name in sums[0]}

    def add_up(stop: StopRequest) -> Totals | None:
        totals: dict[str, tuple[Totals, float]] = {}
        for name, (batches, num_batches, weight) in sources.items():
            source_totals = add_up_batches(batches, num_batches, stop)
            if source_totals is None:
                return None
            totals[name] = source_totals, weight
        losses = {
            f"{SOURCE_LOSS}{name}": np.asarray(model.task.figures(source_totals)["loss"])
            for name, (source_totals, _) in totals.items()
            if name
        }
        return _mixed(model.task.means, list(totals.values())) | losses

    return add_up


def _mixed(means: tuple[Mean, ...], totals: list[tuple[Totals, float]]) -> Totals:
    """Combine the totals of several sources, so that each mean becomes the weighted mean over the sources.

    Args:
        means: the means of the task.
        totals: (totals, weight) of each source.
    """
    if len(totals) == 1:
        return totals[0][0]
    mixed = {name: np.asarray(sum(source[name] for source, _ in totals)) for name in totals[0][0]}
    for _, total, weight in means:
        counted = [(source, share) for source, share in totals if source[weight]]
        if counted:
            mean = math.fsum(share * float(source[total] / source[weight]) for source, share in counted)
            mixed[total] = np.asarray(mixed[weight] * mean / math.fsum(share for _, share in counted))
    return mixed


def _joined(values: list[NDArray[Any]]) -> NDArray[Any]:
    """Add up sums over batches (scalars) in float64; concatenate values for each row."""
    return np.concatenate(values) if values[0].ndim else np.asarray(sum(np.asarray(values, np.float64)))
