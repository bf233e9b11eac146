"""Lifecycle of a run, for pretraining and fine-tuning: check, connect to the devices, train each phase, publish."""

import dataclasses
import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import huggingface_hub

from mlm_common.hub.push import HubPushError, check_hub_access
from mlm_common.hub.retries import HubAwayError
from train import load_tensorflow
from train.checkpoints.run_record import RunRecord
from train.config.phases import naming_phase, phases_of
from train.config.settings import HubConfig, RunSettings, TrainingConfig, saved_on_tpus
from train.data.shards import TrainingInputs, check_phases, open_inputs
from train.loop.phase import Phase, read_sample
from train.loop.report import describe_exported, print_plan, print_result, print_start, show_first_rows
from train.loop.run import Run
from train.model.config import check_reference_layers, resolve_model_config
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
from train.runtime.preemption import StopRequest, listening
from train.runtime.run_folder import LOSS_CURVE_NAME, RunFolder
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
    """The parts of a run that differ between commands: how a run is opened, and how the trained model is used."""

    @abstractmethod
    def open_run(self, config: Settings, cluster: Cluster) -> Run:
        """Open the inputs of a run and resolve its task and model, before TensorFlow is imported."""

    def check(self, run: Run) -> None:
        """Run the checks that only this command needs."""

    def print_more(self, run: Run) -> None:
        """Print what this command's `--dry-run` shows in addition to the plan."""

    def finish(self, trainer: "Trainer", figures: Figures, stop: StopRequest) -> tuple[int, Figures]:  # noqa: ARG002
        """Finish the command after training, for example by writing predictions.

        Returns:
            The step whose model is exported, and the evaluation of that step.
        """
        return trainer.plan.num_steps, figures


class Pretraining(Job[TrainingConfig]):
    """The job of `run_mlm.py`."""

    def open_run(self, config: TrainingConfig, cluster: Cluster) -> Run:
        hub_commits = recorded_commits(config)
        return open_pretraining(config, cluster, lambda phase_config: open_inputs(phase_config.data, hub_commits))


def recorded_commits(config: TrainingConfig) -> dict[str, str]:
    """Read the Hub commits of a resumed run's shards, {NAMESPACE/NAME@REVISION: commit}; empty for a new run."""
    folder = RunFolder(str(config.run.output_dir))
    with suppress(AttributeError, OSError, ValueError):  # run.json is missing or damaged; a later check reports it
        if config.hub.resume_from_hub and not folder.has_run():
            return dict(record_on_hub(config.hub).get("hub_commits", {}))
        recorded = RunRecord.read(folder)
        if not config.run.overwrite_output_dir or recorded.was_started_by_current_supervisor:
            return dict((recorded.content or {}).get("hub_commits", {}))
    return {}


def open_pretraining(
    config: TrainingConfig, cluster: Cluster, open_rows: Callable[[TrainingConfig], TrainingInputs]
) -> Run:
    """Open the inputs of every phase with `open_rows`, and resolve the phase's task and model."""
    phase_settings = phases_of(config)
    inputs = []
    for settings in phase_settings:
        with naming_phase(settings.name):
            inputs.append(open_rows(settings.config))
    check_phases(inputs)
    max_length = max(phase_inputs.max_length for phase_inputs in inputs)
    phases = []
    for index, (settings, phase_inputs) in enumerate(zip(phase_settings, inputs, strict=True)):
        config = settings.config
        with naming_phase(settings.name):
            task = task_of(config, phase_inputs)
            model_config = resolve_model_config(config.model, phase_inputs, max_length)
            task.check_model(model_config, config.model)
        opened = (config, phase_inputs, task, model_config, settings.name, settings.has_separate_schedule, index)
        phases.append(Phase(*opened, sample=read_sample(config, phase_inputs)))
    return Run(tuple(phases), cluster)


def train_run(config: Settings, job: Job[Settings]) -> None:
    """Run a whole command: check everything, connect, train each phase, export, push.

    With `--dry-run`, print the plan and return.

    Raises:
        InputError: a flag, a file or the output folder is wrong.
        RunStoppedError: the run was asked to stop; a checkpoint is saved.
        RunFailedError: training diverged, the device was lost, a checkpoint could not be written, or a push failed.
    """
    run = prepare(config, job)
    if config.run.dry_run:
        print_plan(run := run.planned_as_expected(with_tensorflow=True))
        show_first_rows(run)
        job.print_more(run)
        return
    with locked_run_folder(run) as run:
        show_tpu(run.config.hardware)  # before TensorFlow is imported
        let_tensorflow_free_memory(run.config.hardware)
        run = run.with_streams()
        load_tensorflow()  # now that the input is checked
        from train.loop.trainer import Trainer
        from train.runtime.runtime import wait_for_workers
        from train.runtime.strategy import check_run_agreement, end_together, pin_streams, share_cores

        share_cores(run.num_streams)
        supervisor.report("connect")
        runtime = connect(run.config.hardware, run.cluster)
        pin_streams(run.num_streams)
        with failure_handling(run, runtime) as stop:
            run = run.planned(runtime.num_replicas)
            check_run_agreement(runtime, [phase.config for phase in run.phases], run.fingerprint)
            index = run.newest_phase()
            while index < len(run.phases):
                supervisor.report("build")
                trainer = Trainer(run, index, runtime)
                # Decide what training starts from. The order is important.
                # 1. Load the weights of --init-from. If they cannot be read, the existing run is still intact.
                trainer.load_initial_weights()
                # 2. Delete the existing run, if --overwrite-output-dir is given, so that step 3 does not find it.
                trainer.clear_folder()
                # 3. Restore the newest intact checkpoint, if there is one. Its weights replace the weights of step 1.
                trainer.restore()
                # 4. If this checkpoint belongs to an earlier phase, because all checkpoints of this phase are damaged,
                # build the trainer of the earlier phase.
                if trainer.phase_to_resume != index:
                    index = trainer.phase_to_resume
                    trainer.release()
                    continue
                # 5. Compare the fast variants of a step with the reference, using the weights that training starts
                # from.
                trainer.prove_computation()
                publisher, at_words, figures = train_phase(trainer, stop)
                index += 1
                if index < len(run.phases):
                    wait_for_workers(runtime)  # the other workers read the checkpoint that the chief has written
                    trainer.release()
                    run = run.read_again().planned(runtime.num_replicas)
            step, figures = job.finish(trainer, figures, stop)
        if publisher is not None:
            publish(trainer, publisher, figures, step)
            if at_words is not None:
                with supervisor.keep_reporting("publish", step):
                    at_words.make(trainer.plan.num_steps)  # retry exports that failed during training
        end_together(runtime, run.folder)


def train_phase(trainer: "Trainer", stop: StopRequest) -> tuple[Publisher | None, "ExportsAtWords | None", Figures]:
    """Write `run.json`, print where training starts, and train the phase; push and export during training.

    Returns:
        The publisher (None for workers other than the chief), the exports of `--save-at-words` (None without the flag),
        and the evaluation of the last step (None without an evaluation).
    """
    from train.loop.fitting import fit

    run, publisher = trainer.run, None
    record = trainer.record_run()
    if run.cluster.is_chief:
        publisher = Publisher(run.folder, record, trainer.phase.inputs.tokenizer)
        check_card(record, publisher.tokenizer, trainer.phase.model_config)
        print_start(trainer)
    steps = steps_of_pushes(run.config.hub, trainer.plan)
    at_words = exports_at_words(run, trainer)
    with PushToHub(publisher, steps, trainer.log) as pushing, at_words or nullcontext():
        return publisher, at_words, fit(trainer, stop, pushing)


def publish(trainer: "Trainer", publisher: Publisher, figures: Figures, step: int) -> None:
    """Export the model as of `step`, push it if a repository is named, and print its evaluation and the files' paths.

    Raises:
        HubPushError: the push failed; the export is complete.
    """
    from train.publishing.pytorch_format import take_snapshot

    run, phase = trainer.run, trainer.phase
    supervisor.report("export", trainer.plan.num_steps)
    with trainer.runtime.on_host(trainer.model.network.variables):
        last = take_snapshot(trainer.model.network, step, trainer.log.lines)
    where = {
        **describe_exported(trainer, step),
        "model": run.folder.export.path,
        "plot of the loss": run.folder.files.path_of(LOSS_CURVE_NAME),
    }
    try:
        with supervisor.keep_reporting("publish", step):
            publisher.publish(last, f"{phase.task.card.training_verb.capitalize()} for {step:,} steps")
    except HubPushError:
        print_result(phase, figures, where)
        raise
    print_result(phase, figures, where)


def exports_at_words(run: Run, trainer: "Trainer") -> "ExportsAtWords | None":
    """Start to export the checkpoints of `--save-at-words` in the background; return None without the flag."""
    steps = trainer.phase.steps_at_words(trainer.plan)
    if not steps:
        return None
    from train.publishing.saved_model import ExportsAtWords  # only needed with --save-at-words

    exports = ExportsAtWords(run.folder, steps, run.config.hub.repository())
    trainer.checkpoints.on_kept = exports.submit
    if run.cluster.is_chief:
        exports.submit(trainer.start.step)  # exports that an interrupted process left undone
    return exports


def prepare(config: Settings, job: Job[Settings], *, with_tpu: bool = True) -> Run:
    """Run all checks that need neither TensorFlow nor the device, and return the run.

    Args:
        config: the settings as given.
        job: the command.
        with_tpu: whether to also check that this machine can reach its TPU.
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
        check_reference_layers(phase.config, phase.model_config)
    if config.run.dry_run or not config.hub.resume_from_hub:
        run = check_output_folder(run)
    if cluster.is_chief:
        run.folder.files.check_writable()
        try:
            check_can_push(config.hub)
        except HubAwayError as error:  # the Hub may be reachable again when the run pushes
            if run.starts_over or not run.folder.has_checkpoint():
                raise
            logger.warning("The run resumes although the Hub cannot be reached: %s", error)
    if with_tpu:
        check_tpu_devices(config.hardware)
    job.check(run)
    return run


def check_output_folder(run: Run) -> Run:
    """Check, before the TPU is claimed, that the run may write to its folder and can start or resume there.

    Returns:
        The run with its plans, if the number of replicas is known.
    """
    resume = run.config.run.resume
    if run.recorded.was_started_by_current_supervisor or not run.cluster.is_chief:
        resume = "auto"  # the supervisor's first process, or the chief, may have started the run a moment ago
    run.folder.check(
        *(run.recorded.content, run.fingerprint),
        resume=resume,
        overwrite=run.starts_over,
        begun_phase=run.newest_phase(),
    )
    return run.planned_as_expected(with_tensorflow=False)


def check_can_push(config: HubConfig) -> None:
    """Check that the token may write to the Hub repository, and that the Hub accepts the model card's metadata.

    Does nothing if no repository is named.
    """
    repository = config.repository()
    if repository is not None:
        # Check only the metadata that comes from the settings, because the Hub may reject these values.
        data = huggingface_hub.ModelCardData(
            library_name="transformers", license=config.hub_license, language=config.hub_language or None
        )
        check_hub_access(repository, card=f"---\n{data.to_yaml()}\n---\n")
        if config.hub_strategy == "checkpoint":
            check_hub_access(dataclasses.replace(repository, branch=CHECKPOINTS_BRANCH, tag=None))


@contextmanager
def locked_run_folder(run: Run) -> Iterator[Run]:
    """Lock the output folder, and with `--resume-from-hub` download the run; the chief does both for all workers.

    Yield the run, with its records read again from the locked folder.
    """
    with run.folder.locked() if run.cluster.is_chief else nullcontext():
        if run.config.hub.resume_from_hub:
            resume_from_hub(run.folder, run.config.hub, run.cluster)
        yield check_output_folder(run.read_again())  # another process could change the folder until it was locked


@contextmanager
def failure_handling(run: Run, runtime: "Runtime") -> Iterator[StopRequest]:
    """Explain device errors in one line, and restore the float32 policy on exit; yield the stop request."""
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
            set_precision()  # for later models in this process
