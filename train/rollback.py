"""After a blow-up: back to the last checkpoint before it, and on without the rows in which it happened."""

import logging
from typing import TYPE_CHECKING

from train.callbacks import TrainingDivergedError
from train.checkpoint_record import CheckpointRecord, SkippedRows
from train.checkpoint_store import Arrays
from train.metrics_log import ROLLBACK
from train.preemption import StopRequest
from train.start import Start

if TYPE_CHECKING:
    from train.trainer import Trainer

logger = logging.getLogger(__name__)


def roll_back(trainer: "Trainer", start: Start, error: TrainingDivergedError, stop: StopRequest) -> Start:
    """Restore the last checkpoint before a blow-up, and return the start that leaves out the rows since then.

    Which checkpoint that is follows from steps alone: a run that was killed meanwhile comes to the same rows.

    Args:
        trainer: whose state and log are set back.
        start: of the fitting that blew up.
        error: the blow-up.
        stop: by which several workers meet.

    Raises:
        TrainingDivergedError: the same, where rolling back is not asked for, was done too often, or has nowhere to go.
    """
    if not trainer.can_roll_back or len(start.skipped) >= trainer.config.run.max_rollbacks:
        raise error
    trainer.checkpoints.wait()
    stop.meet()  # the others read what the chief has written
    record = _restore(trainer, error)
    stop.meet()
    trainer.checkpoints.discard_after(record.step)
    trainer.model.optimizer.go_on()
    num_rows = (error.step - record.step) * trainer.plan.global_batch_rows
    earlier = [rows for rows in start.skipped if rows.after_step <= record.step]
    trainer.log.go_on_from(record.step, len(earlier))
    trainer.log.add(
        error.step, ROLLBACK, {"reason": error.reason, "to_step": record.step, "num_skipped_rows": num_rows}
    )
    trainer.log.flush()
    logger.warning("%s Back to step %d, and on without the %d rows since then.", error, record.step, num_rows)
    skipped = (*earlier, SkippedRows(record.step, num_rows))
    return Start(record.step, record.logged_step, skipped, record)


def _restore(trainer: "Trainer", error: TrainingDivergedError) -> CheckpointRecord:
    """Restore the newest regular checkpoint from before the blow-up; another one where there is none."""

    def use(_: CheckpointRecord, arrays: Arrays) -> None:
        trainer.state.write(arrays)

    for interval_steps in (trainer.plan.save_steps, 1):
        record = trainer.checkpoints.restore_newest(
            trainer.fingerprint_sha256, use, up_to=error.good_step, interval_steps=interval_steps
        )
        if record is not None:
            return record
    raise error
