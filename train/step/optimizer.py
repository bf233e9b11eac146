"""AdamW, StableAdamW, LAMB and Muon. They stop updating weights at the first loss or gradient that is not finite."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf
import tf_keras

from train.config.learning import OptimizationConfig
from train.layers.cpu_functions import runs_unfused
from train.model.build import encoder_layers, hidden_matrices
from train.runtime.named_scopes import named
from train.step.orthogonal import orthogonalized, orthogonalized_in_shares
from train.step.schedule import build_schedule
from train.step.sharding import Sharding

Total = Callable[[tf.Tensor], tf.Tensor]


# As in BERT's optimizer, weight decay skips biases and norms: variables whose path has a component that ends as in
# this pattern. The rest of a component is not compared, because the name of a model may contain such a word
# (`roberta_prelayernorm`). On replicas the path ends in `/replica_1`. MPNet's table of relative attention biases is
# treated as a bias, as in transformers' Trainer.
NO_WEIGHT_DECAY = r"(bias|LayerNorm|layer_norm|/(attn_|mlp_|final_)?norm)(/|:|$)"


class GuardedAdamW(tf_keras.optimizers.AdamW):
    """AdamW (Loshchilov & Hutter 2017) with the results of tf_keras' AdamW, but it stops at a non-finite step.

    A step is non-finite if its loss or gradient norm is infinite or NaN. From the first such step on, gradients and all
    update rates are multiplied by 0. Weights, moments and the step counter then keep their exact values. This method
    needs no additional pass over the weights and no wait for the device. It also needs no branch in the compiled
    program; a branch would keep XLA from fusing the updates with other operations.

    Args:
        sharding: how moments and updates are divided among the replicas. None keeps the whole optimizer on each
            replica.
        rate_factors: learning-rate multiplier of each variable, in order. By default 1.
        arguments: arguments of tf_keras' AdamW.
    """

    def __init__(self, *, sharding: Sharding | None = None, rate_factors: Sequence[float] = (), **arguments: object):
        super().__init__(**arguments)
        self.sharding = sharding
        self._rate_factors = self._no_dependency(tuple(rate_factors))
        # 1 until the first non-finite step, then 0. Each replica has a copy, so that no replica waits for another.
        # Checkpoints do not contain it.
        self._going = self._no_dependency(
            tf.Variable(
                1.0,
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
                name="going",
            )
        )

    @property
    def figures(self) -> list[tf.Variable]:
        """The scalar variables: the step, whether the optimizer still takes steps, the last step's learning rate."""
        return [self.iterations, self._going, self.learning_rate]

    @property
    def is_stopped(self) -> bool:
        """Whether a non-finite step has stopped the optimizer. Waits for the device.

        The number of that step would have been `iterations` + 1.
        """
        return not float(self._going.read_value())

    def state_of(self, trained: Mapping[str, tf.Variable]) -> dict[str, tuple[tf.Variable, int | None]]:
        """Return the optimizer's state by name: the step, and the moments of each trained variable.

        Args:
            trained: the variables that the optimizer was built for, in order, by name.

        Returns:
            {name: (variable, axis along which the replicas divide it)}; the axis is None if the variable is whole.
        """
        state: dict[str, tuple[tf.Variable, int | None]] = {"iterations": (self.iterations, None)}
        for kind, moments in (("first_moment", self._momentums), ("second_moment", self._velocities)):
            for (name, variable), moment in zip(trained.items(), moments, strict=True):
                if moment is not None:
                    state[f"{kind}/{name}"] = moment, self.sharded_axis(variable)
        return state

    def sharded_axis(self, variable: tf.Variable) -> int | None:
        """Return the axis along which the variable's moments are divided; None if each replica has whole moments."""
        return self.sharding.axis(variable.shape) if self.sharding else None

    def add_variable_from_reference(
        self, model_variable: Any, variable_name: str, shape: Any = None, initial_value: Any = None
    ) -> tf.Variable:
        """Create a moment of a variable, or this replica's shard of the moment."""
        if self.sharding is None or self.sharded_axis(model_variable) is None:
            return super().add_variable_from_reference(model_variable, variable_name, shape, initial_value)
        shard = tf.Variable(
            tf.zeros(self.sharding.shard_shape(model_variable.shape)),
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.NONE,
            name=f"{variable_name}/{model_variable._shared_name}",
        )
        self._variables.append(shard)
        return shard

    def resume(self) -> None:
        """Take steps again after a non-finite step. Call this after restoring the state before that step."""
        self._going.assign(1.0)

    @named("optimizer")
    def apply_scaled(
        self, gradients: list[tf.Tensor], variables: list[tf.Variable], *, factor: tf.Tensor, is_finite: tf.Tensor
    ) -> None:
        """Take one step with `gradients` times `factor`, unless this step or an earlier step was not finite.

        Args:
            gradients: dense and summed over the replicas; with sharding, the results of `Sharding.sum_gradient`.
            variables: the variable of each gradient.
            factor: scale of the loss times the clipping factor, a float32 scalar; the same on all replicas.
            is_finite: bool scalar; false stops this step and all later steps.
        """
        going = self._going.assign(self._going * tf.cast(is_finite, tf.float32))
        factor = tf.where(going > 0, factor, 0.0)
        # If the factor is 0, the product is 0, even if the gradient is NaN or infinite.
        gradients = [tf.math.multiply_no_nan(gradient, factor) for gradient in gradients]
        if self.sharding:
            self._compute_current_learning_rate()
            gradients = self._update_shards(gradients, variables)
        self.apply_gradients(zip(gradients, variables, strict=True), skip_gradients_aggregation=True)
        self.iterations.assign_add(tf.cast(going, tf.int64) - 1)  # a skipped step is not counted

    def update_step(self, gradient: tf.Tensor, variable: tf.Variable) -> None:
        """Update the moments and then the variable; `apply_gradients` calls this for each variable."""
        if self.sharded_axis(variable) is None:
            if runs_unfused() and self._is_plain_adamw(variable):
                self._update_unfused(gradient, variable)
                return
            gradient = self._update(gradient, variable, tf.convert_to_tensor(variable), tf.identity)
        variable.assign(gradient)  # with sharding, `gradient` is the new value that `_update_shard` returned

    def _is_plain_adamw(self, variable: tf.Variable) -> bool:  # noqa: ARG002
        """Return whether the variable's update is plain AdamW, for which TensorFlow has a kernel."""
        return type(self) is GuardedAdamW

    def _update_unfused(self, gradient: tf.Tensor, variable: tf.Variable) -> None:
        """Compute `_update` with TensorFlow's kernel, which makes a single pass over memory."""
        rate, index = self._rate(variable), self._index_dict[self._var_key(variable)]
        if self.decays(variable):
            variable.assign_sub(variable * (self.weight_decay * rate))
        first_correction, second_correction = self._bias_corrections()
        tf.raw_ops.ResourceApplyAdam(
            var=variable.handle,
            m=self._momentums[index].handle,
            v=self._velocities[index].handle,
            beta1_power=1 - first_correction,
            beta2_power=1 - second_correction,
            lr=rate,
            beta1=1 - (1 - self.beta_1) * self._going,
            beta2=1 - (1 - self.beta_2) * self._going,
            epsilon=self.epsilon,
            grad=gradient,
        )

    def _update_shards(self, gradients: list[tf.Tensor], variables: list[tf.Variable]) -> list[tf.Tensor]:
        """Call `_update_shard` for each variable."""
        return list(map(self._update_shard, gradients, variables))

    def _update_shard(self, gradient: tf.Tensor, variable: tf.Variable) -> tf.Tensor:
        """Update this replica's shard of the moments and return the new value of the whole variable.

        For a variable that is not sharded, return the gradient.
        """
        sharding = self.sharding
        if sharding is None or self.sharded_axis(variable) is None:
            return gradient
        shard = sharding.shard_of(tf.convert_to_tensor(variable))
        return sharding.gather(self._update(gradient, variable, shard, sharding.total), variable.shape)

    def _update(self, gradient: tf.Tensor, variable: tf.Variable, value: tf.Tensor, total: Total) -> tf.Tensor:  # noqa: ARG002
        """Update the moments of a variable or of its shard, and return the new value of the variable or shard.

        Args:
            gradient: gradient of the variable or of its shard.
            variable: the whole variable.
            value: value of the variable or of its shard.
            total: sums a tensor over the shards.
        """
        rate = self._rate(variable)
        first, second = self._update_moments(gradient, variable)
        first_correction, second_correction = self._bias_corrections()
        if self.decays(variable):
            value -= value * self.weight_decay * rate
        alpha = rate * tf.sqrt(second_correction) / first_correction
        return value - first * alpha / (tf.sqrt(second) + self.epsilon)

    def _rate(self, variable: tf.Variable) -> tf.Tensor:
        """Return the learning rate of a variable in this step; 0 after a non-finite step."""
        rate = self.learning_rate * self._going
        return rate * self._rate_factors[self._index_dict[self._var_key(variable)]] if self._rate_factors else rate

    def decays(self, variable: tf.Variable) -> bool:
        """Return whether weight decay applies to the variable (even if its rate is 0)."""
        return bool(self._use_weight_decay(variable))

    def _update_moments(self, gradient: tf.Tensor, variable: tf.Variable) -> tuple[tf.Tensor, tf.Tensor]:
        """Update the first and second moments with the gradient, and return them."""
        index = self._index_dict[self._var_key(variable)]
        first, second = self._momentums[index], self._velocities[index]
        first.assign_add((gradient - first) * ((1 - self.beta_1) * self._going))
        second.assign_add((tf.square(gradient) - second) * ((1 - self.beta_2) * self._going))
        return first, second

    def _bias_corrections(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Return the factors by which the first and second moments are too small because both start at 0."""
        num_steps = tf.cast(self.iterations + 1, tf.float32)
        return 1 - tf.pow(self.beta_1, num_steps), 1 - tf.pow(self.beta_2, num_steps)

    def _apply_weight_decay(self, variables: list[tf.Variable]) -> None:
        """Do nothing, because `_update` includes the decay."""


class GuardedLamb(GuardedAdamW):
    """LAMB (You et al. 2019, algorithm 2): Adam, with each variable's update scaled to the norm of the variable.

    LAMB keeps training with large batches (thousands of rows) stable. As in the authors' code, updates of variables
    without decay are not scaled.
    """

    def _update(self, gradient: tf.Tensor, variable: tf.Variable, value: tf.Tensor, total: Total) -> tf.Tensor:
        """Update the moments of a variable and return its new value; see `GuardedAdamW._update`."""
        rate = self._rate(variable)
        first, second = self._update_moments(gradient, variable)
        first_correction, second_correction = self._bias_corrections()
        change = (first / first_correction) / (tf.sqrt(second / second_correction) + self.epsilon)
        if self.decays(variable):
            change += self.weight_decay * value
            squares = total(tf.stack([tf.reduce_sum(tf.square(value)), tf.reduce_sum(tf.square(change))]))
            norm, change_norm = tf.unstack(tf.sqrt(squares))
            rate *= tf.where((norm > 0) & (change_norm > 0), norm / change_norm, 1.0)
        return value - rate * change


class GuardedStableAdamW(GuardedAdamW):
    """StableAdamW (Wortsman et al. 2023, algorithm 2): AdamW with a lower rate for unusually large gradients.

    The rate is divided by the root mean square of gradient / sqrt(second moment) if this number is above 1 (update
    clipping, as in AdaFactor). ModernBERT was trained with this optimizer, without gradient clipping.
    """

    def _update(self, gradient: tf.Tensor, variable: tf.Variable, value: tf.Tensor, total: Total) -> tf.Tensor:
        """Update the moments of a variable and return its new value; see `GuardedAdamW._update`."""
        first, second = self._update_moments(gradient, variable)
        first_correction, second_correction = self._bias_corrections()
        corrected = second / second_correction
        squares = total(tf.reduce_sum(tf.square(gradient) / tf.maximum(corrected, self.epsilon**2)))
        root_mean_square = tf.sqrt(squares / variable.shape.num_elements())
        rate = self._rate(variable) / tf.maximum(1.0, root_mean_square)
        if self.decays(variable):
            value -= value * self.weight_decay * rate
        return value - rate * (first / first_correction) / (tf.sqrt(corrected) + self.epsilon)


class GuardedMuon(GuardedAdamW):
    """Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) for matrices; AdamW for other variables.

    The update of a matrix is its Nesterov momentum with all singular values brought near 1. As in Liu et al. 2025
    (arXiv:2502.16982) the update is multiplied by 0.2 · sqrt(max(rows, columns)). The update then has the same root
    mean square as AdamW's updates, so AdamW's learning rate and decay also suit matrices. A matrix has only one moment.

    Args:
        num_matrices: for each variable, in order, the number of matrices that it contains side by side; a variable
            with 0 is updated with AdamW.
        momentum: decay rate of the moment of matrices.
        rate_ratio: ratio of the learning rate of matrices to the learning rate of other variables.
        arguments: arguments of `GuardedAdamW`.
    """

    def __init__(self, *, num_matrices: Sequence[int], momentum: float, rate_ratio: float, **arguments: Any):
        super().__init__(**arguments)
        self._num_matrices = self._no_dependency(tuple(num_matrices))
        self.momentum = momentum
        self.rate_ratio = rate_ratio

    def add_variable_from_reference(
        self, model_variable: Any, variable_name: str, shape: Any = None, initial_value: Any = None
    ) -> tf.Variable | None:
        """Create a moment of a variable, or this replica's shard of the moment; None for matrices' second moment."""
        if variable_name == "v" and self.num_matrices(model_variable):
            return None
        return super().add_variable_from_reference(model_variable, variable_name, shape, initial_value)

    def num_matrices(self, variable: tf.Variable) -> int:
        """Return the number of matrices that the variable contains side by side; 0 if AdamW updates it."""
        return self._num_matrices[self._index_dict[self._var_key(variable)]]

    def _is_plain_adamw(self, variable: tf.Variable) -> bool:
        return not self.num_matrices(variable)

    def _rate(self, variable: tf.Variable) -> tf.Tensor:
        rate = super()._rate(variable)
        return rate * self.rate_ratio if self.num_matrices(variable) else rate

    def _update(self, gradient: tf.Tensor, variable: tf.Variable, value: tf.Tensor, total: Total) -> tf.Tensor:
        """Update the moments of a variable and return its new value; see `GuardedAdamW._update`."""
        num_matrices = self.num_matrices(variable)
        if not num_matrices:
            return super()._update(gradient, variable, value, total)
        directions = tf.split(self._direction(gradient, variable), num_matrices, axis=1)
        return self._moved(variable, value, [orthogonalized(direction) for direction in directions])

    def _update_shards(self, gradients: list[tf.Tensor], variables: list[tf.Variable]) -> list[tf.Tensor]:
        """Update the shards of all variables. Each replica orthogonalizes some of the matrices."""
        sharding = self.sharding
        assert sharding is not None
        has_sharded_matrices = [
            self.num_matrices(variable) > 0 and self.sharded_axis(variable) is not None for variable in variables
        ]
        updated: list[Any] = [
            None if has_matrices else self._update_shard(gradient, variable)
            for gradient, variable, has_matrices in zip(gradients, variables, has_sharded_matrices, strict=True)
        ]
        shards, axes, owners = [], [], []
        for index in (index for index, has_matrices in enumerate(has_sharded_matrices) if has_matrices):
            direction, axis = self._direction(gradients[index], variables[index]), self.sharded_axis(variables[index])
            num_matrices = self.num_matrices(variables[index])
            if axis == 1 and num_matrices > 1:  # a shard may contain parts of two matrices
                direction, axis = sharding.gather(direction, variables[index].shape), None
            shards += tf.split(direction, num_matrices, axis=1)
            axes += [axis] * num_matrices
            owners += [index] * num_matrices
        matrices_by_variable: dict[int, list[tf.Tensor]] = {}
        for index, matrix in zip(owners, orthogonalized_in_shares(shards, axes, sharding), strict=True):
            matrices_by_variable.setdefault(index, []).append(matrix)
        for index, matrices in matrices_by_variable.items():
            updated[index] = self._moved(variables[index], tf.convert_to_tensor(variables[index]), matrices)
        return updated

    def _direction(self, gradient: tf.Tensor, variable: tf.Variable) -> tf.Tensor:
        """Update the moment of a matrix (or of its shard), and return the matrix (or shard) to orthogonalize."""
        moment = self._momentums[self._index_dict[self._var_key(variable)]]
        moment.assign_add((gradient - moment) * ((1 - self.momentum) * self._going))
        return gradient + (moment - gradient) * self.momentum

    def _moved(self, variable: tf.Variable, value: tf.Tensor, matrices: list[tf.Tensor]) -> tf.Tensor:
        """Return the new value of a variable, given the orthogonalized matrices that it contains side by side."""
        rate = self._rate(variable)
        if self.decays(variable):
            value -= value * self.weight_decay * rate
        change = tf.cast(tf.concat(matrices, axis=1), value.dtype)
        return value - change * (rate * 0.2 * math.sqrt(max(matrices[0].shape)))


@named("global_norm")
def global_norm(gradients: list[tf.Tensor]) -> tf.Tensor:
    """Return the Euclidean norm of all gradients together, a float32 scalar.

    Squares of gradients with the same shape are added up before the sum is reduced to a scalar. A TPU reads many arrays
    at once nearly twice as fast as one after another, and the sum of a short array takes as long as the sum of a
    thousand rows.
    """
    return tf.sqrt(_squared_norm(gradients))


@named("global_norm")
def global_norm_by_shards(gradients: list[tf.Tensor], variables: list[tf.Variable], sharding: Sharding) -> tf.Tensor:
    """Return the value of `global_norm` for gradients that were summed with `Sharding.sum_gradient`."""
    shards: list[tf.Tensor] = []
    others: list[tf.Tensor] = []
    for gradient, variable in zip(gradients, variables, strict=True):
        (others if sharding.axis(variable.shape) is None else shards).append(gradient)
    squares = [sharding.total(_squared_norm(shards))] if shards else []
    return tf.sqrt(tf.add_n([*squares, *([_squared_norm(others)] if others else [])]))


def _squared_norm(gradients: list[tf.Tensor]) -> tf.Tensor:
    squares: dict[tuple[int, ...], list[tf.Tensor]] = {}
    for gradient in gradients:
        squares.setdefault(tuple(gradient.shape), []).append(tf.square(gradient))
    return tf.add_n([tf.reduce_sum(tf.add_n(group)) for group in squares.values()])


def clipping_factor(norm: tf.Tensor, max_norm: float) -> tf.Tensor:
    """Return the factor that clips a gradient to the norm `max_norm`; 1 if `norm` is smaller or `max_norm` is 0."""
    return tf.minimum(1.0, max_norm / norm) if max_norm else tf.ones_like(norm)


OPTIMIZERS = {"adamw": GuardedAdamW, "stable_adamw": GuardedStableAdamW, "lamb": GuardedLamb, "muon": GuardedMuon}


def build_optimizer(
    config: OptimizationConfig,
    sharding: Sharding | None = None,
    *,
    rate_factors: Sequence[float] = (),
    num_matrices: Sequence[int] = (),
    **numbers: int,
) -> GuardedAdamW:
    """Build the optimizer of a run. The optimizer does not clip gradients; the training step does.

    Args:
        config: the settings.
        sharding: see `GuardedAdamW`.
        rate_factors: see `GuardedAdamW`.
        num_matrices: see `GuardedMuon`; other optimizers ignore it.
        numbers: numbers of steps, passed to `build_schedule`.
    """
    muon_arguments: dict[str, Any] = {}
    if config.optimizer == "muon":
        rate = config.muon_learning_rate or config.learning_rate
        muon_arguments = {
            "num_matrices": num_matrices,
            "momentum": config.muon_momentum,
            "rate_ratio": rate / config.learning_rate,
        }
    optimizer = OPTIMIZERS[config.optimizer](
        learning_rate=build_schedule(config, **numbers),
        weight_decay=config.weight_decay_rate,
        beta_1=config.adam_beta1,
        beta_2=config.adam_beta2,
        epsilon=config.adam_epsilon,
        sharding=sharding,
        rate_factors=rate_factors,
        jit_compile=False,  # either the whole step is compiled or no part of it
        **muon_arguments,
    )
    optimizer.exclude_from_weight_decay(var_names=[NO_WEIGHT_DECAY])
    return optimizer


def count_with_one_moment(config: OptimizationConfig, network: Any) -> int:
    """Count the weights of a TF model for which the optimizer keeps one moment instead of two."""
    if config.optimizer != "muon":
        return 0
    counts = zip(network.trainable_variables, hidden_matrices(network), strict=True)
    return sum(math.prod(variable.shape) for variable, num_matrices in counts if num_matrices)


def layer_rate_factors(network: Any, decay: float) -> tuple[float, ...]:
    """Return the learning-rate factor of each trainable variable of a TF model, in order.

    Lower layers learn more slowly, as in the fine-tuning of ELECTRA (Clark et al. 2020) and BEiT (Bao et al. 2021):

    - 1 for the head, and for a pooler or a norm after the layers;
    - `decay` for the last layer, `decay`² for the layer before it, and so on;
    - the factor of the first layer times `decay` for the embeddings and everything else below the layers.

    A layer that is used several times (as in ALBERT) is counted once.
    """
    layers = encoder_layers(network)
    powers = {
        id(variable): len(layers) - index
        for index, layer in enumerate(layers)
        for variable in layer.trainable_variables
    }
    below = re.compile(rf"/{network.base_model_prefix}/(?!(pooler|final_norm|LayerNorm)/)")
    for variable in network.trainable_variables:
        powers.setdefault(id(variable), len(layers) + 1 if below.search(variable.name) else 0)
    return tuple(decay ** powers[id(variable)] for variable in network.trainable_variables)
