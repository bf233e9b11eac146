"""Save and restore a run: copy its variables off the device, then write and rotate checkpoints in a thread."""

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

# Seconds to wait before the second and third attempts to write. Within an attempt, Cloud Storage's client also retries.
RETRY_SECONDS = (0.5, 2.0)


@dataclass
class Checkpoints:
    """The checkpoints in `OUTPUT_DIR/checkpoints`: the newest `num_kept`, and the checkpoint with the best score.

    All workers restore checkpoints. Only the chief writes them, in a thread that also deletes old checkpoints.

    Attributes:
        folder: the run's folder.
        num_kept: number of newest checkpoints to keep.
        kept_interval_steps: also keep the newest checkpoint whose step is a multiple of this number; 0 keeps no such
            checkpoint.
        first_step: first step of the phase; a checkpoint at this step counts as a multiple.
        kept_steps: never delete checkpoints at these steps.
        is_chief: this worker writes checkpoints.
        rank: returns the sort key of a checkpoint's evaluation, None if it was not evaluated. Default: the recorded
        score.
        on_kept: called in the thread with each step of `kept_steps`, after its checkpoint has been written.
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
        """Pass the newest intact checkpoint to `use`, and return its record.

        Checkpoints that are damaged, or belong to another run, are skipped with a warning.

        Args:
            is_of_run: returns whether a checkpoint belongs to the run.
            use: called with the record and the variables.
            up_to: the last step to consider; None means no limit.
            since: the first step to consider.
            interval_steps: consider only `since` and multiples of this number.

        Returns:
            The record; None if there is no checkpoint.

        Raises:
            InputError: there are checkpoints, but all of them are damaged or belong to another run.
        """
        steps = [step for step in self._store.steps() if step >= since and (up_to is None or step <= up_to)]
        steps = [step for step in steps if step % interval_steps == 0 or step == since]
        if self.is_chief:
            self._store.folder.delete_partial_files("step-")
        for step in reversed(steps):
            try:
                record = self._store.read_record(step)
                if not is_of_run(record):
                    raise DamagedCheckpointError("it belongs to another run")
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
        """Call `copy`, and write the record and the variables that it returns in the chief's thread.

        Waits for the previous checkpoint if it is still being written. Call this on all workers, because a sharded
        optimizer is gathered from all of them.

        Raises:
            RunFailedError: the previous checkpoint could not be written.
        """
        self.wait()
        record, arrays = copy()
        if self.is_chief:
            self._writing = self._thread.submit(self._write, record, arrays)

    def check(self) -> None:
        """Raise the error of the last write if that write has already failed; do not wait for it."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the last checkpoint is written and old files are deleted. A failed deletion only logs a warning.

        Raises:
            RunFailedError: the checkpoint could not be written.
            PermanentError: it could not be written, and only the user can fix it, for example a missing permission.
        """
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        try:
            writing.result()
        except Exception as error:  # from the disk, Cloud Storage's client, or a library that the client uses
            newest = max(self._records, default=None)
            kept = "there is no checkpoint yet" if newest is None else f"the newest one is from step {newest:,}"
            kind = PermanentError if isinstance(error, InputError) else RunFailedError
            raise kind(
                f"A checkpoint could not be written to {self._store.folder}: {error}; {kept}. Fix the cause, then run "
                "the same command again to continue."
            ) from error

    def discard_after(self, step: int) -> None:
        """Delete the checkpoints after `step`, if this worker is the chief."""
        if self.is_chief:
            self.wait()
            self._records = {saved: record for saved, record in self._records.items() if saved <= step}
            self._retry(partial(self._store.delete, lambda saved: saved > step), "deleting checkpoints")

    def _write(self, record: CheckpointRecord, arrays: Arrays) -> None:
        supervisor.report("save", record.step)
        self._records[record.step] = self._retry(
            partial(self._store.write, record, arrays), f"writing the checkpoint of step {record.step}"
        )
        self._records = {step: self._records[step] for step in self._kept_steps()}
        delete = partial(self._store.delete, lambda step: step not in self._records)
        try:
            self._retry(delete, "deleting old checkpoints")
        except Exception as error:  # from the sources that `wait` lists
            logger.warning(
                "old checkpoints in %s could not be deleted; training continues, and the next save will retry: %s",
                *(self._store.folder, error),
            )
        if record.step in self.kept_steps:
            self.on_kept(record.step)

    def _retry(self, function: Callable[[], Result], what: str) -> Result:
        return retry_call(
            function,
            RETRY_SECONDS,
            lambda error: not isinstance(error, InputError),
            on_failure=lambda error, _wait_seconds: logger.warning("%s failed and is retried: %s", what, error),
        )

    def _kept_steps(self) -> list[int]:
        steps = sorted(self._records)
        kept = set(steps[-self.num_kept :]) | set(self.kept_steps).intersection(steps)
        # Scores of other phases are not comparable, because those phases evaluate other rows.
        ranks = {step: self.rank(record) for step, record in self._records.items() if step > self.first_step}
        evaluated = [(rank, -step) for step, rank in ranks.items() if rank is not None]
        if evaluated:
            kept.add(-max(evaluated)[1])
        if self.kept_interval_steps:
            regular = [step for step in steps if step % self.kept_interval_steps == 0 or step == self.first_step]
            kept.update(regular[-1:])
        return sorted(kept)

    def _readable_records(self, newest_step: int) -> dict[int, CheckpointRecord]:
        """Read the records up to `newest_step`. Later records belong to an abandoned branch of training."""
        records = {}
        for step in self._store.steps():
            if step <= newest_step:
                try:
                    records[step] = self._store.read_record(step)
                except DamagedCheckpointError as error:
                    logger.warning("the checkpoint of step %d is damaged: %s", step, error)
        return records


class TrainingState:
    """Reads and writes all variables that a training step changes: weights, moments, the step and the log's means.

    The names of variables do not depend on the replicas, nor on other models built in the process:
    `model/roberta/…`, `optimizer/iterations`, `optimizer/first_moment/roberta/…`, `metrics/loss/total`.
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
        """Copy all variables to the host. Waits for the device."""
        arrays = {name: np.asarray(variable.numpy()) for name, variable in self._variables.items()}
        return arrays | dict(zip(self._means, self._runtime.read(list(self._means.values())), strict=True))

    def write(self, arrays: Arrays) -> None:
        """Set all variables on all replicas.

        Raises:
            RunFailedError: the names, shapes or types of `arrays` and of the variables differ.
        """
        self._check(arrays)
        for name, variable in self._variables.items():
            variable.assign(arrays[name])
        self._runtime.write(list(self._means.values()), [arrays[name] for name in self._means])

    def _check(self, arrays: Arrays) -> None:
        variables: dict[str, Any] = {**self._variables, **self._means}
        expected = {
            name: (np.dtype(variable.dtype.as_numpy_dtype), tuple(variable.shape))
            for name, variable in variables.items()
        }
        saved = {name: (array.dtype, array.shape) for name, array in arrays.items()}
        differing = sorted(name for name in expected.keys() | saved.keys() if expected.get(name) != saved.get(name))
        if differing:
            first = differing[0]
            raise RunFailedError(
                f"A checkpoint must have the variables of the model; {len(differing)} differ. The first is {first}: "
                f"{_shown(saved.get(first))} in the checkpoint, {_shown(expected.get(first))} in the model. Install "
                "the library versions listed in run.json, or start over in another --output-dir."
            )


def _names(variables: Sequence[tf.Variable], outermost: str) -> list[str]:
    """Return unique names without the outermost layer's name, which has a number that depends on earlier models."""
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
