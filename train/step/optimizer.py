"""Learning-rate schedules; AdamW, StableAdamW and LAMB, which stop at the first gradient that is not finite."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
import tf_keras

from train.config.learning import OptimizationConfig
from train.layers.cpu_functions import runs_unfused
from train.model.build import encoder_layers
from train.runtime.named_scopes import named
from train.step.sharding import Sharding

Total = Callable[[tf.Tensor], tf.Tensor]


@dataclass(frozen=True)
class WarmupSchedule(tf_keras.optimizers.schedules.LearningRateSchedule):
    """Rises linearly to `peak` over the warmup; then the rate is `peak` times the fraction that its shape gives.

    Args:
        shape: a name in `SHAPES`.
        peak: the rate after the warmup.
        num_warmup_steps: steps of the warmup; 0 starts at the peak.
        num_steps: the step at which it ends: the last of the run, or of the phase.
        num_decay_steps: last steps, over which `wsd` falls.
        first_step: the step before which it starts.
        min_ratio: fraction of the peak below which the rate does not fall; `linear`, `cosine` and `wsd` end at it.
    """

    shape: str
    peak: float
    num_warmup_steps: int
    num_steps: int
    num_decay_steps: int = 0
    min_ratio: float = 0.0
    first_step: int = 0

    def __call__(self, step: tf.Tensor) -> tf.Tensor:
        """Compute the learning rate of step `step` (from 0), a float32 scalar."""
        step = tf.cast(step - self.first_step, tf.float32)
        # The first step counts as 1, or it would be made with a rate of 0.
        rising = (step + 1) / max(1, self.num_warmup_steps)
        falling = self.min_ratio + (1 - self.min_ratio) * SHAPES[self.shape](self, step)
        return self.peak * tf.clip_by_value(tf.minimum(rising, falling), 0.0, 1.0)

    @property
    def length(self) -> int:
        return self.num_steps - self.first_step

    def get_config(self) -> dict[str, float | str]:
        return dict(vars(self))


def _remaining(schedule: WarmupSchedule, step: tf.Tensor, num_last_steps: int) -> tf.Tensor:
    """Compute the fraction of the last `num_last_steps` steps that remains: above 1 before they start."""
    return tf.maximum(0.0, (schedule.length - step) / max(1, num_last_steps))


def _linear(schedule: WarmupSchedule, step: tf.Tensor) -> tf.Tensor:
    return _remaining(schedule, step, schedule.length - schedule.num_warmup_steps)


def _cosine(schedule: WarmupSchedule, step: tf.Tensor) -> tf.Tensor:
    """One half period (Loshchilov & Hutter 2016, SGDR, without restarts)."""
    remaining = tf.minimum(1.0, _linear(schedule, step))
    return 0.5 * (1 - tf.cos(math.pi * remaining))


def _inverse_sqrt(schedule: WarmupSchedule, step: tf.Tensor) -> tf.Tensor:
    """Vaswani et al. 2017, section 5.3: it does not depend on the length of the run."""
    return tf.sqrt(max(1, schedule.num_warmup_steps) / (step + 1))


def _wsd(schedule: WarmupSchedule, step: tf.Tensor) -> tf.Tensor:
    """Warmup, stable, decay (Hu et al. 2024, MiniCPM); falls as 1 - sqrt, the best form in Hägele et al. 2024."""
    remaining = tf.minimum(1.0, _remaining(schedule, step, schedule.num_decay_steps))
    return 1 - tf.sqrt(1 - remaining)


def _constant(schedule: WarmupSchedule, step: tf.Tensor) -> tf.Tensor:  # noqa: ARG001
    return tf.ones_like(step)


SHAPES: dict[str, Callable[[WarmupSchedule, tf.Tensor], tf.Tensor]] = {
    "linear": _linear,
    "cosine": _cosine,
    "inverse_sqrt": _inverse_sqrt,
    "wsd": _wsd,
    "constant": _constant,
}

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
        """Collect the optimizer's state by name: the step, and two moments of each trained variable.

        Args:
            trained: the variables that it was built for, in their order, by name.

        Returns:
            Each with the axis along which the replicas divide it, None where they do not.
        """
        state: dict[str, tuple[tf.Variable, int | None]] = {"iterations": (self.iterations, None)}
        for kind, moments in (("first_moment", self._momentums), ("second_moment", self._velocities)):
            for (name, variable), moment in zip(trained.items(), moments, strict=True):
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
            gradients = list(map(self._update_shard, gradients, variables))
        self.apply_gradients(zip(gradients, variables, strict=True), skip_gradients_aggregation=True)
        self.iterations.assign_add(tf.cast(going, tf.int64) - 1)  # takes back what was counted

    def update_step(self, gradient: tf.Tensor, variable: tf.Variable) -> None:
        """Update the moments and then the variable; called by `apply_gradients` for each of them."""
        if self.sharded_axis(variable) is None:
            if runs_unfused() and type(self) is GuardedAdamW:
                self._update_unfused(gradient, variable)
                return
            gradient = self._update(gradient, variable, tf.convert_to_tensor(variable), tf.identity)
        variable.assign(gradient)  # the new value, as `_update_shard` has returned it

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


OPTIMIZERS = {"adamw": GuardedAdamW, "stable_adamw": GuardedStableAdamW, "lamb": GuardedLamb}


def build_schedule(config: OptimizationConfig, **numbers: int) -> WarmupSchedule:
    """Build the learning rate over a run, or over one of its phases, of the numbers of steps of `WarmupSchedule`."""
    return WarmupSchedule(
        shape=config.schedule, peak=config.learning_rate, min_ratio=config.min_learning_rate_ratio, **numbers
    )


def build_optimizer(
    config: OptimizationConfig, sharding: Sharding | None = None, rate_factors: Sequence[float] = (), **numbers: int
) -> GuardedAdamW:
    """Build the optimizer of a run; clipping is the train step's, over the gradients of all replicas.

    Args:
        sharding, rate_factors: see `GuardedAdamW`.
        numbers: of steps, as `build_schedule` takes them.
    """
    optimizer = OPTIMIZERS[config.optimizer](
        learning_rate=build_schedule(config, **numbers),
        weight_decay=config.weight_decay_rate,
        beta_1=config.adam_beta1,
        beta_2=config.adam_beta2,
        epsilon=config.adam_epsilon,
        sharding=sharding,
        rate_factors=rate_factors,
        jit_compile=False,  # the whole step is compiled, or nothing is
    )
    optimizer.exclude_from_weight_decay(var_names=[NO_WEIGHT_DECAY])
    return optimizer


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
