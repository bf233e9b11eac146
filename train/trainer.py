"""One run of training: model, optimizer, batches, evaluation, log and checkpoints, put together and fitted."""

from collections.abc import Callable
from dataclasses import dataclass

import tensorflow as tf
import tf_keras
from transformers import PretrainedConfig

from tokenizer_training.tokenizer import special_ids, vocabulary_size
from train.callbacks import EverySteps, TrainingLog
from train.checkpoints import Checkpoints
from train.config import TrainingConfig
from train.data import evaluation_batches, training_batches
from train.evaluation import Evaluation, build_evaluator
from train.initial_weights import start_from
from train.inputs import TrainingInputs
from train.metrics_log import MetricsLog
from train.model import build_masked_lm
from train.optimizer import build_optimizer
from train.plan import Plan
from train.pretraining_model import PretrainingModel
from train.sample_order import SampleOrder
from train.strategy import compiles_with_xla


@dataclass(frozen=True)
class Trainer:
    """A model that is compiled and restored, and what it is fitted with; `fit` runs it to the plan's last step."""

    model: PretrainingModel
    plan: Plan
    start_step: int
    batches: tf.data.Dataset
    evaluate: Callable[[], Evaluation] | None
    log: MetricsLog
    checkpoints: Checkpoints
    log_steps: int

    def first_masked_row(self) -> tuple[list[int], list[int]]:
        """Return the ids of the first row of the first batch, and what the model sees of it at the first update."""
        input_ids = next(iter(self.batches.take(1)))
        masked = self.model.mask_batch(input_ids, self.start_step)
        return input_ids[0].numpy().tolist(), masked.input_ids[0].numpy().tolist()

    def fit(self) -> Evaluation | None:
        """Train, log, evaluate and save; return the last evaluation, None without validation rows."""
        training_log = TrainingLog(self.model, self.log, self.plan, self.start_step)
        latest: list[Evaluation] = []

        def evaluate(step: int) -> None:
            if self.evaluate is None:
                return
            with training_log.clock_stopped():
                latest[:] = [self.evaluate()]
                training_log.write_evaluation(step, latest[0])

        def save(step: int) -> None:
            training_log.read_finite(step)  # a checkpoint of a run that diverged is no place to go on from
            with training_log.clock_stopped():
                self.checkpoints.save(step)

        callbacks = [
            EverySteps(interval_steps, action, start_step=self.start_step, num_steps=self.plan.num_steps)
            for interval_steps, action in (
                (self.log_steps, training_log.write_train),
                (self.plan.eval_steps, evaluate),
                (self.plan.save_steps, save),
            )
        ]
        remaining_steps = self.plan.num_steps - self.start_step
        try:
            if remaining_steps > 0:
                self.model.fit(self.batches, steps_per_epoch=remaining_steps, verbose=0, callbacks=callbacks)
            else:
                evaluate(self.plan.num_steps)
        finally:
            training_log.close()
        self.log.draw()
        return latest[0] if latest else None


def build_trainer(
    config: TrainingConfig,
    inputs: TrainingInputs,
    model_config: PretrainedConfig,
    plan: Plan,
    strategy: tf.distribute.Strategy,
) -> Trainer:
    """Return the trainer of a run, restored from its newest checkpoint where there is one."""
    tf_keras.mixed_precision.set_global_policy("mixed_bfloat16" if config.hardware.bfloat16 else "float32")
    jit_compile = compiles_with_xla(config.hardware)
    with strategy.scope():
        model = PretrainingModel(
            build_masked_lm(
                model_config,
                config.model,
                vocabulary_size=vocabulary_size(inputs.tokenizer),
                seed=config.run.seed,
            ),
            inputs.masking_rule(config.masking),
            seed=config.run.seed,
            num_micro_batches=config.optimization.gradient_accumulation_steps,
            max_grad_norm=config.optimization.max_grad_norm,
        )
        optimizer = build_optimizer(
            config.optimization, num_steps=plan.num_steps, num_warmup_steps=plan.num_warmup_steps
        )
        optimizer.build(model.masked_lm.trainable_variables)
        model.compile(
            optimizer=optimizer, jit_compile=jit_compile, steps_per_execution=config.hardware.steps_per_execution
        )
    output_dir = str(config.run.output_dir)
    checkpoints = Checkpoints(output_dir, model, num_kept=config.run.keep_checkpoints)
    start_step = checkpoints.restore_latest()
    if config.model.init_from is not None and start_step == 0:
        start_from(model.masked_lm, config.model.init_from, vocabulary_size(inputs.tokenizer))
    manifest = inputs.eval_shards.manifest if inputs.eval_shards else None
    return Trainer(
        model=model,
        plan=plan,
        start_step=start_step,
        batches=_training_batches(config, inputs, plan, start_step),
        evaluate=_evaluator(inputs, model, plan, strategy, jit_compile),
        log=MetricsLog(output_dir, start_step, manifest.unigram_entropy_nats if manifest else None),
        checkpoints=checkpoints,
        log_steps=config.run.log_steps,
    )


def _training_batches(config: TrainingConfig, inputs: TrainingInputs, plan: Plan, start_step: int) -> tf.data.Dataset:
    shards = inputs.train_shards
    order = SampleOrder(shards.paths, shards.num_rows_per_shard, config.run.seed, config.data.shuffle_buffer_size)
    return training_batches(
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
    batches = evaluation_batches(
        inputs.eval_shards,
        inputs.evaluation_rule(),
        length=plan.max_length,
        global_batch_rows=plan.global_batch_rows // model.num_micro_batches,
        pad_token_id=special_ids(inputs.tokenizer)["pad"],
    )
    return build_evaluator(model, batches, strategy, jit_compile=jit_compile)
