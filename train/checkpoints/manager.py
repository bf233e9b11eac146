"""Checkpoints of a run: its variables copied off the device, then written and rotated by a thread; and restored."""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from mlm_common.errors import InputError, PermanentError, RunFailedError, retry_call
from train.checkpoints.store import Arrays, CheckpointRecord, CheckpointStore, DamagedCheckpointError
from train.runtime import supervisor
from train.runtime.run_folder import RunFolder
from train.step.train_step import PretrainingModel

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# Waits before the second and the third try to write; what Cloud Storage's client repeats by itself is one try.
RETRY_SECONDS = (0.5, 2.0)


@dataclass
class Checkpoints:
    """The checkpoints in `OUTPUT_DIR/checkpoints`: the newest `num_kept`, and the one of the best validation score.

    Every worker restores them; the chief alone writes them, in a thread that then deletes old ones.

    kept_interval_steps: the newest one at a multiple of it is kept, too; 0 keeps none for that.
    first_step: that of the phase; its checkpoint counts as a multiple.
    kept_steps: of checkpoints that are kept, too.
    rank: returns the rank of a checkpoint's evaluation, None without one; by default as recorded.
    on_kept: called by the thread with each of `kept_steps` that is written.
    """

    folder: RunFolder
    num_kept: int
    kept_interval_steps: int = 0
    first_step: int = 0
    kept_steps: Collection[int] = ()
    is_chief: bool = True
    rank: Callable[[CheckpointRecord], tuple[float, float] | None] = lambda record: record.rank
    on_kept: Callable[[int], None] = lambda _: None

    def __post_init__(self) -> None:
        self._store = CheckpointStore(self.folder.checkpoints)
        self._records: dict[int, CheckpointRecord] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoints")
        self._writing: Future[None] | None = None

    def restore_newest(
        self,
        is_of_run: Callable[[CheckpointRecord], bool],
        use: Callable[[CheckpointRecord, Arrays], None],
        *,
        up_to: int | None = None,
        since: int = 0,
        interval_steps: int = 1,
    ) -> CheckpointRecord | None:
        """Give the newest checkpoint that is whole to `use`, and return its record; None where the folder has none.

        Those that are damaged, or of another run, are warned of and passed over; InputError if all are. Of the steps
        from `since` to `up_to`, only the first and multiples of `interval_steps` are considered.
        """
        steps = [step for step in self._store.steps() if step >= since and (up_to is None or step <= up_to)]
        steps = [step for step in steps if step % interval_steps == 0 or step == since]
        if self.is_chief:
            self._store.folder.delete_partial_files("step-")
        for step in reversed(steps):
            try:
                record = self._store.read_record(step)
                if not is_of_run(record):
                    raise DamagedCheckpointError("it is of another run")
                arrays = self._store.read_arrays(record)
            except DamagedCheckpointError as error:
                logger.warning("the checkpoint of step %d is skipped: %s", step, error)
                continue
            use(record, arrays)
            self._records = self._readable_records(record.step)
            return record
        if steps:
            raise InputError(
                f"All {len(steps)} checkpoints in {self._store.folder} are damaged. Restore one from a backup, or "
                "start over with --overwrite-output-dir."
            )
        return None

    def steps(self) -> list[int]:
        return self._store.steps()

    def save(self, copy: Callable[[], tuple[CheckpointRecord, Arrays]]) -> None:
        """Call `copy` for a record and the variables, and have the thread of the chief write them.

        Waits for the checkpoint before, if it is still being written; RunFailedError if that could not be. To be called
        on all workers: a sharded optimizer is put together from theirs.
        """
        self.wait()
        record, arrays = copy()
        if self.is_chief:
            self._writing = self._thread.submit(self._write, record, arrays)

    def check(self) -> None:
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the last checkpoint is written and old ones are deleted, as far as that succeeds.

        RunFailedError if it could not be written; PermanentError if a person must act: no permission, say.
        """
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        try:
            writing.result()
        except Exception as error:  # of the disk, of Cloud Storage's client, or of what that uses
            newest = max(self._records, default=None)
            kept = "no checkpoint is there" if newest is None else f"the newest one is that of step {newest:,}"
            kind = PermanentError if isinstance(error, InputError) else RunFailedError
            raise kind(
                f"A checkpoint could not be written to {self._store.folder}: {error}; {kept}. When the cause is "
                "removed, give the same command again: it resumes from there."
            ) from error

    def discard_after(self, step: int) -> None:
        """Delete the checkpoints after `step`; nothing but on the chief."""
        if self.is_chief:
            self.wait()
            self._records = {saved: record for saved, record in self._records.items() if saved <= step}
            self._repeatedly(partial(self._store.delete, lambda saved: saved > step), "checkpoints are deleted again")

    def _write(self, record: CheckpointRecord, arrays: Arrays) -> None:
        supervisor.report("save", record.step)
        self._records[record.step] = self._repeatedly(
            partial(self._store.write, record, arrays), f"the checkpoint of step {record.step} is written again"
        )
        self._records = {step: self._records[step] for step in self._kept_steps()}
        delete = partial(self._store.delete, lambda step: step not in self._records)
        try:
            self._repeatedly(delete, "old checkpoints are deleted again")
        except Exception as error:  # as in `wait`
            logger.warning(
                "old checkpoints in %s could not be deleted; training continues, and the next save tries again: %s",
                *(self._store.folder, error),
            )
        if record.step in self.kept_steps:
            self.on_kept(record.step)

    def _repeatedly(self, function: Callable[[], Result], what: str) -> Result:
        return retry_call(
            function,
            RETRY_SECONDS,
            lambda error: not isinstance(error, InputError),
            on_failure=lambda error, _wait_seconds: logger.warning("%s, after: %s", what, error),
        )

    def _kept_steps(self) -> list[int]:
        steps = sorted(self._records)
        kept = set(steps[-self.num_kept :]) | set(self.kept_steps).intersection(steps)
        # Scores of other phases are of other rows.
        ranks = {step: self.rank(record) for step, record in self._records.items() if step > self.first_step}
        evaluated = [(rank, -step) for step, rank in ranks.items() if rank is not None]
        if evaluated:
            kept.add(-max(evaluated)[1])
        if self.kept_interval_steps:
            regular = [step for step in steps if step % self.kept_interval_steps == 0 or step == self.first_step]
            kept.update(regular[-1:])
        return sorted(kept)

    def _readable_records(self, newest_step: int) -> dict[int, CheckpointRecord]:
        """Read the records up to that step; later ones are not of the way that training takes from there."""
        records = {}
        for step in self._store.steps():
            if step <= newest_step:
                try:
                    records[step] = self._store.read_record(step)
                except DamagedCheckpointError as error:
                    logger.warning("the checkpoint of step %d is damaged: %s", step, error)
        return records


class TrainingState:
    """All that a step changes, by name: weights, moments, step, and the means of the log; to the host and back.

    Names do not depend on what else was built in the process, nor on the replicas: `model/roberta/…`,
    `optimizer/iterations`, `optimizer/first_moment/roberta/…`, `metrics/loss/total`.
    """

    def __init__(self, model: PretrainingModel):
        self._runtime = model.runtime
        variables = model.network.variables
        weights = dict(zip(_names(variables, model.network.name), variables, strict=True))
        names = {variable.ref(): name for name, variable in weights.items()}
        trained = {names[variable.ref()]: variable for variable in model.network.trainable_variables}
        self._variables = {f"model/{name}": self._runtime.variable(variable) for name, variable in weights.items()}
        for name, (variable, axis) in model.optimizer.state_of(trained).items():
            self._variables[f"optimizer/{name}"] = self._runtime.variable(variable, axis)
        self._means: dict[str, tf.Variable] = {}
        for metric in model.metrics:
            for name, variable in zip(_names(metric.variables, metric.name), metric.variables, strict=True):
                self._means[f"metrics/{metric.name}/{name}"] = variable

    def read(self) -> Arrays:
        """Copy all variables; waits for the device."""
        arrays = {name: np.asarray(variable.numpy()) for name, variable in self._variables.items()}
        return arrays | dict(zip(self._means, self._runtime.read(list(self._means.values())), strict=True))

    def write(self, arrays: Arrays) -> None:
        """Set all variables, on all replicas; names, shapes and types must be those of the variables."""
        self._check(arrays)
        for name, variable in self._variables.items():
            variable.assign(arrays[name])
        self._runtime.write(list(self._means.values()), [arrays[name] for name in self._means])

    def _check(self, arrays: Arrays) -> None:
        variables: dict[str, Any] = {**self._variables, **self._means}
        expected = {name: (np.dtype(one.dtype.as_numpy_dtype), tuple(one.shape)) for name, one in variables.items()}
        found = {name: (array.dtype, array.shape) for name, array in arrays.items()}
        differing = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
        if differing:
            first = differing[0]
            raise RunFailedError(
                f"A checkpoint must have the variables of the model; {len(differing)} differ, the first {first}: "
                f"{_shown(found.get(first))} there, {_shown(expected.get(first))} here. Resume with the versions of "
                "the libraries that run.json names, or start over in another --output-dir."
            )


def _names(variables: Sequence[tf.Variable], outermost: str) -> list[str]:
    """Make unique names without that of the outermost layer, which counts the models built before."""
    names = [variable.name.split(":")[0].removeprefix(f"{outermost}/") for variable in variables]
    counts = Counter(names)
    seen: Counter[str] = Counter()
    for index, name in enumerate(names):
        if counts[name] > 1:
            names[index] = f"{name}#{seen[name]}"
            seen[name] += 1
    return names


def _shown(kind: tuple[np.dtype, tuple[int, ...]] | None) -> str:
    return f"{kind[0]}{list(kind[1])}" if kind else "none"
