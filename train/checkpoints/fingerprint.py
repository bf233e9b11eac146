"""What makes a run this run and no other: its settings, shards and architecture."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from train.checkpoints.store import CheckpointRecord
from train.config.settings import ADDED, MAY_CHANGE, RunSettings, default_of, settings_marked
from train.data.inputs import Inputs
from train.runtime.run_folder import FORMER_FINGERPRINT_KEY, phase_prefix


def fingerprint(config: RunSettings, inputs: Inputs, model_config: dict[str, Any]) -> dict[str, Any]:
    """Collect what makes a run this run: {name: value}, from settings, rows and architecture.

    Settings that may change are left out, since something else stands for them: the shards for their folders, the
    resolved configuration for the model's name, the global batch of a checkpoint's plan for its factors. So is the
    version of transformers, which every configuration bears; and what was added, where it is off, so that a run of
    before it was there has the fingerprint that it had.
    """
    settings = config.without(MAY_CHANGE)
    kind = type(config)
    added = {name for name in settings_marked(ADDED, kind) if settings[name] == default_of(name, kind)}
    model = {f"model.{key}": value for key, value in model_config.items()}
    model.pop(FORMER_FINGERPRINT_KEY, None)
    content = {name: value for name, value in settings.items() if name not in added} | inputs.identities() | model
    return json.loads(json.dumps(content))  # as it is read again


def fingerprint_of_phases(fingerprints: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join the fingerprints of a run's phases: the first, and under the names of others what differs from it.

    So a run whose later phases are not begun yet is the same as one without them.
    """
    first, *others = fingerprints
    joined = dict(first)
    for index, one in enumerate(others, start=1):
        names = sorted(name for name in one.keys() | first.keys() if one.get(name) != first.get(name))
        joined |= {phase_prefix(index) + name: one.get(name) for name in names}
    return joined


def fingerprint_sha256(fingerprint: dict[str, Any]) -> str:
    """Hash a fingerprint: 64 hexadecimal digits."""
    return hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()


def is_checkpoint_of(fingerprint: dict[str, Any], record: CheckpointRecord) -> bool:
    """Tell whether a checkpoint is of the run with this fingerprint, also where it was saved before 0.3.0."""
    former = {**fingerprint, FORMER_FINGERPRINT_KEY: record.versions.get("transformers")}
    return record.fingerprint_sha256 in (fingerprint_sha256(fingerprint), fingerprint_sha256(former))
