"""The published model: a snapshot of a run becomes a folder with its card, local or `gs://`, and goes to the Hub."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from mlm_common.hub.own_files import CARD_NAME
from mlm_common.hub.push import HubRepository, push_files
from mlm_common.hub.retries import Interruption
from mlm_common.storage import open_folder
from tokenizer_training.tokenizer import vocabulary_size
from train.publishing.hub_checkpoints import push_newest_checkpoint
from train.publishing.pytorch_format import ModelSnapshot, export_model, take_snapshot
from train.runtime.run_folder import LOSS_CURVE_NAME, TENSORBOARD_FOLDER

# The Hub shows event files as training metrics.
EVENTS_FOLDER = "runs"
EVENTS_MARK = "tfevents"


@dataclass(frozen=True)
class Publication:
    """A run after a step: its model, and all lines of `metrics.jsonl` so far."""

    step: int
    model: ModelSnapshot
    metrics: Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Publisher:
    """Writes a folder, local or `gs://`, and pushes it where `repository` is given.

    run_folder: of the run, with the picture of its loss and its TensorBoard files.
    export_folder: that is written.
    card: makes the README.md of a publication; whether the folder has the picture of the loss is its second argument.
    pushes_checkpoints: push the newest checkpoint of the run, too.
    publish_details: push its records as they are.
    """

    run_folder: str
    export_folder: str
    tokenizer: PreTrainedTokenizerFast
    model_max_length: int
    card: Callable[[Publication, bool], str]
    repository: HubRepository | None = None
    pushes_checkpoints: bool = False
    publish_details: bool = False

    def take(self, network: Any, step: int, metrics: Sequence[dict[str, Any]]) -> Publication:
        """Copy what is to be published from the model and the log; takes as long as copying the weights."""
        return Publication(step, take_snapshot(network), list(metrics))

    def publish(
        self, publication: Publication, commit_message: str, *, interruption: Interruption | None = None
    ) -> str | None:
        """Export the publication, push it, and return the URL of the Hub's commit, None without a repository.

        Raises:
            HubPushError: the push did not succeed; the export is complete.
        """
        export = open_folder(self.export_folder)
        with export.staging() as local_folder:
            names = self.write(publication, local_folder)
            export.upload_folder(local_folder)
            if self.repository is None:
                return None
            url = push_files(
                {name: Path(local_folder, name) for name in names},
                self.repository,
                commit_message=commit_message,
                kept_in=self.export_folder,
                interruption=interruption,
            )
        if self.pushes_checkpoints:
            push_newest_checkpoint(
                self.run_folder, self.repository, publish_details=self.publish_details, interruption=interruption
            )
        return url

    def write(self, publication: Publication, folder: str) -> list[str]:
        """Write the publication to a local folder, and return the names of its files."""
        names = export_model(
            publication.model,
            self.tokenizer,
            folder,
            model_max_length=self.model_max_length,
            vocabulary_size=vocabulary_size(self.tokenizer),
        )
        run, export = open_folder(self.run_folder), open_folder(folder)
        has_picture = run.exists(LOSS_CURVE_NAME)
        if has_picture:
            export.write_bytes(LOSS_CURVE_NAME, run.read_bytes(LOSS_CURVE_NAME))
            names.append(LOSS_CURVE_NAME)
        export.write_text(CARD_NAME, self.card(publication, has_picture))
        events = run.subfolder(TENSORBOARD_FOLDER)
        event_files = [name for name in sorted(events.list_files()) if EVENTS_MARK in name]
        # The names that TensorFlow gives hold that of the machine.
        targets = [f"{EVENTS_FOLDER}/events.out.{EVENTS_MARK}.{number:05d}" for number in range(len(event_files))]
        for name, target in zip(event_files, targets, strict=True):
            export.write_bytes(target, events.read_bytes(name))
        return [*names, CARD_NAME, *targets]
