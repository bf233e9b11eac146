"""The record of a checkpoint, a JSON file written last: what the checkpoint is of, and how to tell that it is whole."""

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

import google_crc32c

FORMAT_VERSION = 1
CHECKSUM_FIELD = "record_crc32c"


class DamagedCheckpointError(ValueError):
    """A checkpoint that is not whole, or not of this run; the message says why."""


@dataclass(frozen=True)
class SkippedRows:
    """Rows that are left out of training: `num_rows`, from the first that the update after `after_step` would take."""

    after_step: int
    num_rows: int


@dataclass(frozen=True)
class CheckpointRecord:
    """What a checkpoint is of.

    Attributes:
        step: updates made.
        row: the row after the last one used, counted over all epochs; rows that were left out count.
        fingerprint_sha256: hash of what makes the run this run.
        plan: numbers of the run at that time, as in `train.runtime.plan`; replicas and global batch are among them.
        settings: all flags at that time, by subject.
        versions: {library: version}.
        logged_step: the last step with a line of training in the log; the means since then are in the data.
        validation_loss: nats, of these weights; None where they were not evaluated.
        skipped: rows that were left out, in the order in which that was decided.
        num_bytes: size of the data file.
        crc32c: checksum of the data file, eight hexadecimal digits.
    """

    step: int
    row: int
    fingerprint_sha256: str
    plan: dict[str, Any]
    settings: dict[str, dict[str, Any]]
    versions: dict[str, str]
    logged_step: int
    validation_loss: float | None = None
    skipped: tuple[SkippedRows, ...] = ()
    num_bytes: int = 0
    crc32c: str = ""
    format_version: int = field(default=FORMAT_VERSION)

    def to_json(self) -> str:
        """Return the record as text, with a checksum of its own."""
        content = dataclasses.asdict(self)
        return json.dumps({**content, CHECKSUM_FIELD: _checksum(content)}, indent=2) + "\n"


def parse_record(text: str) -> CheckpointRecord:
    """Return the record that `to_json` wrote.

    Raises:
        DamagedCheckpointError: it is something else, or was changed.
    """
    try:
        content = json.loads(text)
        checksum = content.pop(CHECKSUM_FIELD)
        version = content["format_version"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(f"its record cannot be read: {error!r}") from error
    if checksum != _checksum(content):
        raise DamagedCheckpointError("its record was changed since it was written")
    if version != FORMAT_VERSION:
        raise DamagedCheckpointError(f"its format is {version}, which this version does not know")
    skipped = tuple(SkippedRows(**rows) for rows in content.pop("skipped"))
    return CheckpointRecord(skipped=skipped, **content)


def _checksum(content: dict[str, Any]) -> str:
    """Return the CRC32C of the content in a form that does not depend on how it is laid out."""
    return f"{google_crc32c.value(json.dumps(content, sort_keys=True).encode()):08x}"
