"""One run of training: model, optimizer, batches, evaluation, log and checkpoints, put together."""

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import tensorflow as tf
import tf_keras
from transformers import PretrainedConfig

from mlm_common.storage import open_folder
from tokenizer_training.tokenizer import vocabulary_size
from train.checkpoints.fingerprint import fingerprint, fingerprint_sha256
from train.checkpoints.manager import Checkpoints
from train.checkpoints.resume import ResumePoint, check_checkpoint, installed_versions, resume_point
from train.checkpoints.state import TrainingState
from train.checkpoints.store import Arrays, CheckpointRecord, SkippedRows
from train.config import TrainingConfig
from train.data.pipeline import ONE_PIPELINE, evaluation_batches, num_evaluation_batches, training_batches
from train.data.shards import TrainingInputs
from train.data.shuffle import SampleOrder
from train.metrics.evaluation import Evaluator, build_evaluator
from train.metrics.log import ROLLBACK, VALIDATION, MetricsLog
from train.metrics.profiler import Profile
from train.metrics.throughput import Throughput
from train.metrics.training_log import EverySteps, TrainingDivergedError, TrainingLog
from train.model.build import build_network
from train.model.flops import full_speed_step_seconds
from train.model.init_from import load_initial_weights
from train.optimizer import build_optimizer
from train.publishing.push_to_hub import PushToHubCallback
from train.runtime import heartbeat
from train.runtime.plan import Plan
from train.runtime.preemption import RunStoppedError, StopRequest
from train.runtime.run_folder import TENSORBOARD_FOLDER
from train.runtime.steps_per_execution import Launches
from train.runtime.strategy import compiles_with_xla, computes_as_suits_tpu, distribute_batches
from train.tasks.task import Task
from train.train_step import PretrainingModel


class Fitting:
    """One call of `fit`, with what is logged, evaluated and saved between its launches."""

    def __init__(
        self, trainer: "Trainer", start: ResumePoint, stop: StopRequest, pushing: PushToHubCallback | None = None
    ):
        self._trainer = trainer
        self._plan = trainer.plan
        self._start = start
        self._stop = stop
        self._pushing = pushing
        self._evaluation: tuple[int, dict[str, float]] | None = None
        self._saved_seconds = time.monotonic()
        self._launches = self._build_launches()
        self._throughput = Throughput(trainer.plan, trainer.full_speed_step_seconds)
        self._log = TrainingLog(
            *(trainer.model, trainer.log, trainer.plan),
            start_step=start.step,
            logged_step=start.logged_step,
            num_skipped_rows=start.num_skipped_rows,
            launches=self._launches,
            throughput=self._throughput,
            max_loss_rise=trainer.config.run.max_loss_rise,
        )

    def run(self) -> dict[str, float] | None:
        """Train to the end; return the figures of the last evaluation, None without validation rows.

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
            self._evaluation = step, {name: value for name, value in line.items() if name not in ("step", "split")}
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
                f"of {self._plan.num_steps:,}, which is saved. Give the same command again: it resumes from there."
            )

    def _is_time_to_save(self) -> bool:
        minutes = self._trainer.config.run.save_minutes
        return minutes is not None and time.monotonic() - self._saved_seconds >= minutes * 60

    def _save(self, step: int) -> None:
        self._log.check_finite()  # a checkpoint of a run that diverged is no place to resume from
        self._saved_seconds = time.monotonic()
        with self._throughput.clock_stopped():
            self._trainer.checkpoints.save(lambda: (self._record(step), self._trainer.state.read()))

    def _record(self, step: int) -> CheckpointRecord:
        is_evaluated = self._evaluation is not None and self._evaluation[0] == step
        return CheckpointRecord(
            step=step,
            row=self._plan.row_after(step, self._start.num_skipped_rows),
            fingerprint_sha256=self._trainer.fingerprint_sha256,
            plan=asdict(self._plan),
            settings=self._trainer.config.as_dict(),
            versions=self._trainer.versions,
            logged_step=self._log.logged_step,
            validation_loss=self._evaluation[1]["loss"] if self._evaluation and is_evaluated else None,
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
            max_steps=self._trainer.config.hardware.max_steps_per_execution,
        )

    def _build_profile(self) -> Profile:
        run = self._trainer.config.run
        # Launches end at these steps on all workers, and one of them writes the trace.
        steps = run.profiled_steps if self._trainer.log.is_chief else None
        return Profile(open_folder(str(run.output_dir)).path_of(TENSORBOARD_FOLDER), steps, start_step=self._start.step)


logger = logging.getLogger(__name__)


def roll_back(trainer: "Trainer", start: ResumePoint, error: TrainingDivergedError, stop: StopRequest) -> ResumePoint:
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
    trainer.model.optimizer.resume()
    num_rows = (error.step - record.step) * trainer.plan.global_batch_rows
    earlier = [rows for rows in start.skipped if rows.after_step <= record.step]
    trainer.log.rewind_to(record.step, len(earlier))
    trainer.log.add(
        error.step, ROLLBACK, {"reason": error.reason, "to_step": record.step, "num_skipped_rows": num_rows}
    )
    trainer.log.flush()
    logger.warning("%s Back to step %d, and on without the %d rows since then.", error, record.step, num_rows)
    skipped = (*earlier, SkippedRows(record.step, num_rows))
    return ResumePoint(record.step, record.logged_step, skipped, record)


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


@dataclass(frozen=True)
class Trainer:
    """A model that is compiled and restored, and what it is fitted with; `fit` runs it to the plan's last step."""

    model: PretrainingModel
    plan: Plan
    start: ResumePoint
    order: SampleOrder
    evaluate: Evaluator | None
    log: MetricsLog
    state: TrainingState
    checkpoints: Checkpoints
    config: TrainingConfig
    fingerprint_sha256: str
    versions: dict[str, str]
    full_speed_step_seconds: float | None

    @property
    def can_roll_back(self) -> bool:
        """Whether a blow-up leads back to a checkpoint, and not to the end of the run."""
        return self.config.run.on_nonfinite == "skip"

    def batches_from(self, start: ResumePoint) -> Callable[[tf.distribute.InputContext], tf.data.Dataset]:
        """Return what makes the batches of one input pipeline, from a start on."""
        return functools.partial(
            training_batches,
            self.order,
            self.model.task.features(self.plan.max_length),
            global_batch_rows=self.plan.global_batch_rows,
            start_step=start.step,
            num_steps=max(1, self.plan.num_steps - start.step),
            num_left_out_rows=start.num_skipped_rows,
        )

    def first_rows(self) -> Any:
        """Read the first batch, and prepare it as the first step does."""
        batch = next(iter(self.batches_from(self.start)(ONE_PIPELINE).take(1)))
        return self.model.prepare_batch(batch, self.start.step)

    def fit(self, stop: StopRequest | None = None, pushing: PushToHubCallback | None = None) -> dict[str, float] | None:
        """Train, log, evaluate, save and push; return the figures of the last evaluation, None without validation rows.

        Raises:
            RunStoppedError: `stop` was requested; all is saved.
            RunFailedError: training diverged, or a checkpoint could not be written.
        """
        start, stop = self.start, stop or StopRequest()
        while True:
            try:
                evaluation = Fitting(self, start, stop, pushing).run()
                break
            except TrainingDivergedError as error:
                start = roll_back(self, start, error, stop)
        self.log.draw()
        return evaluation


def build_model(
    config: TrainingConfig,
    inputs: TrainingInputs,
    task: Task,
    model_config: PretrainedConfig,
    plan: Plan,
    strategy: tf.distribute.Strategy,
) -> PretrainingModel:
    """Return the model of a run with its optimizer, compiled, with fresh weights."""
    tf_keras.mixed_precision.set_global_policy("mixed_bfloat16" if config.hardware.bfloat16 else "float32")
    jit_compile = compiles_with_xla(config.hardware)
    with strategy.scope():
        model = PretrainingModel(
            build_network(
                model_config,
                config.model,
                vocabulary_size=vocabulary_size(inputs.tokenizer),
                seed=config.run.seed,
                tpu_layers=computes_as_suits_tpu(config.hardware),
                model_class=task.model_class,
            ),
            task,
            seed=config.run.seed,
            num_micro_batches=config.optimization.gradient_accumulation_steps,
            max_grad_norm=config.optimization.max_grad_norm,
        )
        optimizer = build_optimizer(
            config.optimization,
            num_steps=plan.num_steps,
            num_warmup_steps=plan.num_warmup_steps,
            num_decay_steps=plan.num_decay_steps,
        )
        optimizer.build(model.network.trainable_variables)
        model.compile(
            optimizer=optimizer, jit_compile=jit_compile, steps_per_execution=config.hardware.max_steps_per_execution
        )
    return model


def build_trainer(
    config: TrainingConfig,
    inputs: TrainingInputs,
    task: Task,
    model_config: PretrainedConfig,
    plan: Plan,
    strategy: tf.distribute.Strategy,
) -> Trainer:
    """Return the trainer of a run, restored from its newest checkpoint where there is one.

    Raises:
        InputError: it cannot go on from there with this plan, or no checkpoint is whole.
    """
    model = build_model(config, inputs, task, model_config, plan, strategy)
    output_dir = str(config.run.output_dir)
    is_chief = strategy.extended.should_checkpoint
    state = TrainingState(model)
    checkpoints = Checkpoints(
        output_dir,
        num_kept=config.run.keep_checkpoints,
        kept_interval_steps=plan.save_steps if config.run.on_nonfinite == "skip" else 0,
        is_chief=is_chief,
    )
    sha256 = fingerprint_sha256(fingerprint(config, inputs, model_config.to_diff_dict()))

    def restore(record: CheckpointRecord, arrays: Arrays) -> None:
        check_checkpoint(record, plan)
        state.write(arrays)

    start = resume_point(checkpoints.restore_newest(sha256, restore))
    if config.model.init_from is not None and start.checkpoint is None:
        num_ids = vocabulary_size(inputs.tokenizer)
        load_initial_weights(model.network, config.model.init_from, num_ids, task.model_class)
    manifest = inputs.eval_shards.manifest if inputs.eval_shards else None
    log = MetricsLog(output_dir, manifest.unigram_entropy_nats if manifest else None, is_chief=is_chief)
    log.rewind_to(start.step, len(start.skipped))
    shards, data = inputs.train_shards, config.data
    return Trainer(
        model=model,
        plan=plan,
        start=start,
        order=SampleOrder(shards.paths, shards.num_rows_per_shard, config.run.seed, data.shuffle_buffer_size),
        evaluate=_evaluator(inputs, model, plan, strategy, compiles_with_xla(config.hardware)),
        log=log,
        state=state,
        checkpoints=checkpoints,
        config=config,
        fingerprint_sha256=sha256,
        versions=installed_versions(),
        full_speed_step_seconds=full_speed_step_seconds(
            config,
            model_config,
            plan,
            task.num_predictions(config.optimization.per_replica_batch_size * plan.max_length),
        ),
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
