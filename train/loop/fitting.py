"""The training loop: `fit`, the hooks called between its steps, and the rollback to a checkpoint after a divergence.

An *execution* (Keras's term) is one call from Python that runs one or more steps. It ends when the next hook is due, or
earlier if more steps would exceed the work that may be queued on the device.
"""

import functools
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import tensorflow as tf
import tf_keras

from train.checkpoints.resume import ResumePoint, resume_point
from train.checkpoints.store import Arrays, CheckpointRecord, SkippedRows
from train.loop.report import print_step_time
from train.loop.trainer import Trainer
from train.metrics.log import ROLLBACK, VALIDATION
from train.metrics.training_log import TrainingDivergedError, TrainingLog
from train.publishing.publisher import PushToHub
from train.runtime import supervisor
from train.runtime.preemption import InFlight, RunStoppedError, StopRequest
from train.runtime.private import steps_per_execution
from train.runtime.runtime import WAIT_NAME, Runtime

logger = logging.getLogger(__name__)


def fit(trainer: Trainer, stop: StopRequest | None = None, pushing: PushToHub | None = None) -> dict[str, float] | None:
    """Train, log, evaluate, save and push; return the evaluation of the last step, None if it was not evaluated.

    Raises:
        RunStoppedError: `stop` was requested before training was complete; a checkpoint is saved.
        RunFailedError: training diverged, or a checkpoint could not be written.
    """
    stop = stop or StopRequest()
    with trainer.log:
        while True:
            try:
                return _fit_from_start(trainer, stop, pushing)
            except TrainingDivergedError as error:
                trainer.start = roll_back(trainer, error, stop)


def _fit_from_start(trainer: Trainer, stop: StopRequest, pushing: PushToHub | None) -> dict[str, float] | None:
    model, start = trainer.model, trainer.start
    with closing(TrainingHooks(trainer, stop, pushing)) as hooks:
        hooks.catch_up()
        if num_steps := trainer.plan.num_steps - start.step:
            batches = model.runtime.distribute(trainer.batches_from(start))
            model.fit(batches, steps_per_epoch=num_steps, verbose=0, callbacks=[hooks.steps_per_execution])
        trainer.checkpoints.wait()
    trainer.log.draw()
    return hooks.figures_of(trainer.plan.num_steps)


class TrainingHooks:
    """The hooks called between the steps of one call of Keras's `fit`: log, evaluate, save, push.

    Attributes:
        steps_per_execution: the Keras callback that calls the hooks.
    """

    def __init__(self, trainer: Trainer, stop: StopRequest, pushing: PushToHub | None):
        self._figures: dict[str, float] | None = None  # metrics of the newest evaluation
        self._trainer, self._plan, self._start, self._stop = trainer, trainer.plan, trainer.start, stop
        self._evaluated_step = -1
        self._saved_step = -1 if self._start.checkpoint is None else self._start.step
        self._saved_seconds = time.monotonic()
        config, input_waits = trainer.phase.config, InputWaits()
        self._log = TrainingLog(
            *(trainer.model, trainer.log, trainer.plan),
            start_step=self._start.step,
            logged_step=self._start.logged_step,
            num_skipped_rows=self._start.num_skipped_rows,
            take_wait_seconds=input_waits.take_seconds,
            max_loss_rise=config.run.max_loss_rise,
            num_eval_rows=trainer.phase.inputs.num_eval_rows,
            full_speed_step_seconds=trainer.full_speed_step_seconds,
        )
        runtime = trainer.model.runtime
        wait_for_device = functools.partial(runtime.wait, trainer.model.optimizer.iterations)
        profiled_steps = config.run.profiled_steps if trainer.log.is_chief else None
        self._profile = Profile(runtime, trainer.log.tensorboard_folder, profiled_steps, wait_for_device)
        # Hooks are called in this order. Each hook is due at the same steps on all workers, so all workers run
        # executions of the same length, although only one worker pushes and profiles.
        hooks = [
            Hook(self._profile.begin_or_end, at_steps=config.run.profiled_steps or ()),
            Hook(self._log.advance),
            Hook(self._log.write_train, every_steps=self._plan.log_steps(config.run.log_steps)),
            Hook(self._evaluate, every_steps=self._plan.eval_steps),
            Hook(self._report),
            Hook(self._save, every_steps=self._plan.save_steps),
            Hook(self._save, at_steps=trainer.phase.steps_at_words(self._plan)),
            Hook(self._save_by_the_clock),
            Hook(self._stop_if_asked),
        ]
        if pushing is not None:
            hooks.append(Hook(functools.partial(pushing.push, trainer.model), at_steps=pushing.steps))
        self.steps_per_execution = StepsPerExecution(
            hooks,
            InFlight(wait_for_device, stop),
            input_waits,
            start_step=self._start.step,
            num_steps=self._plan.num_steps,
            max_steps=config.hardware.max_steps_per_execution,
        )

    def catch_up(self) -> None:
        """Call the hooks that are due at the starting step and that the previous process may not have called.

        If the run may roll back and has no checkpoint, save a first checkpoint.
        """
        step = self._start.step
        line = self._trainer.log.find(step, VALIDATION)
        if line is not None:
            self._figures = {name: value for name, value in line.items() if name not in ("step", "split", "phase")}
            self._evaluated_step = step
        elif step > 0 and (step % self._plan.eval_steps == 0 or step == self._plan.num_steps):
            self._evaluate(step)
        if self._trainer.can_roll_back and self._start.checkpoint is None:
            self._save(step)
        self._stop_if_asked(step)
        self._profile.begin_or_end(step)

    def figures_of(self, step: int) -> dict[str, float] | None:
        return self._figures if self._evaluated_step == step else None

    def close(self) -> None:
        self._profile.close()
        self._log.close()
        print_step_time(self._trainer, self._log.step_seconds)

    def _report(self, step: int) -> None:
        supervisor.report("train", step)
        self._trainer.checkpoints.check()

    def _evaluate(self, step: int) -> None:
        if self._trainer.add_up is None:
            return
        with self._log.clock_stopped(is_evaluation=True):
            figures = self._trainer.evaluate(self._stop)
            if figures is not None:  # None if a stop was requested; the resumed run then evaluates
                self._figures, self._evaluated_step = figures, step
        if figures is not None:
            self._log.write_evaluation(step, figures)
            if self._trainer.is_best_so_far(step):
                self._save(step)

    def _save_by_the_clock(self, step: int) -> None:
        minutes = self._plan.save_minutes
        is_due = minutes is not None and time.monotonic() - self._saved_seconds >= minutes * 60
        if self._stop.take_agreement_to_save(is_due):
            self._save(step)

    def _save(self, step: int) -> None:
        if step == self._saved_step:
            return
        self._log.check_finite()  # never save weights that have diverged
        self._saved_step, self._saved_seconds = step, time.monotonic()
        with self._log.clock_stopped():
            self._trainer.checkpoints.save(lambda: (self._record(step), self._trainer.state.read()))

    def _stop_if_asked(self, step: int) -> None:
        is_evaluated = self._trainer.add_up is None or self._evaluated_step == step
        is_complete = step == self._plan.num_steps and is_evaluated
        if is_complete or not self._stop.is_agreed():
            return
        self._save(step)
        self._trainer.checkpoints.wait()
        raise RunStoppedError(
            f"Stopped{self._stop.in_words} at step {step:,} of {self._plan.num_steps:,}, saved. Run the same command "
            "again to continue."
        )

    def _record(self, step: int) -> CheckpointRecord:
        figures = self.figures_of(step)
        log = self._trainer.log
        return CheckpointRecord(
            step=step,
            row=self._plan.row_after(step, self._start.num_skipped_rows),
            fingerprint_sha256=self._trainer.run.fingerprint_sha256(self._trainer.phase.index),
            plan=self._plan,
            settings=self._trainer.phase.config.as_dict(),
            versions=self._trainer.versions,
            computation=asdict(self._trainer.computation),
            made_by=self._trainer.made_by,
            logged_step=self._log.logged_step,
            validation_loss=figures["loss"] if figures else None,
            validation_score=self._trainer.phase.task.score(figures) if figures else None,
            skipped=self._start.skipped,
            num_written_log_lines=(num_written := log.num_written),
            unwritten_log_lines=tuple(log.lines[num_written:]),
        )


def roll_back(trainer: Trainer, error: TrainingDivergedError, stop: StopRequest) -> ResumePoint:
    """Restore the last checkpoint before a divergence; return the point to resume from, skipping the rows since then.

    The choice of the checkpoint depends only on step numbers, so a run that is killed during the rollback skips the
    same rows. If there are several workers, they wait for each other at each `stop.compare`.

    Raises:
        TrainingDivergedError: `error` again, if rollbacks are off, `--max-rollbacks` is reached, or there is no
            earlier checkpoint.
    """
    trainer.checkpoints.wait()
    if not trainer.can_roll_back or len(trainer.start.skipped) >= trainer.phase.config.run.max_rollbacks:
        raise error
    stop.compare()  # the other workers read the checkpoint that the chief has written

    def use(_: CheckpointRecord, arrays: Arrays) -> None:
        trainer.state.write(arrays)

    restored = functools.partial(
        trainer.checkpoints.restore_newest, trainer.run.owns, use, up_to=error.good_step, since=trainer.plan.first_step
    )
    record = restored(interval_steps=trainer.plan.save_steps) or restored()  # prefer a multiple of --save-steps
    if record is None:
        raise error
    stop.compare()
    trainer.checkpoints.discard_after(record.step)
    trainer.model.optimizer.resume()
    trainer.model.runtime.push(trainer.model.optimizer.figures)
    num_rows = (error.step - record.step) * trainer.plan.global_batch_rows
    skipped_before = [rows for rows in trainer.start.skipped if rows.after_step <= record.step]
    trainer.log.rewind_to(record.step, len(skipped_before))
    trainer.log.add(
        error.step, ROLLBACK, {"reason": error.reason, "to_step": record.step, "num_skipped_rows": num_rows}
    )
    trainer.log.flush()
    logger.warning("%s Returning to step %d and skipping the %d rows since then.", error, record.step, num_rows)
    skipped = (*skipped_before, SkippedRows(record.step, num_rows))
    return replace(resume_point(record, trainer.plan), skipped=skipped)


@dataclass(frozen=True)
class Hook:
    """An action between steps. A hook with neither `every_steps` nor `at_steps` is due after every execution.

    Attributes:
        action: called with the number of steps taken so far.
        every_steps: the action is due at multiples of this number, and after the last step of the run.
        at_steps: the action is due at these steps.
    """

    action: Callable[[int], None]
    every_steps: int | None = None
    at_steps: Collection[int] | None = None

    def is_due(self, step: int, num_steps: int) -> bool:
        """Return whether the action is due after `step`, the last step of an execution, in a run of `num_steps`."""
        if self.every_steps is not None:
            return step % self.every_steps == 0 or step == num_steps
        return self.at_steps is None or step in self.at_steps

    def next_steps(self, step: int) -> Iterable[int]:
        """Return the steps after `step` at which an execution must end."""
        if self.every_steps is not None:
            return (step - step % self.every_steps + self.every_steps,)
        return (at for at in self.at_steps or () if at > step)


class InputWaits:
    """Sums up the seconds that executions waited for input. `add` does not wait for the device."""

    def __init__(self) -> None:
        self._seconds: list[Any] = []

    def add(self, seconds: Any) -> None:
        self._seconds.append(seconds)

    def take_seconds(self) -> float:
        """Return the sum since the last call. Waits for the device."""
        total = sum(float(seconds) for seconds in self._seconds)
        self._seconds.clear()
        return total


class StepsPerExecution(tf_keras.callbacks.Callback):
    """Calls the hooks that are due, in order, and sets the length of the next execution.

    The callback counts steps on the host, because reading the counter from the device would wait for the device.

    Args:
        hooks: called in this order.
        in_flight: limits the steps queued on the device.
        input_waits: collects how long each execution waited for input.
        start_step: number of steps taken before `fit`.
        num_steps: number of steps of the whole run.
        max_steps: maximum number of steps per execution.
    """

    # Otherwise Keras reads the logs of every execution from the device.
    _supports_tf_logs = True

    def __init__(
        self,
        hooks: Iterable[Hook],
        in_flight: InFlight,
        input_waits: "InputWaits",
        *,
        start_step: int,
        num_steps: int,
        max_steps: int,
    ):
        super().__init__()
        self._hooks, self._in_flight, self._input_waits = tuple(hooks), in_flight, input_waits
        self._start_step = self._step = start_step
        self._num_steps, self._max_steps = num_steps, max_steps

    def on_train_begin(self, logs: Any = None) -> None:  # noqa: ARG002
        self._set_length()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        before, self._step = self._step, self._start_step + batch + 1
        self._input_waits.add(logs[WAIT_NAME])
        has_waited = self._in_flight.add(self._step - before)
        for hook in self._hooks:
            if hook.is_due(self._step, self._num_steps):
                hook.action(self._step)
        if has_waited:  # otherwise the device kept working during the hooks
            self._in_flight.start_clock()
        self._set_length()

    def length_after(self, step: int) -> int:
        """Return the number of steps of the execution that starts after `step`; at least 1."""
        ends = (end for hook in self._hooks for end in hook.next_steps(step))
        longest = min(self._max_steps, self._in_flight.num_allowed)
        return min(step + longest, self._num_steps, *ends) - step or 1

    def _set_length(self) -> None:
        if self._max_steps > 1:
            steps_per_execution(self.model).assign(self.length_after(self._step))


@dataclass
class Profile:
    """A trace of host and device for TensorBoard's profiler: of the steps after `steps[0]`, up to `steps[1]`.

    If the trace cannot be written, a warning is logged.

    Attributes:
        folder: a local folder, because a bucket may be slow.
        steps: two steps, counted from the start of the run. A process that resumes between them traces nothing. None
            disables tracing.
        wait_for_device: called before the trace ends.
    """

    runtime: Runtime
    folder: str
    steps: tuple[int, int] | None
    wait_for_device: Callable[[], object]
    is_tracing: bool = False

    def begin_or_end(self, step: int) -> None:
        if self.steps and step == self.steps[0]:
            with self._warning():
                self.runtime.start_profile(self.folder)
                self.is_tracing = True
        elif self.steps and step == self.steps[1]:
            self.close()

    def close(self) -> None:
        if self.steps and self.is_tracing:
            self.is_tracing = False
            self.wait_for_device()  # so that the trace includes the last steps
            with self._warning():
                self.runtime.stop_profile()
                logger.info("profiled the steps after %d, up to %d", *self.steps)

    @contextmanager
    def _warning(self) -> Iterator[None]:
        try:
            yield
        except (tf.errors.OpError, OSError, RuntimeError) as error:  # JAX raises RuntimeError
            logger.warning("no profile is written; training continues: %s", error)
