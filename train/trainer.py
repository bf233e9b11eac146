"""One run of training: model, optimizer, batches, evaluation, log and checkpoints, put together and fitted."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tensorflow as tf
import tf_keras
from transformers import PretrainedConfig

from tokenizer_training import storage
from tokenizer_training.tokenizer import special_ids, vocabulary_size
from train.callbacks import EverySteps, TrainingLog
from train.checkpoints import Checkpoints
from train.config import TrainingConfig
from train.data import ONE_PIPELINE, evaluation_batches, num_evaluation_batches, training_batches
from train.evaluation import Evaluation, build_evaluator
from train.initial_weights import start_from
from train.inputs import TrainingInputs
from train.launch import Launches
from train.metrics_log import MetricsLog
from train.model import build_masked_lm
from train.optimizer import build_optimizer
from train.output_folder import TENSORBOARD_FOLDER
from train.plan import Plan
from train.pretraining_model import PretrainingModel
from train.profiling import Profile
from train.sample_order import SampleOrder
from train.strategy import compiles_with_xla, computes_as_suits_tpu, distribute_batches
from train.throughput import Throughput, full_speed_update_seconds


@dataclass(frozen=True)
class Trainer:
    """A model that is compiled and restored, and what it is fitted with; `fit` runs it to the plan's last step."""

    model: PretrainingModel
    plan: Plan
    start_step: int
    batches_of: Callable[[tf.distribute.InputContext], tf.data.Dataset]
    evaluate: Callable[[], Evaluation] | None
    log: MetricsLog
    checkpoints: Checkpoints
    config: TrainingConfig
    full_speed_update_seconds: float | None

    def first_masked_row(self) -> tuple[list[int], list[int]]:
        """Return the ids of the first row of the first batch, and what the model sees of it at the first update."""
        input_ids = next(iter(self.batches_of(ONE_PIPELINE).take(1)))
        masked = self.model.mask_batch(input_ids, self.start_step)
        return input_ids[0].numpy().tolist(), masked.input_ids[0].numpy().tolist()

    def fit(
        self, more_callbacks: Sequence[tf_keras.callbacks.Callback] = (), *, stops: Sequence[int] = ()
    ) -> Evaluation | None:
        """Train, log, evaluate and save; return the last evaluation, None without validation rows.

        Args:
            more_callbacks: act after what is done here.
            stops: updates after which these have something to do.
        """
        launches, profile = self._launches(stops), self._profile()
        throughput = Throughput(self.plan, self.full_speed_update_seconds)
        training_log = TrainingLog(
            self.model, self.log, self.plan, self.start_step, launches=launches, throughput=throughput
        )
        latest: list[Evaluation] = []

        def evaluate(step: int) -> None:
            if self.evaluate is None:
                return
            with throughput.clock_stopped():
                latest[:] = [self.evaluate()]
                training_log.write_evaluation(step, latest[0])

        def save(step: int) -> None:
            training_log.check_finite()  # a checkpoint of a run that diverged is no place to go on from
            with throughput.clock_stopped():
                self.checkpoints.save(step)

        actions = (
            (self.config.run.log_steps, training_log.write_train),
            (self.plan.eval_steps, evaluate),
            (self.plan.save_steps, save),
        )
        every_steps = [
            EverySteps(interval_steps, action, start_step=self.start_step, num_steps=self.plan.num_steps)
            for interval_steps, action in actions
        ]
        remaining_steps = self.plan.num_steps - self.start_step
        try:
            if remaining_steps > 0:
                batches = distribute_batches(self.model.distribute_strategy, self.batches_of)
                callbacks = [launches, profile, *every_steps, *more_callbacks]
                self.model.fit(batches, steps_per_epoch=remaining_steps, verbose=0, callbacks=callbacks)
            else:
                evaluate(self.plan.num_steps)
        finally:
            profile.close()
            training_log.close()
        self.log.draw()
        return latest[0] if latest else None

    def _launches(self, stops: Sequence[int]) -> Launches:
        return Launches(
            (self.config.run.log_steps, self.plan.eval_steps, self.plan.save_steps),
            (*(self.config.run.profiled_steps or ()), *stops),
            start_step=self.start_step,
            num_steps=self.plan.num_steps,
            max_steps=self.config.hardware.max_steps_per_launch,
        )

    def _profile(self) -> Profile:
        folder = storage.join(str(self.config.run.output_dir), TENSORBOARD_FOLDER)
        # Launches end at these steps on all workers, and one of them writes the trace.
        steps = self.config.run.profiled_steps if self.log.is_chief else None
        return Profile(folder, steps, start_step=self.start_step)


def build_model(
    config: TrainingConfig,
    inputs: TrainingInputs,
    model_config: PretrainedConfig,
    plan: Plan,
    strategy: tf.distribute.Strategy,
) -> PretrainingModel:
    """Return the model of a run with its optimizer, compiled, with fresh weights."""
    tf_keras.mixed_precision.set_global_policy("mixed_bfloat16" if config.hardware.bfloat16 else "float32")
    jit_compile = compiles_with_xla(config.hardware)
    with strategy.scope():
        model = PretrainingModel(
            build_masked_lm(
                model_config,
                config.model,
                vocabulary_size=vocabulary_size(inputs.tokenizer),
                seed=config.run.seed,
                tpu_layers=computes_as_suits_tpu(config.hardware),
            ),
            inputs.masking_rule(config.masking),
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
        optimizer.build(model.masked_lm.trainable_variables)
        model.compile(
            optimizer=optimizer, jit_compile=jit_compile, steps_per_execution=config.hardware.max_steps_per_launch
        )
    return model


def build_trainer(
    config: TrainingConfig,
    inputs: TrainingInputs,
    model_config: PretrainedConfig,
    plan: Plan,
    strategy: tf.distribute.Strategy,
) -> Trainer:
    """Return the trainer of a run, restored from its newest checkpoint where there is one."""
    model = build_model(config, inputs, model_config, plan, strategy)
    output_dir = str(config.run.output_dir)
    is_chief = strategy.extended.should_checkpoint
    checkpoints = Checkpoints(output_dir, model, num_kept=config.run.keep_checkpoints, is_chief=is_chief)
    start_step = checkpoints.restore_latest()
    if config.model.init_from is not None and start_step == 0:
        start_from(model.masked_lm, config.model.init_from, vocabulary_size(inputs.tokenizer))
    manifest = inputs.eval_shards.manifest if inputs.eval_shards else None
    return Trainer(
        model=model,
        plan=plan,
        start_step=start_step,
        batches_of=_training_batches(config, inputs, plan, start_step),
        evaluate=_evaluator(inputs, model, plan, strategy, compiles_with_xla(config.hardware)),
        log=MetricsLog(output_dir, start_step, manifest.unigram_entropy_nats if manifest else None, is_chief=is_chief),
        checkpoints=checkpoints,
        config=config,
        full_speed_update_seconds=full_speed_update_seconds(config, model_config, plan),
    )


def _training_batches(
    config: TrainingConfig, inputs: TrainingInputs, plan: Plan, start_step: int
) -> Callable[[tf.distribute.InputContext], tf.data.Dataset]:
    """Return what makes the batches of one input pipeline."""
    shards = inputs.train_shards
    order = SampleOrder(shards.paths, shards.num_rows_per_shard, config.run.seed, config.data.shuffle_buffer_size)
    return functools.partial(
        training_batches,
        order,
        length=plan.max_length,
        global_batch_rows=plan.global_batch_rows,
        start_step=start_step,
        num_steps=max(1, plan.num_steps - start_step),
    )


def _evaluator(
    inputs: TrainingInputs, model: PretrainingModel, plan: Plan, strategy: tf.distribute.Strategy, jit_compile: bool
) -> Callable[[], Evaluation] | None:
    if inputs.eval_shards is None:
        return None
    global_batch_rows = plan.global_batch_rows // model.num_micro_batches
    batches_of = functools.partial(
        evaluation_batches,
        inputs.eval_shards,
        inputs.evaluation_rule(),
        length=plan.max_length,
        global_batch_rows=global_batch_rows,
        pad_token_id=special_ids(inputs.tokenizer)["pad"],
    )
    return build_evaluator(
        model,
        distribute_batches(strategy, batches_of),
        num_evaluation_batches(inputs.eval_shards, global_batch_rows),
        strategy,
        jit_compile=jit_compile,
    )
