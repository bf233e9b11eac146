"""`Run`, which can be checked and planned without TensorFlow, and functions that return the content of run.json."""

import dataclasses
import functools
import json
import platform
import re
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlm_common.cli.command_line import commit
from mlm_common.errors import InputError
from mlm_common.tokenizer import vocabulary_size
from mlm_common.workers import num_cores
from train import load_tensorflow
from train.checkpoints.resume import (
    ResumePoint,
    check_checkpoint,
    fingerprint,
    fingerprint_of_phases,
    fingerprint_sha256,
    installed_versions,
)
from train.checkpoints.run_record import RunRecord
from train.checkpoints.store import CheckpointRecord
from train.config.settings import HardwareConfig, RunSettings
from train.data.inputs import Inputs
from train.loop.phase import Phase, make_plans
from train.model.computation import Computation, count_streams, may_use_streams
from train.model.configurations import settings_of
from train.runtime.machines import (
    ACCELERATOR_TYPE_VARIABLE,
    ASSUMED_TPU_REPLICAS,
    Cluster,
    has_cpu_alone,
    local_accelerator_type,
    num_replicas_of,
)
from train.runtime.plan import Plan
from train.runtime.run_folder import RunFolder
from train.runtime.supervisor import supervision
from train.tasks.task import task_record

if TYPE_CHECKING:
    import tensorflow as tf


@dataclass(frozen=True)
class Run:
    """A run: its phases, its folder, the workers that train it, and its fingerprint.

    Attributes:
        why_runtime: why this runtime was chosen; printed with the plan.
        exports_best: whether the checkpoint with the best evaluation is exported instead of the last one.
        plans: the plan of each phase; empty until the number of replicas is known.
        num_streams: the number of parallel streams of a step without XLA; see `with_streams`.
    """

    phases: tuple[Phase, ...]
    cluster: Cluster = field(default_factory=Cluster)
    why_runtime: str = ""
    exports_best: bool = False
    plans: tuple[Plan, ...] = ()
    num_streams: int = 1

    @property
    def config(self) -> RunSettings:
        """The settings of the first phase. A few settings differ between phases."""
        return self.phases[0].config

    @functools.cached_property
    def folder(self) -> RunFolder:
        return RunFolder(str(self.config.run.output_dir))

    @functools.cached_property
    def recorded(self) -> RunRecord:
        """The record that an earlier process left in the output folder. Each `Run` reads it once."""
        return RunRecord() if self.config.run.output_dir is None else RunRecord.read(self.folder)

    @property
    def has_named_phases(self) -> bool:
        return bool(self.phases[0].name)

    @property
    def starts_over(self) -> bool:
        """Whether to delete the existing run in the folder. With a supervisor, only its first process does so."""
        return self.config.run.overwrite_output_dir and not self.recorded.was_started_by_current_supervisor

    def read_again(self) -> "Run":
        """Return a copy of the run that reads the records in its folder again, because they have changed.

        The copy has no plans, so that `planned` checks its plans with the new records.
        """
        return dataclasses.replace(self, plans=())

    def planned(self, num_replicas: int) -> "Run":
        """Return the run with plans for `num_replicas` replicas, after checking that it can start or resume with them.

        A run that already has these plans is returned unchanged.

        Raises:
            InputError: the run cannot start or resume with these plans.
        """
        if self.plans and self.plans[0].num_replicas == num_replicas:
            return self
        plans = make_plans(self.phases, num_replicas)
        for phase, plan in zip(self.phases, plans, strict=True):
            phase.steps_at_words(plan)
        if record := self.checkpoint_to_resume:
            check_checkpoint(record, plans[record.plan.phase_index])
        return dataclasses.replace(self, plans=plans)

    @property
    def checkpoint_to_resume(self) -> CheckpointRecord | None:
        """The record of the newest checkpoint in the folder; None if this run does not continue from it."""
        record = None if self.starts_over else self.recorded.newest
        return record if record is not None and self.owns(record) else None

    def planned_as_expected(self, *, with_tensorflow: bool) -> "Run":
        """Return the run with its plans for the expected number of replicas, without claiming the TPU.

        Args:
            with_tensorflow: TensorFlow may be imported to count this machine's devices.

        Returns:
            The run with its plans. The plans are missing if the number of replicas is not known yet, because counting
            the devices would need TensorFlow, or JAX, which could not connect to other hosts afterwards.

        Raises:
            InputError: the run cannot start or resume with these plans.
        """
        if self.plans:
            return self
        hardware, num_hosts = self.config.hardware, self.cluster.num_workers
        if not hardware.wants_tpu:
            can_count = num_hosts == 1 if hardware.runtime == "jax" else has_cpu_alone()
            if not can_count and not with_tensorflow:
                return self
            return self.planned(num_hosts * num_local_devices(hardware))
        num_replicas = num_replicas_of(local_accelerator_type() or "")
        if num_replicas is not None:
            return self.planned(num_replicas)
        record = self.checkpoint_to_resume
        assumed = record.plan.num_replicas if record else ASSUMED_TPU_REPLICAS
        try:
            return self.planned(assumed)
        except InputError as error:
            raise InputError(
                f"{error} This assumes {assumed} replicas. If the TPU has a different number of chips, set "
                f"{ACCELERATOR_TYPE_VARIABLE} to its type, such as v5e-4."
            ) from error

    def with_streams(self) -> "Run":
        """Return the run with its number of parallel streams. Call it before TensorFlow is imported.

        A run keeps its number when it resumes, so that its sums are rounded in the same way.
        """
        record, hardware, num_streams = self.recorded.content, self.config.hardware, 1
        if not self.plans or not may_use_streams(hardware):
            return self
        if record is not None and not self.starts_over:
            with self.folder.guarded_record():
                if record["hardware"] == describe_hardware(hardware, self.plans[0].num_replicas):
                    num_streams = int(record["computation"].get("num_streams", 1))
        elif has_cpu_alone():
            cores = num_cores()
            num_streams = min(
                1 if phase.task.couples_rows else count_streams(phase.model_config, plan, phase.task.model_class, cores)
                for phase, plan in zip(self.phases, self.plans, strict=True)
            )
        return dataclasses.replace(self, num_streams=num_streams)

    def inputs_of(self, index: int) -> Inputs:
        """Return the inputs of phase `index`, with each source continuing where the previous phase ends."""
        inputs = self.phases[0].inputs
        for (before, phase), plan in zip(pairwise(self.phases[: index + 1]), self.plans, strict=False):
            if not phase.inputs.has_rows_of(before.inputs):
                inputs = phase.inputs.after(inputs.rows_used(plan.row_after(plan.num_steps)))
        return inputs

    def batches_from(self, phase: Phase, start: ResumePoint) -> "functools.partial[tf.data.Dataset]":
        """Return a function from a `tf.distribute.InputContext` to the batches of the phase after `start`."""
        plan = self.plans[phase.index]
        return functools.partial(
            self.inputs_of(phase.index).training_batches,
            phase.task.features(plan.max_length),
            seed=phase.config.run.seed,
            global_batch_rows=plan.global_batch_rows,
            start_step=start.step - plan.first_step,
            num_steps=max(1, plan.num_steps - start.step),
            num_left_out_rows=plan.first_row + start.num_skipped_rows,
        )

    @functools.cached_property
    def fingerprint(self) -> dict[str, Any]:
        return self._fingerprint_up_to(len(self.phases) - 1)

    def fingerprint_sha256(self, index: int) -> str:
        """Hash the fingerprint of the phases up to `index`. The checkpoints of phase `index` store this hash."""
        return fingerprint_sha256(self._fingerprint_up_to(index))

    def owns(self, record: CheckpointRecord) -> bool:
        """Return whether the checkpoint was saved by this run."""
        index = record.plan.phase_index
        return index < len(self.phases) and record.fingerprint_sha256 == self.fingerprint_sha256(index)

    def newest_phase(self) -> int:
        """Return the index of the phase in which the newest checkpoint was saved; 0 if there is no checkpoint."""
        record = None if self.starts_over else self.recorded.newest
        index = record.plan.phase_index if record else 0
        if index >= len(self.phases):
            raise InputError(
                f"--phases must list every phase that has started; {self.folder} has a checkpoint of phase "
                f"{index + 1}, received {len(self.phases)}. Restore the missing phases, or use another --output-dir."
            )
        return index

    def _fingerprint_up_to(self, last_index: int) -> dict[str, Any]:
        contents = []
        for phase in self.phases[: last_index + 1]:
            content = fingerprint(phase.config, phase.inputs, settings_of(phase.model_config))
            content |= phase.task.identity
            contents.append(content | ({"has_own_schedule": True} if phase.has_separate_schedule else {}))
        return fingerprint_of_phases(contents)


def describe_run(run: Run, phase: Phase, computation: Computation, num_parameters: int) -> dict[str, Any]:
    """Return the content of `run.json` during a phase: settings, plan, inputs, versions, hardware, fingerprint."""
    plan = run.plans[phase.index]
    phases = [
        {"name": each_phase.name, **describe_phase(each_phase, each_plan)}
        for each_phase, each_plan in zip(run.phases, run.plans, strict=True)
    ]
    return {
        "commit": commit(),
        "versions": installed_versions(),
        "hardware": describe_hardware(run.config.hardware, plan.num_replicas),
        "computation": dataclasses.asdict(computation),
        # Commit of a configuration (with --init-from also of the weights) that came from the Hub.
        "hub_revision": getattr(phase.model_config, "_commit_hash", None),
        "tokenizer": phase.inputs.tokenizer_source,
        "task": task_record(phase.task),
        "num_parameters": num_parameters,
        **describe_phase(phase, plan),
        **({"phases": phases} if run.has_named_phases else {}),
        "supervision": supervision(),
        "fingerprint": run.fingerprint,
    }


def describe_phase(phase: Phase, plan: Plan) -> dict[str, Any]:
    return {
        "model_config": json.loads(phase.model_config.to_json_string(use_diff=False)),
        "plan": dataclasses.asdict(plan),
        **phase.inputs.describe(),
        "settings": phase.config.as_dict(),
    }


def describe_hardware(config: HardwareConfig, num_replicas: int) -> str:
    return f"{device_kind(config)}, {num_replicas} replica(s){' of JAX' if config.runtime == 'jax' else ''}"


def num_local_devices(config: HardwareConfig) -> int:
    if config.runtime == "jax":
        import jax

        from train.runtime.jax_programs import set_up_jax

        set_up_jax()
        return int(jax.local_device_count())
    if has_cpu_alone():
        return 1
    load_tensorflow()
    from train.runtime.strategy import local_devices

    return len(local_devices())


def device_kind(config: HardwareConfig) -> str:
    """Return the kind of device that the run computes on, such as `NVIDIA H100`."""
    if config.wants_tpu:
        local_type = local_accelerator_type() if config.tpu_name == "local" else None
        return f"TPU {local_type or ''}".strip()
    if config.runtime == "jax":
        import jax

        if (device := jax.devices()[0]).platform != "cpu":
            return str(device.device_kind)
    elif not has_cpu_alone():
        import tensorflow as tf

        if gpus := tf.config.list_physical_devices("GPU"):
            return str(tf.config.experimental.get_device_details(gpus[0]).get("device_name", "GPU"))
    cpu_info = Path("/proc/cpuinfo")
    model = re.search(
        r"^model name\s*: (.+)$", cpu_info.read_text(encoding="utf-8") if cpu_info.exists() else "", re.MULTILINE
    )
    return f"CPU ({model[1] if model else platform.machine()})"


def new_network(phase: Phase) -> Any:
    load_tensorflow()
    from train.model.build import build_network

    network = build_network(
        phase.model_config,
        vocabulary_size=vocabulary_size(phase.inputs.tokenizer),
        seed=phase.config.run.seed,
        model_class=phase.task.model_class,
        **phase.config.model.network_options,
    )
    return phase.task.adapt_network(network)
