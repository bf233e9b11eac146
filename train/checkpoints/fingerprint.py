"""What makes a run this run and no other: its settings, shards and architecture."""

import hashlib
import json
from typing import Any

from tfrecord_prep.manifest import ShardSet
from train.checkpoints.store import CheckpointRecord
from train.config import MAY_CHANGE, TrainingConfig
from train.data.shards import TrainingInputs
from train.runtime.run_folder import FORMER_FINGERPRINT_KEY


def fingerprint(config: TrainingConfig, inputs: TrainingInputs, model_config: dict[str, Any]) -> dict[str, Any]:
    """Collect what makes a run this run: {name: value}, from settings, shards and architecture.

    Settings that may change are left out, since something else stands for them: the shards for their folders, the
    resolved configuration for the model's name, the global batch of a checkpoint's plan for its factors. So is the
    version of transformers, which every configuration bears.
    """
    shards: dict[str, Any] = {"max_length": inputs.max_length}
    for name, shard_set in (("train", inputs.train_shards), ("eval", inputs.eval_shards)):
        shards[f"{name}_shards"] = _shard_identities(shard_set) if shard_set else None
    model = {f"model.{key}": value for key, value in model_config.items()}
    model.pop(FORMER_FINGERPRINT_KEY, None)
    return {**config.without(MAY_CHANGE), **shards, **model}


def fingerprint_sha256(fingerprint: dict[str, Any]) -> str:
    """Hash a fingerprint: 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()


def is_checkpoint_of(fingerprint: dict[str, Any], record: CheckpointRecord) -> bool:
    """Tell whether a checkpoint is of the run with this fingerprint, also where it was saved before 0.3.0."""
    former = {**fingerprint, FORMER_FINGERPRINT_KEY: record.versions.get("transformers")}
    return record.fingerprint_sha256 in (fingerprint_sha256(fingerprint), fingerprint_sha256(former))


def _shard_identities(shards: ShardSet) -> list[str]:
    """List what tells these shards from others: names, and checksums where a manifest has them."""
    if shards.manifest is not None:
        return [f"{shard.name} {shard.crc32c}" for shard in shards.manifest.shards]
    return [path.rsplit("/", 1)[-1] for path in shards.paths]
