"""Hooks between the steps of `fit`, and which evaluation a run returns as its result."""

import itertools
import math
import time
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import tensorflow as tf
import tf_keras
from tensorflow.python.util import _pywrap_determinism

from tests.fixtures.plans import make_plan
from tests.fixtures.tiny_steps import one_cpu, two_cpus
from train.checkpoints.resume import ResumePoint
from train.checkpoints.store import SkippedRows
from train.config.learning import OptimizationConfig
from train.config.settings import RunConfig
from train.loop import fitting
from train.loop.fitting import Hook, InputWaits, Profile, StepsPerExecution
from train.metrics.log import VALIDATION, MetricsLog
from train.metrics.training_log import TrainingDivergedError
from train.runtime import preemption
from train.runtime.preemption import InFlight, StopRequest
from train.runtime.run_folder import RunFolder
from train.runtime.tensorflow_runtime import TensorFlowRuntime, build_train_function


class Counter(tf_keras.Model):
    """Sums what it is given."""

    def __init__(self):
        super().__init__()
        self.total = self.add_weight("total", (), initializer="zeros", aggregation=tf.VariableAggregation.SUM)

    def train_step(self, data):
        self.total.assign_add(tf.reduce_sum(data))
        return {}

    def make_train_function(self, force=False):  # noqa: ARG002
        self.train_function = build_train_function(self)
        return self.train_function


def unbounded():
    in_flight = InFlight(lambda: None, StopRequest())
    in_flight.num_allowed = 10**9
    return in_flight


def steps_per_execution(
    start_step=0, num_steps=20, max_steps=8, every=(5, 7), at_steps=(), calls=None, in_flight=None, input_waits=None
):
    """Note what is called as (name, step)."""
    calls = [] if calls is None else calls

    def noting(name):
        return lambda step: calls.append((name, step))

    hooks = [Hook(noting(f"every {number}"), every_steps=number) for number in every]
    hooks += [Hook(noting("at"), at_steps=at_steps), Hook(noting("execution"))]
    of_run = {"start_step": start_step, "num_steps": num_steps, "max_steps": max_steps}
    return StepsPerExecution(hooks, in_flight or unbounded(), input_waits or InputWaits(), **of_run)


def fit(strategy, max_steps=8, input_seconds=0.0, num_steps=20, **settings):
    def wait(value):
        time.sleep(input_seconds)
        return value

    numbers = tf.data.Dataset.range(1, num_steps + 1).map(lambda number: tf.fill((2,), tf.cast(number, tf.float32)))
    if input_seconds:
        numbers = numbers.map(lambda value: tf.ensure_shape(tf.numpy_function(wait, [value], tf.float32), (2,)))
    with strategy.scope():
        model = Counter()
        model.compile(steps_per_execution=max_steps)
    calls = []
    input_waits = InputWaits()
    callback = steps_per_execution(
        max_steps=max_steps, num_steps=num_steps, calls=calls, input_waits=input_waits, **settings
    )
    started_seconds = time.perf_counter()
    model.fit(numbers, steps_per_epoch=num_steps, verbose=0, callbacks=[callback])
    seconds, wait_seconds = time.perf_counter() - started_seconds, input_waits.take_seconds()
    assert input_waits.take_seconds() == 0  # it is read once
    return float(model.total.numpy()), calls, wait_seconds, seconds


@pytest.mark.parametrize(
    ("strategy", "max_steps", "steps"), [(one_cpu, 1, list(range(1, 21))), (two_cpus, 8, [5, 7, 10, 14, 15, 17, 20])]
)
def test_executions_end_where_a_hook_is_due_and_hooks_are_called_in_their_order(strategy, max_steps, steps):
    total, calls, _, _ = fit(strategy(), max_steps, at_steps=(7, 17))
    assert total == 2 * sum(range(21))
    hooks = {"every 5": (5, 10, 15, 20), "every 7": (7, 14, 20), "at": (7, 17), "execution": steps}
    assert calls == [(name, step) for step in steps for name, due in hooks.items() if step in due]


@pytest.mark.parametrize("max_steps", [1, 8])
def test_waiting_for_input_is_measured(max_steps):
    """A batch takes 20 ms to make and no time to use; a few may be made while the first step is traced."""
    _, _, wait_seconds, seconds = fit(one_cpu(), max_steps, input_seconds=0.02)
    assert 0.5 * 20 * 0.02 < wait_seconds < seconds


def test_tensorflows_determinism_forbids_no_run():
    """What TF_DETERMINISTIC_OPS=1 sets for a whole process; then the wait for input is not known."""
    _pywrap_determinism.enable(True)
    try:
        with pytest.raises(tf.errors.FailedPreconditionError):
            tf.timestamp()
        for max_steps in (1, 8):
            total, _, wait_seconds, _ = fit(one_cpu(), max_steps)
            assert total == 2 * sum(range(21))
            assert math.isnan(wait_seconds)
    finally:
        _pywrap_determinism.enable(False)


def test_an_execution_has_as_many_steps_as_may_be_in_flight(monkeypatch):
    """By a clock that says that each step takes a sixteenth of a second, where a quarter may be in flight."""
    now = [0.0]
    monkeypatch.setattr(preemption, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(preemption, "IN_FLIGHT_SECONDS", 0.25)

    class Timed(InFlight):
        def add(self, num_pieces):
            now[0] += num_pieces / 16
            return super().add(num_pieces)

    _, calls, _, _ = fit(one_cpu(), 32, every=(), in_flight=Timed(lambda: None, StopRequest()))
    steps = [0, *(step for name, step in calls if name == "execution")]
    assert [after - before for before, after in itertools.pairwise(steps)] == [1, 1, 4, 4, 4, 4, 2]


def test_a_profile_that_cannot_be_written_is_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("no folder", encoding="utf-8")
    runtime = TensorFlowRuntime(one_cpu())
    profile = Profile(runtime, str(tmp_path / "file" / "tensorboard"), (1, 2), wait_for_device=lambda: None)
    profile.begin_or_end(1)
    profile.begin_or_end(2)
    assert "no profile is written; training continues" in caplog.text


@pytest.mark.parametrize(("num_steps", "expected"), [(3, {"loss": 2.5}), (6, None)])
def test_only_an_evaluation_after_the_last_step_is_the_result(num_steps, expected, tmp_path):
    """A phase resumes after step 3, where the phase before it was evaluated, and evaluates nothing itself."""
    trainer = MagicMock(add_up=None, can_roll_back=False, start=ResumePoint(step=3))
    trainer.log = MetricsLog(RunFolder(tmp_path), lambda _: b"")
    trainer.log.add(3, VALIDATION, {"loss": 2.5, "phase": 1})
    run = trainer.phase.config.run = RunConfig()
    trainer.phase.inputs.num_eval_rows = 0
    optimization = OptimizationConfig(max_steps=num_steps)
    trainer.plan = make_plan(optimization, run, num_rows=64, max_length=16, num_replicas=1)
    trainer.phase.config.hardware.max_steps_per_execution = 1
    assert fitting.fit(trainer) == expected
    assert trainer.model.fit.called == (num_steps > 3)


def test_workers_wait_for_each_other_around_a_rollback_and_earlier_rollbacks_to_the_same_checkpoint_count(monkeypatch):
    """The others must not read checkpoints before the chief has written them, nor lose some while they read."""
    calls = []
    noted = {name: (lambda *_, name=name: calls.append(name)) for name in ("wait", "compare", "discard_after")}
    record = SimpleNamespace(step=40)

    def restore_newest(*_, **__):
        calls.append("restore")
        return record

    trainer = MagicMock()
    trainer.can_roll_back, trainer.phase.config.run.max_rollbacks = True, 4
    trainer.plan.global_batch_rows, trainer.plan.save_steps = 8, 20
    trainer.start.skipped = (SkippedRows(20, 16), SkippedRows(40, 24), SkippedRows(60, 8))
    trainer.checkpoints.wait, trainer.checkpoints.restore_newest = noted["wait"], restore_newest
    trainer.checkpoints.discard_after = noted["discard_after"]
    point = ResumePoint(step=40)
    monkeypatch.setattr(fitting, "resume_point", lambda *_: point)
    error = TrainingDivergedError("The loss is not finite.", reason="nonfinite", step=50, good_step=45)
    resumed = fitting.roll_back(trainer, error, SimpleNamespace(compare=noted["compare"]))
    assert calls == ["wait", "compare", "restore", "compare", "discard_after"]
    assert resumed.skipped == (SkippedRows(20, 16), SkippedRows(40, 24), SkippedRows(40, 80))
