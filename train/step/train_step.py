"""`PretrainingModel`: a network with its task, and its training and evaluation steps."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
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

# Numbers of separate random streams: for the task, for dropout, and for dropout of inputs that all rows share.
TASK_STREAM, DROPOUT_STREAM, SHARED_STREAM = 0, 1, 2
# Number of rows per replica on which the variants of a step are compared: the height of a TPU's vectors. More rows
# would take longer without showing more.
NUM_PROOF_ROWS = 8

Sums = dict[str, tf.Tensor]


class PretrainingModel(tf_keras.Model):
    """The Keras model that is trained and evaluated.

    A training step takes `global_batch_rows` rows, which the replicas divide equally. Each replica processes its rows
    in `num_micro_batches` micro-batches. The loss is summed and then divided by the total weight of the whole global
    batch, so it does not depend on how the batch is divided.

    AutoGraph is off here and in the input pipeline, because no traced Python code branches on a tensor, and converting
    a model's code would add seconds to each start.

    Args:
        network: the network to train.
        task: the task to learn.
        seed: seed of masks and dropout.
        num_micro_batches: number of micro-batches per replica and step.
        max_grad_norm: the gradient is clipped to this norm; 0 disables clipping.
        num_streams: the number of parallel streams that divide the rows of a micro-batch. Each has at least one row.
        runtime: the devices on which the model computes; by default TensorFlow's, with the strategy in whose scope the
            model is built.
    """

    def __init__(
        self,
        network: Any,
        task: Task,
        *,
        seed: int,
        num_micro_batches: int = 1,
        max_grad_norm: float = 0.0,
        num_streams: int = 1,
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
        self.num_streams = num_streams
        # As a function of its own, it is traced once for streams with the same number of rows.
        self._stream_sums = tf.function(functools.partial(self.task.sums, self.network), autograph=False)
        self._stream_gradients = tf.function(self._gradients_of_stream, autograph=False)
        # Use float32 under every policy, because a graph that only assigns a variable does not find the variable if
        # the policy may cast it.
        self.means = [tf_keras.metrics.Mean(mean.name, dtype="float32") for mean in task.means]
        self.grad_norm_mean = tf_keras.metrics.Mean("grad_norm", dtype="float32")

    @property
    def runtime(self) -> Runtime:
        """The runtime that executes the steps; by default TensorFlow with the strategy of the model's scope."""
        return self._runtime or TensorFlowRuntime(self.distribute_strategy)

    @property
    def figures(self) -> list[tf.Variable]:
        """The variables that the log reads: the variables of the means, and the optimizer's scalars."""
        return [*(variable for metric in self.metrics for variable in metric.variables), *self.optimizer.figures]

    @property
    def metrics(self) -> list[tf_keras.metrics.Metric]:
        """Means since the last reset: the task's weighted means, and the mean norm of the gradient."""
        return [*self.means, self.grad_norm_mean]

    def reset_metrics(self) -> None:
        """Do nothing: `fit` calls this at its start, but a run may resume in the middle of a logging interval."""

    def reset_means(self) -> None:
        for metric in self.metrics:
            metric.reset_state()
            self.runtime.push(metric.variables)

    @tf.autograph.experimental.do_not_convert
    def train_step(self, batch: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Take one step, given this replica's part of the global batch, {feature: (rows, …)}."""
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

        # If the weight is 0, make the mean 0 instead of NaN.
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
        """Build the function that `fit` calls for each execution."""
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
        """Add up the task's sums over the prepared rows of all replicas, and collect the task's values for each row."""
        replica = tf.distribute.get_replica_context()
        sums = self._evaluation_sums(rows)
        row_values = {name: sums.pop(name) for name in list(sums) if sums[name].shape.rank}
        sums = replica.all_reduce(tf.distribute.ReduceOp.SUM, sums)
        # Sum one value at a time, because integers and floats may be on different devices.
        for name, value in row_values.items():
            sums[name] = replica.all_reduce(tf.distribute.ReduceOp.SUM, placed(value))
        return sums

    def _evaluation_sums(self, rows: Any) -> Sums:
        if self.num_streams == 1:
            return self.task.sums(self.network, rows, training=False)
        streams = [self._stream_sums(part, training=False) for part in divided_rows(rows, self.num_streams)]
        return {
            name: tf.concat(values, axis=0) if values[0].shape.rank else tf.add_n(values)
            for name, values in ((name, [sums[name] for sums in streams]) for name in streams[0])
        }

    @tf.autograph.experimental.do_not_convert
    def gradient_sums(self, batch: dict[str, tf.Tensor]) -> tuple[Sums, tf.Tensor]:
        """Compute the task's sums and the squared gradient norms of the next step, without changing anything.

        Each replica uses only its first NUM_PROOF_ROWS rows of the batch.

        Returns:
            The task's sums, and the squared norm of each variable's gradient of the summed loss, (variables,). Both are
            added up over the replicas.
        """
        gradients, sums = self._first_gradients(batch)
        squares = tf.stack([tf.reduce_sum(tf.square(gradient)) for gradient in gradients])
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, (sums, squares))

    @tf.autograph.experimental.do_not_convert
    def divided_squares(self, batch: dict[str, tf.Tensor]) -> tf.Tensor:
        """Shard the weights and the next step's gradients, gather them again, and compare; change nothing.

        Each replica uses only its first NUM_PROOF_ROWS rows of the batch.

        Returns:
            Four squared norms for each sharded variable, (4, variables): the norms of the summed gradient, of its
            shards together, of the difference between the gradient and its gathered shards, and of the difference
            between the weights and their gathered shards.
        """
        sharding, squares = self.optimizer.sharding, []
        gradients, _ = self._first_gradients(batch)
        for gradient, variable in zip(gradients, self.network.trainable_variables, strict=True):
            if self.optimizer.sharded_axis(variable) is None:
                continue
            value, whole, shard = variable.read_value(), sharding.total(gradient), sharding.sum_gradient(gradient)
            gathered = sharding.gather(shard, variable.shape)
            weights = sharding.gather(sharding.shard_of(value), variable.shape)
            tensors = (whole, shard, gathered - whole, weights - value)
            squared_norms = [tf.reduce_sum(tf.square(tensor)) for tensor in tensors]
            squared_norms[1] = sharding.total(squared_norms[1])
            squares.append(tf.stack(squared_norms))
        return tf.stack(squares, axis=1) if squares else tf.zeros((4, 0))

    def _first_gradients(self, batch: dict[str, tf.Tensor]) -> tuple[list[tf.Tensor], Sums]:
        """Compute the next step's gradients and the task's sums on this replica's first NUM_PROOF_ROWS rows."""
        replica = tf.distribute.get_replica_context()
        step = tf.cast(self.optimizer.iterations, tf.int32)
        batch = {name: feature[:NUM_PROOF_ROWS] for name, feature in batch.items()}
        num_rows = _num_rows(batch)
        first_row = tf.cast(replica.replica_id_in_sync_group, tf.int32) * num_rows
        keys = row_keys((self.seed, DROPOUT_STREAM, step), num_rows, first_row)
        rows = self._weighed(self.prepare_batch(batch, step, first_row=first_row))
        return self._micro_batch_gradients(rows, keys, key_of((self.seed, SHARED_STREAM, step)))

    def _gradients(self, rows: Any, keys: tf.Tensor) -> tuple[list[tf.Tensor], Sums]:
        """Compute the gradients of the loss and the task's sums, both summed over this replica's rows.

        The gradients are dense float32 tensors.
        """
        shared_key = key_of((self.seed, SHARED_STREAM, tf.cast(self.optimizer.iterations, tf.int32)))
        if self.num_micro_batches == 1:
            return self._micro_batch_gradients(rows, keys, shared_key)
        micro_batches = tf.nest.map_structure(
            lambda tensor: tf.reshape(tensor, (self.num_micro_batches, -1, *tensor.shape[1:])), (rows, keys)
        )
        if self.task.couples_rows:
            return self._cached_gradients(rows, micro_batches, shared_key)

        def micro_batch_gradients(index: tf.Tensor) -> tuple[list[tf.Tensor], Sums]:
            rows, keys = tf.nest.map_structure(lambda tensor: tensor[index], micro_batches)
            return self._micro_batch_gradients(rows, keys, shared_key)

        return self._added_up(micro_batch_gradients, dict.fromkeys(self._sum_names, tf.constant(0.0)))

    def _added_up(
        self, micro_batch_gradients: Callable[[tf.Tensor], tuple[list[tf.Tensor], Sums]], zero_sums: Sums
    ) -> tuple[list[tf.Tensor], Sums]:
        """Add up the gradients and the task's sums of all micro-batches, given a function of their index."""
        zeros = [tf.zeros(variable.shape, tf.float32) for variable in self.network.trainable_variables]
        _, gradients, sums = tf.while_loop(
            lambda index, *_: index < self.num_micro_batches,
            lambda index, *added: (index + 1, *tf.nest.map_structure(tf.add, added, micro_batch_gradients(index))),
            (tf.constant(0), zeros, zero_sums),
            maximum_iterations=self.num_micro_batches,
        )
        return gradients, sums

    def _cached_gradients(self, rows: Any, micro_batches: Any, shared_key: tf.Tensor) -> tuple[list[tf.Tensor], Sums]:
        """Compute gradients and sums of a loss that couples rows, with GradCache (Gao et al. 2021, arXiv:2101.06983).

        First compute the outputs of all micro-batches, without memory for a backward pass. Then compute the loss and
        its gradient with respect to the outputs. Then compute each micro-batch again and backpropagate this gradient.
        Dropout depends only on the keys, so both passes use the same dropout masks.
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
        output_gradients = tape.gradient(sums[self.task.means[0].total], outputs)
        output_gradients = tf.reshape(output_gradients, (self.num_micro_batches, *first.shape))

        def micro_batch_gradients(index: tf.Tensor) -> tuple[list[tf.Tensor], Sums]:
            with tf.GradientTape() as tape:
                outputs = outputs_of(index)
            gradients = tape.gradient(
                outputs, variables, output_gradients[index], unconnected_gradients=tf.UnconnectedGradients.ZERO
            )
            return _dense(gradients, variables), {}

        gradients, _ = self._added_up(micro_batch_gradients, {})
        return gradients, {name: sums[name] for name in self._sum_names}

    def _micro_batch_gradients(self, rows: Any, keys: tf.Tensor, shared_key: tf.Tensor) -> tuple[list[tf.Tensor], Sums]:
        if self.num_streams == 1:
            return self._gradients_of_stream(rows, keys, shared_key)
        streams = [self._stream_gradients(*part, shared_key) for part in divided_rows((rows, keys), self.num_streams)]
        added: tuple[list[tf.Tensor], Sums] = tf.nest.map_structure(lambda *parts: tf.add_n(parts), *streams)
        return added

    def _gradients_of_stream(self, rows: Any, keys: tf.Tensor, shared_key: tf.Tensor) -> tuple[list[tf.Tensor], Sums]:
        variables = self.network.trainable_variables
        with dropping_out_by(keys, shared_key):
            with tf.GradientTape() as tape:
                sums = self.task.sums(self.network, rows, training=True)
            loss = sums[self.task.means[0].total]
            gradients = tape.gradient(loss, variables, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        return _dense(gradients, variables), {name: sums[name] for name in self._sum_names}

    @property
    def _sum_names(self) -> list[str]:
        """The names of the sums from which the task's means are computed."""
        return sorted({name for mean in self.task.means for name in (mean.total, mean.weight)})


def prepare_batch(
    task: Task, seed: int, batch: dict[str, tf.Tensor], step: int | tf.Tensor, *, first_row: int | tf.Tensor = 0
) -> Any:
    """Prepare (mask) the rows of a training step. The batch starts at row `first_row` of the global batch."""
    return task.prepare_batch(batch, row_keys((seed, TASK_STREAM, step), _num_rows(batch), first_row))


def divided_rows(rows: Any, num_parts: int) -> list[Any]:
    """Divide a structure of tensors (rows, …) into structures with nearly equal numbers of rows.

    There are fewer than `num_parts` structures if there are fewer rows, so that none is empty.
    """
    tensors = tf.nest.flatten(rows)
    num_rows = tensors[0].shape[0]
    sizes = [len(part) for part in np.array_split(np.arange(num_rows), min(num_parts, num_rows))]
    parts = zip(*(tf.split(tensor, sizes) for tensor in tensors), strict=True)
    return [tf.nest.pack_sequence_as(rows, part) for part in parts]


def _dense(gradients: list[Any], variables: list[tf.Variable]) -> list[tf.Tensor]:
    """Make the gradients of embeddings dense, because sparse ones are slow to add up and to sum over the replicas.

    The shapes are set, because a sparse gradient that comes out of a conditional has lost its static shape.
    """
    return [
        tf.ensure_shape(tf.convert_to_tensor(gradient), variable.shape)
        for gradient, variable in zip(gradients, variables, strict=True)
    ]


def _num_rows(batch: dict[str, tf.Tensor]) -> int:
    return next(iter(batch.values())).shape[0]


def set_precision(*, bfloat16: bool = False, is_compiled: bool = False) -> None:
    """Set the precision of all models that this process builds from now on.

    With `bfloat16` and XLA (`is_compiled`), all operations compute in bfloat16; without XLA, only matrix products do.
    """
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
    """Build the model of a run with random weights, and compile it with its optimizer.

    Args:
        config: the settings.
        inputs: the inputs of the run, which give the size of the vocabulary.
        task: the task to learn.
        model_config: configuration of the network.
        plan: the plan of the phase, which gives the numbers of steps, replicas and micro-batches.
        runtime: the devices on which the model computes.
        computation: how a step is computed; by default the same as in a new run. TPU-optimized layers and a sharded
            optimizer are used even if they have not been checked yet.
    """
    if computation is None:
        computation = choose_computation(config, model_config, plan)
    is_compiled = config.hardware.wants_tpu or computation.jit_compile
    set_precision(bfloat16=config.hardware.bfloat16, is_compiled=is_compiled)
    with runtime.scope():
        model = PretrainingModel(
            build_network(
                model_config,
                vocabulary_size=vocabulary_size(inputs.tokenizer),
                seed=config.run.seed,
                tpu_layers=computation.tpu_layers is not False,
                model_class=task.model_class,
                by_transformers=computation.reference_layers,
                **config.model.network_options,
            ),
            task,
            seed=config.run.seed,
            num_micro_batches=plan.num_micro_batches,
            max_grad_norm=config.optimization.max_grad_norm,
            num_streams=computation.num_streams,
            runtime=runtime,
        )
        compile_model(model, config, plan, computation)
    return model


def compile_model(model: PretrainingModel, config: RunSettings, plan: Plan, computation: Computation) -> None:
    """Compile the model with a new optimizer. Call it in the scope of the model's runtime."""
    is_sharded = computation.shard_optimizer is not False
    sharding = Sharding(plan.num_replicas, by_xla=config.hardware.has_own_xla) if is_sharded else None
    decay = model.task.layer_lr_decay
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
