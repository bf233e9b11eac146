import numpy as np
import pytest
import tensorflow as tf

from train.config import OptimizationConfig
from train.optimizer import LinearWarmupDecay, build_optimizer


def test_learning_rates_are_pinned():
    schedule = LinearWarmupDecay(peak=1.0, num_warmup_steps=4, num_steps=12)
    rates = [float(schedule(step)) for step in range(13)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0])


def test_without_warmup_the_first_update_has_the_peak():
    assert float(LinearWarmupDecay(peak=0.5, num_warmup_steps=0, num_steps=10)(0)) == 0.5


def test_biases_and_layer_norms_do_not_decay():
    config = OptimizationConfig(learning_rate=0.1, weight_decay_rate=0.5)
    optimizer = build_optimizer(config, num_steps=10, num_warmup_steps=0)
    names = ("layer/dense/kernel", "layer/dense/bias", "layer/LayerNorm/gamma")
    variables = [tf.Variable([1.0, 1.0], name=name) for name in names]
    optimizer.build(variables)
    optimizer.apply_gradients([(tf.zeros(2), variable) for variable in variables])
    decayed = [not np.array_equal(variable.numpy(), [1.0, 1.0]) for variable in variables]
    assert decayed == [True, False, False]
    assert variables[0].numpy() == pytest.approx([0.95, 0.95])
