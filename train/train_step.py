"""The model that `fit` trains: a transformers masked-LM with the pretraining step around it."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf
import tf_keras

from train.model.gathered_head import gather_before_head, predicting_at
from train.model.random_bits import RANDOM_ALGORITHM
from train.model.stateless_dropout import draw_row_keys, dropping_out_by, key_dropout
from train.optimizer import clipping_factor
from train.tasks.masked_lm import MaskedSums, masked_sums
from train.tasks.masking import MaskedRows, collect_predictions, mask_rows
from train.tasks.masking_rule import MaskingRule, num_prediction_slots

# Keeps the random numbers of dropout apart from those of the masks, whose stream is 0.
DROPOUT_STREAM = 1


class PretrainingModel(tf_keras.Model):
    """Owns `train_step`: masks, gathered head, accumulation, gradients of the global batch, clipping, metrics.

    One update takes `global_batch_rows` rows, of which each replica gets an equal share and goes through it in
    `num_micro_batches` parts. The loss is summed over the masked tokens and divided by their number in the whole
    global batch, so it does not depend on how the batch is cut.
    """

    def __init__(
        self, masked_lm: Any, rule: MaskingRule, *, seed: int, num_micro_batches: int = 1, max_grad_norm: float = 0.0
    ):
        super().__init__()
        gather_before_head(masked_lm)
        key_dropout(masked_lm)
        self.masked_lm = masked_lm
        self.rule = rule
        self.seed = seed
        self.num_micro_batches = num_micro_batches
        self.max_grad_norm = max_grad_norm
        self.loss_mean = tf_keras.metrics.Mean("loss")
        self.accuracy_mean = tf_keras.metrics.Mean("masked_accuracy")
        self.grad_norm_mean = tf_keras.metrics.Mean("grad_norm")

    @property
    def metrics(self) -> list[tf_keras.metrics.Metric]:
        """Means over the updates since they were last reset, weighted by masked tokens where that applies."""
        return [self.loss_mean, self.accuracy_mean, self.grad_norm_mean]

    def reset_metrics(self) -> None:
        """Keep the means: `fit` calls this as it begins, and a run may go on from the middle of an interval."""

    def reset_means(self) -> None:
        """Begin the means anew."""
        for metric in self.metrics:
            metric.reset_state()

    def call(self, inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
        """Return the logits at all positions: int32 (batch, length) -> (batch, length, vocabulary)."""
        return self.masked_lm(self._model_inputs(inputs), training=training).logits[..., : self.rule.vocabulary_size]

    def train_step(self, input_ids: tf.Tensor) -> dict[str, tf.Tensor]:
        """Make one update from this replica's share of the global batch, int32 (rows, length)."""
        replica = tf.distribute.get_replica_context()
        step = tf.cast(self.optimizer.iterations, tf.int32)
        num_rows = input_ids.shape[0]
        first_row = tf.cast(replica.replica_id_in_sync_group, tf.int32) * num_rows
        batch = self.mask_batch(input_ids, step, first_row=first_row)
        dropout_seed = tf.random.fold_in(tf.constant((self.seed, DROPOUT_STREAM), tf.int32), step, alg=RANDOM_ALGORITHM)
        gradients, sums = self._gradients(batch, draw_row_keys(dropout_seed, num_rows, first_row))
        gradients, sums = replica.all_reduce(tf.distribute.ReduceOp.SUM, (gradients, tuple(sums)))
        loss, num_correct, num_masked = sums

        # 0 masked tokens give the loss 0, not NaN.
        scale = tf.math.reciprocal_no_nan(num_masked)
        grad_norm = tf.linalg.global_norm(gradients) * scale
        self.optimizer.apply_scaled(
            gradients,
            self.masked_lm.trainable_variables,
            factor=scale * clipping_factor(grad_norm, self.max_grad_norm),
            is_finite=tf.math.is_finite(loss) & tf.math.is_finite(grad_norm),
        )

        self.loss_mean.update_state(loss * scale, sample_weight=num_masked)
        self.accuracy_mean.update_state(num_correct * scale, sample_weight=num_masked)
        self.grad_norm_mean.update_state(grad_norm)
        return {"loss": loss * scale}

    def make_train_function(self, force: bool = False) -> Any:
        """Return what `fit` calls for each launch; see `build_launch`."""
        if self.train_function is None or force:
            self.train_function: Any = build_launch(self)
        return self.train_function

    def mask_batch(self, input_ids: tf.Tensor, step: int | tf.Tensor, *, first_row: int | tf.Tensor = 0) -> MaskedRows:
        """Return rows, int32 (rows, length), as they are masked at update `step`; see `mask_rows`."""
        seed = tf.random.fold_in(tf.constant((self.seed, 0), tf.int32), step, alg=RANDOM_ALGORITHM)
        return mask_rows(input_ids, seed, self.rule, first_row=first_row)

    def evaluation_step(self, batch: MaskedRows, mlm_probability: float) -> MaskedSums:
        """Return the sums over all replicas for one batch that is masked already, at the rate given."""
        replica = tf.distribute.get_replica_context()
        num_slots = num_prediction_slots(batch.input_ids.shape.num_elements(), mlm_probability)
        sums = self._masked_sums(batch, num_slots, training=False)
        return MaskedSums(*replica.all_reduce(tf.distribute.ReduceOp.SUM, tuple(sums)))

    def _gradients(self, batch: MaskedRows, row_keys: tf.Tensor) -> tuple[list[tf.Tensor], MaskedSums]:
        """Return the gradients of the summed loss, dense float32, and the sums, over this replica's rows."""
        if self.num_micro_batches == 1:
            return self._micro_batch_gradients(batch, row_keys)
        *micro_batches, micro_batch_keys = (
            tf.reshape(tensor, (self.num_micro_batches, -1, tensor.shape[1])) for tensor in (*batch, row_keys)
        )

        def add_micro_batch(index: tf.Tensor, gradients: list[tf.Tensor], sums: MaskedSums) -> tuple:
            micro_batch = MaskedRows(*(tensor[index] for tensor in micro_batches))
            more, more_sums = self._micro_batch_gradients(micro_batch, micro_batch_keys[index])
            gradients = [total + gradient for total, gradient in zip(gradients, more, strict=True)]
            return index + 1, gradients, MaskedSums(*(total + add for total, add in zip(sums, more_sums, strict=True)))

        zeros = [tf.zeros(variable.shape, tf.float32) for variable in self.masked_lm.trainable_variables]
        _, gradients, sums = tf.while_loop(
            lambda index, *_: index < self.num_micro_batches,
            add_micro_batch,
            (tf.constant(0), zeros, MaskedSums(*[tf.constant(0.0)] * 3)),
            maximum_iterations=self.num_micro_batches,
        )
        return gradients, sums

    def _micro_batch_gradients(self, batch: MaskedRows, row_keys: tf.Tensor) -> tuple[list[tf.Tensor], MaskedSums]:
        variables = self.masked_lm.trainable_variables
        num_slots = self.rule.num_prediction_slots(batch.input_ids.shape.num_elements())
        with dropping_out_by(row_keys):
            with tf.GradientTape() as tape:
                sums = self._masked_sums(batch, num_slots, training=True)
            gradients = tape.gradient(sums.loss, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        # Embeddings give sparse gradients, which neither add up nor reduce well.
        return [tf.convert_to_tensor(gradient) for gradient in gradients], sums

    def _masked_sums(self, rows: MaskedRows, num_slots: int, training: bool) -> MaskedSums:
        predictions = collect_predictions(rows, num_slots)
        with predicting_at(predictions.positions):
            logits = self.masked_lm(self._model_inputs(rows.input_ids), training=training).logits
        return masked_sums(
            logits[0], predictions.labels, predictions.weights, vocabulary_size=self.rule.vocabulary_size
        )

    def _model_inputs(self, input_ids: tf.Tensor) -> dict[str, tf.Tensor]:
        attended = tf.cast(input_ids != self.masked_lm.config.pad_token_id, tf.int32)  # (batch, length)
        return {"input_ids": input_ids, "attention_mask": attended}


WAIT_NAME = "input_wait_seconds"


def build_launch(model: tf_keras.Model) -> Callable[[Any], dict[str, tf.Tensor]]:
    """Return what `fit` calls with an iterator of global batches: it runs `model.train_step` on all replicas.

    As tf_keras' own `Model.make_train_function`, with a clock around the iterator. The answer holds, under `WAIT_NAME`,
    the seconds in which the host had no batch to hand out, float64. On a TPU the updates handed out before may still be
    computed in that time, so the device was idle for at most as long.
    """
    strategy = model.distribute_strategy
    train_step = model.train_step
    if model.jit_compile:
        train_step = tf.function(train_step, jit_compile=True, reduce_retracing=True)

    def update(iterator: Any) -> tf.Tensor:
        asked_seconds = tf.timestamp()
        with tf.control_dependencies([asked_seconds]):
            batch = next(iterator)
        with tf.control_dependencies(tf.nest.flatten(batch, expand_composites=True)):
            answered_seconds = tf.timestamp()
        strategy.run(train_step, args=(batch,))
        return answered_seconds - asked_seconds

    # tf_keras' variable: its `fit` counts by it, and reads it anew for each launch.
    num_steps = model._steps_per_execution

    def launch(iterator: Any) -> dict[str, tf.Tensor]:
        wait_seconds = tf.constant(0.0, tf.float64)
        for _ in tf.range(num_steps):
            wait_seconds += update(iterator)
        return {WAIT_NAME: wait_seconds}

    def launch_one(iterator: Any) -> dict[str, tf.Tensor]:
        return {WAIT_NAME: update(iterator)}

    return tf.function(launch if num_steps.numpy() > 1 else launch_one, reduce_retracing=True)
