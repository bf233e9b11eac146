"""What `run.json` says about a run besides its settings: enough to write the model's card from."""

import dataclasses
import json
import platform
from typing import TYPE_CHECKING, Any

from tfrecord_prep.manifest import ShardSet
from tokenizer_training.command_line import commit
from train.chips import local_accelerator_type
from train.config import HardwareConfig
from train.plan import Plan
from train.versions import installed_versions

if TYPE_CHECKING:
    import tensorflow as tf

    from train.run import Run


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
