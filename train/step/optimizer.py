"""AdamW, StableAdamW, LAMB and Muon, which stop at the first gradient that is not finite."""

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


# As in BERT's optimizer: a part of a variable's path that ends so. The names of whole models may hold such a word, as
# `roberta_prelayernorm` does, and on replicas the path ends in `/replica_1`. MPNet's table of relative attention biases
# counts as a bias, as for transformers' Trainer: it is added to the scores.
NO_WEIGHT_DECAY = r"(bias|LayerNorm|layer_norm|/(attn_|mlp_|final_)?norm)(/|:|$)"


class GuardedAdamW(tf_keras.optimizers.AdamW):
    """AdamW (Loshchilov & Hutter 2017), with the numbers of tf_keras', that makes no more steps after a bad one.

    From the first step that is not finite on, the gradients are taken as 0 and so are the rates by which moments,
    weights and step move, so all keep their exact values. It costs no pass over the weights, no branch in the compiled
    program, which would keep XLA from joining the updates with what is around them, and no wait for the device.

    Args:
        sharding: how moments and updates are divided among the replicas; None for an optimizer that is whole on each.
        rate_factors: by which the learning rate of each variable is multiplied, in their order; by default 1.
    """

    def __init__(self, *, sharding: Sharding | None = None, rate_factors: Sequence[float] = (), **arguments: object):
        super().__init__(**arguments)
        self.sharding = sharding
        self._rate_factors = self._no_dependency(tuple(rate_factors))
        # 1 until the first bad step, then 0. Of each replica, so that none waits for another; not in checkpoints.
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
        """Its variables of one number: the step, whether it goes on, and the learning rate of the last step."""
        return [self.iterations, self._going, self.learning_rate]

    @property
    def is_stopped(self) -> bool:
        """Whether a step was not finite: it would have been number `iterations` + 1. Waits for the device."""
        return not float(self._going.read_value())

    def state_of(self, trained: Mapping[str, tf.Variable]) -> dict[str, tuple[tf.Variable, int | None]]:
        """Collect the optimizer's state by name: the step, and the moments of each trained variable.

        Args:
            trained: the variables that it was built for, in their order, by name.

        Returns:
            Each with the axis along which the replicas divide it, None where they do not.
        """
        state: dict[str, tuple[tf.Variable, int | None]] = {"iterations": (self.iterations, None)}
        for kind, moments in (("first_moment", self._momentums), ("second_moment", self._velocities)):
            for (name, variable), moment in zip(trained.items(), moments, strict=True):
                if moment is not None:
                    state[f"{kind}/{name}"] = moment, self.sharded_axis(variable)
        return state

    def sharded_axis(self, variable: tf.Variable) -> int | None:
        """Find the axis along which the variable's moments are divided; None where they are whole on each replica."""
        return self.sharding.axis(variable.shape) if self.sharding else None

    def add_variable_from_reference(
        self, model_variable: Any, variable_name: str, shape: Any = None, initial_value: Any = None
    ) -> tf.Variable:
        """Make a moment of a variable, or this replica's shard of it."""
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
        """Make steps again after one that was not finite, once the state before it is restored."""
        self._going.assign(1.0)

    @named("optimizer")
    def apply_scaled(
        self, gradients: list[tf.Tensor], variables: list[tf.Variable], *, factor: tf.Tensor, is_finite: tf.Tensor
    ) -> None:
        """Make one step with `gradients` times `factor`, the same on all replicas, unless there was a bad one.

        Args:
            gradients: dense, summed over the replicas; with sharding as `Sharding.sum_gradient` gives them.
            variables: one for each gradient.
            factor: float32 scalar, for the scale of the loss and for clipping.
            is_finite: bool scalar; false stops this step and all further ones.
        """
        going = self._going.assign(self._going * tf.cast(is_finite, tf.float32))
        factor = tf.where(going > 0, factor, 0.0)
        # 0 where the factor is 0, whatever the gradient.
        gradients = [tf.math.multiply_no_nan(gradient, factor) for gradient in gradients]
        if self.sharding:
            self._compute_current_learning_rate()
            gradients = self._update_shards(gradients, variables)
        self.apply_gradients(zip(gradients, variables, strict=True), skip_gradients_aggregation=True)
        self.iterations.assign_add(tf.cast(going, tf.int64) - 1)  # takes back what was counted

    def update_step(self, gradient: tf.Tensor, variable: tf.Variable) -> None:
        """Update the moments and then the variable; called by `apply_gradients` for each of them."""
        if self.sharded_axis(variable) is None:
            if runs_unfused() and self._is_plain_adamw(variable):
                self._update_unfused(gradient, variable)
                return
            gradient = self._update(gradient, variable, tf.convert_to_tensor(variable), tf.identity)
        variable.assign(gradient)  # the new value, as `_update_shard` has returned it

    def _is_plain_adamw(self, variable: tf.Variable) -> bool:  # noqa: ARG002
        """Return whether the variable's update is AdamW's, for which TensorFlow has a kernel."""
        return type(self) is GuardedAdamW

    def _update_unfused(self, gradient: tf.Tensor, variable: tf.Variable) -> None:
        """Update the moments and then the variable as `_update` does, by TensorFlow's kernel: one pass over memory."""
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
        """Update this replica's shard of the moments and return the new values of the whole variable.

        Of a variable that is not divided, the gradient is returned.
        """
        sharding = self.sharding
        if sharding is None or self.sharded_axis(variable) is None:
            return gradient
        shard = sharding.shard_of(tf.convert_to_tensor(variable))
        return sharding.gather(self._update(gradient, variable, shard, sharding.total), variable.shape)

    def _update(self, gradient: tf.Tensor, variable: tf.Variable, value: tf.Tensor, total: Total) -> tf.Tensor:  # noqa: ARG002
        """Update the moments of a variable and compute its new value, or those of a shard of it.

        Args:
            gradient, value: of the variable or of its shard.
            total: adds up over the shards.
        """
        rate = self._rate(variable)
        first, second = self._update_moments(gradient, variable)
        first_correction, second_correction = self._bias_corrections()
        if self.decays(variable):
            value -= value * self.weight_decay * rate
        alpha = rate * tf.sqrt(second_correction) / first_correction
        return value - first * alpha / (tf.sqrt(second) + self.epsilon)

    def _rate(self, variable: tf.Variable) -> tf.Tensor:
        """Compute the learning rate of a variable in this step; 0 once there was a bad step."""
        rate = self.learning_rate * self._going
        return rate * self._rate_factors[self._index_dict[self._var_key(variable)]] if self._rate_factors else rate

    def decays(self, variable: tf.Variable) -> bool:
        """Return whether weight decay applies to the variable, whatever its rate."""
        return bool(self._use_weight_decay(variable))

    def _update_moments(self, gradient: tf.Tensor, variable: tf.Variable) -> tuple[tf.Tensor, tf.Tensor]:
        """Update the first and the second moment with this gradient in them."""
        index = self._index_dict[self._var_key(variable)]
        first, second = self._momentums[index], self._velocities[index]
        first.assign_add((gradient - first) * ((1 - self.beta_1) * self._going))
        second.assign_add((tf.square(gradient) - second) * ((1 - self.beta_2) * self._going))
        return first, second

    def _bias_corrections(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Compute the factors by which the moments, which start at 0, are too small."""
        num_steps = tf.cast(self.iterations + 1, tf.float32)
        return 1 - tf.pow(self.beta_1, num_steps), 1 - tf.pow(self.beta_2, num_steps)

    def _apply_weight_decay(self, variables: list[tf.Variable]) -> None:
        """Do nothing: decay is a part of `_update`."""


class GuardedLamb(GuardedAdamW):
    """LAMB (You et al. 2019, algorithm 2): Adam's update of each variable, scaled to the norm of the variable.

    It keeps large batches (thousands of rows) stable. As in the authors' code, variables without decay are not scaled.
    """

    def _update(self, gradient: tf.Tensor, variable: tf.Variable, value: tf.Tensor, total: Total) -> tf.Tensor:
        """Update the moments of a variable and compute its new value; see `GuardedAdamW`."""
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
    """StableAdamW (Wortsman et al. 2023, algorithm 2): a variable with an unusual gradient is updated at a lower rate.

    The rate is divided by the root mean square of gradient / sqrt(second moment), where that is above 1 (update
    clipping, as in AdaFactor). ModernBERT was trained with it, without clipping the gradient.
    """

    def _update(self, gradient: tf.Tensor, variable: tf.Variable, value: tf.Tensor, total: Total) -> tf.Tensor:
        """Update the moments of a variable and compute its new value; see `GuardedAdamW`."""
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

    The update of a matrix is its momentum, looked ahead (Nesterov), with all singular values brought near 1. As in Liu
    et al. 2025 (arXiv:2502.16982) it is multiplied by 0.2 · sqrt(max(rows, columns)), which gives it the root mean
    square of AdamW's updates, so that AdamW's learning rate and decay suit matrices as well. A matrix has one moment.

    Args:
        num_matrices: of each variable in their order: how many matrices it holds side by side; 0 to update by AdamW.
        momentum: decay of the moment of matrices.
        rate_ratio: the learning rate of matrices over that of other variables.
    """

    def __init__(self, *, num_matrices: Sequence[int], momentum: float, rate_ratio: float, **arguments: Any):
        super().__init__(**arguments)
        self._num_matrices = self._no_dependency(tuple(num_matrices))
        self.momentum = momentum
        self.rate_ratio = rate_ratio

    def add_variable_from_reference(
        self, model_variable: Any, variable_name: str, shape: Any = None, initial_value: Any = None
    ) -> tf.Variable | None:
        """Make a moment of a variable, or this replica's shard of it; None for the second moment of matrices."""
        if variable_name == "v" and self.num_matrices(model_variable):
            return None
        return super().add_variable_from_reference(model_variable, variable_name, shape, initial_value)

    def num_matrices(self, variable: tf.Variable) -> int:
        """Return how many matrices the variable holds side by side; 0 where AdamW updates it."""
        return self._num_matrices[self._index_dict[self._var_key(variable)]]

    def _is_plain_adamw(self, variable: tf.Variable) -> bool:
        return not self.num_matrices(variable)

    def _rate(self, variable: tf.Variable) -> tf.Tensor:
        rate = super()._rate(variable)
        return rate * self.rate_ratio if self.num_matrices(variable) else rate

    def _update(self, gradient: tf.Tensor, variable: tf.Variable, value: tf.Tensor, total: Total) -> tf.Tensor:
        """Update the moments of a variable and compute its new value; see `GuardedAdamW`."""
        num_matrices = self.num_matrices(variable)
        if not num_matrices:
            return super()._update(gradient, variable, value, total)
        directions = tf.split(self._direction(gradient, variable), num_matrices, axis=1)
        return self._moved(variable, value, [orthogonalized(direction) for direction in directions])

    def _update_shards(self, gradients: list[tf.Tensor], variables: list[tf.Variable]) -> list[tf.Tensor]:
        """Update the shards of all variables; each replica orthogonalizes some of the matrices, whole."""
        sharding = self.sharding
        assert sharding is not None
        is_shared = [self.num_matrices(one) > 0 and self.sharded_axis(one) is not None for one in variables]
        updated: list[Any] = [
            None if shared else self._update_shard(gradient, variable)
            for gradient, variable, shared in zip(gradients, variables, is_shared, strict=True)
        ]
        shards, axes, owners = [], [], []
        for index in (index for index, shared in enumerate(is_shared) if shared):
            direction, axis = self._direction(gradients[index], variables[index]), self.sharded_axis(variables[index])
            num_matrices = self.num_matrices(variables[index])
            if axis == 1 and num_matrices > 1:  # a shard may hold parts of two matrices
                direction, axis = sharding.gather(direction, variables[index].shape), None
            shards += tf.split(direction, num_matrices, axis=1)
            axes += [axis] * num_matrices
            owners += [index] * num_matrices
        matrices: dict[int, list[tf.Tensor]] = {}
        for index, matrix in zip(owners, orthogonalized_in_shares(shards, axes, sharding), strict=True):
            matrices.setdefault(index, []).append(matrix)
        for index, of_variable in matrices.items():
            updated[index] = self._moved(variables[index], tf.convert_to_tensor(variables[index]), of_variable)
        return updated

    def _direction(self, gradient: tf.Tensor, variable: tf.Variable) -> tf.Tensor:
        """Update the moment of a matrix and return what is orthogonalized, or the shards of both."""
        moment = self._momentums[self._index_dict[self._var_key(variable)]]
        moment.assign_add((gradient - moment) * ((1 - self.momentum) * self._going))
        return gradient + (moment - gradient) * self.momentum

    def _moved(self, variable: tf.Variable, value: tf.Tensor, matrices: list[tf.Tensor]) -> tf.Tensor:
        """Compute the new value of a variable from the orthogonalized matrices that it holds side by side."""
        rate = self._rate(variable)
        if self.decays(variable):
            value -= value * self.weight_decay * rate
        change = tf.cast(tf.concat(matrices, axis=1), value.dtype)
        return value - change * (rate * 0.2 * math.sqrt(max(matrices[0].shape)))


@named("global_norm")
def global_norm(gradients: list[tf.Tensor]) -> tf.Tensor:
    """Compute the Euclidean norm of all gradients together, a float32 scalar.

    Squares of one shape are added up before their sum is taken: a TPU reads many arrays at a time at nearly twice the
    speed of one after the other, and each sum of a short one costs as much as that of a thousand rows.
    """
    return tf.sqrt(_squared_norm(gradients))


@named("global_norm")
def global_norm_by_shards(gradients: list[tf.Tensor], variables: list[tf.Variable], sharding: Sharding) -> tf.Tensor:
    """Compute what `global_norm` does, of gradients that `Sharding.sum_gradient` has summed."""
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
    """Compute what brings a gradient of this norm down to `max_norm`, 1 where it is smaller or `max_norm` is 0."""
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
    """Build the optimizer of a run; clipping is the train step's, over the gradients of all replicas.

    Args:
        sharding, rate_factors: see `GuardedAdamW`.
        num_matrices: see `GuardedMuon`; others take no notice of it.
        numbers: of steps, as `build_schedule` takes them.
    """
    of_muon: dict[str, Any] = {}
    if config.optimizer == "muon":
        rate = config.muon_learning_rate or config.learning_rate
        of_muon = {
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
        jit_compile=False,  # the whole step is compiled, or nothing is
        **of_muon,
    )
    optimizer.exclude_from_weight_decay(var_names=[NO_WEIGHT_DECAY])
    return optimizer


def count_with_one_moment(config: OptimizationConfig, network: Any) -> int:
    """Count the weights of a TF model of which the optimizer keeps one moment instead of two."""
    if config.optimizer != "muon":
        return 0
    counts = zip(network.trainable_variables, hidden_matrices(network), strict=True)
    return sum(math.prod(variable.shape) for variable, num_matrices in counts if num_matrices)


def layer_rate_factors(network: Any, decay: float) -> tuple[float, ...]:
    """Compute the factor of the learning rate for each trainable variable of a TF model, in their order.

    Lower layers learn more slowly, as ELECTRA (Clark et al. 2020) and BEiT (Bao et al. 2021) were fine-tuned: 1 for the
    head, and for a pooler or a norm after the layers; `decay` for the last layer, its square for the layer before; for
    the embeddings, and whatever else is below the layers, one power more than for the first layer. Layers that are used
    several times (ALBERT's) count once.
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
