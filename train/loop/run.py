"""A run and its phases, once all checks that need no TensorFlow have passed."""

import functools
import os
from dataclasses import dataclass, field
from typing import Any

from transformers import PretrainedConfig

from mlm_common.errors import InputError
from train.checkpoints.resume import fingerprint, fingerprint_of_phases, fingerprint_sha256
from train.checkpoints.store import CheckpointRecord, newest_record
from train.config.settings import RunSettings
from train.data.inputs import Inputs
from train.metrics.training_log import about
from train.model.flops import planned_step_flops
from train.runtime.machines import Cluster
from train.runtime.plan import PhaseToPlan, Plan, make_plans, phase_index
from train.runtime.run_folder import RunFolder
from train.tasks.task import Task

# What a step of training reaches on one CPU with AVX2; of some twice that.
CPU_FLOPS_PER_SECOND = 5e10
CPU_ADVICE = "--preset tiny-cpu is made for CPUs"


@dataclass(frozen=True)
class Phase:
    """A part of a run: what is trained, on what, with which settings. Without `--phases` a run is one without a name.

    config: the settings of the run as they are in this phase.
    has_separate_schedule: its learning rate begins and ends with it; else one schedule spans the whole run.
    index: counted from 0.
    """

    config: RunSettings
    inputs: Inputs
    task: Task
    model_config: PretrainedConfig
    name: str = ""
    has_separate_schedule: bool = False
    index: int = 0

    def to_plan(self, before: "Phase | None") -> PhaseToPlan:
        """Collect what its plan follows from; `before` is the phase before it."""
        return PhaseToPlan(
            optimization=self.config.optimization,
            run=self.config.run,
            num_rows=self.inputs.num_rows,
            max_length=self.inputs.max_length,
            goes_on_in_rows=before is not None and self.inputs.has_rows_of(before.inputs),
            has_separate_schedule=self.has_separate_schedule,
            name=self.name,
            mean_length=self.inputs.mean_length,
            fills_passes=self.inputs.fills_passes,
            num_eval_rows=self.inputs.num_eval_rows,
        )

    def num_predictions(self, plan: Plan) -> int:
        """Count the positions at which a replica predicts at once."""
        return self.task.num_predictions(self.config.optimization.per_replica_batch_size * plan.max_length)

    def describe(self, plan: Plan, num_parameters: int) -> dict[str, str]:
        """Describe the plan as human-readable {title: text}."""
        phase = {"phase": f"{self.index + 1} of {plan.num_phases}: {self.name}"} if self.name else {}
        return phase | plan.describe(num_parameters, self.inputs.num_eval_rows) | self.inputs.describe_rows()

    def describe_time_on_cpu(self, plan: Plan, step: int = 0) -> dict[str, str]:
        """Estimate how long the steps after `step` take on this machine's CPUs, as {title: text}."""
        flops = planned_step_flops(self.model_config, plan, self.num_predictions(plan))
        if flops is None or step >= plan.num_steps:
            return {}
        num_steps = (plan.num_steps - step) / (1 - plan.evaluation_share(self.inputs.num_eval_rows))
        seconds = cpu_seconds(num_steps * flops)
        is_long = seconds >= 3600 and self.advice_on_time
        return {"time": f"{about(seconds)} on this CPU, estimated{f'; {self.advice_on_time}' if is_long else ''}"}

    @property
    def advice_on_time(self) -> str:
        """What to do about a run that takes long on a CPU; nothing where that is not another preset."""
        preset = self.config.model.preset
        return "" if "cpu" in preset or not self.task.card.predicts_tokens else CPU_ADVICE


@dataclass(frozen=True)
class Run:
    """A run: its phases, its folder, the workers that train it, and its identity."""

    phases: tuple[Phase, ...]
    cluster: Cluster = field(default_factory=Cluster)

    @property
    def config(self) -> RunSettings:
        """The settings, as they are in the first phase; the phases differ in a few."""
        return self.phases[0].config

    @functools.cached_property
    def folder(self) -> RunFolder:
        return RunFolder(str(self.config.run.output_dir))

    @property
    def has_named_phases(self) -> bool:
        return bool(self.phases[0].name)

    @property
    def starts_over(self) -> bool:
        """Whether the existing run is to be deleted; a supervisor has its first process do so."""
        return self.config.run.overwrite_output_dir and not self.folder.was_started_by_current_supervisor()

    def plans(self, num_replicas: int) -> tuple[Plan, ...]:
        """Plan all phases on that number of replicas.

        Raises:
            InputError: a batch larger than the data set, or a warmup longer than the run.
        """
        earlier = zip(self.phases, (None, *self.phases), strict=False)
        return make_plans(tuple(phase.to_plan(before) for phase, before in earlier), num_replicas)

    @functools.cached_property
    def fingerprint(self) -> dict[str, Any]:
        """The settings, rows and architecture that identify it."""
        return self._fingerprint_up_to(len(self.phases) - 1)

    def fingerprint_sha256(self, index: int) -> str:
        """Hash the fingerprint up to the phase of that index, by which its checkpoints are known."""
        return fingerprint_sha256(self._fingerprint_up_to(index))

    def owns(self, record: CheckpointRecord) -> bool:
        """Return whether a checkpoint is of this run."""
        index = phase_index(record.plan)
        return index < len(self.phases) and record.fingerprint_sha256 == self.fingerprint_sha256(index)

    def newest_phase(self) -> int:
        """Return the index of the phase in which the newest checkpoint was saved; 0 without one.

        Raises:
            InputError: the run has fewer phases.
        """
        record = None if self.starts_over else newest_record(self.folder)
        index = phase_index(record.plan) if record else 0
        if index >= len(self.phases):
            raise InputError(
                f"--phases must have all phases that have begun; {self.folder} has a checkpoint of phase {index + 1}, "
                f"received {len(self.phases)}. Restore the phases that are over, or name another --output-dir."
            )
        return index

    def _fingerprint_up_to(self, last_index: int) -> dict[str, Any]:
        contents = []
        for phase in self.phases[: last_index + 1]:
            content = fingerprint(phase.config, phase.inputs, phase.model_config.to_diff_dict())
            contents.append(content | ({"has_own_schedule": True} if phase.has_separate_schedule else {}))
        return fingerprint_of_phases(contents)


def cpu_seconds(flops: float) -> float:
    """Estimate how long the CPUs that this process may use take for the floating-point operations of a run."""
    num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return flops / (CPU_FLOPS_PER_SECOND * num_cpus)
