"""The model that is trained and evaluated: a transformers model with its training and evaluation steps."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf
import tf_keras
from transformers import PretrainedConfig

from mlm_common.tokenizer import vocabulary_size
from train.config.settings import RunSettings
from train.data.inputs import Inputs
from train.layers.cpu_functions import multiply_in_bfloat16
from train.layers.random_bits import dropping_out_by, key_dropout, key_of, row_keys
from train.model.build import build_network, hidden_matrices
from train.model.computation import Computation, choose_computation
from train.runtime.plan import Plan
from train.runtime.runtime import Runtime
from train.runtime.tensorflow_runtime import TensorFlowRuntime
from train.step.optimizer import (
    build_optimizer,
    clipping_factor,
    global_norm,
    global_norm_by_shards,
    layer_rate_factors,
)
from train.step.sharding import Sharding, placed
from train.tasks.task import Task

# Separate streams of random numbers: of the task, of dropout, and of dropout of inputs that all rows share.
TASK_STREAM, DROPOUT_STREAM, SHARED_STREAM = 0, 1, 2
# Rows of each replica by which a computation is proven: the height of a TPU's vectors; more would take longer without
# showing more.
NUM_PROOF_ROWS = 8

Sums = dict[str, tf.Tensor]


class PretrainingModel(tf_keras.Model):
    """Has `train_step`: the task's sums, accumulation, gradients of the global batch, clipping, metrics.

    A step takes `global_batch_rows` rows, which the replicas divide equally; each processes its part in
    `num_micro_batches` micro-batches. The loss is summed and divided by its weight in the whole global batch, so it
    does not depend on how the batch is cut. AutoGraph converts nothing here, nor in the data: no traced Python code
    branches on a tensor, and converting the code of a model takes seconds of each start.
    """

    def __init__(
        self,
        network: Any,
        task: Task,
        *,
        seed: int,
        num_micro_batches: int = 1,
        max_grad_norm: float = 0.0,
        runtime: Runtime | None = None,
    ):
        super().__init__()
        self._runtime = runtime
        self.network = task.adapt_network(network)
        key_dropout(self.network)
        self.task = task
        self.seed = seed
        self.num_micro_batches = num_micro_batches
        self.max_grad_norm = max_grad_norm
        # Whatever the policy: a variable that it may cast is unknown to a graph that only assigns it.
        self.means = [tf_keras.metrics.Mean(mean.name, dtype="float32") for mean in task.means]
        self.grad_norm_mean = tf_keras.metrics.Mean("grad_norm", dtype="float32")

    @property
    def runtime(self) -> Runtime:
        """What it is trained on; by default the strategy in whose scope it was made."""
        return self._runtime or TensorFlowRuntime(self.distribute_strategy)

    @property
    def figures(self) -> list[tf.Variable]:
        """The variables that the log reads: of the means, and the optimizer's state of one number."""
        return [*(variable for metric in self.metrics for variable in metric.variables), *self.optimizer.figures]

    @property
    def metrics(self) -> list[tf_keras.metrics.Metric]:
        """Means over the steps since they were last reset: the task's by their weights, and of the gradient's norm."""
        return [*self.means, self.grad_norm_mean]

    def reset_metrics(self) -> None:
        """Keep the means: `fit` calls this when it starts, and a run may resume in the middle of an interval."""

    def reset_means(self) -> None:
        for metric in self.metrics:
            metric.reset_state()
            self.runtime.push(metric.variables)

    @tf.autograph.experimental.do_not_convert
    def train_step(self, batch: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Make one step from this replica's part of the global batch, {feature: (rows, …)}."""
        replica, means = tf.distribute.get_replica_context(), self.task.means
        step = tf.cast(self.optimizer.iterations, tf.int32)
        num_rows = _num_rows(batch)
        first_row = tf.cast(replica.replica_id_in_sync_group, tf.int32) * num_rows
        rows = self._weighed(self.prepare_batch(batch, step, first_row=first_row))
        gradients, sums = self._gradients(rows, row_keys((self.seed, DROPOUT_STREAM, step), num_rows, first_row))
        variables, sharding = self.network.trainable_variables, self.optimizer.sharding
        if sharding is None:
            gradients, sums = replica.all_reduce(tf.distribute.ReduceOp.SUM, (gradients, sums))
            norm = global_norm(gradients)
        else:
            sums = replica.all_reduce(tf.distribute.ReduceOp.SUM, sums)
            gradients = [sharding.sum_gradient(gradient) for gradient in gradients]
            norm = global_norm_by_shards(gradients, variables, sharding)

        # Where nothing counts the means are 0, not NaN.
        weights = dict.fromkeys(mean.weight for mean in means)
        scales = {weight: tf.math.reciprocal_no_nan(sums[weight]) for weight in weights}
        loss, scale = sums[means[0].total], scales[means[0].weight]
        grad_norm = norm * scale
        self.optimizer.apply_scaled(
            gradients,
            variables,
            factor=scale * clipping_factor(grad_norm, self.max_grad_norm),
            is_finite=tf.math.is_finite(loss) & tf.math.is_finite(grad_norm),
        )

        for metric, (_, total, weight) in zip(self.means, means, strict=True):
            metric.update_state(sums[total] * scales[weight], sample_weight=sums[weight])
        self.grad_norm_mean.update_state(grad_norm)
        return {"loss": loss * scale}

    def make_train_function(self, force: bool = False) -> Any:
        """Build what `fit` calls for each execution."""
        if self.train_function is None or force:
            self.train_function: Any = self.runtime.train_function(self)
        return self.train_function

    def prepare_batch(
        self, batch: dict[str, tf.Tensor], step: int | tf.Tensor, *, first_row: int | tf.Tensor = 0
    ) -> Any:
        return prepare_batch(self.task, self.seed, batch, step, first_row=first_row)

    def _weighed(self, rows: Any) -> Any:
        replica = tf.distribute.get_replica_context()
        return self.task.apply_global_weights(rows, lambda total: replica.all_reduce(tf.distribute.ReduceOp.SUM, total))

    @tf.autograph.experimental.do_not_convert
    def evaluation_step(self, rows: Any) -> Sums:
        """Add up the task's sums for a batch of prepared rows, over all replicas; collect its values for each row."""
        replica = tf.distribute.get_replica_context()
        sums = self.task.sums(self.network, rows, training=False)
        of_rows = {name: sums.pop(name) for name in list(sums) if sums[name].shape.rank}
        sums = replica.all_reduce(tf.distribute.ReduceOp.SUM, sums)
        # One by one: integers and floats may be on different devices.
        for name, value in of_rows.items():
            sums[name] = replica.all_reduce(tf.distribute.ReduceOp.SUM, placed(value))
        return sums

    @tf.autograph.experimental.do_not_convert
    def gradient_sums(self, batch: dict[str, tf.Tensor]) -> tuple[Sums, tf.Tensor]:
        """Add up, over all replicas, the task's sums and the squares of each variable's gradient of the summed loss.

        It computes as the next step would on the first rows of the batch, and changes nothing.
        """
        gradients, sums = self._first_gradients(batch)
        squares = tf.stack([tf.reduce_sum(tf.square(gradient)) for gradient in gradients])
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, (sums, squares))

    @tf.autograph.experimental.do_not_convert
    def divided_squares(self, batch: dict[str, tf.Tensor]) -> tf.Tensor:
        """Divide the next gradients, over the first rows, and the weights; put both together again; change nothing.

        Returns:
            For each variable that is divided, squared norms, (4, variables): of its summed gradient; of all shards of
            that; of the difference between it and its shards put together; of that between the weights and theirs.
        """
        sharding, squares = self.optimizer.sharding, []
        gradients, _ = self._first_gradients(batch)
        for gradient, variable in zip(gradients, self.network.trainable_variables, strict=True):
            if self.optimizer.sharded_axis(variable) is None:
                continue
            value, whole, shard = variable.read_value(), sharding.total(gradient), sharding.sum_gradient(gradient)
            summed, weights = (sharding.gather(one, variable.shape) for one in (shard, sharding.shard_of(value)))
            of_replica = [tf.reduce_sum(tf.square(one)) for one in (whole, shard, summed - whole, weights - value)]
            of_replica[1] = sharding.total(of_replica[1])
            squares.append(tf.stack(of_replica))
        return tf.stack(squares, axis=1) if squares else tf.zeros((4, 0))

    def _first_gradients(self, batch: dict[str, tf.Tensor]) -> tuple[list[tf.Tensor], Sums]:
        """Compute the gradients and the sums of the next step over this replica's first rows."""
        replica = tf.distribute.get_replica_context()
        step = tf.cast(self.optimizer.iterations, tf.int32)
        batch = {name: feature[:NUM_PROOF_ROWS] for name, feature in batch.items()}
        num_rows = _num_rows(batch)
        first_row = tf.cast(replica.replica_id_in_sync_group, tf.int32) * num_rows
        keys = row_keys((self.seed, DROPOUT_STREAM, step), num_rows, first_row)
        rows = self._weighed(self.prepare_batch(batch, step, first_row=first_row))
        return self._micro_batch_gradients(rows, keys, key_of((self.seed, SHARED_STREAM, step)))

    def _gradients(self, rows: Any, keys: tf.Tensor) -> tuple[list[tf.Tensor], Sums]:
        """Compute the gradients of the summed loss, dense float32, and the sums, over this replica's rows."""
        shared_key = key_of((self.seed, SHARED_STREAM, tf.cast(self.optimizer.iterations, tf.int32)))
        if self.num_micro_batches == 1:
            return self._micro_batch_gradients(rows, keys, shared_key)
        micro_batches = tf.nest.map_structure(
            lambda tensor: tf.reshape(tensor, (self.num_micro_batches, -1, *tensor.shape[1:])), (rows, keys)
        )
        if self.task.couples_rows:
            return self._cached_gradients(rows, micro_batches, shared_key)

        def of_micro_batch(index: tf.Tensor) -> tuple[list[tf.Tensor], Sums]:
            rows, keys = tf.nest.map_structure(lambda tensor: tensor[index], micro_batches)
            return self._micro_batch_gradients(rows, keys, shared_key)

        return self._added_up(of_micro_batch, dict.fromkeys(self._sum_names, tf.constant(0.0)))

    def _added_up(
        self, of_micro_batch: Callable[[tf.Tensor], tuple[list[tf.Tensor], Sums]], no_sums: Sums
    ) -> tuple[list[tf.Tensor], Sums]:
        """Add up the gradients and sums of all micro-batches."""
        zeros = [tf.zeros(variable.shape, tf.float32) for variable in self.network.trainable_variables]
        _, gradients, sums = tf.while_loop(
            lambda index, *_: index < self.num_micro_batches,
            lambda index, *added: (index + 1, *tf.nest.map_structure(tf.add, added, of_micro_batch(index))),
            (tf.constant(0), zeros, no_sums),
            maximum_iterations=self.num_micro_batches,
        )
        return gradients, sums

    def _cached_gradients(self, rows: Any, micro_batches: Any, shared_key: tf.Tensor) -> tuple[list[tf.Tensor], Sums]:
        """Compute gradients and sums of a loss that couples rows, by GradCache (Gao et al. 2021, arXiv:2101.06983).

        The outputs of all micro-batches come first, without memory for a backward pass; then the loss, and its
        gradient by the outputs; then each micro-batch again, with that gradient. Dropout is a function of the keys, so
        both passes drop the same.
        """
        variables = self.network.trainable_variables

        def outputs_of(index: tf.Tensor) -> tf.Tensor:
            rows, keys = tf.nest.map_structure(lambda tensor: tensor[index], micro_batches)
            with dropping_out_by(keys, shared_key):
                return self.task.outputs(self.network, rows, training=True)

        first = outputs_of(tf.constant(0))
        cached = tf.TensorArray(tf.float32, self.num_micro_batches, element_shape=first.shape).write(0, first)
        _, cached = tf.while_loop(
            lambda index, _: index < self.num_micro_batches,
            lambda index, cached: (index + 1, cached.write(index, outputs_of(index))),
            (tf.constant(1), cached),
            maximum_iterations=self.num_micro_batches - 1,
        )
        outputs = tf.reshape(cached.stack(), (-1, *first.shape[1:]))
        with tf.GradientTape() as tape:
            tape.watch(outputs)
            sums = self.task.sums_of_outputs(outputs, rows)
        by_outputs = tape.gradient(sums[self.task.means[0].total], outputs)
        by_outputs = tf.reshape(by_outputs, (self.num_micro_batches, *first.shape))

        def of_micro_batch(index: tf.Tensor) -> tuple[list[tf.Tensor], Sums]:
            with tf.GradientTape() as tape:
                outputs = outputs_of(index)
            gradients = tape.gradient(
                outputs, variables, by_outputs[index], unconnected_gradients=tf.UnconnectedGradients.ZERO
            )
            return [tf.convert_to_tensor(gradient) for gradient in gradients], {}

        gradients, _ = self._added_up(of_micro_batch, {})
        return gradients, {name: sums[name] for name in self._sum_names}

    def _micro_batch_gradients(self, rows: Any, keys: tf.Tensor, shared_key: tf.Tensor) -> tuple[list[tf.Tensor], Sums]:
        with dropping_out_by(keys, shared_key):
            with tf.GradientTape() as tape:
                sums = self.task.sums(self.network, rows, training=True)
            loss = sums[self.task.means[0].total]
            gradients = tape.gradient(
                loss, self.network.trainable_variables, unconnected_gradients=tf.UnconnectedGradients.ZERO
            )
        # Embeddings give sparse gradients, which neither add up nor reduce well.
        gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
        return gradients, {name: sums[name] for name in self._sum_names}

    @property
    def _sum_names(self) -> list[str]:
        """The task's sums that the means need."""
        return sorted({name for mean in self.task.means for name in (mean.total, mean.weight)})


def prepare_batch(
    task: Task, seed: int, batch: dict[str, tf.Tensor], step: int | tf.Tensor, *, first_row: int | tf.Tensor = 0
) -> Any:
    """Make the rows that a step learns from, from a batch that starts at `first_row` of the global one."""
    return task.prepare_batch(batch, row_keys((seed, TASK_STREAM, step), _num_rows(batch), first_row))


def _num_rows(batch: dict[str, tf.Tensor]) -> int:
    return next(iter(batch.values())).shape[0]


def set_precision(*, bfloat16: bool = False, is_compiled: bool = False) -> None:
    """Let all that this process builds from now on compute in float32 or in bfloat16, without XLA only its products."""
    tf_keras.mixed_precision.set_global_policy("mixed_bfloat16" if bfloat16 and is_compiled else "float32")
    multiply_in_bfloat16(bfloat16 and not is_compiled)


def build_model(
    config: RunSettings,
    inputs: Inputs,
    task: Task,
    model_config: PretrainedConfig,
    plan: Plan,
    runtime: Runtime,
    computation: Computation | None = None,
) -> PretrainingModel:
    """Build the model of a run with its optimizer, compiled, with fresh weights.

    Args:
        computation: how its step is computed; by default as in a new run. What has not been compared yet, TPU-optimized
            layers and a sharded optimizer, is used.
    """
    if computation is None:
        computation = choose_computation(config, model_config, plan)
    is_compiled = config.hardware.wants_tpu or computation.jit_compile
    set_precision(bfloat16=config.hardware.bfloat16, is_compiled=is_compiled)
    with runtime.scope():
        model = PretrainingModel(
            build_network(
                model_config,
                config.model,
                vocabulary_size=vocabulary_size(inputs.tokenizer),
                seed=config.run.seed,
                tpu_layers=computation.tpu_layers is not False,
                model_class=task.model_class,
            ),
            task,
            seed=config.run.seed,
            num_micro_batches=plan.num_micro_batches,
            max_grad_norm=config.optimization.max_grad_norm,
            runtime=runtime,
        )
        compile_model(model, config, plan, computation)
    return model


def compile_model(model: PretrainingModel, config: RunSettings, plan: Plan, computation: Computation) -> None:
    """Give the model a new optimizer; to be called in the scope of its runtime."""
    is_sharded = computation.shard_optimizer is not False
    sharding = Sharding(plan.num_replicas, by_xla=config.hardware.has_own_xla) if is_sharded else None
    decay = config.optimization.layer_lr_decay
    factors = layer_rate_factors(model.network, decay) if decay < 1 else ()
    matrices = hidden_matrices(model.network) if config.optimization.optimizer == "muon" else ()
    optimizer = build_optimizer(
        config.optimization, sharding, rate_factors=factors, num_matrices=matrices, **plan.schedule_steps
    )
    optimizer.build(model.network.trainable_variables)
    model.compile(
        optimizer=optimizer,
        jit_compile=computation.jit_compile,
        steps_per_execution=config.hardware.max_steps_per_execution,
    )
