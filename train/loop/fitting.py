"""The training loop: `fit`, what is due between its steps, and the return to a checkpoint after a divergence."""

import functools
import logging
import time
from contextlib import closing
from dataclasses import asdict, replace

from train.checkpoints.resume import ResumePoint, resume_point
from train.checkpoints.store import Arrays, CheckpointRecord, SkippedRows
from train.loop.trainer import Trainer
from train.metrics.log import ROLLBACK, VALIDATION
from train.metrics.training_log import TrainingDivergedError, TrainingLog
from train.publishing.push_to_hub import PushToHub
from train.runtime import heartbeat
from train.runtime.hooks import Hook, Profile, StepsPerExecution
from train.runtime.preemption import InFlight, RunStoppedError, StopRequest
from train.runtime.strategy import distribute_batches

logger = logging.getLogger(__name__)


def fit(trainer: Trainer, stop: StopRequest | None = None, pushing: PushToHub | None = None) -> dict[str, float] | None:
    """Train, log, evaluate, save and push; return the evaluation of the last step, None if there was none.

    Raises:
        RunStoppedError: `stop` was requested, and something is left to do; all is saved.
        RunFailedError: training diverged, or a checkpoint could not be written.
    """
    stop = stop or StopRequest()
    with trainer.log, trainer.checkpoints:
        while True:
            try:
                return _fit_from_start(trainer, stop, pushing)
            except TrainingDivergedError as error:
                trainer.start = roll_back(trainer, error, stop)


def _fit_from_start(trainer: Trainer, stop: StopRequest, pushing: PushToHub | None) -> dict[str, float] | None:
    model, start = trainer.model, trainer.start
    with closing(TrainingHooks(trainer, stop, pushing)) as hooks:
        hooks.catch_up()
        if num_steps := trainer.plan.num_steps - start.step:
            batches = distribute_batches(model.distribute_strategy, trainer.batches_from(start))
            model.fit(batches, steps_per_epoch=num_steps, verbose=0, callbacks=[hooks.steps_per_execution])
        trainer.checkpoints.wait()
    trainer.log.draw()
    return hooks.figures_of(trainer.plan.num_steps)


class TrainingHooks:
    """What is done between the steps of one `fit`: log, evaluate, save, push.

    steps_per_execution: the callback of `fit` that does it.
    """

    def __init__(self, trainer: Trainer, stop: StopRequest, pushing: PushToHub | None):
        self._figures: dict[str, float] | None = None  # of the newest evaluation
        self._trainer = trainer
        self._plan = trainer.plan
        self._start = trainer.start
        self._stop = stop
        self._evaluated_step = -1
        self._saved_step = -1 if self._start.checkpoint is None else self._start.step
        self._saved_seconds = time.monotonic()
        config = trainer.phase.config
        self._log = TrainingLog(
            *(trainer.model, trainer.log, trainer.plan),
            start_step=self._start.step,
            logged_step=self._start.logged_step,
            num_skipped_rows=self._start.num_skipped_rows,
            take_wait_seconds=lambda: self.steps_per_execution.take_wait_seconds(),
            max_loss_rise=config.run.max_loss_rise,
            num_eval_rows=trainer.phase.inputs.num_eval_rows,
            full_speed_step_seconds=trainer.full_speed_step_seconds,
            advice=trainer.phase.advice_on_time if trainer.is_on_cpu else "",
        )
        wait_for_device = trainer.model.optimizer.iterations.numpy
        self._profile = Profile(
            trainer.log.tensorboard_folder,
            config.run.profiled_steps if trainer.log.is_chief else None,
            wait_for_device,
        )
        # In the order in which they are called. On all workers the same steps, though one alone pushes and profiles.
        hooks = [
            Hook(self._profile.begin_or_end, at_steps=config.run.profiled_steps or ()),
            Hook(self._log.advance),
            Hook(self._log.write_train, every_steps=config.run.log_steps or self._plan.log_steps),
            Hook(self._evaluate, every_steps=self._plan.eval_steps),
            Hook(self._report),
            Hook(self._save, every_steps=self._plan.save_steps),
            Hook(self._save_by_the_clock),
            Hook(self._stop_if_asked),
        ]
        if pushing is not None:
            hooks.append(Hook(functools.partial(pushing.push, trainer.model), at_steps=pushing.steps))
        self.steps_per_execution = StepsPerExecution(
            hooks,
            InFlight(wait_for_device, stop),
            start_step=self._start.step,
            num_steps=self._plan.num_steps,
            max_steps=config.hardware.max_steps_per_execution,
        )

    def catch_up(self) -> None:
        """Do what is due at the start and was not done, and make sure that there is a checkpoint to roll back to.

        Raises:
            RunStoppedError: the run was asked to stop meanwhile, or before.
        """
        step = self._start.step
        line = self._trainer.log.find(step, VALIDATION)
        if line is not None:
            self._figures = {name: value for name, value in line.items() if name not in ("step", "split", "phase")}
            self._evaluated_step = step
        elif step > 0 and (step % self._plan.eval_steps == 0 or step == self._plan.num_steps):
            self._evaluate(step)
        if self._trainer.can_roll_back and self._start.checkpoint is None:
            self._save(step)
        self._stop_if_asked(step)
        self._profile.begin_or_end(step)

    def figures_of(self, step: int) -> dict[str, float] | None:
        """Return the figures of the evaluation after `step`; None if the newest one is of another step."""
        return self._figures if self._evaluated_step == step else None

    def close(self) -> None:
        """End the profile and the progress bar."""
        self._profile.close()
        self._log.close()

    def _report(self, step: int) -> None:
        heartbeat.report("train", step)
        self._trainer.checkpoints.check()

    def _evaluate(self, step: int) -> None:
        if self._trainer.evaluate is None:
            return
        with self._log.clock_stopped(is_evaluation=True):
            figures = self._trainer.evaluate(self._stop)
            if figures is not None:  # else the next start evaluates
                self._figures, self._evaluated_step = figures, step
        if figures is not None:
            self._log.write_evaluation(step, figures)
            if self._trainer.is_best_so_far(step):
                self._save(step)

    def _save_by_the_clock(self, step: int) -> None:
        minutes = self._plan.save_minutes
        if minutes is not None and time.monotonic() - self._saved_seconds >= minutes * 60:
            self._save(step)

    def _save(self, step: int) -> None:
        if step == self._saved_step:
            return
        self._log.check_finite()  # a checkpoint of a run that diverged is no place to resume from
        self._saved_step, self._saved_seconds = step, time.monotonic()
        with self._log.clock_stopped():
            self._trainer.checkpoints.save(lambda: (self._record(step), self._trainer.state.read()))

    def _stop_if_asked(self, step: int) -> None:
        is_evaluated = self._trainer.evaluate is None or self._evaluated_step == step
        is_complete = step == self._plan.num_steps and is_evaluated
        if is_complete or not self._stop.is_agreed:
            return
        self._save(step)
        self._trainer.checkpoints.wait()
        raise RunStoppedError(
            f"Stopped{self._stop.in_words} at step {step:,} of {self._plan.num_steps:,}, saved. Run the same command "
            "again to continue."
        )

    def _record(self, step: int) -> CheckpointRecord:
        figures = self.figures_of(step)
        log = self._trainer.log
        return CheckpointRecord(
            step=step,
            row=self._plan.row_after(step, self._start.num_skipped_rows),
            fingerprint_sha256=self._trainer.run.fingerprint_sha256(self._trainer.phase.index),
            plan=asdict(self._plan),
            settings=self._trainer.phase.config.as_dict(),
            versions=self._trainer.versions,
            computation=asdict(self._trainer.computation),
            made_by=self._trainer.made_by,
            logged_step=self._log.logged_step,
            validation_loss=figures["loss"] if figures else None,
            validation_score=self._trainer.phase.task.score(figures) if figures else None,
            skipped=self._start.skipped,
            num_written_log_lines=(num_written := log.num_written),
            unwritten_log_lines=tuple(log.lines[num_written:]),
        )


def roll_back(trainer: Trainer, error: TrainingDivergedError, stop: StopRequest) -> ResumePoint:
    """Restore the last checkpoint before a divergence, and return the point to resume at without the rows since then.

    Which checkpoint that is follows from steps alone: a run that was killed meanwhile comes to the same rows.

    Args:
        trainer: whose state and log are set back.
        error: the divergence.
        stop: by which several workers wait for each other.

    Raises:
        TrainingDivergedError: the same, where rolling back is not asked for, was done too often, or has nowhere to go.
    """
    trainer.checkpoints.wait_for_pending()
    if not trainer.can_roll_back or len(trainer.start.skipped) >= trainer.phase.config.run.max_rollbacks:
        raise error
    stop.compare()  # the others read what the chief has written
    record = _restore(trainer, error)
    stop.compare()
    trainer.checkpoints.discard_after(record.step)
    trainer.model.optimizer.resume()
    num_rows = (error.step - record.step) * trainer.plan.global_batch_rows
    earlier = [rows for rows in trainer.start.skipped if rows.after_step <= record.step]
    trainer.log.rewind_to(record.step, len(earlier))
    trainer.log.add(
        error.step, ROLLBACK, {"reason": error.reason, "to_step": record.step, "num_skipped_rows": num_rows}
    )
    trainer.log.flush()
    logger.warning("%s Back to step %d, and on without the %d rows since then.", error, record.step, num_rows)
    skipped = (*earlier, SkippedRows(record.step, num_rows))
    return replace(resume_point(record, trainer.plan), skipped=skipped)


def _restore(trainer: Trainer, error: TrainingDivergedError) -> CheckpointRecord:
    """Restore the newest regular checkpoint from before the divergence; without one, any other."""

    def use(_: CheckpointRecord, arrays: Arrays) -> None:
        trainer.state.write(arrays)

    for interval_steps in (trainer.plan.save_steps, 1):
        record = trainer.checkpoints.restore_newest(
            trainer.run.owns,
            use,
            up_to=error.good_step,
            since=trainer.plan.first_step,
            interval_steps=interval_steps,
        )
        if record is not None:
            return record
    raise error
