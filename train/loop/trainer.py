"""`Trainer`: the compiled model of one phase, which is restored from a checkpoint, trained, and published."""

import functools
import gc
import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import tensorflow as tf
import tf_keras

from mlm_common.cli.command_line import commit
from mlm_common.tokenizer import special_ids, vocabulary_size
from train.checkpoints.manager import Checkpoints, TrainingState
from train.checkpoints.resume import ResumePoint, check_checkpoint, installed_versions, resume_point
from train.checkpoints.store import Arrays, CheckpointRecord, rank
from train.config.settings import TrainingConfig
from train.loop.run import Run, describe_hardware, describe_run, device_kind
from train.metrics.log import VALIDATION, MetricsLog
from train.metrics.run_curves import RunCurves, draw_run
from train.model.computation import Computation, choose_computation, full_speed_step_seconds
from train.runtime import supervisor
from train.runtime.plan import Plan
from train.runtime.preemption import StopRequest
from train.runtime.run_folder import EARLIER_SCHEDULES
from train.runtime.runtime import Runtime, wait_for_workers
from train.runtime.strategy import check_agreement
from train.step.evaluation import build_adder
from train.step.train_step import build_model, compile_model
from train.tasks.task import SOURCE_LOSS, Task

logger = logging.getLogger(__name__)


class Trainer:
    """The compiled model of a phase, with its plan, log and checkpoints.

    Use it in this order: `restore`, `train.loop.fitting.fit`, `train.loop.lifecycle.publish`.

    Args:
        run: the run.
        index: index of the phase to train, counted from 0.
        runtime: the runtime in whose scope the model is built.
    """

    def __init__(self, run: Run, index: int, runtime: Runtime):
        self.run, self.phase, self.runtime = run, run.phases[index], runtime
        self.plan = plan = run.plans[index]
        config, inputs = self.phase.config, self.phase.inputs
        task, model_config = self.phase.task, self.phase.model_config
        self.start, self.versions = ResumePoint(), installed_versions()
        self.made_by = {"device": device_kind(config.hardware), "commit": commit()}
        so_far = self._computation_so_far()
        self.computation = choose_computation(config, model_config, plan, so_far, run.num_streams)
        self.model = build_model(config, inputs, task, model_config, plan, runtime, self.computation)
        self.state = TrainingState(self.model)
        self.add_up = build_adder(inputs, self.model, plan, jit_compile=self.computation.jit_compile)
        self.score = self._scorer()
        num_predictions = self.phase.num_predictions(plan)
        self.full_speed_step_seconds = full_speed_step_seconds(config, model_config, plan, num_predictions)
        is_chief = run.cluster.is_chief
        trackers = []
        if config.run.report_to and is_chief:
            from train.metrics.trackers import open_trackers  # only needed with --report-to

            trackers = open_trackers(config, run.folder)
        draw = functools.partial(RunCurves, run.folder.path, self._describe_run())
        self.log = MetricsLog(run.folder, lambda lines: draw_run(draw(lines)), is_chief=is_chief, trackers=trackers)
        self.checkpoints = Checkpoints(
            run.folder,
            num_kept=config.run.keep_checkpoints,
            kept_interval_steps=plan.save_steps if config.run.on_nonfinite == "skip" else 0,
            first_step=plan.first_step,
            kept_steps=self.phase.steps_at_words(plan),
            is_chief=is_chief,
            rank=functools.partial(rank_of_checkpoint, task, self.log),
        )

    def _computation_so_far(self) -> Computation | None:
        """Return how the phase's steps have been computed so far; None for a new phase, or on other hardware."""
        record = self.run.recorded.content
        if self.starts_over or record is None:
            return None
        with self.run.folder.guarded_record():
            hardware = describe_hardware(self.run.config.hardware, self.plan.num_replicas)
            is_same_hardware = record.get("hardware") == hardware
            is_same_phase = Plan.from_record(record["plan"]).phase_index == self.phase.index
            return Computation(**record["computation"]) if is_same_hardware and is_same_phase else None

    def _scorer(self) -> Callable[[], dict[str, float]] | None:
        sample, tokenizer, max_length = self.phase.sample, self.phase.inputs.tokenizer, self.phase.inputs.max_length
        if sample is None:
            return None
        from train.scoring.answers import QueriedModel

        tokens_per_batch = self.phase.config.optimization.per_replica_batch_size * max_length
        scored = QueriedModel(
            self.model.network, self.runtime, vocabulary_size(tokenizer), special_ids(tokenizer)["pad"]
        )
        return lambda: sample.figures(scored.answer, max_length, tokens_per_batch)

    def _describe_run(self) -> dict[str, Any]:
        num_parameters = self.model.network.count_params()
        return describe_run(self.run, self.phase, self.computation, num_parameters)

    @property
    def can_roll_back(self) -> bool:
        """Whether the run returns to a checkpoint after a divergence, instead of failing."""
        return self.phase.config.run.on_nonfinite == "skip"

    @property
    def starts_over(self) -> bool:
        """Whether to delete the existing run in the folder and start over. Only the first phase does so."""
        return self.phase.index == 0 and self.run.starts_over

    def clear_folder(self) -> None:
        """Delete the run in the folder if `--overwrite-output-dir` is given. Workers wait until the chief is done."""
        if self.run.cluster.is_chief and self.starts_over:
            self.run.folder.clear()
        if self.run.config.run.overwrite_output_dir:
            wait_for_workers(self.runtime)

    def load_initial_weights(self) -> None:
        """Load the weights of `--init-from`, if the flag is given and there is no checkpoint to resume from."""
        phase, init_from = self.phase, self.phase.config.model.init_from
        if init_from is not None and (self.starts_over or not self.run.folder.has_checkpoint()):
            from train.model.from_pretrained import load_initial_weights  # only needed with --init-from

            num_ids = vocabulary_size(phase.inputs.tokenizer)
            network, task = self.model.network, phase.task
            tf_keras.utils.set_random_seed(phase.config.run.seed)  # seed the weights of a new head
            adapt_network = task.adapt_network if task.allows_new_head else None
            grows = isinstance(phase.config, TrainingConfig) and phase.config.model.grow
            seed = phase.config.run.seed if grows else None
            load_initial_weights(
                network, init_from, num_ids, task.model_class, adapt_network=adapt_network, grow_seed=seed
            )

    def restore(self) -> None:
        """Restore the newest checkpoint, if there is one.

        Raises:
            InputError: the plan cannot resume from the checkpoint, all checkpoints are corrupt, or workers found
                different checkpoints.
        """
        run = self.run

        def use(record: CheckpointRecord, arrays: Arrays) -> None:
            check_checkpoint(record, run.plans[record.plan.phase_index])
            self.state.write(arrays)

        self.start = resume_point(self.checkpoints.restore_newest(run.owns, use), self.plan)
        rule = (
            f"--output-dir must be a folder that all workers share; they found different checkpoints in {run.folder}."
        )
        check_agreement(self.runtime, {"newest step": self.start.step}, rule=rule)
        saved = self.start.checkpoint
        self.log.restore(
            self.start.step,
            len(self.start.skipped),
            num_written=saved.num_written_log_lines if saved else 0,
            unwritten=saved.unwritten_log_lines if saved else (),
        )

    @property
    def phase_to_resume(self) -> int:
        """Index of the phase in which training continues after the restored checkpoint."""
        saved = self.start.checkpoint
        if saved is None:
            return 0
        is_end_of_last = self.start.step == self.plan.first_step and saved.plan.phase_index == self.phase.index - 1
        return self.phase.index if is_end_of_last else saved.plan.phase_index

    def release(self) -> None:
        """Free the memory of the model, which the model of the next phase needs."""
        del self.model, self.state, self.add_up, self.score
        self.runtime.release()
        gc.collect()

    def evaluate(self, stop: StopRequest) -> dict[str, float] | None:
        """Evaluate the model on all validation rows; return None without validation rows, or after a stop request."""
        totals = self.add_up(stop) if self.add_up is not None else None
        if totals is None:
            return None
        names = [f"{SOURCE_LOSS}{source}" for source in self.phase.inputs.evaluated() if source]
        sources = {name: float(totals[name]) for name in names}
        return self.model.task.figures(totals) | sources | (self.score() if self.score is not None else {})

    def record_run(self) -> dict[str, Any]:
        """Write `run.json`, after all checks have passed, and return its content."""
        record = self._describe_run()
        if earlier := self._earlier_schedules():
            record[EARLIER_SCHEDULES] = earlier
        if self.run.cluster.is_chief:
            self.run.folder.write_record(record)
        return record

    def _earlier_schedules(self) -> list[tuple[int, int]]:
        """Return the schedule's earlier lengths, in order, each as (last step with this length, length in steps)."""
        saved = self.start.checkpoint
        if saved is None:
            return []
        with self.run.folder.guarded_record():
            recorded = (self.run.recorded.content or {}).get(EARLIER_SCHEDULES, [])
            earlier = [(int(last), int(num_steps)) for last, num_steps in recorded if last < self.start.step]
        saved_schedule = saved.plan.schedule_steps
        if saved.plan.phase_index == self.phase.index and saved_schedule != self.plan.schedule_steps:
            earlier.append((self.start.step, saved_schedule["num_steps"]))
        return earlier

    def prove_computation(self) -> None:
        """Compare the TPU-optimized layers and the sharded optimizer with the reference, on the first rows.

        Use each of them only if its results match. Does nothing if the settings or an earlier check have already
        decided.
        """
        if None not in (self.computation.tpu_layers, self.computation.shard_optimizer):
            return
        from train.step.proofs import prove_sharding, prove_tpu_layers  # only needed on a TPU

        supervisor.report("prove")
        batch = next(iter(self.runtime.distribute(self.batches_from(self.start))))
        if self.computation.tpu_layers is None:
            self.computation = replace(self.computation, tpu_layers=prove_tpu_layers(self.model, batch))
        if self.computation.shard_optimizer is None:
            is_proven = prove_sharding(self.model, batch)
            self.computation = replace(self.computation, shard_optimizer=is_proven)
            if not is_proven:
                self._replace_optimizer()

    def _replace_optimizer(self) -> None:
        arrays = self.state.read()
        with self.runtime.scope():
            compile_model(self.model, self.phase.config, self.plan, self.computation)
        self.state = TrainingState(self.model)
        self.state.write(arrays)

    def is_best_so_far(self, step: int) -> bool:
        """Return whether the run exports the best checkpoint, and the evaluation after `step` is the best so far."""
        best = self.best_evaluation()
        return self.run.exports_best and best is not None and best["step"] == step

    def restore_best(self) -> tuple[int, dict[str, float] | None]:
        """After training, restore the checkpoint with the best evaluation; warn if a better checkpoint was deleted.

        Returns:
            The step of the restored checkpoint and its evaluation; if no checkpoint was evaluated, the last step and
            None.
        """
        best, restored = self.best_evaluation(), self.best_evaluation(self.checkpoints.steps())
        if best is None or restored is None:
            return self.plan.num_steps, None
        if restored["step"] != best["step"]:
            score = self.phase.task.score
            logger.warning(
                "The checkpoint of the best evaluation, step %d (score %.6g), no longer exists. Using step %d (score "
                "%.6g), the best of the saved ones; a higher score is better.",
                *(best["step"], score(best), restored["step"], score(restored)),
            )
        if restored["step"] != self.plan.num_steps:
            step = restored["step"]
            self.checkpoints.restore_newest(
                self.run.owns, lambda _, arrays: self.state.write(arrays), up_to=step, since=step
            )
        figures = {name: value for name, value in restored.items() if name not in ("step", "split", "phase")}
        return restored["step"], figures

    def best_evaluation(self, steps: Collection[int] | None = None) -> dict[str, Any] | None:
        """Return the log's best validation line among `steps` (default: all); of equal lines, the earliest."""
        lines = [line for line in self.log.lines if line["split"] == VALIDATION]
        return max(
            (line for line in lines if steps is None or line["step"] in steps),
            key=lambda line: (rank(self.phase.task.score(line), line["loss"]), -line["step"]),
            default=None,
        )

    def batches_from(self, start: ResumePoint) -> Callable[[tf.distribute.InputContext], tf.data.Dataset]:
        return self.run.batches_from(self.phase, start)


def rank_of_checkpoint(task: Task, log: MetricsLog, record: CheckpointRecord) -> tuple[float, float] | None:
    """Rank a checkpoint by its line in the log, because the metric may have changed since it was saved."""
    line = log.find(record.step, VALIDATION)
    return record.rank if line is None else rank(task.score(line), line["loss"])
