"""The learning rate over a run, or over one of its phases."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import tensorflow as tf
import tf_keras

from train.config.learning import OptimizationConfig


@dataclass(frozen=True)
class WarmupSchedule(tf_keras.optimizers.schedules.LearningRateSchedule):
    """A learning rate that rises linearly to `peak` over the warmup, and then follows the curve `shape`.

    Args:
        shape: a key of `SHAPES`.
        peak: the rate after the warmup.
        num_warmup_steps: length of the warmup; with 0 the schedule starts at the peak.
        num_steps: the last step of the schedule, which is the last step of the run or of the phase.
        num_decay_steps: number of final steps over which `wsd` falls.
        first_step: number of steps before the schedule starts.
        min_ratio: lower limit of the rate as a fraction of the peak; `linear`, `cosine` and `wsd` end at this limit.
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
        # The first step counts as step 1, otherwise its rate would be 0.
        rising = (step + 1) / max(1, self.num_warmup_steps)
        falling = self.min_ratio + (1 - self.min_ratio) * SHAPES[self.shape](self, step)
        return self.peak * tf.clip_by_value(tf.minimum(rising, falling), 0.0, 1.0)

    @property
    def length(self) -> int:
        return self.num_steps - self.first_step

    def get_config(self) -> dict[str, float | str]:
        return dict(vars(self))


def _remaining(schedule: WarmupSchedule, step: tf.Tensor, num_last_steps: int) -> tf.Tensor:
    """Return the fraction of the last `num_last_steps` steps that remains; above 1 before these steps start."""
    return tf.maximum(0.0, (schedule.length - step) / max(1, num_last_steps))


def _linear(schedule: WarmupSchedule, step: tf.Tensor) -> tf.Tensor:
    return _remaining(schedule, step, schedule.length - schedule.num_warmup_steps)


def _cosine(schedule: WarmupSchedule, step: tf.Tensor) -> tf.Tensor:
    """Compute half a cosine period (Loshchilov & Hutter 2016, SGDR, without restarts)."""
    remaining = tf.minimum(1.0, _linear(schedule, step))
    return 0.5 * (1 - tf.cos(math.pi * remaining))


def _inverse_sqrt(schedule: WarmupSchedule, step: tf.Tensor) -> tf.Tensor:
    """Compute the inverse square root of the step (Vaswani et al. 2017, section 5.3), whatever the run's length."""
    return tf.sqrt(max(1, schedule.num_warmup_steps) / (step + 1))


def _wsd(schedule: WarmupSchedule, step: tf.Tensor) -> tf.Tensor:
    """Warm up, stay constant, decay (Hu et al. 2024, MiniCPM) as 1 - sqrt, the best shape in Hägele et al. 2024."""
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
    """Build the learning rate schedule of a run or a phase; `numbers` are the numbers of steps of `WarmupSchedule`."""
    return WarmupSchedule(
        shape=config.schedule, peak=config.learning_rate, min_ratio=config.min_learning_rate_ratio, **numbers
    )
