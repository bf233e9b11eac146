"""The stages of one run around its training: checked and planned without TensorFlow, connected, recorded, printed."""

import dataclasses
import functools
import json
import logging
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PretrainedConfig

from mlm_common.command_line import commit
from mlm_common.folder_owner import owned_folder
from mlm_common.hub.access import check_hub_access
from mlm_common.hub.retries import HubAwayError
from mlm_common.storage import open_folder
from tfrecord_prep.manifest import ShardSet
from tokenizer_training.tokenizer import vocabulary_size
from train.checkpoints.fingerprint import fingerprint, fingerprint_sha256, is_checkpoint_of
from train.checkpoints.resume import installed_versions
from train.checkpoints.store import CheckpointRecord
from train.config import HardwareConfig, HubConfig, TrainingConfig
from train.data.shards import TrainingInputs, open_inputs
from train.model.config import resolve_model_config
from train.runtime import heartbeat
from train.runtime.cluster import Cluster, read_cluster
from train.runtime.plan import Plan, make_plan
from train.runtime.preemption import StopRequest, listening
from train.runtime.run_folder import (
    EXPORT_FOLDER,
    check_run_folder,
    clear_run_folder,
    has_checkpoint,
    is_of_this_supervision,
    write_run_record,
)
from train.runtime.supervisor import supervision
from train.runtime.tpu import check_tpu_devices, check_tpu_use, expected_num_replicas, local_accelerator_type
from train.tasks.masked_lm import MaskedLanguageModeling
from train.tasks.task import Task

if TYPE_CHECKING:
    import tensorflow as tf

    from train.metrics.log import MetricsLog
    from train.publishing.publisher import Publisher
    from train.publishing.push_to_hub import PushToHub

logger = logging.getLogger(__name__)


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

    @property
    def starts_anew(self) -> bool:
        """Whether the run that is there is to be deleted; what supervises this run does so with its first process."""
        return self.config.run.overwrite_output_dir and not is_of_this_supervision(self.output_dir)

    @functools.cached_property
    def fingerprint(self) -> dict[str, Any]:
        """What makes it this run and no other."""
        return fingerprint(self.config, self.inputs, self.model_config.to_diff_dict())

    @functools.cached_property
    def fingerprint_sha256(self) -> str:
        """Hash of the fingerprint, by which its checkpoints are known."""
        return fingerprint_sha256(self.fingerprint)

    def is_of_run(self, record: CheckpointRecord) -> bool:
        """Tell whether a checkpoint is of this run."""
        return is_checkpoint_of(self.fingerprint, record)

    def plan(self, num_replicas: int) -> Plan:
        """Plan the run on that many replicas.

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
    """Make all checks that need neither TensorFlow nor the device, and return what they have found.

    Raises:
        InputError: whatever is wrong with settings, shards, tokenizer, model, output folder, Hub access, TPU or
            TF_CONFIG.
        HubAwayError: the Hub cannot be reached, and there is no checkpoint to resume from without it.
    """
    cluster = read_cluster()
    check_tpu_use(config, cluster)
    inputs = open_inputs(config.data)
    task = MaskedLanguageModeling.of(inputs, config.masking)
    run = Run(config, inputs, task, resolve_model_config(config.model, inputs), cluster)
    run.plan(num_replicas=cluster.num_workers)
    if config.run.dry_run or not config.hub.resume_from_hub:
        check_output_folder(run)
    if cluster.is_chief:
        open_folder(run.output_dir).check_writable()
        _check_can_push(run, resumes=not run.starts_anew and has_checkpoint(run.output_dir))
    check_tpu_devices(config.hardware)
    return run


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
    if is_of_this_supervision(run.output_dir) or not run.cluster.is_chief:
        resume = "auto"  # whose first process, or the chief, may have begun the run a moment ago
    check_run_folder(run.output_dir, run.fingerprint, resume=resume, overwrite=run.starts_anew)


@contextmanager
def own_run_folder(run: Run) -> Iterator[None]:
    """Own the output folder within it, with a run fetched from the Hub if that is asked for; the chief does for all.

    Raises:
        InputError: it belongs to another run that is alive, or holds something else than it may.
    """
    with owned_folder(run.output_dir, supervision=supervision()) if run.cluster.is_chief else nullcontext():
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
def explained_and_stoppable(run: Run, strategy: "tf.distribute.Strategy") -> Iterator[StopRequest]:
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
    settings = shared_settings(run.config, run.fingerprint)
    check_agreement(strategy, run.cluster, settings, rule="All workers must be given the same flags and shards.")


def clear_folder_if_asked(run: Run, strategy: "tf.distribute.Strategy") -> None:
    """Delete the run that is there if `--overwrite-output-dir` asks for that; the others wait until the chief has."""
    from train.runtime.collectives import max_over_workers

    if run.cluster.is_chief and run.starts_anew:
        clear_run_folder(run.output_dir)
    if run.cluster.num_workers > 1 and run.config.run.overwrite_output_dir:
        max_over_workers(strategy, [0.0])


def record_run(run: Run, plan: Plan, strategy: "tf.distribute.Strategy") -> dict[str, Any]:
    """Write `run.json`, once nothing can refuse the run any more, and return its content."""
    record = describe_run(run, plan, strategy)
    if run.cluster.is_chief:
        write_run_record(run.output_dir, record)
    return record


def build_publisher(run: Run, record: dict[str, Any]) -> "Publisher | None":
    """Build what writes `export/` and its card, and pushes them if asked to; None on all workers but the chief."""
    from train.publishing.model_card import model_card
    from train.publishing.publisher import Publisher

    if not run.cluster.is_chief:
        return None
    tokenizer = run.inputs.tokenizer
    return Publisher(
        run_folder=run.output_dir,
        export_folder=open_folder(run.output_dir).path_of(EXPORT_FOLDER),
        tokenizer=tokenizer,
        model_max_length=run.inputs.max_length,
        card=functools.partial(model_card, record, tokenizer),
        repository=run.config.hub.repository(),
        pushes_checkpoints=run.config.hub.hub_strategy == "checkpoint",
        publish_details=run.config.hub.publish_details,
    )


def push_while_training(run: Run, plan: Plan, publisher: "Publisher | None", log: "MetricsLog") -> "PushToHub":
    """Build what pushes the model while it is trained, if asked to; of several workers the chief's does."""
    from train.publishing.push_to_hub import PushToHub, steps_of_pushes

    return PushToHub(publisher, steps_of_pushes(run.config.hub, plan), metrics=lambda: log.lines)


def print_plan(run: Run) -> None:
    """Print what the run would do; the model is built on the CPU to count its parameters."""
    from train.model.build import build_network
    from train.runtime.strategy import local_devices

    plan = run.plan(expected_num_replicas(run.config.hardware, run.cluster, len(local_devices())))
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


def print_result(run: Run, figures: dict[str, float] | None, where: dict[str, str]) -> None:
    """Print the figures of the last evaluation beside what frequencies alone would give, and where everything is."""
    rows = {**(run.task.describe(figures) if figures else {}), **where}
    manifest = run.inputs.eval_shards.manifest if run.inputs.eval_shards else None
    if manifest is not None and run.task.card.predicts_tokens:
        entropy = f"{manifest.unigram_entropy_nats:.4f} nats: the best loss of a guess from frequencies alone"
        rows = {"unigram entropy": entropy, **rows}
    print()
    print_table(rows)


def print_table(rows: dict[str, str]) -> None:
    """Print titles and texts in two columns; a text may have several lines."""
    for title, text in rows.items():
        for index, line in enumerate(text.split("\n")):
            print(f"{'' if index else title:<22} {line}")


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
        "task": run.task.record(),
        "plan": dataclasses.asdict(plan),
        "train_data": describe_shards(run.inputs.train_shards),
        "eval_data": describe_shards(run.inputs.eval_shards),
        "supervision": supervision(),
        "settings": run.config.as_dict(),
        "fingerprint": run.fingerprint,
    }


def describe_hardware(config: HardwareConfig, strategy: "tf.distribute.Strategy") -> str:
    """Name what the run computes on, as in `NVIDIA H100, 2 replica(s)`."""
    return f"{device_kind(config)}, {strategy.num_replicas_in_sync} replica(s)"


def device_kind(config: HardwareConfig) -> str:
    """Name the kind of device that the run computes on, as in `NVIDIA H100`."""
    import tensorflow as tf

    if config.wants_tpu:
        local_type = local_accelerator_type() if config.tpu_name == "local" else None
        return f"TPU {local_type or ''}".strip()
    if gpus := tf.config.list_physical_devices("GPU"):
        return str(tf.config.experimental.get_device_details(gpus[0]).get("device_name", "GPU"))
    cpu_info = Path("/proc/cpuinfo")
    model = re.search(r"^model name\s*: (.+)$", cpu_info.read_text() if cpu_info.exists() else "", re.MULTILINE)
    return f"CPU ({model[1] if model else platform.machine()})"


def describe_shards(shards: ShardSet | None) -> dict[str, Any] | None:
    """Collect what a manifest says about its rows, but for the list of shards; only their number without a manifest."""
    if shards is None:
        return None
    if shards.manifest is None:
        return {"totals": {"num_rows": shards.num_rows}}
    return {name: value for name, value in dataclasses.asdict(shards.manifest).items() if name != "shards"}
