"""The loop: a model is built and restored, fitted with what is due between its steps, rolled back and published."""

import functools
import gc
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import tensorflow as tf

from mlm_common.command_line import commit
from mlm_common.hub.push import HubPushError
from tokenizer_training.tokenizer import vocabulary_size
from train.checkpoints.manager import Checkpoints, TrainingState
from train.checkpoints.resume import (
    ResumePoint,
    check_checkpoint,
    describe_resume_point,
    installed_versions,
    resume_point,
)
from train.checkpoints.store import Arrays, CheckpointRecord, SkippedRows
from train.data.pipeline import ONE_PIPELINE, evaluation_batches, num_evaluation_batches, training_batches
from train.data.shards import TrainingInputs
from train.data.shuffle import SampleOrder
from train.metrics.log import MetricsLog
from train.metrics.log_files import ROLLBACK, VALIDATION
from train.metrics.training_log import Throughput, TrainingDivergedError, TrainingLog
from train.model.computation import Computation, choose_computation, describe_computation
from train.model.flops import full_speed_step_seconds
from train.model.from_pretrained import load_initial_weights
from train.publishing.publisher import Publisher
from train.publishing.push_to_hub import PushToHub
from train.run import (
    Run,
    clear_folder_if_asked,
    computation_so_far,
    device_kind,
    newest_phase,
    print_result,
    print_table,
    wait_for_workers,
)
from train.runtime import heartbeat
from train.runtime.collectives import check_agreement
from train.runtime.hooks import Hook, Profile, StepsPerExecution
from train.runtime.plan import Plan, phase_index
from train.runtime.preemption import InFlight, RunStoppedError, StopRequest
from train.runtime.run_folder import has_checkpoint
from train.runtime.strategy import distribute_batches
from train.train_step import Evaluator, PretrainingModel, build_evaluator, build_model, prove_tpu_layers

logger = logging.getLogger(__name__)


@dataclass
class Trainer:
    """A compiled model and what it is fitted with: `restore` it, `fit` it to the plan's last step, `publish` it."""

    run: Run
    model: PretrainingModel
    plan: Plan
    order: SampleOrder
    evaluate: Evaluator | None
    log: MetricsLog
    state: TrainingState
    checkpoints: Checkpoints
    full_speed_step_seconds: float | None
    computation: Computation
    made_by: dict[str, str]
    start: ResumePoint = field(default_factory=ResumePoint)
    versions: dict[str, str] = field(default_factory=installed_versions)

    @property
    def can_roll_back(self) -> bool:
        """Whether a blow-up leads back to a checkpoint, and not to the end of the run."""
        return self.run.config.run.on_nonfinite == "skip"

    def load_initial_weights(self) -> None:
        """Load the weights of `--init-from`, if it is given and there is no checkpoint to resume from.

        Raises:
            InputError: they are not there, or do not fit.
        """
        run, init_from = self.run, self.run.config.model.init_from
        if init_from is not None and (run.starts_anew or not has_checkpoint(run.output_dir)):
            num_ids = vocabulary_size(run.inputs.tokenizer)
            load_initial_weights(self.model.network, init_from, num_ids, run.task.model_class)

    def restore(self) -> None:
        """Restore the newest checkpoint, if there is one.

        Raises:
            InputError: the run cannot resume from there with this plan, no checkpoint is whole, or the workers of a run
                found different ones.
        """
        run = self.run

        def use(record: CheckpointRecord, arrays: Arrays) -> None:
            check_checkpoint(record, run.plans(self.plan.num_replicas)[phase_index(record.plan)])
            self.state.write(arrays)

        self.start = resume_point(self.checkpoints.restore_newest(run.is_of_run, use), self.plan)
        rule = (
            f"--output-dir must be one folder that all workers see; they found other checkpoints in {run.output_dir}."
        )
        check_agreement(self.model.distribute_strategy, run.cluster, {"newest step": self.start.step}, rule=rule)
        saved = self.start.checkpoint
        self.log.restore(
            self.start.step,
            len(self.start.skipped),
            num_written=saved.num_written_log_lines if saved else 0,
            unwritten=saved.unwritten_log_lines if saved else (),
        )

    @property
    def phase_to_resume(self) -> int:
        """The phase that the restored checkpoint leads to, counted from 0."""
        saved = self.start.checkpoint
        if saved is None:
            return 0
        is_end_of_last = self.start.step == self.plan.first_step and phase_index(saved.plan) == self.run.index - 1
        return self.run.index if is_end_of_last else phase_index(saved.plan)

    def release(self) -> None:
        """Let go of the model, so that the next phase's finds its memory free."""
        del self.model, self.state, self.evaluate
        gc.collect()

    def prove_layers(self) -> None:
        """Let the first rows decide between the layers for TPUs and the stock ones, where that is open."""
        if self.computation.tpu_layers is None:
            heartbeat.report("prove")
            strategy = self.model.distribute_strategy
            batch = next(iter(distribute_batches(strategy, self.batches_from(self.start))))
            self.computation = replace(self.computation, tpu_layers=prove_tpu_layers(self.model, batch, strategy))

    def print_start(self) -> None:
        """Print the plan, how it is computed, where it begins or resumes, and a first row as the model sees it."""
        path = self.checkpoints.path(self.start.step)
        computation = asdict(self.computation)
        start = describe_resume_point(
            self.start, self.plan, self.run.config, self.versions, computation, self.made_by, path
        )
        computed = describe_computation(computation, on_tpu=self.run.config.hardware.wants_tpu)
        rows = {
            **self.run.describe(self.plan, self.model.network.count_params()),
            "computation": computed,
            "start": "\n".join(start),
        }
        print_table(rows)
        for title, text in self.run.task.describe_row(self.first_rows(), self.run.inputs.tokenizer).items():
            logger.info("%s: %s", title, text)

    def fit(self, stop: StopRequest | None = None, pushing: PushToHub | None = None) -> dict[str, float] | None:
        """Train, log, evaluate, save and push; return the last step's evaluation, None without validation rows.

        Raises:
            RunStoppedError: `stop` was requested, and something is left to do; all is saved.
            RunFailedError: training diverged, or a checkpoint could not be written.
        """
        with self.log, self.checkpoints:
            return self._fit(stop or StopRequest(), pushing)

    def _fit(self, stop: StopRequest, pushing: PushToHub | None) -> dict[str, float] | None:
        while True:
            try:
                with closing(TrainingHooks(self, stop, pushing)) as hooks:
                    hooks.catch_up()
                    if num_steps := self.plan.num_steps - self.start.step:
                        batches = distribute_batches(self.model.distribute_strategy, self.batches_from(self.start))
                        self.model.fit(
                            batches, steps_per_epoch=num_steps, verbose=0, callbacks=[hooks.steps_per_execution]
                        )
                    self.checkpoints.wait()
                self.log.draw()
                return hooks.figures
            except TrainingDivergedError as error:
                self.start = roll_back(self, error, stop)

    def publish(self, publisher: Publisher, figures: dict[str, float] | None) -> None:
        """Export the model, push it if asked to, and print where all is, with the figures of the last evaluation.

        Raises:
            HubPushError: the push did not succeed; the export is complete.
        """
        heartbeat.report("export", self.plan.num_steps)
        last = publisher.take(self.model.network, self.plan.num_steps, self.log.lines)
        where = {"checkpoints": self.checkpoints.describe(), "model": publisher.export_folder}
        try:
            with heartbeat.kept_up("publish", last.step):
                publisher.publish(last, f"Pretrained for {last.step:,} steps")
        except HubPushError:
            print_result(self.run, figures, where)
            raise
        print_result(self.run, figures, where)

    def batches_from(self, start: ResumePoint) -> Callable[[tf.distribute.InputContext], tf.data.Dataset]:
        """Prepare what makes the batches of one input pipeline, from a step on."""
        return functools.partial(
            training_batches,
            self.order,
            self.model.task.features(self.plan.max_length),
            global_batch_rows=self.plan.global_batch_rows,
            start_step=start.step - self.plan.first_step,
            num_steps=max(1, self.plan.num_steps - start.step),
            num_left_out_rows=self.plan.first_row + start.num_skipped_rows,
        )

    def first_rows(self) -> Any:
        """Read the first batch, and prepare it as the first step does."""
        batch = next(iter(self.batches_from(self.start)(ONE_PIPELINE).take(1)))
        return self.model.prepare_batch(batch, self.start.step)


class TrainingHooks:
    """What is done between the steps of one `fit`: figures are logged, the model is evaluated, saved and pushed.

    figures: of the newest evaluation.
    steps_per_execution: the callback of `fit` that does it.
    """

    def __init__(self, trainer: Trainer, stop: StopRequest, pushing: PushToHub | None):
        self.figures: dict[str, float] | None = None
        self._trainer = trainer
        self._plan = trainer.plan
        self._start = trainer.start
        self._stop = stop
        self._evaluated_step = -1
        self._saved_step = -1 if self._start.checkpoint is None else self._start.step
        self._saved_seconds = time.monotonic()
        config = trainer.run.config
        self._throughput = Throughput(trainer.plan, trainer.full_speed_step_seconds)
        self._log = TrainingLog(
            *(trainer.model, trainer.log, trainer.plan),
            start_step=self._start.step,
            logged_step=self._start.logged_step,
            num_skipped_rows=self._start.num_skipped_rows,
            take_wait_seconds=lambda: self.steps_per_execution.take_wait_seconds(),
            throughput=self._throughput,
            max_loss_rise=config.run.max_loss_rise,
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
            Hook(self._log.write_train, every_steps=config.run.log_steps),
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
        """Do what is due at the start and was not done, and see to it that there is something to roll back to.

        Raises:
            RunStoppedError: the run was asked to stop meanwhile, or before.
        """
        step = self._start.step
        line = self._trainer.log.find(step, VALIDATION)
        if line is not None:
            self.figures = {name: value for name, value in line.items() if name not in ("step", "split", "phase")}
            self._evaluated_step = step
        elif step > 0 and (step % self._plan.eval_steps == 0 or step == self._plan.num_steps):
            self._evaluate(step)
        if self._trainer.can_roll_back and self._start.checkpoint is None:
            self._save(step)
        self._stop_if_asked(step)
        self._profile.begin_or_end(step)

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
        with self._throughput.clock_stopped():
            figures = self._trainer.evaluate(self._stop)
            if figures is not None:  # else it is made up for at the next start
                self.figures, self._evaluated_step = figures, step
                self._log.write_evaluation(step, figures)

    def _save_by_the_clock(self, step: int) -> None:
        minutes = self._plan.save_minutes
        if minutes is not None and time.monotonic() - self._saved_seconds >= minutes * 60:
            self._save(step)

    def _save(self, step: int) -> None:
        if step == self._saved_step:
            return
        self._log.check_finite()  # a checkpoint of a run that diverged is no place to resume from
        self._saved_step, self._saved_seconds = step, time.monotonic()
        with self._throughput.clock_stopped():
            self._trainer.checkpoints.save(lambda: (self._record(step), self._trainer.state.read()))

    def _stop_if_asked(self, step: int) -> None:
        is_evaluated = self._trainer.evaluate is None or self._evaluated_step == step
        is_complete = step == self._plan.num_steps and is_evaluated
        if is_complete or not self._stop.is_agreed:
            return
        self._save(step)
        self._trainer.checkpoints.wait()
        raise RunStoppedError(
            f"The run was asked to stop ({self._stop.reason or 'on another worker'}) and has, after step {step:,} of "
            f"{self._plan.num_steps:,}, which is saved. Give the same command again: it resumes from there."
        )

    def _record(self, step: int) -> CheckpointRecord:
        is_evaluated = self.figures is not None and self._evaluated_step == step
        log = self._trainer.log
        return CheckpointRecord(
            step=step,
            row=self._plan.row_after(step, self._start.num_skipped_rows),
            fingerprint_sha256=self._trainer.run.fingerprint_sha256,
            plan=asdict(self._plan),
            settings=self._trainer.run.config.as_dict(),
            versions=self._trainer.versions,
            computation=asdict(self._trainer.computation),
            made_by=self._trainer.made_by,
            logged_step=self._log.logged_step,
            validation_loss=self.figures["loss"] if self.figures and is_evaluated else None,
            skipped=self._start.skipped,
            num_written_log_lines=(num_written := log.num_written),
            unwritten_log_lines=tuple(log.lines[num_written:]),
        )


def roll_back(trainer: Trainer, error: TrainingDivergedError, stop: StopRequest) -> ResumePoint:
    """Restore the last checkpoint before a blow-up, and return the point to resume at without the rows since then.

    Which checkpoint that is follows from steps alone: a run that was killed meanwhile comes to the same rows.

    Args:
        trainer: whose state and log are set back.
        error: the blow-up.
        stop: by which several workers wait for each other.

    Raises:
        TrainingDivergedError: the same, where rolling back is not asked for, was done too often, or has nowhere to go.
    """
    trainer.checkpoints.settle()
    if not trainer.can_roll_back or len(trainer.start.skipped) >= trainer.run.config.run.max_rollbacks:
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
    """Restore the newest regular checkpoint from before the blow-up; another one where there is none."""

    def use(_: CheckpointRecord, arrays: Arrays) -> None:
        trainer.state.write(arrays)

    for interval_steps in (trainer.plan.save_steps, 1):
        record = trainer.checkpoints.restore_newest(
            trainer.run.is_of_run,
            use,
            up_to=error.good_step,
            since=trainer.plan.first_step,
            interval_steps=interval_steps,
        )
        if record is not None:
            return record
    raise error


def restored_trainers(run: Run, strategy: tf.distribute.Strategy) -> Iterator[Trainer]:
    """Yield a trainer for each phase that is not over, built and restored when the one before it has been fitted.

    Raises:
        InputError: the initial weights are not there or do not fit, or the run cannot resume from its checkpoints.
    """
    index = newest_phase(run)
    while True:
        phase = run.phases[index]
        heartbeat.report("build")
        trainer = build_trainer(phase, phase.plan(strategy.num_replicas_in_sync), strategy)
        trainer.load_initial_weights()
        clear_folder_if_asked(phase, strategy)
        trainer.restore()
        index = trainer.phase_to_resume
        if index == phase.index:  # else the newest checkpoint of this phase is damaged, and one before it is whole
            trainer.prove_layers()
            yield trainer
            index += 1
            if index == len(run.phases):
                return
            wait_for_workers(run, strategy)  # the others read what the chief has written
        trainer.release()


def build_trainer(run: Run, plan: Plan, strategy: tf.distribute.Strategy) -> Trainer:
    """Build the trainer of a run, with fresh weights."""
    config, inputs = run.config, run.inputs
    num_predictions = run.task.num_predictions(config.optimization.per_replica_batch_size * plan.max_length)
    recorded = computation_so_far(run, strategy)
    computation = choose_computation(config, run.model_config, plan, num_predictions, recorded)
    model = build_model(config, inputs, run.task, run.model_config, plan, strategy, computation)
    is_chief = strategy.extended.should_checkpoint
    manifest = inputs.eval_shards.manifest if inputs.eval_shards else None
    return Trainer(
        run=run,
        model=model,
        plan=plan,
        order=SampleOrder(
            inputs.train_shards.paths,
            inputs.train_shards.num_rows_per_shard,
            config.run.seed,
            config.data.shuffle_buffer_size,
        ),
        evaluate=_evaluator(inputs, model, plan, strategy, computation.jit_compile),
        log=MetricsLog(
            run.output_dir,
            manifest.unigram_entropy_nats if manifest and run.task.card.predicts_tokens else None,
            title=run.task.card.model_kind.capitalize(),
            loss_unit=run.task.card.loss_unit,
            is_chief=is_chief,
        ),
        state=TrainingState(model),
        checkpoints=Checkpoints(
            run.output_dir,
            num_kept=config.run.keep_checkpoints,
            kept_interval_steps=plan.save_steps if config.run.on_nonfinite == "skip" else 0,
            first_step=plan.first_step,
            is_chief=is_chief,
        ),
        made_by={"device": device_kind(config.hardware), "commit": commit()},
        full_speed_step_seconds=full_speed_step_seconds(config, run.model_config, plan, num_predictions),
        computation=computation,
    )


def _evaluator(
    inputs: TrainingInputs, model: PretrainingModel, plan: Plan, strategy: tf.distribute.Strategy, jit_compile: bool
) -> Evaluator | None:
    if inputs.eval_shards is None:
        return None
    global_batch_rows = plan.global_batch_rows // model.num_micro_batches
    batches_of = functools.partial(
        evaluation_batches,
        inputs.eval_shards,
        model.task.features(plan.max_length),
        model.task.prepare_row,
        global_batch_rows=global_batch_rows,
    )
    return build_evaluator(
        model,
        distribute_batches(strategy, batches_of),
        num_evaluation_batches(inputs.eval_shards, global_batch_rows),
        strategy,
        jit_compile=jit_compile,
    )
