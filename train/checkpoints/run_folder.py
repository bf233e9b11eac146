"""The folder of a run: where things lie in it, and whose run it holds."""

import dataclasses
import hashlib
import json
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from mlm_common.command_line import commit
from mlm_common.errors import InputError
from mlm_common.storage import files as storage
from tfrecord_prep.manifest import ShardSet
from train.checkpoints.store import CHECKPOINTS_FOLDER
from train.config import HardwareConfig, HubConfig, TrainingConfig
from train.data.shards import TrainingInputs
from train.runtime.plan import Plan
from train.runtime.supervisor import supervision
from train.runtime.tpu import local_accelerator_type

if TYPE_CHECKING:
    import tensorflow as tf

    from train.run import Run


RECORD_NAME = "run.json"
EXPORT_FOLDER = "export"

# Settings that may change when a run goes on.
NOT_IN_FINGERPRINT = {
    "data": ("train_dataset", "eval_dataset", "tokenizer", "max_length"),  # the shards stand for them
    # The global batch, which is the product of the first two and the replicas, is compared with the checkpoint's. The
    # others are the length of the run.
    "optimization": ("per_replica_batch_size", "gradient_accumulation_steps", "num_epochs", "max_steps"),
    # The resolved configuration stands for them.
    "model": (
        "preset",
        "pretrained_model_config",
        "config_overrides",
        "dropout",
        "gradient_checkpointing",
    ),
    "hardware": (
        "tpu_name",
        "tpu_zone",
        "gcp_project",
        "no_tpu",
        "jit_compile",
        "tpu_layers",
        "steps_per_execution",
    ),
    "run": (
        "output_dir",
        "log_steps",
        "eval_steps",
        "save_steps",
        "save_minutes",
        "keep_checkpoints",
        "resume",
        "overwrite_output_dir",
        "on_nonfinite",
        "max_loss_rise",
        "max_rollbacks",
        "supervise",
        "stall_minutes",
        "max_retries",
        "retry_seconds",
        "profile",
        "dry_run",
    ),
    "hub": tuple(one.name for one in dataclasses.fields(HubConfig)),
}


def fingerprint(config: TrainingConfig, inputs: TrainingInputs, model_config: dict[str, Any]) -> dict[str, Any]:
    """Return what makes a run this run and no other: {name: value}, from settings, shards and architecture."""
    settings = config.as_dict()
    kept = {
        f"{subject}.{name}": value
        for subject, values in settings.items()
        for name, value in values.items()
        if name not in NOT_IN_FINGERPRINT.get(subject, ())
    }
    shards: dict[str, Any] = {"max_length": inputs.max_length}
    for name, shard_set in (("train", inputs.train_shards), ("eval", inputs.eval_shards)):
        shards[f"{name}_shards"] = _shard_identities(shard_set) if shard_set else None
    return {**kept, **shards, **{f"model.{key}": value for key, value in model_config.items()}}


def fingerprint_sha256(mine: dict[str, Any]) -> str:
    """Return the hash of a fingerprint, 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).hexdigest()


def settings_that_may_change() -> list[str]:
    """Return the flags that a run may be given otherwise when it goes on."""
    return sorted(f"--{name.replace('_', '-')}" for names in NOT_IN_FINGERPRINT.values() for name in names)


def claim_output_folder(output_dir: str, mine: dict[str, Any], *, resume: str, overwrite: bool) -> None:
    """Check that the folder is empty or holds this very run, as `--resume` asks for.

    Raises:
        InputError: it holds another run, and the first differences are named; a run where there must be none, or none
            where there must be one.
    """
    files = storage.list_files(output_dir)
    if overwrite:
        return
    if resume == "must" and not _has_checkpoint(output_dir, files):
        raise InputError(
            f"--resume must needs a run with a checkpoint; {output_dir} has none. Name the folder of the run, or give "
            "--resume auto."
        )
    if not files:
        return
    if RECORD_NAME not in files:
        raise InputError(
            f"--output-dir must be an empty folder or that of this run; {output_dir} holds {sorted(files)[0]} and no "
            f"{RECORD_NAME}. Name another folder."
        )
    if resume == "never":
        raise InputError(
            f"--resume never needs a folder without a run; {output_dir} has one. Name another folder, or give "
            "--overwrite-output-dir, which deletes that run."
        )
    _check_fingerprint(output_dir, mine)


def is_of_this_supervision(output_dir: str) -> bool:
    """Return whether a process of the same supervision has claimed the folder before: flags to start anew are done."""
    path = storage.join(output_dir, RECORD_NAME)
    if supervision() is None or not storage.exists(path):
        return False
    return json.loads(storage.read_text(path)).get("supervision") == supervision()


def _check_fingerprint(output_dir: str, mine: dict[str, Any]) -> None:
    theirs = read_record(output_dir)["fingerprint"]
    differing = sorted(key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key))
    if differing:
        shown = "; ".join(
            f"{key}: {_short(theirs.get(key))} there, {_short(mine.get(key))} now" for key in differing[:3]
        )
        more = f", and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise InputError(
            f"--output-dir must not hold another run; {output_dir} does ({shown}{more}). Name another folder, give "
            "--overwrite-output-dir, or the settings of that run, of which these may change: "
            f"{', '.join(settings_that_may_change())}."
        )


def _has_checkpoint(output_dir: str, files: dict[str, int]) -> bool:
    folder = storage.join(output_dir, CHECKPOINTS_FOLDER)
    return RECORD_NAME in files and any(name.endswith(".json") for name in storage.list_files(folder))


def write_record(output_dir: str, config: TrainingConfig, mine: dict[str, Any], about: dict[str, Any]) -> None:
    """Write `run.json`: the resolved settings, the fingerprint, and `about` (see `describe_run`)."""
    record = {**about, "supervision": supervision(), "settings": config.as_dict(), "fingerprint": mine}
    storage.write_text(storage.join(output_dir, RECORD_NAME), json.dumps(record, indent=2) + "\n")


def read_record(output_dir: str) -> dict[str, Any]:
    """Return the content of `run.json`."""
    return json.loads(storage.read_text(storage.join(output_dir, RECORD_NAME)))


def _shard_identities(shards: ShardSet) -> list[str]:
    """Return what tells these shards from others: names, and checksums where a manifest has them."""
    if shards.manifest is not None:
        return [f"{shard.name} {shard.crc32c}" for shard in shards.manifest.shards]
    return [path.rsplit("/", 1)[-1] for path in shards.paths]


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "…"


def describe_run(run: "Run", plan: Plan, strategy: "tf.distribute.Strategy") -> dict[str, Any]:
    """Return commit, versions, hardware, model, plan, what the rows were made of, the revision of what the Hub gave."""
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
    }


def describe_hardware(config: HardwareConfig, strategy: "tf.distribute.Strategy") -> str:
    """Return what the run computes on, as in `2 x NVIDIA H100`."""
    import tensorflow as tf

    if config.wants_tpu:
        local_type = local_accelerator_type() if config.tpu_name == "local" else None
        return f"TPU {local_type or ''}".strip() + f", {strategy.num_replicas_in_sync} replicas"
    if gpus := tf.config.list_physical_devices("GPU"):
        name = tf.config.experimental.get_device_details(gpus[0]).get("device_name", "GPU")
        return f"{strategy.num_replicas_in_sync} x {name}"
    return f"CPU ({platform.machine()}), {strategy.num_replicas_in_sync} replica(s)"


def describe_shards(shards: ShardSet | None) -> dict[str, Any] | None:
    """Return what a manifest says about its rows, but for the list of shards; only their number without a manifest."""
    if shards is None:
        return None
    if shards.manifest is None:
        return {"totals": {"num_rows": shards.num_rows}}
    return {name: value for name, value in dataclasses.asdict(shards.manifest).items() if name != "shards"}


LIBRARIES = ("tensorflow", "tensorflow-tpu", "tf-keras", "transformers", "tokenizers", "numpy")


def installed_versions() -> dict[str, str]:
    """Return {library: version} of those that are installed."""
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
