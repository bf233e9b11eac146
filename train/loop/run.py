"""The stages of one run around its training: checked and planned without TensorFlow, connected, published."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from transformers import PretrainedConfig

from mlm_common.errors import InputError
from mlm_common.folder_lock import locked_folder
from mlm_common.hub.access import check_hub_access
from mlm_common.hub.retries import HubAwayError
from mlm_common.storage import open_folder
from train.checkpoints.fingerprint import (
    fingerprint,
    fingerprint_of_phases,
    fingerprint_sha256,
    is_checkpoint_of,
)
from train.checkpoints.store import CheckpointRecord, newest_record
from train.config.settings import MAY_CHANGE, HubConfig, RunSettings, TrainingConfig, flags_marked
from train.data.inputs import Inputs
from train.data.shards import check_phases, open_inputs
from train.model.config import resolve_model_config
from train.model.flops import planned_step_flops
from train.runtime import heartbeat
from train.runtime.cluster import Cluster, read_cluster
from train.runtime.pace import about, cpu_seconds
from train.runtime.phases import naming_phase, phases_of
from train.runtime.plan import PhaseToPlan, Plan, make_plans, phase_index
from train.runtime.preemption import StopRequest, listening
from train.runtime.run_folder import (
    EXPORT_FOLDER,
    check_run_folder,
    clear_run_folder,
    has_checkpoint,
    was_started_by_current_supervisor,
)
from train.runtime.supervisor import supervision
from train.runtime.tpu import check_tpu_devices, check_tpu_use
from train.tasks.task import Task

if TYPE_CHECKING:
    import tensorflow as tf

    from train.metrics.log import MetricsLog
    from train.publishing.publisher import Publisher
    from train.publishing.push_to_hub import PushToHub

logger = logging.getLogger(__name__)

CPU_ADVICE = "--preset tiny-cpu is made for CPUs"

Settings = TypeVar("Settings", bound=RunSettings)


@dataclass(frozen=True)
class Run:
    """A run whose settings, inputs and output folder have passed all checks that need no TensorFlow.

    With `--phases` it is the run as it is in one of them, number `index`; `all_phases` are all of them, in their order.
    """

    config: RunSettings
    inputs: Inputs
    task: Task
    model_config: PretrainedConfig
    cluster: Cluster = field(default_factory=Cluster)
    name: str = ""
    has_separate_schedule: bool = False
    index: int = 0
    all_phases: tuple["Run", ...] = ()

    @property
    def output_dir(self) -> str:
        """The folder of the run."""
        return str(self.config.run.output_dir)

    @property
    def phases(self) -> "tuple[Run, ...]":
        """The run as it is in each of its phases."""
        return tuple(dataclasses.replace(one, all_phases=self.all_phases) for one in self.all_phases) or (self,)

    @property
    def title(self) -> str:
        """Number and name of the phase, for people."""
        return f"{self.index + 1} of {len(self.phases)}: {self.name}"

    def describe(self, plan: Plan, num_parameters: int) -> dict[str, str]:
        """Describe the plan as {title: text}, for people."""
        phase = {"phase": self.title} if self.all_phases else {}
        return phase | plan.describe(num_parameters, self.inputs.num_eval_rows) | self.inputs.describe_rows()

    def describe_time_on_cpu(self, plan: Plan, step: int = 0) -> dict[str, str]:
        """Estimate how long the steps after `step` take on this machine's CPUs, as {title: text}."""
        flops = planned_step_flops(self.model_config, plan, self._num_predictions(plan))
        if flops is None or step >= plan.num_steps:
            return {}
        num_steps = (plan.num_steps - step) / (1 - plan.evaluation_share(self.inputs.num_eval_rows))
        seconds = cpu_seconds(num_steps * flops)
        is_long = seconds >= 3600 and self.advice_on_time
        return {"time": f"{about(seconds)} on this CPU, estimated{f'; {self.advice_on_time}' if is_long else ''}"}

    def _num_predictions(self, plan: Plan) -> int:
        return self.task.num_predictions(self.config.optimization.per_replica_batch_size * plan.max_length)

    @property
    def advice_on_time(self) -> str:
        """What to do about a run that takes long on a CPU; nothing where that is not another preset."""
        preset = self.config.model.preset
        return "" if "cpu" in preset or not self.task.card.predicts_tokens else CPU_ADVICE

    @property
    def starts_anew(self) -> bool:
        """Whether the run that is there is to be deleted; what supervises this run does so with its first process."""
        is_asked_for = self.config.run.overwrite_output_dir and self.index == 0
        return is_asked_for and not was_started_by_current_supervisor(self.output_dir)

    @functools.cached_property
    def fingerprint(self) -> dict[str, Any]:
        """What makes it this run and no other."""
        return self._fingerprint_up_to(len(self.phases))

    @functools.cached_property
    def fingerprint_sha256(self) -> str:
        """Hash of the fingerprint up to this phase, by which its checkpoints are known."""
        return fingerprint_sha256(self._fingerprint_up_to(self.index + 1))

    def _fingerprint_up_to(self, num_phases: int) -> dict[str, Any]:
        def own(phase: "Run") -> dict[str, Any]:
            content = fingerprint(phase.config, phase.inputs, phase.model_config.to_diff_dict())
            return content | ({"has_own_schedule": True} if phase.has_separate_schedule else {})

        return fingerprint_of_phases([own(phase) for phase in self.phases[:num_phases]])

    def is_of_run(self, record: CheckpointRecord) -> bool:
        """Tell whether a checkpoint is of this run."""
        index = phase_index(record.plan)
        return index < len(self.phases) and is_checkpoint_of(self._fingerprint_up_to(index + 1), record)

    def plan(self, num_replicas: int) -> Plan:
        """Plan the run, or this phase of it, on that many replicas; see `plans`."""
        return self.plans(num_replicas)[self.index]

    def plans(self, num_replicas: int) -> tuple[Plan, ...]:
        """Plan all phases on that many replicas.

        Raises:
            InputError: a batch larger than the data set, or a warmup longer than the run.
        """
        phases = self.phases
        return make_plans(
            tuple(
                PhaseToPlan(
                    phase.config.optimization,
                    phase.config.run,
                    phase.inputs.num_rows,
                    phase.inputs.max_length,
                    index > 0 and phase.inputs.has_rows_of(phases[index - 1].inputs),
                    phase.has_separate_schedule,
                    phase.name,
                    phase.inputs.mean_length,
                    phase.inputs.fills_passes,
                    phase.inputs.num_eval_rows,
                )
                for index, phase in enumerate(phases)
            ),
            num_replicas,
        )


def prepare_run(config: TrainingConfig) -> Run:
    """Make all checks of a run of pretraining that need neither TensorFlow nor the device; see `checked`."""
    return checked(config, open_run)


def checked(config: Settings, open_run: Callable[[Settings, Cluster], Run]) -> Run:
    """Make all checks that need neither TensorFlow nor the device, and return what they have found.

    Args:
        config: of the run.
        open_run: opens its inputs and resolves task and model.

    Raises:
        InputError: whatever is wrong with settings, shards, tokenizer, model, output folder, Hub access, TPU or
            TF_CONFIG.
        HubAwayError: the Hub cannot be reached, and there is no checkpoint to resume from without it.
    """
    cluster = read_cluster()
    check_tpu_use(config, cluster)
    run = open_run(config, cluster)
    run.plan(num_replicas=cluster.num_workers)
    if config.run.dry_run or not config.hub.resume_from_hub:
        check_output_folder(run)
    if cluster.is_chief:
        open_folder(run.output_dir).check_writable()
        _check_can_push(run, resumes=not run.starts_anew and has_checkpoint(run.output_dir))
    check_tpu_devices(config.hardware)
    return run


def open_run(config: TrainingConfig, cluster: Cluster) -> Run:
    """Open the inputs of a run and resolve its model, phase by phase; return it as it is in its first phase.

    Raises:
        InputError: whatever is wrong with phases, shards, tokenizer or model.
    """
    phases = phases_of(config)
    inputs = []
    for phase in phases:
        with naming_phase(phase.name):
            inputs.append(open_inputs(phase.config.data))
    check_phases(inputs)
    from train.tasks.pair_pretraining import task_of  # TensorFlow, once the shards have been checked

    max_length = max(one.max_length for one in inputs)
    runs = []
    for index, (phase, own) in enumerate(zip(phases, inputs, strict=True)):
        with naming_phase(phase.name):
            task = task_of(phase.config, own)
            model_config = resolve_model_config(phase.config.model, own, max_length)
        described = (phase.name, phase.has_separate_schedule, index)
        runs.append(Run(phase.config, own, task, model_config, cluster, *described))
    return dataclasses.replace(runs[0], all_phases=tuple(runs) if config.run.phases else ())


def newest_phase(run: Run) -> int:
    """Find the phase in which the newest checkpoint was saved, counted from 0; 0 without one.

    Raises:
        InputError: the run has not so many phases.
    """
    record = None if run.starts_anew else newest_record(run.output_dir)
    index = phase_index(record.plan) if record else 0
    if index >= len(run.phases):
        raise InputError(
            f"--phases must have all phases that are begun; {run.output_dir} has a checkpoint of phase {index + 1}, "
            f"received {len(run.phases)}. Give those that lie behind as they were, or name another --output-dir."
        )
    return index


def _check_can_push(run: Run, *, resumes: bool) -> None:
    """Check the push of a run; one that resumes does so without the Hub, which may be back when it is needed."""
    try:
        check_can_push(run.config.hub)
    except HubAwayError as error:
        if not resumes:
            raise
        logger.warning("The run resumes although the Hub is away: %s", error)


def check_output_folder(run: Run) -> None:
    """Check that the output folder holds what the run may begin, resume or replace.

    Raises:
        InputError: it holds something else.
    """
    resume = run.config.run.resume
    if was_started_by_current_supervisor(run.output_dir) or not run.cluster.is_chief:
        resume = "auto"  # whose first process, or the chief, may have begun the run a moment ago
    check_run_folder(
        run.output_dir,
        run.fingerprint,
        resume=resume,
        overwrite=run.starts_anew,
        begun_phase=newest_phase(run),
        changeable_flags=flags_marked(MAY_CHANGE, type(run.config)),
    )


@contextmanager
def locked_run_folder(run: Run) -> Iterator[None]:
    """Own the output folder within it, with a run fetched from the Hub if that is asked for; the chief does for all.

    Raises:
        InputError: it belongs to another run that is alive, or holds something else than it may.
    """
    with locked_folder(run.output_dir, supervision=supervision()) if run.cluster.is_chief else nullcontext():
        if run.config.hub.resume_from_hub:
            from train.publishing.hub_checkpoints import resume_from_hub

            resume_from_hub(run.output_dir, run.config.hub, run.cluster)
        check_output_folder(run)  # once more: nobody else changes it from here on
        yield


def check_can_push(config: HubConfig) -> None:
    """Check, where a repository is named, that the token may write to it and that the Hub accepts the card's metadata.

    Raises:
        InputError: it may not, or the Hub does not.
        HubAwayError: the Hub cannot be reached.
    """
    from huggingface_hub import ModelCardData

    repository = config.repository()
    if repository is not None:
        # Of the card's metadata, what the settings say: that could be refused.
        data = ModelCardData(
            library_name="transformers", license=config.hub_license, language=config.hub_language or None
        )
        check_hub_access(repository, card=f"---\n{data.to_yaml()}\n---\n")
        if config.hub_strategy == "checkpoint":
            from train.publishing.hub_checkpoints import CHECKPOINTS_BRANCH

            check_hub_access(dataclasses.replace(repository, branch=CHECKPOINTS_BRANCH, tag=None))


def connect(run: Run) -> "tf.distribute.Strategy":
    """Connect to the devices of the run: its TPU claimed and initialised, or all its workers there.

    Raises:
        InputError: no TPU can be used as this machine is set up.
        RunFailedError: the TPU that is named is not ready, or the other workers are not.
    """
    from train.runtime import strategy

    heartbeat.report("connect")
    return strategy.connect(run.config.hardware, run.cluster)


@contextmanager
def failure_handling(run: Run, strategy: "tf.distribute.Strategy") -> Iterator[StopRequest]:
    """Explain, within it, what TensorFlow fails by, and give what is asked whether the run is to stop."""
    from train.runtime.collectives import max_over_workers
    from train.runtime.failures import explained_failures

    hardware = run.config.hardware
    stop = StopRequest(functools.partial(max_over_workers, strategy) if run.cluster.num_workers > 1 else None)
    on_tpu_vm = hardware.wants_tpu and hardware.tpu_name == "local"
    with explained_failures(run.cluster, run.output_dir), listening(stop, on_cloud_machine=on_tpu_vm):
        yield stop


def check_workers(run: Run, strategy: "tf.distribute.Strategy") -> None:
    """Check that all workers are those of the same run.

    Raises:
        InputError: workers that were given something else than the chief.
    """
    from train.runtime.collectives import check_agreement, shared_settings

    heartbeat.report("build")
    settings = shared_settings([phase.config for phase in run.phases], run.fingerprint)
    check_agreement(strategy, run.cluster, settings, rule="All workers must be given the same flags and shards.")


def clear_folder_if_asked(run: Run, strategy: "tf.distribute.Strategy") -> None:
    """Delete the run that is there if `--overwrite-output-dir` asks for that; the others wait until the chief has."""
    if run.cluster.is_chief and run.starts_anew:
        clear_run_folder(run.output_dir)
    if run.config.run.overwrite_output_dir:
        wait_for_workers(run, strategy)


def wait_for_workers(run: Run, strategy: "tf.distribute.Strategy") -> None:
    """Wait until all workers have come here."""
    from train.runtime.collectives import max_over_workers

    if run.cluster.num_workers > 1:
        max_over_workers(strategy, [0.0])


def build_publisher(run: Run, record: dict[str, Any]) -> "Publisher | None":
    """Build what writes `export/` and its card, and pushes them if asked to; None on all workers but the chief."""
    from train.publishing.model_card import check_card, model_card
    from train.publishing.publisher import Publisher

    if not run.cluster.is_chief:
        return None
    tokenizer = run.inputs.tokenizer
    check_card(record, tokenizer, run.model_config)
    return Publisher(
        run_folder=run.output_dir,
        export_folder=open_folder(run.output_dir).path_of(EXPORT_FOLDER),
        tokenizer=tokenizer,
        model_max_length=max(phase.inputs.max_length for phase in run.phases[: run.index + 1]),
        card=functools.partial(model_card, record, tokenizer),
        repository=run.config.hub.repository(),
        pushes_checkpoints=run.config.hub.hub_strategy == "checkpoint",
        publish_details=run.config.hub.publish_details,
    )


def push_while_training(run: Run, plan: Plan, publisher: "Publisher | None", log: "MetricsLog") -> "PushToHub":
    """Build what pushes the model while it is trained, if asked to; of several workers the chief's does."""
    from train.publishing.push_to_hub import PushToHub, steps_of_pushes

    return PushToHub(publisher, steps_of_pushes(run.config.hub, plan), metrics=lambda: log.lines)
