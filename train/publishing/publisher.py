"""Export a snapshot of a run, with its card, to a folder, local or `gs://`, and push it to the Hub."""

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from mlm_common.errors import InputError, RunFailedError, error_summary
from mlm_common.hub.push import CARD_NAME, HubRepository, mark_card, push_files
from mlm_common.hub.retries import Interruption
from mlm_common.storage import open_folder
from mlm_common.tokenizer import vocabulary_size
from train.publishing.hub_checkpoints import push_newest_checkpoint
from train.publishing.pytorch_format import ModelSnapshot, export_model, take_snapshot
from train.runtime.run_folder import (
    CONFUSION_NAME,
    EVENTS_FOLDER,
    LOSS_CURVE_NAME,
    TENSORBOARD_SPLITS,
    RunFolder,
)

logger = logging.getLogger(__name__)

EVENTS_MARK = "tfevents"
# If the card cannot be built.
MINIMAL_CARD = """---
library_name: transformers
---

The model's card could not be built: the log of its training or export says why.
"""


@dataclass(frozen=True)
class Publication:
    """The state of a run after a step: its model, and all lines of `metrics.jsonl` so far."""

    step: int
    model: ModelSnapshot
    metrics: Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Publisher:
    """Writes a folder, local or `gs://`, and pushes it if `repository` is given.

    run_folder: has the plot of its loss and its TensorBoard files.
    export_folder: is written.
    card: makes the README.md of a publication; its second argument are the names of the files beside it. If it fails,
        a minimal README.md is written and a warning logged.
    pushes_checkpoints: push the newest checkpoint of the run, too.
    publish_details: do not redact its records.
    """

    run_folder: RunFolder
    export_folder: str
    tokenizer: PreTrainedTokenizerFast
    model_max_length: int
    card: Callable[[Publication, Collection[str]], str]
    repository: HubRepository | None = None
    pushes_checkpoints: bool = False
    publish_details: bool = False

    def take(self, network: Any, step: int, metrics: Sequence[dict[str, Any]]) -> Publication:
        """Copy the model and the log; takes as long as copying the weights."""
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
        export = open_folder(folder)
        log_files = read_log_files(self.run_folder)
        for name, content in log_files.items():
            export.write_bytes(name, content)
        export.write_text(CARD_NAME, mark_card(self._card_text(publication, log_files)))
        return [*names, *log_files, CARD_NAME]

    def _card_text(self, publication: Publication, files: Collection[str]) -> str:
        try:
            return self.card(publication, files)
        except Exception as error:
            logger.warning(
                "the model's card cannot be built, so %s is a minimal one: %s", CARD_NAME, error_summary(error)
            )
            return MINIMAL_CARD


def read_log_files(run: RunFolder) -> dict[str, bytes]:
    """Read the plots and TensorBoard's files, {name in the export: content}; what fails is a warning."""
    files = {}
    try:
        for name in (LOSS_CURVE_NAME, CONFUSION_NAME):
            if run.files.exists(name):
                files[name] = run.files.read_bytes(name)
        for split in TENSORBOARD_SPLITS:
            events = run.tensorboard.subfolder(split)
            names = [name for name in sorted(events.list_files()) if EVENTS_MARK in name]
            for number, name in enumerate(names):
                # TensorFlow's names contain the host name.
                path = f"{EVENTS_FOLDER}/{split}/events.out.{EVENTS_MARK}.{number:05d}"
                files[path] = events.read_bytes(name)
    except (InputError, RunFailedError, OSError) as error:
        logger.warning("the export is made without some files of the log: %s", error)
    return files
