"""The folder of a run: where things lie in it, and whose run it holds."""

import dataclasses
import hashlib
import json
from typing import Any

from tfrecord_prep.manifest import ShardSet
from tokenizer_training import storage
from tokenizer_training.command_line import InputError
from train.config import TrainingConfig
from train.hub_config import HubConfig
from train.inputs import TrainingInputs
from train.supervise import supervision

RECORD_NAME = "run.json"
METRICS_NAME = "metrics.jsonl"
LOSS_CURVE_NAME = "loss.png"
CHECKPOINTS_FOLDER = "checkpoints"
TENSORBOARD_FOLDER = "tensorboard"
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
        "recompute",
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


def clear_output_folder(output_dir: str) -> None:
    """Delete what a run writes, and nothing else, from the folder; local or gs://."""
    import tensorflow as tf

    for name in (METRICS_NAME, LOSS_CURVE_NAME, RECORD_NAME):
        if storage.exists(storage.join(output_dir, name)):
            tf.io.gfile.remove(storage.join(output_dir, name))
    for name in (CHECKPOINTS_FOLDER, TENSORBOARD_FOLDER, EXPORT_FOLDER):
        if tf.io.gfile.isdir(storage.join(output_dir, name)):
            tf.io.gfile.rmtree(storage.join(output_dir, name))


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
