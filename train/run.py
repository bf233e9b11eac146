"""The stages of one run: prepared without TensorFlow, then trained, exported and pushed."""

import dataclasses
import functools
import json
import logging
import platform
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from transformers import PretrainedConfig

from mlm_common.command_line import commit
from mlm_common.hub.push import HubPushError
from mlm_common.storage import open_folder
from tfrecord_prep.manifest import ShardSet
from tokenizer_training.tokenizer import vocabulary_size
from train.checkpoints.fingerprint import fingerprint
from train.checkpoints.resume import describe_resume_point, installed_versions
from train.config import HardwareConfig, TrainingConfig
from train.data.shards import TrainingInputs, open_inputs
from train.model.config import resolve_model_config
from train.publishing.hub_access import check_can_push
from train.runtime import heartbeat
from train.runtime.cluster import Cluster, read_cluster
from train.runtime.plan import Plan, make_plan
from train.runtime.preemption import StopRequest, listening
from train.runtime.run_folder import (
    EXPORT_FOLDER,
    claim_run_folder,
    clear_run_folder,
    is_of_this_supervision,
    write_run_record,
)
from train.runtime.supervisor import supervision
from train.runtime.tpu import check_tpu_devices, check_tpu_use, expected_num_replicas, local_accelerator_type
from train.tasks.masked_lm import MaskedLanguageModeling
from train.tasks.task import Task

if TYPE_CHECKING:
    import tensorflow as tf

    from train.publishing.publisher import Publisher
    from train.publishing.push_to_hub import PushToHubCallback
    from train.trainer import Trainer


@dataclass(frozen=True)
class Run:
    """A run whose settings, inputs and output folder have passed all checks that need no TensorFlow."""

    config: TrainingConfig
    inputs: TrainingInputs
    task: Task
    model_config: PretrainedConfig
    cluster: Cluster = field(default_factory=Cluster)

    @property
    def output_dir(self) -> str:
        """The folder of the run."""
        return str(self.config.run.output_dir)

    @functools.cached_property
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
    task = MaskedLanguageModeling.of(inputs, config.masking)
    run = Run(config, inputs, task, resolve_model_config(config.model, inputs), cluster)
    run.plan(num_replicas=cluster.num_workers)
    if config.hub.resume_from_hub and not config.run.dry_run:
        from train.publishing.hub_checkpoints import resume_from_hub

        resume_from_hub(run.output_dir, config.hub, cluster)
    resume, overwrite = config.run.resume, config.run.overwrite_output_dir
    if is_of_this_supervision(run.output_dir):
        resume, overwrite = "auto", False
    elif not cluster.is_chief:
        resume = "auto"  # the chief may have claimed it a moment ago
    claim_run_folder(run.output_dir, run.fingerprint, resume=resume, overwrite=overwrite)
    if cluster.is_chief:
        check_can_push(config.hub)
    check_tpu_devices(config.hardware)
    return run


def train_and_export(run: Run) -> None:
    """Connect to the device, train to the plan's last step, export, and push if asked to.

    Raises:
        RunStoppedError: it was asked to stop before, and has saved.
    """
    from train.runtime.collectives import any_worker, explain_lost_devices
    from train.runtime.strategy import connect

    heartbeat.report("connect")
    strategy = connect(run.config.hardware, run.cluster)
    stop = StopRequest(functools.partial(any_worker, strategy) if run.cluster.num_workers > 1 else None)
    with explain_lost_devices(run.cluster, run.output_dir), _listening(run, stop):
        heartbeat.report("build")
        plan = run.plan(strategy.num_replicas_in_sync)
        record = describe_run(run, plan, strategy)
        trainer = _agreed_trainer(run, strategy, plan, record)
        if run.cluster.is_chief:
            print_table(trainer.plan.describe(trainer.model.network.count_params()))
            print_start(run, trainer)
            log_first_row(run, trainer)
        publisher = _publisher(run, record) if run.cluster.is_chief else None
        with _pushing(run, trainer, publisher) as pushing:
            evaluation = trainer.fit(stop, pushing)
    if publisher is None:
        return
    heartbeat.report("export", trainer.plan.num_steps)
    checkpoints = trainer.checkpoints.describe()
    last = publisher.take(trainer.model.network, trainer.plan.num_steps, trainer.log.lines)
    try:
        publisher.publish(last, f"Pretrained for {last.step:,} steps")
    except HubPushError:
        print_result(run, evaluation, checkpoints, publisher.export_folder)
        raise
    print_result(run, evaluation, checkpoints, publisher.export_folder)


def _pushing(run: Run, trainer: "Trainer", publisher: "Publisher | None") -> "PushToHubCallback":
    """Return what pushes the model while it is trained, if asked to; of several workers the chief's does."""
    from train.publishing.push_to_hub import PushToHubCallback, steps_of_pushes

    steps = steps_of_pushes(run.config.hub, trainer.plan)
    return PushToHubCallback(publisher, steps, metrics=lambda: trainer.log.lines)


def _agreed_trainer(run: Run, strategy: "tf.distribute.Strategy", plan: Plan, record: dict[str, Any]) -> "Trainer":
    """Return the trainer, restored, once all workers have one of the same run, at the same step.

    Raises:
        InputError: workers that were given something else than the chief, or do not see its checkpoints.
    """
    from train.runtime.collectives import check_agreement, shared_settings
    from train.trainer import build_trainer

    if run.cluster.is_chief:
        if run.config.run.overwrite_output_dir and not is_of_this_supervision(run.output_dir):
            clear_run_folder(run.output_dir)
        write_run_record(run.output_dir, record)
    # The others wait here until the folder is cleared.
    settings = shared_settings(run.config, run.fingerprint)
    check_agreement(strategy, run.cluster, settings, rule="All workers must be given the same flags and shards.")
    trainer = build_trainer(run.config, run.inputs, run.task, run.model_config, plan, strategy)
    rule = f"--output-dir must be one folder that all workers see; they found other checkpoints in {run.output_dir}."
    check_agreement(strategy, run.cluster, {"newest step": trainer.start.step}, rule=rule)
    return trainer


def _listening(run: Run, stop: StopRequest) -> AbstractContextManager[None]:
    hardware = run.config.hardware
    return listening(stop, on_cloud_machine=hardware.wants_tpu and hardware.tpu_name == "local")


def _publisher(run: Run, record: dict[str, Any]) -> "Publisher":
    """Return what writes `export/` and its card, and pushes them to the Hub if asked to."""
    from train.publishing.model_card import model_card
    from train.publishing.publisher import Publisher

    tokenizer = run.inputs.tokenizer
    return Publisher(
        run_folder=run.output_dir,
        export_folder=open_folder(run.output_dir).path_of(EXPORT_FOLDER),
        tokenizer=tokenizer,
        model_max_length=run.inputs.max_length,
        card=functools.partial(model_card, record, tokenizer),
        repository=run.config.hub.repository(),
        pushes_checkpoints=run.config.hub.hub_strategy == "checkpoint",
    )


logger = logging.getLogger(__name__)


def print_plan(run: "Run") -> None:
    """Print what the run would do; the model is built on the CPU to count its parameters."""
    from train.model.build import build_network

    plan = run.plan(expected_num_replicas(run.config.hardware, run.cluster))
    if run.config.hardware.wants_tpu:
        print(f"Without claiming the TPU, {plan.num_replicas} replicas are assumed.")
    network = build_network(
        run.model_config,
        run.config.model,
        vocabulary_size=vocabulary_size(run.inputs.tokenizer),
        seed=run.config.run.seed,
        model_class=run.task.model_class,
    )
    print_table(plan.describe(network.count_params()))


def print_start(run: "Run", trainer: "Trainer") -> None:
    """Print where training begins or goes on, and what is not as it was."""
    start = trainer.start
    path = trainer.checkpoints.path(start.step)
    for index, text in enumerate(describe_resume_point(start, trainer.plan, run.config, trainer.versions, path)):
        print(f"{'' if index else 'start':<22} {text}")


def log_first_row(run: "Run", trainer: "Trainer") -> None:
    """Show a person what goes in: the first training row as it is at the first step."""
    for title, text in run.task.describe_row(trainer.first_rows(), run.inputs.tokenizer).items():
        logger.info("%s: %s", title, text)


def print_result(run: "Run", evaluation: dict[str, float] | None, checkpoints: str, export_folder: str) -> None:
    """Print the last evaluation beside what frequencies alone would give, and where everything is."""
    rows = {"checkpoints": checkpoints, "model": export_folder}
    if evaluation is not None:
        rows = {**run.task.describe(evaluation), **rows}
    manifest = run.inputs.eval_shards.manifest if run.inputs.eval_shards else None
    if manifest is not None:
        entropy = f"{manifest.unigram_entropy_nats:.4f} nats: the best loss of a guess from frequencies alone"
        rows = {"unigram entropy": entropy, **rows}
    print()
    print_table(rows)


def print_table(rows: dict[str, str]) -> None:
    """Print titles and texts in two columns."""
    for title, text in rows.items():
        print(f"{title:<22} {text}")


def describe_run(run: Run, plan: Plan, strategy: "tf.distribute.Strategy") -> dict[str, Any]:
    """Collect the content of `run.json`: settings, fingerprint, and how and of what the run is made."""
    return {
        "commit": commit(),
        "versions": installed_versions(),
        "hardware": describe_hardware(run.config.hardware, strategy),
        # Of a configuration, and with --init-from of its weights, that came from the Hub.
        "hub_revision": getattr(run.model_config, "_commit_hash", None),
        "model_config": json.loads(run.model_config.to_json_string(use_diff=False)),
        "tokenizer": run.inputs.tokenizer_source,
        "plan": dataclasses.asdict(plan),
        "train_data": describe_shards(run.inputs.train_shards),
        "eval_data": describe_shards(run.inputs.eval_shards),
        "supervision": supervision(),
        "settings": run.config.as_dict(),
        "fingerprint": run.fingerprint,
    }


def describe_hardware(config: HardwareConfig, strategy: "tf.distribute.Strategy") -> str:
    """Name what the run computes on, as in `2 x NVIDIA H100`."""
    import tensorflow as tf

    if config.wants_tpu:
        local_type = local_accelerator_type() if config.tpu_name == "local" else None
        return f"TPU {local_type or ''}".strip() + f", {strategy.num_replicas_in_sync} replicas"
    if gpus := tf.config.list_physical_devices("GPU"):
        name = tf.config.experimental.get_device_details(gpus[0]).get("device_name", "GPU")
        return f"{strategy.num_replicas_in_sync} x {name}"
    return f"CPU ({platform.machine()}), {strategy.num_replicas_in_sync} replica(s)"


def describe_shards(shards: ShardSet | None) -> dict[str, Any] | None:
    """Collect what a manifest says about its rows, but for the list of shards; only their number without a manifest."""
    if shards is None:
        return None
    if shards.manifest is None:
        return {"totals": {"num_rows": shards.num_rows}}
    return {name: value for name, value in dataclasses.asdict(shards.manifest).items() if name != "shards"}
