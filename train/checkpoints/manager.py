"""Checkpoints of a run: copied off the device while training waits, then written and rotated by a thread."""

import logging
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from mlm_common.errors import InputError, RunFailedError
from mlm_common.retry import call_repeatedly
from mlm_common.storage import open_folder
from train.checkpoints.store import Arrays, CheckpointRecord, CheckpointStore, DamagedCheckpointError
from train.runtime import heartbeat
from train.runtime.run_folder import CHECKPOINTS_FOLDER

logger = logging.getLogger(__name__)

# Waits before the second and the third try to write; what Cloud Storage's client repeats by itself is one try.
RETRY_SECONDS = (0.5, 2.0)


class Checkpoints:
    """The checkpoints in `OUTPUT_DIR/checkpoints`: the newest `num_kept`, and the one of the lowest validation loss.

    Every worker restores them; one writes them, which it can alone, since each worker has all weights and moments.

    Args:
        output_dir: of the run.
        num_kept: newest checkpoints to keep.
        kept_interval_steps: the newest one at a multiple of it is kept, too; 0 keeps none for that.
        is_chief: whether this process writes.
    """

    def __init__(self, output_dir: str, *, num_kept: int, kept_interval_steps: int = 0, is_chief: bool = True):
        self.stall_seconds: list[float] = []
        self._store = CheckpointStore(open_folder(output_dir).subfolder(CHECKPOINTS_FOLDER))
        self._num_kept = num_kept
        self._kept_interval_steps = kept_interval_steps
        self._is_chief = is_chief
        self._records: dict[int, CheckpointRecord] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoints")
        self._writing: Future[None] | None = None

    def restore_newest(
        self,
        fingerprint_sha256: str,
        use: Callable[[CheckpointRecord, Arrays], None],
        *,
        up_to: int | None = None,
        interval_steps: int = 1,
    ) -> CheckpointRecord | None:
        """Give the newest checkpoint that is whole to `use`, and return its record; None where the folder has none.

        Those that are damaged, or of another run, are warned of and passed over.

        Args:
            fingerprint_sha256: of this run.
            use: takes the record and the variables.
            up_to: the last step to consider.
            interval_steps: only its multiples are considered.

        Raises:
            InputError: there are checkpoints, and none of them can be used.
        """
        steps = [step for step in self._store.steps() if step % interval_steps == 0]
        steps = [step for step in steps if up_to is None or step <= up_to]
        if self._is_chief:
            self._store.folder.delete_partial_files("step-")
        for step in reversed(steps):
            try:
                record = self._store.read_record(step)
                if record.fingerprint_sha256 != fingerprint_sha256:
                    raise DamagedCheckpointError("it is of another run")
                arrays = self._store.read_arrays(record)
            except DamagedCheckpointError as error:
                logger.warning("the checkpoint of step %d is passed over: %s", step, error)
                continue
            use(record, arrays)
            self._records = self._readable_records(record.step)
            return record
        if steps:
            raise InputError(
                f"{self._store.folder} must have a checkpoint that is whole; none of its {len(steps)} is. Put one back "
                "there, or start anew with --overwrite-output-dir."
            )
        return None

    def path(self, step: int) -> str:
        """Name the file with the variables of a checkpoint."""
        return self._store.path(step)

    def describe(self) -> str:
        """Describe, for people, what saving has cost so far."""
        if not self.stall_seconds:
            return "none saved"
        median_seconds = statistics.median(self.stall_seconds)
        return f"{len(self.stall_seconds)} saved, for each of which training waited {median_seconds:.2f} s (median)"

    def save(self, copy: Callable[[], tuple[CheckpointRecord, Arrays]]) -> None:
        """Call `copy` for a record and the variables, and have the thread write them; nothing but on the chief.

        Waits for the checkpoint before, if it is still being written.

        Raises:
            RunFailedError, InputError: the checkpoint before could not be written.
        """
        if not self._is_chief:
            return
        started_seconds = time.perf_counter()
        self.wait()
        record, arrays = copy()
        self.stall_seconds.append(time.perf_counter() - started_seconds)
        self._writing = self._thread.submit(self._write, record, arrays)

    def check(self) -> None:
        """Raise what `wait` would, if the writing has ended already."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the last checkpoint is written.

        Raises:
            RunFailedError: it could not be written.
            InputError: it could not, and a person must act: no permission, say.
        """
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        try:
            writing.result()
        except InputError:
            raise
        except Exception as error:  # of the disk, of Cloud Storage's client, or of what it stands on
            newest = max(self._records, default=None)
            kept = "no checkpoint is there" if newest is None else f"the newest one is that of step {newest:,}"
            raise RunFailedError(
                f"A checkpoint could not be written to {self._store.folder}: {error}; {kept}. When the cause is "
                "removed, give the same command again: it resumes from there."
            ) from error

    def discard_after(self, step: int) -> None:
        """Delete the checkpoints after `step`; nothing but on the chief."""
        if self._is_chief:
            self.wait()
            self._records = {saved: record for saved, record in self._records.items() if saved <= step}
            self._store.keep_only(saved for saved in self._store.steps() if saved <= step)

    def _write(self, record: CheckpointRecord, arrays: Arrays) -> None:
        heartbeat.report("save", record.step)
        self._records[record.step] = call_repeatedly(
            lambda: self._store.write(record, arrays),
            RETRY_SECONDS,
            lambda error: not isinstance(error, InputError),
            on_failure=lambda error, _wait_seconds: logger.warning(
                "the checkpoint of step %d is written again, after: %s", record.step, error
            ),
        )
        kept = self._kept_steps()
        self._records = {step: self._records[step] for step in kept}
        self._store.keep_only(kept)

    def _kept_steps(self) -> list[int]:
        steps = sorted(self._records)
        kept = set(steps[-self._num_kept :])
        losses = {step: record.validation_loss for step, record in self._records.items()}
        evaluated = [(loss, step) for step, loss in losses.items() if loss is not None]
        if evaluated:
            kept.add(min(evaluated)[1])
        if self._kept_interval_steps:
            kept.update([step for step in steps if step % self._kept_interval_steps == 0][-1:])
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
