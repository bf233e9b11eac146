"""A file written piece by piece, which gets its name last: until then nothing shows it."""

import os
import tempfile
import uuid
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from mlm_common.storage import files as storage
from mlm_common.storage import gcs as cloud_storage


class StreamedFile:
    """A new file for a local or `gs://` folder; left without `finish`, it is deleted.

    Until then it is in the folder, under a name that no listing of `storage` shows; for `gs://` it is a temporary file
    without a name, which not even a killed process leaves behind. Errors are those of `storage`.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._partial: Path | None = None
        self._file: BinaryIO
        if storage.is_remote(folder):
            self._file = tempfile.TemporaryFile()  # noqa: SIM115
        else:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._partial = Path(folder, f".{uuid.uuid4().hex}{storage.PARTIAL_SUFFIX}")
            self._file = self._partial.open("xb")

    def write(self, data: bytes) -> None:
        """Append to the file."""
        self._file.write(data)

    def finish(self, name: str) -> None:
        """Make it the file of that name in its folder, replacing what was there, once all of it is stored."""
        self._file.flush()
        path = storage.join(self._folder, name)
        if self._partial is None:
            cloud_storage.upload_file(self._file, path)
        else:
            os.fsync(self._file.fileno())
            self._partial.replace(path)

    def __enter__(self) -> "StreamedFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._file.close()
        finally:
            if self._partial is not None:
                self._partial.unlink(missing_ok=True)
