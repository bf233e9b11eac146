"""The learning rate over a run."""

import math

import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from train.step.schedule import SHAPES, WarmupSchedule


def rates(shape, num_steps=12, num_warmup_steps=4, **settings):
    schedule = WarmupSchedule(shape, peak=1.0, num_warmup_steps=num_warmup_steps, num_steps=num_steps, **settings)
    return schedule(tf.range(num_steps + 1)).numpy().tolist()


# The rates of steps 1 to 12, and of the one that is not made any more.
PINNED = {
    "linear": [0.25, 0.5, 0.75, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0],
    "cosine": [0.25, 0.5, 0.75, 1, *(0.5 + 0.5 * math.cos(math.pi * part / 8) for part in range(9))],
    "inverse_sqrt": [0.25, 0.5, 0.75, 1, *(math.sqrt(4 / step) for step in range(5, 14))],
    "wsd": [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, *(1 - math.sqrt(part / 4) for part in range(1, 5))],
    "constant": [0.25, 0.5, 0.75, *[1] * 10],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_rates_are_pinned(shape):
    assert rates(shape, num_decay_steps=4) == pytest.approx(PINNED[shape], abs=1e-6)
    assert rates(shape, num_warmup_steps=0)[0] == 1.0


@pytest.mark.parametrize("shape", ["linear", "cosine", "wsd"])
def test_the_end_may_be_above_0(shape):
    values = rates(shape, num_steps=1000, num_decay_steps=200, min_ratio=0.1)
    assert values[-1] == pytest.approx(0.1)
    assert min(values[4:]) == values[-1]
    assert values[0] == 0.25  # the warmup begins where it did


@given(
    shape=st.sampled_from(sorted(SHAPES)),
    num_steps=st.integers(1, 400),
    num_warmup_steps=st.integers(0, 399),
    num_decay_steps=st.integers(0, 400),
)
def test_every_step_has_a_rate_up_to_the_peak(shape, num_steps, num_warmup_steps, num_decay_steps):
    num_warmup_steps = min(num_warmup_steps, num_steps - 1)
    num_decay_steps = min(num_decay_steps, num_steps - num_warmup_steps)
    values = rates(shape, num_steps, num_warmup_steps, num_decay_steps=num_decay_steps)[:-1]
    warmup, after_warmup = values[:num_warmup_steps], values[num_warmup_steps:]
    assert all(0 < value <= 1 for value in values)
    assert warmup == sorted(warmup)
    assert after_warmup == sorted(after_warmup, reverse=True)
