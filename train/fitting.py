"""Training from one start to the end of the run, or to a stop: what is done after which update."""

import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from tokenizer_training import storage
from train import heartbeat
from train.callbacks import EverySteps, TrainingLog
from train.checkpoint_record import CheckpointRecord
from train.evaluation import Evaluation
from train.hub import PushToHubCallback
from train.launch import Launches
from train.metrics_log import VALIDATION
from train.output_folder import TENSORBOARD_FOLDER
from train.preemption import RunStoppedError, StopRequest
from train.profiling import Profile
from train.start import Start
from train.strategy import distribute_batches
from train.throughput import Throughput

if TYPE_CHECKING:
    from train.trainer import Trainer


class Fitting:
    """One call of `fit`, with what is logged, evaluated and saved between its launches."""

    def __init__(self, trainer: "Trainer", start: Start, stop: StopRequest, pushing: PushToHubCallback | None = None):
        self._trainer = trainer
        self._plan = trainer.plan
        self._start = start
        self._stop = stop
        self._pushing = pushing
        self._evaluation: tuple[int, Evaluation] | None = None
        self._saved_seconds = time.monotonic()
        self._launches = self._build_launches()
        self._throughput = Throughput(trainer.plan, trainer.full_speed_update_seconds)
        self._log = TrainingLog(
            *(trainer.model, trainer.log, trainer.plan, start),
            launches=self._launches,
            throughput=self._throughput,
            max_loss_rise=trainer.config.run.max_loss_rise,
        )

    def run(self) -> Evaluation | None:
        """Train to the end; return the last evaluation, None without validation rows.

        Raises:
            RunStoppedError: there was a request to stop; all is saved.
        """
        plan, model, start_step = self._plan, self._trainer.model, self._start.step
        profile = self._build_profile()
        actions = (
            (self._trainer.config.run.log_steps, self._log.write_train),
            (plan.eval_steps, self._evaluate),
            (1, self._after_launch),
        )
        every_steps = [
            EverySteps(interval_steps, action, start_step=start_step, num_steps=plan.num_steps)
            for interval_steps, action in actions
        ]
        try:
            self._catch_up()
            remaining_steps = plan.num_steps - start_step
            if remaining_steps > 0:
                batches = distribute_batches(model.distribute_strategy, self._trainer.batches_from(self._start))
                callbacks = [self._launches, profile, *every_steps]
                if self._pushing is not None:
                    callbacks.append(self._pushing.counting_from(start_step))
                model.fit(batches, steps_per_epoch=remaining_steps, verbose=0, callbacks=callbacks)
            self._trainer.checkpoints.wait()
        finally:
            profile.close()
            self._log.close()
        return self._evaluation[1] if self._evaluation else None

    def _catch_up(self) -> None:
        """Do what is due at the start and was not done, and see to it that there is something to roll back to."""
        step = self._start.step
        line = self._trainer.log.find(step, VALIDATION)
        if line is not None:
            figures = line["loss"], line["masked_accuracy"], line["num_masked_tokens"]
            self._evaluation = step, Evaluation(*figures)
        elif step > 0 and (step % self._plan.eval_steps == 0 or step == self._plan.num_steps):
            self._evaluate(step)
        if self._trainer.can_roll_back and self._start.checkpoint is None:
            self._save(step)

    def _evaluate(self, step: int) -> None:
        if self._trainer.evaluate is None:
            return
        with self._throughput.clock_stopped():
            evaluation = self._trainer.evaluate(lambda: self._stop.may_interrupt)
            if evaluation is not None:  # else it is made up for at the next start
                self._evaluation = step, evaluation
                self._log.write_evaluation(step, evaluation)

    def _after_launch(self, step: int) -> None:
        """Save where it is due, and stop if asked to."""
        heartbeat.report("train", step)
        checkpoints = self._trainer.checkpoints
        checkpoints.check()
        is_end = step == self._plan.num_steps
        stops = not is_end and self._stop.is_due(step)
        if stops or is_end or step % self._plan.save_steps == 0 or self._is_time_to_save():
            self._save(step)
        if stops:
            checkpoints.wait()
            raise RunStoppedError(
                f"The run was asked to stop ({self._stop.reason or 'on another worker'}) and has, after step {step:,} "
                f"of {self._plan.num_steps:,}, which is saved. Give the same command again: it goes on from there."
            )

    def _is_time_to_save(self) -> bool:
        minutes = self._trainer.config.run.save_minutes
        return minutes is not None and time.monotonic() - self._saved_seconds >= minutes * 60

    def _save(self, step: int) -> None:
        self._log.check_finite()  # a checkpoint of a run that diverged is no place to go on from
        self._saved_seconds = time.monotonic()
        with self._throughput.clock_stopped():
            self._trainer.checkpoints.save(lambda: (self._record(step), self._trainer.state.read()))

    def _record(self, step: int) -> CheckpointRecord:
        is_evaluated = self._evaluation is not None and self._evaluation[0] == step
        return CheckpointRecord(
            step=step,
            row=self._start.row(step, self._plan.global_batch_rows),
            fingerprint_sha256=self._trainer.fingerprint_sha256,
            plan=asdict(self._plan),
            settings=self._trainer.config.as_dict(),
            versions=self._trainer.versions,
            logged_step=self._log.logged_step,
            validation_loss=self._evaluation[1].loss if self._evaluation and is_evaluated else None,
            skipped=self._start.skipped,
        )

    def _build_launches(self) -> Launches:
        run = self._trainer.config.run
        intervals_steps: tuple[int, ...] = (run.log_steps, self._plan.eval_steps, self._plan.save_steps)
        if self._stop.interval_steps > 1:
            intervals_steps += (self._stop.interval_steps,)
        return Launches(
            intervals_steps,
            (*(run.profiled_steps or ()), *(self._pushing.steps if self._pushing else ())),
            start_step=self._start.step,
            num_steps=self._plan.num_steps,
            max_steps=self._trainer.config.hardware.max_steps_per_launch,
        )

    def _build_profile(self) -> Profile:
        run = self._trainer.config.run
        # Launches end at these steps on all workers, and one of them writes the trace.
        steps = run.profiled_steps if self._trainer.log.is_chief else None
        return Profile(storage.join(str(run.output_dir), TENSORBOARD_FOLDER), steps, start_step=self._start.step)
