"""One run of training: model, optimizer, batches, evaluation, log and checkpoints, put together."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import tensorflow as tf
import tf_keras
from transformers import PretrainedConfig

from tokenizer_training.tokenizer import special_ids, vocabulary_size
from train.callbacks import TrainingDivergedError
from train.checkpoint_record import CheckpointRecord
from train.checkpoint_store import Arrays
from train.checkpoints import Checkpoints
from train.config import TrainingConfig
from train.data import ONE_PIPELINE, evaluation_batches, num_evaluation_batches, training_batches
from train.evaluation import Evaluation, Evaluator, build_evaluator
from train.fitting import Fitting
from train.hub import PushToHubCallback
from train.initial_weights import start_from
from train.inputs import TrainingInputs
from train.metrics_log import MetricsLog
from train.model import build_masked_lm
from train.optimizer import build_optimizer
from train.output_folder import fingerprint, fingerprint_sha256
from train.plan import Plan
from train.preemption import StopRequest
from train.pretraining_model import PretrainingModel
from train.rollback import roll_back
from train.sample_order import SampleOrder
from train.start import Start, check_checkpoint, start_of
from train.strategy import compiles_with_xla, computes_as_suits_tpu, distribute_batches
from train.throughput import full_speed_update_seconds
from train.training_state import TrainingState
from train.versions import installed_versions


@dataclass(frozen=True)
class Trainer:
    """A model that is compiled and restored, and what it is fitted with; `fit` runs it to the plan's last step."""

    model: PretrainingModel
    plan: Plan
    start: Start
    order: SampleOrder
    evaluate: Evaluator | None
    log: MetricsLog
    state: TrainingState
    checkpoints: Checkpoints
    config: TrainingConfig
    fingerprint_sha256: str
    versions: dict[str, str]
    full_speed_update_seconds: float | None

    @property
    def can_roll_back(self) -> bool:
        """Whether a blow-up leads back to a checkpoint, and not to the end of the run."""
        return self.config.run.on_nonfinite == "skip"

    def batches_from(self, start: Start) -> Callable[[tf.distribute.InputContext], tf.data.Dataset]:
        """Return what makes the batches of one input pipeline, from a start on."""
        return functools.partial(
            training_batches,
            self.order,
            length=self.plan.max_length,
            global_batch_rows=self.plan.global_batch_rows,
            start_step=start.step,
            num_steps=max(1, self.plan.num_steps - start.step),
            num_left_out_rows=start.num_skipped_rows,
        )

    def first_masked_row(self) -> tuple[list[int], list[int]]:
        """Return the ids of the first row of the first batch, and what the model sees of it at the first update."""
        input_ids = next(iter(self.batches_from(self.start)(ONE_PIPELINE).take(1)))
        masked = self.model.mask_batch(input_ids, self.start.step)
        return input_ids[0].numpy().tolist(), masked.input_ids[0].numpy().tolist()

    def fit(self, stop: StopRequest | None = None, pushing: PushToHubCallback | None = None) -> Evaluation | None:
        """Train, log, evaluate, save and push; return the last evaluation, None without validation rows.

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
    """Return the trainer of a run, restored from its newest checkpoint where there is one.

    Raises:
        InputError: it cannot go on from there with this plan, or no checkpoint is whole.
    """
    model = build_model(config, inputs, model_config, plan, strategy)
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

    start = start_of(checkpoints.restore_newest(sha256, restore))
    if config.model.init_from is not None and start.checkpoint is None:
        start_from(model.masked_lm, config.model.init_from, vocabulary_size(inputs.tokenizer))
    manifest = inputs.eval_shards.manifest if inputs.eval_shards else None
    log = MetricsLog(output_dir, manifest.unigram_entropy_nats if manifest else None, is_chief=is_chief)
    log.go_on_from(start.step, len(start.skipped))
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
        full_speed_update_seconds=full_speed_update_seconds(config, model_config, plan),
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
