"""The stages of one run: prepared without TensorFlow, then trained, exported and pushed."""

import functools
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from transformers import PretrainedConfig

from tokenizer_training import storage
from tokenizer_training.hub import HubPushError
from train import heartbeat
from train.cluster import Cluster, read_cluster
from train.config import TrainingConfig
from train.hub_config import preliminary_card
from train.inputs import TrainingInputs, open_inputs
from train.model_config import resolve_model_config
from train.output_folder import (
    EXPORT_FOLDER,
    claim_output_folder,
    clear_output_folder,
    fingerprint,
    is_of_this_supervision,
    read_record,
    write_record,
)
from train.plan import Plan, make_plan
from train.preemption import StopRequest, listening
from train.run_printing import log_first_row, print_result, print_start, print_table
from train.run_record import describe_run
from train.tpu_devices import check_tpu_devices, check_tpu_use

if TYPE_CHECKING:
    import tensorflow as tf

    from train.hub import PushToHubCallback
    from train.publisher import Publisher
    from train.trainer import Trainer


@dataclass(frozen=True)
class Run:
    """A run whose settings, inputs and output folder have passed all checks that need no TensorFlow."""

    config: TrainingConfig
    inputs: TrainingInputs
    model_config: PretrainedConfig
    cluster: Cluster = field(default_factory=Cluster)

    @property
    def output_dir(self) -> str:
        """The folder of the run."""
        return str(self.config.run.output_dir)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What makes it this run and no other."""
        return fingerprint(self.config, self.inputs, self.model_config.to_diff_dict())

    def plan(self, num_replicas: int) -> Plan:
        """Return the plan on that many replicas.

        Raises:
            InputError: a batch larger than the data set, or a warmup longer than the run.
        """
        return make_plan(
            self.config.optimization,
            self.config.run,
            num_rows=self.inputs.train_shards.num_rows,
            max_length=self.inputs.max_length,
            num_replicas=num_replicas,
        )


def prepare_run(config: TrainingConfig) -> Run:
    """Return the run after all checks that need neither TensorFlow nor the device.

    Raises:
        InputError: whatever is wrong with settings, shards, tokenizer, model, output folder, Hub access, TPU or
            TF_CONFIG.
    """
    cluster = read_cluster()
    check_tpu_use(config, cluster)
    inputs = open_inputs(config.data)
    inputs.masking_rule(config.masking)
    run = Run(config, inputs, resolve_model_config(config.model, inputs), cluster)
    run.plan(num_replicas=cluster.num_workers)
    if config.hub.resume_from_hub and not config.run.dry_run:
        from train.hub_checkpoints import resume_from_hub

        resume_from_hub(run.output_dir, config.hub, cluster)
    resume, overwrite = config.run.resume, config.run.overwrite_output_dir
    if is_of_this_supervision(run.output_dir):
        resume, overwrite = "auto", False
    elif not cluster.is_chief:
        resume = "auto"  # the chief may have claimed it a moment ago
    claim_output_folder(run.output_dir, run.fingerprint, resume=resume, overwrite=overwrite)
    repository = config.hub.repository()
    if repository is not None and cluster.is_chief:
        from tokenizer_training.hub_access import check_hub_access

        check_hub_access(repository, card=preliminary_card(config.hub))
    check_tpu_devices(config.hardware)
    return run


def train_and_export(run: Run) -> None:
    """Connect to the device, train to the plan's last step, export, and push if asked to.

    Raises:
        RunStoppedError: it was asked to stop before, and has saved.
    """
    from train.agreement import any_worker, ending_with_lost_devices
    from train.strategy import connect

    heartbeat.report("connect")
    strategy = connect(run.config.hardware, run.cluster)
    stop = StopRequest(functools.partial(any_worker, strategy) if run.cluster.num_workers > 1 else None)
    with ending_with_lost_devices(run.cluster, run.output_dir), _listening(run, stop):
        heartbeat.report("build")
        trainer = _agreed_trainer(run, strategy, run.plan(strategy.num_replicas_in_sync))
        if run.cluster.is_chief:
            print_table(trainer.plan.describe(trainer.model.masked_lm.count_params()))
            print_start(run, trainer)
            log_first_row(run, trainer)
        publisher = _publisher(run) if run.cluster.is_chief else None
        with _pushing(run, trainer, publisher) as pushing:
            evaluation = trainer.fit(stop, pushing)
    if publisher is None:
        return
    heartbeat.report("export", trainer.plan.num_steps)
    checkpoints = trainer.checkpoints.describe()
    last = publisher.take(trainer.model.masked_lm, trainer.plan.num_steps, trainer.log.lines)
    try:
        publisher.publish(last, f"Pretrained for {last.step:,} steps")
    except HubPushError:
        print_result(run, evaluation, checkpoints, publisher.export_folder)
        raise
    print_result(run, evaluation, checkpoints, publisher.export_folder)


def _pushing(run: Run, trainer: "Trainer", publisher: "Publisher | None") -> "PushToHubCallback":
    """Return what pushes the model while it is trained, if asked to; of several workers the chief's does."""
    from train.hub import PushToHubCallback, steps_of_pushes

    steps = steps_of_pushes(run.config.hub, trainer.plan)
    return PushToHubCallback(publisher, steps, metrics=lambda: trainer.log.lines)


def _agreed_trainer(run: Run, strategy: "tf.distribute.Strategy", plan: Plan) -> "Trainer":
    """Return the trainer, restored, once all workers have one of the same run, at the same step.

    Raises:
        InputError: workers that were given something else than the chief, or do not see its checkpoints.
    """
    from train.agreement import check_agreement, shared_settings
    from train.trainer import build_trainer

    if run.cluster.is_chief:
        if run.config.run.overwrite_output_dir and not is_of_this_supervision(run.output_dir):
            clear_output_folder(run.output_dir)
        write_record(run.output_dir, run.config, run.fingerprint, describe_run(run, plan, strategy))
    # The others wait here until the folder is cleared.
    settings = shared_settings(run.config, run.fingerprint)
    check_agreement(strategy, run.cluster, settings, rule="All workers must be given the same flags and shards.")
    trainer = build_trainer(run.config, run.inputs, run.model_config, plan, strategy)
    rule = f"--output-dir must be one folder that all workers see; they found other checkpoints in {run.output_dir}."
    check_agreement(strategy, run.cluster, {"newest step": trainer.start.step}, rule=rule)
    return trainer


def _listening(run: Run, stop: StopRequest) -> AbstractContextManager[None]:
    hardware = run.config.hardware
    return listening(stop, on_cloud_machine=hardware.wants_tpu and hardware.tpu_name == "local")


def _publisher(run: Run) -> "Publisher":
    """Return what writes `export/` and its card, and pushes them to the Hub if asked to."""
    from train.model_card import model_card
    from train.publisher import Publisher

    tokenizer = run.inputs.tokenizer
    return Publisher(
        run_folder=run.output_dir,
        export_folder=storage.join(run.output_dir, EXPORT_FOLDER),
        tokenizer=tokenizer,
        model_max_length=run.inputs.max_length,
        card=functools.partial(model_card, read_record(run.output_dir), tokenizer),
        repository=run.config.hub.repository(),
        pushes_checkpoints=run.config.hub.hub_strategy == "checkpoint",
    )
