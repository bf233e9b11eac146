"""The learning rate over a run, or over one of its phases."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import tensorflow as tf
import tf_keras

from train.config.learning import OptimizationConfig


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


def build_schedule(config: OptimizationConfig, **numbers: int) -> WarmupSchedule:
    """Build the learning rate over a run, or over one of its phases, of the numbers of steps of `WarmupSchedule`."""
    return WarmupSchedule(
        shape=config.schedule, peak=config.learning_rate, min_ratio=config.min_learning_rate_ratio, **numbers
    )
