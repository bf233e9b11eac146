import time

import pytest
import tensorflow as tf
import tf_keras

from train.runtime.steps_per_execution import Launches
from train.runtime.strategy import mirrored_strategy
from train.train_step import build_launch


class Counter(tf_keras.Model):
    """Sums what it is given."""

    def __init__(self):
        super().__init__()
        self.total = self.add_weight("total", (), initializer="zeros", aggregation=tf.VariableAggregation.SUM)

    def train_step(self, data):
        self.total.assign_add(tf.reduce_sum(data))
        return {}

    def make_train_function(self, force=False):  # noqa: ARG002
        self.train_function = build_launch(self)
        return self.train_function


class Noted(tf_keras.callbacks.Callback):
    _supports_tf_logs = True

    def __init__(self):
        super().__init__()
        self.steps = []

    def on_train_batch_end(self, batch, logs=None):  # noqa: ARG002
        self.steps.append(batch + 1)


def launches_of(start_step=0, num_steps=20, max_steps=8, intervals_steps=(5, 7), marks=()):
    return Launches(intervals_steps, marks, start_step=start_step, num_steps=num_steps, max_steps=max_steps)


def fit(strategy, max_steps=8, input_seconds=0.0, num_steps=20):
    def wait(value):
        time.sleep(input_seconds)
        return value

    numbers = tf.data.Dataset.range(1, num_steps + 1).map(lambda number: tf.fill((2,), tf.cast(number, tf.float32)))
    if input_seconds:
        numbers = numbers.map(lambda value: tf.ensure_shape(tf.numpy_function(wait, [value], tf.float32), (2,)))
    with strategy.scope():
        model = Counter()
        model.compile(steps_per_execution=max_steps)
    launches, noted = launches_of(max_steps=max_steps, num_steps=num_steps), Noted()
    started_seconds = time.perf_counter()
    model.fit(numbers, steps_per_epoch=num_steps, verbose=0, callbacks=[launches, noted])
    return float(model.total.numpy()), noted.steps, launches.take_wait_seconds(), time.perf_counter() - started_seconds


def one_cpu():
    return tf.distribute.OneDeviceStrategy("/device:CPU:0")


def two_cpus():
    return mirrored_strategy(tuple(device.name for device in tf.config.list_logical_devices("CPU")))


def test_launches_end_where_something_is_due():
    launches = launches_of(start_step=3, marks=(17, 2))
    step, steps = 3, []
    while step < 20:
        step += launches.length_after(step)
        steps.append(step)
    assert steps == [5, 7, 10, 14, 15, 17, 20]
    assert launches_of(max_steps=2).length_after(0) == 2


@pytest.mark.parametrize("strategy", [one_cpu, two_cpus])
@pytest.mark.parametrize(("max_steps", "steps"), [(8, [5, 7, 10, 14, 15, 20]), (1, list(range(1, 21)))])
def test_fit_makes_every_update_in_launches_of_these_lengths(strategy, max_steps, steps):
    total, ends, _, _ = fit(strategy(), max_steps)
    assert total == 2 * sum(range(21))
    assert ends == steps


@pytest.mark.parametrize("max_steps", [1, 8])
def test_waiting_for_input_is_measured(max_steps):
    """A batch takes 20 ms to make and no time to use, so that nearly all the time is spent waiting."""
    _, _, wait_seconds, seconds = fit(one_cpu(), max_steps, input_seconds=0.02)
    assert 0.8 * 20 * 0.02 < wait_seconds < seconds


def test_the_wait_is_read_once():
    launches = launches_of()
    launches.set_model(Counter())
    launches.model.compile(steps_per_execution=8)
    for end, wait in ((4, 0.5), (6, 0.25)):
        launches.on_train_batch_end(end, {"input_wait_seconds": tf.constant(wait, tf.float64)})
    assert launches.take_wait_seconds() == 0.75
    assert launches.take_wait_seconds() == 0
