"""The files of a run's checkpoints, local or gs://: written so that a kill at any moment loses none that was there.

A checkpoint is `step-00000100.safetensors`, all variables by name, and `step-00000100.json`, its record, which is
written last and deleted first. Without a record there is no checkpoint.
"""

import contextlib
import dataclasses
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import google_crc32c
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save_file

from mlm_common.storage import files as storage
from train.checkpoints.record import CheckpointRecord, DamagedCheckpointError, parse_record

CHECKPOINTS_FOLDER = "checkpoints"

Arrays = dict[str, NDArray[np.generic]]

RECORD_SUFFIX, DATA_SUFFIX = ".json", ".safetensors"
PIECE_BYTES = 1 << 20

_NAME = re.compile(r"step-(\d{8,})(\.json|\.safetensors)")


class CheckpointStore:
    """The checkpoints in one folder."""

    def __init__(self, folder: str):
        self.folder = folder

    def path(self, step: int, suffix: str = DATA_SUFFIX) -> str:
        """Return the path of one of the two files of a checkpoint."""
        return storage.join(self.folder, f"step-{step:08d}{suffix}")

    def steps(self) -> list[int]:
        """Return the steps of the checkpoints that have a record, in ascending order."""
        return sorted(step for step, suffix in self._files() if suffix == RECORD_SUFFIX)

    def read_record(self, step: int) -> CheckpointRecord:
        """Return the record of a checkpoint.

        Raises:
            DamagedCheckpointError: it is not there, or not as it was written.
        """
        try:
            record = parse_record(storage.read_text(self.path(step, RECORD_SUFFIX)))
        except (FileNotFoundError, UnicodeDecodeError) as error:
            raise DamagedCheckpointError(f"its record cannot be read: {error}") from error
        if record.step != step:
            raise DamagedCheckpointError(f"its record is that of step {record.step}")
        return record

    def read_arrays(self, record: CheckpointRecord) -> Arrays:
        """Return the variables of a checkpoint.

        Raises:
            DamagedCheckpointError: they are not there, or not as they were written.
        """
        try:
            data = storage.read_bytes(self.path(record.step))
        except FileNotFoundError as error:
            raise DamagedCheckpointError("its data file is missing") from error
        if len(data) != record.num_bytes:
            raise DamagedCheckpointError(f"its data file has {len(data)} bytes, and had {record.num_bytes}")
        if _checksum(data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES)) != record.crc32c:
            raise DamagedCheckpointError("its data file was changed since it was written")
        try:
            return load(data)
        except SafetensorError as error:
            raise DamagedCheckpointError(f"its data file cannot be read: {error}") from error

    def write(self, record: CheckpointRecord, arrays: Arrays) -> CheckpointRecord:
        """Write a checkpoint, in the place of one of the same step; return its record with size and checksum."""
        self._delete([(record.step, RECORD_SUFFIX)])
        with storage.replacing(self.path(record.step)) as partial:
            save_file(arrays, partial)
            written = dataclasses.replace(record, num_bytes=partial.stat().st_size, crc32c=_checksum(_pieces(partial)))
        storage.write_text(self.path(record.step, RECORD_SUFFIX), written.to_json())
        return written

    def keep_only(self, steps: Iterable[int]) -> None:
        """Delete all checkpoints but those of these steps, and what killed writes and deletions left."""
        kept = set(steps)
        files = [(step, suffix) for step, suffix in self._files() if step not in kept]
        for suffix in (RECORD_SUFFIX, DATA_SUFFIX):
            self._delete([file for file in files if file[1] == suffix])

    def delete_partial_files(self) -> None:
        """Delete what killed writes left of files that never came to be."""
        if not storage.is_remote(self.folder):
            for path in Path(self.folder).glob(f".step-*{storage.PARTIAL_SUFFIX}"):
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()

    def _files(self) -> list[tuple[int, str]]:
        matches = map(_NAME.fullmatch, storage.list_files(self.folder))
        return [(int(match[1]), match[2]) for match in matches if match]

    def _delete(self, files: Iterable[tuple[int, str]]) -> None:
        storage.delete_files(self.folder, [self.path(*file).rpartition("/")[2] for file in files])


def _pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            yield piece


def _checksum(pieces: Iterable[bytes]) -> str:
    """Return the CRC32C of the pieces together, eight hexadecimal digits."""
    checksum = google_crc32c.Checksum()
    for piece in pieces:
        checksum.update(piece)
    return checksum.hexdigest().decode()
