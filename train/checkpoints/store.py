"""The files of a run's checkpoints, local or gs://. Killing the process never damages older checkpoints.

A checkpoint consists of `step-00000100.safetensors` with all variables by name, and `step-00000100.json`, its record.
The record is written last and deleted first, so data without a record is not a checkpoint.
"""

import dataclasses
import io
import json
import math
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import google_crc32c
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save_file

from mlm_common.errors import InputError, RunFailedError
from mlm_common.storage import PARTIAL_SUFFIX, Folder, check_folder_or_hub
from mlm_common.storage.guard import unreadable
from train.runtime.plan import Plan
from train.runtime.run_folder import RunFolder

CHECKPOINT_NAME = re.compile(r"step-(\d+)(\.safetensors|\.json)?")
Arrays = dict[str, NDArray[np.generic]]

FORMAT_VERSION = 1
CHECKSUM_FIELD = "record_crc32c"
RECORD_SUFFIX, DATA_SUFFIX = ".json", ".safetensors"
BLOCK_BYTES = 1 << 20
# Name of the random generator of masks and dropout, `train.layers.random_bits`.
GENERATOR = "keyed mixer"

_NAME = re.compile(r"step-(\d{8,})(\.json|\.safetensors)")


class DamagedCheckpointError(ValueError):
    """A checkpoint is incomplete or corrupt, or belongs to another run. The message says why."""


@dataclass(frozen=True)
class SkippedRows:
    """Rows left out of training: the next `num_rows` rows after step `after_step`."""

    after_step: int
    num_rows: int


@dataclass(frozen=True)
class CheckpointRecord:
    """The record of a checkpoint: the state of the run that is not in the variables. Stored as JSON.

    Attributes:
        step: number of steps taken.
        row: next row to read, counted across epochs and including skipped rows.
        fingerprint_sha256: hash of the run's fingerprint, see `train.checkpoints.resume.fingerprint`.
        plan: the plan of the phase.
        settings: all flags at that time, {subject: {name: value}}.
        versions: versions of the libraries, {name: version}.
        logged_step: last step with a training line in the log. The variables include the means since that step.
        validation_loss: loss of these weights, in nats; None if they were not evaluated.
        skipped: rows that were skipped, in the order in which they were skipped.
        num_bytes: size of the data file.
        crc32c: checksum of the data file, eight hexadecimal digits.
        format_version: version of this format.
        generator: random generator of masks and dropout.
        computation: how steps were computed, see `train.model.computation`.
        made_by: the kind of `device` on which the checkpoint was written, and the `commit` of this project.
        num_written_log_lines: number of log lines known to be on disk; None if unknown.
        unwritten_log_lines: the log lines that are not yet on disk; a resumed run writes them.
        validation_score: higher is better; None if the weights were not evaluated, or only the loss is known.
    """

    step: int
    row: int
    fingerprint_sha256: str
    plan: Plan
    settings: dict[str, dict[str, Any]]
    versions: dict[str, str]
    logged_step: int
    validation_loss: float | None = None
    skipped: tuple[SkippedRows, ...] = ()
    num_bytes: int = 0
    crc32c: str = ""
    format_version: int = FORMAT_VERSION
    generator: str = GENERATOR
    computation: dict[str, Any] = field(default_factory=dict)
    made_by: dict[str, str] = field(default_factory=dict)
    num_written_log_lines: int | None = None
    unwritten_log_lines: tuple[dict[str, Any], ...] = ()
    validation_score: float | None = None

    @property
    def rank(self) -> tuple[float, float] | None:
        """Sort key of the checkpoint's evaluation, see `rank`; None if it was not evaluated."""
        if self.validation_loss is None:
            return None
        score = self.validation_score
        return rank(-self.validation_loss if score is None else score, self.validation_loss)

    def to_json(self) -> str:
        content = dataclasses.asdict(self)
        return json.dumps({**content, CHECKSUM_FIELD: _content_checksum(content)}, indent=2) + "\n"


def rank(score: float, loss: float) -> tuple[float, float]:
    """Return the sort key of an evaluation: a higher score ranks higher, then a lower loss. NaN ranks lowest."""
    by_score, by_loss = (-math.inf if math.isnan(value) else value for value in (score, -loss))
    return by_score, by_loss


def parse_record(text: str) -> CheckpointRecord:
    """Parse the record that `to_json` wrote.

    Raises:
        DamagedCheckpointError: the text is not a record, or was changed after it was written.
    """
    try:
        content = json.loads(text)
        checksum = content.pop(CHECKSUM_FIELD)
        version = content["format_version"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(f"its record cannot be read: {error!r}") from error
    if checksum != _content_checksum(content):
        raise DamagedCheckpointError("its record was changed since it was written")
    if version != FORMAT_VERSION:
        raise DamagedCheckpointError(f"its format is {version}, which this version does not support")
    try:
        content["plan"] = Plan.from_record(content["plan"])
        content["skipped"] = tuple(SkippedRows(**rows) for rows in content["skipped"])
        content["unwritten_log_lines"] = tuple(content["unwritten_log_lines"])
        return CheckpointRecord(**content)
    except (KeyError, TypeError) as error:  # the checksum is correct, so another version wrote the record
        raise DamagedCheckpointError(f"its record is of another version of this project: {error}") from error


def _content_checksum(content: dict[str, Any]) -> str:
    return f"{google_crc32c.value(json.dumps(content, sort_keys=True).encode()):08x}"


class CheckpointStore:
    """The checkpoints in one folder."""

    def __init__(self, folder: Folder):
        self.folder = folder

    def path(self, step: int, suffix: str = DATA_SUFFIX) -> str:
        return self.folder.path_of(_name(step, suffix))

    def steps(self) -> list[int]:
        return sorted(step for step, suffix in self._names() if suffix == RECORD_SUFFIX)

    def read_record(self, step: int) -> CheckpointRecord:
        """Read the record of a checkpoint.

        Raises:
            DamagedCheckpointError: the record is missing, or was changed after it was written.
        """
        try:
            with self._guarded(step, RECORD_SUFFIX):
                text = self.folder.read_text(_name(step, RECORD_SUFFIX))
            record = parse_record(text)
        except (FileNotFoundError, UnicodeDecodeError) as error:
            raise DamagedCheckpointError(f"its record cannot be read: {error}") from error
        if record.step != step:
            raise DamagedCheckpointError(f"its record belongs to step {record.step}")
        return record

    def read_arrays(self, record: CheckpointRecord) -> Arrays:
        """Read the variables of a checkpoint.

        Raises:
            DamagedCheckpointError: the data file is missing, or was changed after it was written.
        """
        try:
            with self._guarded(record.step, DATA_SUFFIX):
                data = self.folder.read_bytes(_name(record.step, DATA_SUFFIX))
        except FileNotFoundError as error:
            raise DamagedCheckpointError("its data file is missing") from error
        if len(data) != record.num_bytes:
            raise DamagedCheckpointError(f"its data file has {len(data)} bytes instead of {record.num_bytes}")
        if _checksum(io.BytesIO(data)) != record.crc32c:
            raise DamagedCheckpointError("its data file was changed since it was written")
        try:
            return load(data)
        except SafetensorError as error:
            raise DamagedCheckpointError(f"its data file cannot be read: {error}") from error

    @contextmanager
    def _guarded(self, step: int, suffix: str) -> Iterator[None]:
        """Fail if a file cannot be read, because it may be intact: do not resume from an older checkpoint."""
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            refusal = unreadable(self.path(step, suffix), "a file of a checkpoint", error)
            if isinstance(error, PermissionError | IsADirectoryError):
                raise refusal from error
            raise RunFailedError(str(refusal)) from error  # a disk or network error, so a retry may succeed

    def write(self, record: CheckpointRecord, arrays: Arrays) -> CheckpointRecord:
        """Write or replace a step's checkpoint; return the record with the data's size and checksum."""
        self.folder.delete_files([_name(record.step, RECORD_SUFFIX)])
        with self.folder.replacing(_name(record.step, DATA_SUFFIX)) as partial:
            write_safetensors(partial, arrays)
            with partial.open("rb") as file:
                written = dataclasses.replace(record, num_bytes=partial.stat().st_size, crc32c=_checksum(file))
        self.folder.write_text(_name(record.step, RECORD_SUFFIX), written.to_json())
        return written

    def delete(self, is_obsolete: Callable[[int], bool]) -> None:
        """Delete the checkpoints for which `is_obsolete(step)`, including files left by interrupted writes and deletes.

        Files are deleted one at a time, because a pool of threads would delay the end of the process.
        """
        files = [file for file in self._names() if is_obsolete(file[0])]
        for file in sorted(files, key=lambda file: file[1] != RECORD_SUFFIX):
            self.folder.delete_files([_name(*file)])

    def _names(self) -> list[tuple[int, str]]:
        matches = map(_NAME.fullmatch, self.folder.list_files())
        return [(int(match[1]), match[2]) for match in matches if match]


def newest_records(folder: RunFolder) -> Iterator[CheckpointRecord]:
    """Yield the records of a run's checkpoints, newest first; skip records that cannot be read."""
    store = CheckpointStore(folder.checkpoints)
    for step in reversed(store.steps()):
        with suppress(DamagedCheckpointError):
            yield store.read_record(step)


def find_checkpoint(path: str) -> tuple[RunFolder, int] | None:
    """Find the checkpoint that a path names: `OUTPUT_DIR/checkpoints/step-…`, or OUTPUT_DIR for a run's newest one.

    Returns:
        The run's folder and the step; None if the path names an exported model.

    Raises:
        InputError: there is no such checkpoint, folder, or model on the Hub.
    """
    folder, _, name = path.rstrip("/").rpartition("/")
    match = CHECKPOINT_NAME.fullmatch(name)
    run_folder = RunFolder(folder.rpartition("/")[0] or "." if match else path)
    if match is None and not run_folder.has_run():
        check_folder_or_hub(path)
        return None
    store = CheckpointStore(run_folder.checkpoints)
    steps = store.steps()
    step = int(match[1]) if match else max(steps, default=None)
    if step is None or step not in steps:
        existing = f"checkpoints of the steps {', '.join(map(str, steps))}" if steps else "none"
        raise InputError(f"No such checkpoint: {store.folder} has {existing}.")
    return run_folder, step


def write_safetensors(path: Path, arrays: Arrays, metadata: dict[str, str] | None = None) -> None:
    """Write arrays to a file with default (umask) permissions; safetensors would make it readable only by its owner.

    The library first writes to a file with a random name. Here this file is in a temporary folder. If the process is
    killed, a later process recognizes the folder by its name, and deletes it.
    """
    path.touch()
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f"{path.name}.", suffix=PARTIAL_SUFFIX) as folder:
        written = Path(folder, path.name)
        save_file(arrays, written, metadata=metadata)
        written.chmod(path.stat().st_mode)
        written.replace(path)


def _name(step: int, suffix: str) -> str:
    return f"step-{step:08d}{suffix}"


def _checksum(file: BinaryIO) -> str:
    checksum = google_crc32c.Checksum()
    while block := file.read(BLOCK_BYTES):
        checksum.update(block)
    return checksum.hexdigest().decode()
