"""AdamW with warmup and linear decay."""

import tensorflow as tf
import tf_keras

from train.config import OptimizationConfig

# As in BERT's optimizer: matched against the variables' names.
NO_WEIGHT_DECAY = ["bias", "LayerNorm", "layer_norm", "layernorm"]


class LinearWarmupDecay(tf_keras.optimizers.schedules.LearningRateSchedule):
    """Rises linearly from 0 to `peak` over the warmup, then falls linearly to 0 at the last update."""

    def __init__(self, peak: float, num_warmup_steps: int, num_steps: int):
        self.peak = peak
        self.num_warmup_steps = num_warmup_steps
        self.num_steps = num_steps

    def __call__(self, step: tf.Tensor) -> tf.Tensor:
        """Return the learning rate of update `step` (from 0), a float32 scalar."""
        step = tf.cast(step, tf.float32)
        # The first update counts as 1, or it would be made with a rate of 0.
        rising = (step + 1) / max(1, self.num_warmup_steps)
        falling = (self.num_steps - step) / max(1, self.num_steps - self.num_warmup_steps)
        return self.peak * tf.clip_by_value(tf.minimum(rising, falling), 0.0, 1.0)

    def get_config(self) -> dict[str, float]:
        """Return the arguments of the constructor."""
        return {"peak": self.peak, "num_warmup_steps": self.num_warmup_steps, "num_steps": self.num_steps}


def build_optimizer(
    config: OptimizationConfig, *, num_steps: int, num_warmup_steps: int
) -> tf_keras.optimizers.Optimizer:
    """Return AdamW (Loshchilov & Hutter 2017); clipping is the train step's, over the gradients of all replicas."""
    optimizer = tf_keras.optimizers.AdamW(
        learning_rate=LinearWarmupDecay(config.learning_rate, num_warmup_steps, num_steps),
        weight_decay=config.weight_decay_rate,
        beta_1=config.adam_beta1,
        beta_2=config.adam_beta2,
        epsilon=config.adam_epsilon,
        jit_compile=False,  # the whole step is compiled, or nothing is
    )
    optimizer.exclude_from_weight_decay(var_names=NO_WEIGHT_DECAY)
    return optimizer
