"""What of the records of a run is published: all by which it can be resumed, nothing of where it was made."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from mlm_common.hub.redaction import redact_except, redacted_hash, withhold, withhold_settings
from tfrecord_prep.push_to_hub import published_manifest
from train.checkpoints.store import CheckpointRecord
from train.config.settings import SUBJECTS

# Of `run.json`: as they are.
PUBLIC_FIELDS = ("commit", "versions", "hardware", "computation", "hub_revision", "task", "plan")
# Of a checkpoint's record: as they are.
PUBLIC_CHECKPOINT_FIELDS = (
    "step", "row", "fingerprint_sha256", "plan", "versions", "logged_step", "validation_loss", "validation_score",
    "skipped", "num_bytes", "crc32c", "format_version", "generator", "computation", "made_by", "num_written_log_lines",
    "unwritten_log_lines",
)  # fmt: skip
# Where transformers keeps the folder that a configuration came from.
CONFIG_SOURCE = "_name_or_path"


def published_run(record: Mapping[str, Any]) -> dict[str, Any]:
    """Withhold of a `run.json` what is its owner's; of the fingerprint the hash stays, for the run to be resumed."""
    published = _published_phase(record)
    if "phases" in record:
        published["phases"] = [_published_phase(phase) for phase in record["phases"]]
    published["fingerprint"] = {
        name: value if withhold(value) == value else redacted_hash(value)
        for name, value in record["fingerprint"].items()
    }
    return published


def published_checkpoint(record: CheckpointRecord) -> CheckpointRecord:
    """Withhold of a checkpoint's record what is its owner's."""
    withheld = {
        one.name: withhold(getattr(record, one.name))
        for one in fields(record)
        if one.name not in PUBLIC_CHECKPOINT_FIELDS
    }
    return replace(record, **withheld | {"settings": _published_settings(record.settings)})


def _published_phase(record: Mapping[str, Any]) -> dict[str, Any]:
    published = redact_except(record, PUBLIC_FIELDS)
    published["model_config"] = redact_except(record["model_config"], record["model_config"].keys() - {CONFIG_SOURCE})
    published["settings"] = _published_settings(record["settings"])
    for name in ("train_data", "eval_data"):
        published[name] = _published_data(record[name]) if record[name] else None
    return published


def _published_settings(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {subject: withhold_settings(values, SUBJECTS) for subject, values in settings.items()}


def _published_data(data: Mapping[str, Any]) -> dict[str, Any]:
    return published_manifest(data) if "corpus" in data else {"totals": data["totals"]}
