"""What the workers of a run compare with each other, so that they train one model."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from mlm_common.cli.settings import flag_of
from mlm_common.errors import InputError
from train.config.settings import PER_WORKER, RunSettings
from train.runtime.cluster import Cluster


def shared_settings(phases: Sequence[RunSettings], fingerprint: dict[str, Any]) -> dict[str, Any]:
    """Collect what the workers of a run must have in common: {name: value}, of the same names for all runs.

    For what lies at the paths, which may differ, stands the fingerprint.
    """
    of_phases = [config.without(PER_WORKER) for config in phases]
    values = {name: [settings[name] for settings in of_phases] for name in of_phases[0]}
    settings = {flag_of(name.partition(".")[2]): own if len(own) > 1 else own[0] for name, own in values.items()}
    return {**settings, "shards, tokenizer or model": fingerprint}


def check_agreement(
    strategy: tf.distribute.Strategy, cluster: Cluster, values: Mapping[str, Any], *, rule: str
) -> None:
    """Check that all workers of the cluster call this with the same values; waits for them.

    Args:
        values: of JSON types, with the same names on all workers; their hashes are compared.
        rule: what must be the same, and the cure, for the error's message.

    Raises:
        InputError: on all workers, if the values differ; the names of the first that do are in the message.
    """
    if cluster.num_workers == 1:
        return
    hashes = tf.constant([[_hash(value) for value in values.values()]], tf.int64)
    replicas = strategy.experimental_distribute_values_from_function(lambda _: hashes)
    gathered = strategy.gather(replicas, axis=0).numpy()  # (replicas, values)
    differs = gathered != gathered[0]
    if differs.any():
        names = [name for name, is_different in zip(values, differs.any(axis=0), strict=True) if is_different]
        replicas_per_worker = len(gathered) // cluster.num_workers
        workers = sorted({int(replica) // replicas_per_worker for replica in np.flatnonzero(differs.any(axis=1))})
        raise InputError(
            f"{rule} Not the chief's on {', '.join(cluster.addresses[worker] for worker in workers)}: "
            f"{', '.join(names[:5])}; here, on {cluster.addresses[cluster.index]}: {str(values[names[0]])[:100]}."
        )


def max_over_workers(strategy: tf.distribute.Strategy, values: Sequence[float]) -> list[float]:
    """Return the greatest that any worker called this with for each value, once all have called it."""
    row = tf.constant([values], tf.float32)
    rows = strategy.experimental_distribute_values_from_function(lambda _: row)
    greatest: list[float] = strategy.gather(rows, axis=0).numpy().max(axis=0).tolist()
    return greatest


def _hash(value: Any) -> int:
    """Hash a value of JSON types to 63 bits."""
    digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
