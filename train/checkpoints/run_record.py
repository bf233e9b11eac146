"""`RunRecord`: the records that an earlier process left in the folder of a run."""

from dataclasses import dataclass
from typing import Any

from train.checkpoints.store import CheckpointRecord, newest_records
from train.runtime.run_folder import RunFolder
from train.runtime.supervisor import supervision


@dataclass(frozen=True)
class RunRecord:
    """The records that an earlier process left in the folder of a run.

    Attributes:
        content: the content of `run.json`; None if the folder has no such file.
        newest: the record of the newest checkpoint with a readable record; None without such a checkpoint.
    """

    content: dict[str, Any] | None = None
    newest: CheckpointRecord | None = None

    @classmethod
    def read(cls, folder: RunFolder) -> "RunRecord":
        """Read the records in a folder.

        Raises:
            InputError: `run.json` is damaged.
        """
        content = folder.read_record() if folder.has_run() else None
        return cls(content, next(newest_records(folder), None))

    @property
    def was_started_by_current_supervisor(self) -> bool:
        """Whether a process of the same supervisor wrote `run.json`. If so, the run must not start over."""
        content = self.content or {}
        return supervision() is not None and content.get("supervision") == supervision()
