"""The published model: a snapshot of a run becomes a folder with its card, local or `gs://`, and goes to the Hub."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from mlm_common.hub.push import HubRepository, push_folder
from mlm_common.hub.retries import Interruption
from mlm_common.storage import files as storage
from tokenizer_training.tokenizer import vocabulary_size
from train.metrics.log import LOSS_CURVE_NAME, TENSORBOARD_FOLDER
from train.publishing.hub_checkpoints import push_newest_checkpoint
from train.publishing.pytorch_format import ModelSnapshot, export_model, take_snapshot

CARD_NAME = "README.md"
# The Hub shows event files as training metrics.
EVENTS_FOLDER = "runs"
EVENTS_MARK = "tfevents"


@dataclass(frozen=True)
class Publication:
    """A run after an update: its model, and all lines of `metrics.jsonl` so far."""

    step: int
    model: ModelSnapshot
    metrics: list[dict[str, Any]]


@dataclass(frozen=True)
class Publisher:
    """Writes a folder, local or `gs://`, and pushes it where `repository` is given.

    run_folder: of the run, with the picture of its loss and its TensorBoard files.
    export_folder: that is written.
    card: makes the README.md of a publication; whether the folder has the picture of the loss is its second argument.
    pushes_checkpoints: push the newest checkpoint of the run, too.
    """

    run_folder: str
    export_folder: str
    tokenizer: PreTrainedTokenizerFast
    model_max_length: int
    card: Callable[[Publication, bool], str]
    repository: HubRepository | None = None
    pushes_checkpoints: bool = False

    def take(self, network: Any, step: int, metrics: list[dict[str, Any]]) -> Publication:
        """Return what is to be published, copied from the model and the log; takes as long as copying the weights."""
        return Publication(step, take_snapshot(network), list(metrics))

    def publish(
        self, publication: Publication, commit_message: str, *, interruption: Interruption | None = None
    ) -> str | None:
        """Export the publication, push it, and return the URL of the Hub's commit, None without a repository.

        Raises:
            HubPushError: the push did not succeed; the export is complete.
        """
        is_remote = storage.is_remote(self.export_folder)
        with tempfile.TemporaryDirectory(prefix="export-") as temporary_folder:
            local_folder = temporary_folder if is_remote else self.export_folder
            self._write(publication, local_folder)
            if is_remote:
                storage.upload_folder(local_folder, self.export_folder)
            if self.repository is None:
                return None
            url = push_folder(
                local_folder,
                self.repository,
                commit_message=commit_message,
                kept_in=self.export_folder,
                interruption=interruption,
            )
        if self.pushes_checkpoints:
            push_newest_checkpoint(self.run_folder, self.repository, interruption=interruption)
        return url

    def _write(self, publication: Publication, folder: str) -> None:
        export_model(
            publication.model,
            self.tokenizer,
            folder,
            model_max_length=self.model_max_length,
            vocabulary_size=vocabulary_size(self.tokenizer),
        )
        picture = storage.join(self.run_folder, LOSS_CURVE_NAME)
        has_picture = storage.exists(picture)
        if has_picture:
            storage.write_bytes(str(Path(folder, LOSS_CURVE_NAME)), storage.read_bytes(picture))
        storage.write_text(str(Path(folder, CARD_NAME)), self.card(publication, has_picture))
        events = storage.join(self.run_folder, TENSORBOARD_FOLDER)
        names = [name for name in sorted(storage.list_files(events)) if EVENTS_MARK in name]
        for number, name in enumerate(names):
            # The names that TensorFlow gives hold that of the machine.
            target = Path(folder, EVENTS_FOLDER, f"events.out.{EVENTS_MARK}.{number:05d}")
            storage.write_bytes(str(target), storage.read_bytes(storage.join(events, name)))
