"""The life of a run, of pretraining and of fine-tuning: prepared, connected, trained phase by phase, published."""

import dataclasses
import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import huggingface_hub

from mlm_common.hub.push import check_hub_access
from mlm_common.hub.retries import HubAwayError
from train.config.settings import HubConfig, RunSettings, TrainingConfig, saved_on_tpus
from train.data.shards import TrainingInputs, check_phases, open_inputs
from train.loop.run import Phase, Run, print_plan
from train.model.config import resolve_model_config
from train.publishing.model_card import check_card
from train.publishing.publisher import (
    CHECKPOINTS_BRANCH,
    Publisher,
    PushToHub,
    record_on_hub,
    resume_from_hub,
    steps_of_pushes,
)
from train.runtime import supervisor
from train.runtime.machines import Cluster, check_tpu_devices, check_tpu_use, read_cluster
from train.runtime.pjrt_settings import show_tpu
from train.runtime.plan import Plan, naming_phase, phases_of
from train.runtime.preemption import StopRequest, listening
from train.runtime.run_folder import RunFolder
from train.runtime.runtime_choice import choose_runtime, connect, let_tensorflow_free_memory
from train.tasks.pair_pretraining import task_of

if TYPE_CHECKING:
    from train.loop.trainer import Trainer
    from train.publishing.saved_model import ExportsAtWords
    from train.runtime.runtime import Runtime

logger = logging.getLogger(__name__)

Settings = TypeVar("Settings", bound=RunSettings)
Figures = dict[str, float] | None


class Job(ABC, Generic[Settings]):
    """What is special about one command: which run it opens, and what it does with the trained model."""

    @abstractmethod
    def open_run(self, config: Settings, cluster: Cluster) -> Run:
        """Open the inputs of a run and resolve its task and model, before TensorFlow starts."""

    def check(self, run: Run) -> None:
        """Check what this command alone asks for."""

    def print_more(self, run: Run) -> None:
        """Print what `--dry-run` says beside the plan."""

    def finish(self, trainer: "Trainer", figures: Figures, stop: StopRequest) -> tuple[int, Figures]:  # noqa: ARG002
        """Use the trained model; return the step of the model that is exported, and its figures."""
        return trainer.plan.num_steps, figures


class Pretraining(Job[TrainingConfig]):
    """The job of `run_mlm.py`."""

    def open_run(self, config: TrainingConfig, cluster: Cluster) -> Run:
        hub_commits = recorded_commits(config)
        return open_pretraining(config, cluster, lambda of_phase: open_inputs(of_phase.data, hub_commits))


def recorded_commits(config: TrainingConfig) -> dict[str, str]:
    """Read from which commits of the Hub the shards of a resumed run are; none for a new run."""
    folder = RunFolder(str(config.run.output_dir))
    with suppress(AttributeError, OSError, ValueError):  # no run, which is checked later
        if config.hub.resume_from_hub and not folder.has_run():
            return dict(record_on_hub(config.hub).get("hub_commits", {}))
        if not config.run.overwrite_output_dir or folder.was_started_by_current_supervisor():
            return dict(folder.read_record().get("hub_commits", {}))
    return {}


def open_pretraining(
    config: TrainingConfig, cluster: Cluster, open_rows: Callable[[TrainingConfig], TrainingInputs]
) -> Run:
    settings = phases_of(config)
    inputs = []
    for one in settings:
        with naming_phase(one.name):
            inputs.append(open_rows(one.config))
    check_phases(inputs)
    max_length = max(one.max_length for one in inputs)
    phases = []
    for index, (one, rows) in enumerate(zip(settings, inputs, strict=True)):
        with naming_phase(one.name):
            task = task_of(one.config, rows)
            model_config = resolve_model_config(one.config.model, rows, max_length)
            task.check_model(model_config, one.config.model)
        phases.append(Phase(one.config, rows, task, model_config, one.name, one.has_separate_schedule, index))
    return Run(tuple(phases), cluster)


def train_run(config: Settings, job: Job[Settings]) -> None:
    """Check all that can be checked, print the plan, connect; phase by phase build, restore, fit; export, push.

    Raises:
        InputError: whatever is wrong with the input.
        RunStoppedError: the run was asked to stop; all is saved.
        RunFailedError: training diverged, the device was lost, a checkpoint could not be written or a push failed.
    """
    run = prepare(config, job)
    if config.run.dry_run:
        show_first_rows(run, print_plan(run))
        job.print_more(run)
        return
    with locked_run_folder(run):
        show_tpu(run.config.hardware)  # before TensorFlow is imported
        let_tensorflow_free_memory(run.config.hardware)
        from train.loop.fitting import fit  # not for bad input
        from train.loop.trainer import restored_trainers
        from train.runtime.strategy import check_run_agreement, end_together

        supervisor.report("connect")
        runtime = connect(run.config.hardware, run.cluster)
        with failure_handling(run, runtime) as stop:
            run.checked_plans(runtime.num_replicas)  # that is, for the devices that are there
            supervisor.report("build")
            check_run_agreement(runtime, [phase.config for phase in run.phases], run.fingerprint)
            for trainer in restored_trainers(run, runtime):
                record = trainer.record_run()
                publisher = None
                if run.cluster.is_chief:
                    publisher = Publisher(run.folder, record, trainer.phase.inputs.tokenizer)
                    check_card(record, publisher.tokenizer, trainer.phase.model_config)
                    trainer.print_start()
                steps = steps_of_pushes(run.config.hub, trainer.plan)
                at_words = exports_at_words(run, trainer)
                with PushToHub(publisher, steps, trainer.log) as pushing, at_words or nullcontext():
                    figures = fit(trainer, stop, pushing)
            step, figures = job.finish(trainer, figures, stop)
        if publisher is not None:
            trainer.publish(publisher, figures, step)
            if at_words is not None:
                with supervisor.keep_reporting("publish", step):
                    at_words.make(trainer.plan.num_steps)  # what failed meanwhile
        end_together(runtime, run.folder)


def exports_at_words(run: Run, trainer: "Trainer") -> "ExportsAtWords | None":
    """Let the checkpoints of `--save-at-words` be exported as they are kept; None without any."""
    steps = trainer.phase.steps_at_words(trainer.plan)
    if not steps:
        return None
    from train.publishing.saved_model import ExportsAtWords  # for this flag alone

    exports = ExportsAtWords(run.folder, steps, run.config.hub.repository())
    trainer.checkpoints.on_kept = exports.submit
    if run.cluster.is_chief:
        exports.submit(trainer.start.step)  # what a killed process has left
    return exports


def show_first_rows(run: Run, plans: tuple[Plan, ...]) -> None:
    """Print for `--dry-run` the row that each phase begins with, which takes TensorFlow to read and to mask."""
    if run.config.hardware.tpu_name == "local" and run.config.hardware.wants_tpu:
        print("\nThe first row is printed when the run starts: showing it here would claim the TPU.")
        return
    try:
        from train.loop.trainer import print_first_rows
        from train.runtime.device_errors import explained_failures
    except ImportError as error:
        logger.warning("The first row is not shown: %s", error)
        return
    with explained_failures(run.cluster, run.folder):
        print_first_rows(run, plans)


def prepare(config: Settings, job: Job[Settings], *, with_tpu: bool = True) -> Run:
    """Make all checks that need neither TensorFlow nor the device, and return the run.

    Without `with_tpu`, whether this machine reaches the TPU is not checked.
    """
    if config.run.report_to:
        from train.metrics.trackers import check_trackers

        check_trackers(config.run.report_to)
    hardware, reason = choose_runtime(config.hardware)
    chosen = {"hardware": hardware, "run": saved_on_tpus(config.run, hardware)}
    config = cast(Settings, dataclasses.replace(cast(Any, config), **chosen))
    cluster = read_cluster(tpu_hosts=hardware.runtime == "jax" and hardware.wants_tpu)
    if with_tpu:
        check_tpu_use(config, cluster)
    run = dataclasses.replace(job.open_run(config, cluster), why_runtime=reason)
    for phase in run.phases:
        _ = phase.sample  # which checks the file of --score-pairs
    if config.run.dry_run or not config.hub.resume_from_hub:
        check_output_folder(run)
    if cluster.is_chief:
        run.folder.files.check_writable()
        try:
            check_can_push(config.hub)
        except HubAwayError as error:  # which may be back when it is needed
            if run.starts_over or not run.folder.has_checkpoint():
                raise
            logger.warning("The run resumes although the Hub is away: %s", error)
    if with_tpu:
        check_tpu_devices(config.hardware)
    job.check(run)
    return run


def check_output_folder(run: Run) -> None:
    """Check that the run may write to its folder, and can start or resume there, before its TPU is claimed."""
    resume = run.config.run.resume
    if run.folder.was_started_by_current_supervisor() or not run.cluster.is_chief:
        resume = "auto"  # the first process of the supervisor, or the chief, may have begun the run a moment ago
    begun_phase = run.newest_phase()
    run.folder.check(run.fingerprint, resume=resume, overwrite=run.starts_over, begun_phase=begun_phase)
    run.expected_plans(with_tensorflow=False)


def check_can_push(config: HubConfig) -> None:
    """Check, if a repository is named, that the token may write to it and that the Hub accepts the card's metadata."""
    repository = config.repository()
    if repository is not None:
        # The part of the card's metadata that comes from the settings, which the Hub could refuse.
        data = huggingface_hub.ModelCardData(
            library_name="transformers", license=config.hub_license, language=config.hub_language or None
        )
        check_hub_access(repository, card=f"---\n{data.to_yaml()}\n---\n")
        if config.hub_strategy == "checkpoint":
            check_hub_access(dataclasses.replace(repository, branch=CHECKPOINTS_BRANCH, tag=None))


@contextmanager
def locked_run_folder(run: Run) -> Iterator[None]:
    """Lock the output folder within it, with a run fetched from the Hub if asked for; the chief does so for all."""
    with run.folder.locked() if run.cluster.is_chief else nullcontext():
        if run.config.hub.resume_from_hub:
            resume_from_hub(run.folder, run.config.hub, run.cluster)
        check_output_folder(run)  # again: nobody else changes it from here on
        yield


@contextmanager
def failure_handling(run: Run, runtime: "Runtime") -> Iterator[StopRequest]:
    """Explain errors of the devices within it, and leave float32 behind; yield whether the run was asked to stop."""
    from train.runtime.device_errors import explained_failures
    from train.runtime.runtime import max_over_workers
    from train.step.train_step import set_precision

    hardware = run.config.hardware
    stop = StopRequest(functools.partial(max_over_workers, runtime) if run.cluster.num_workers > 1 else None)
    on_tpu_vm = hardware.wants_tpu and hardware.tpu_name == "local"
    with explained_failures(run.cluster, run.folder), listening(stop, on_cloud_machine=on_tpu_vm):
        try:
            yield stop
        finally:
            set_precision()  # of other models in this process
