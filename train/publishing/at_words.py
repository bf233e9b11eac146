"""The checkpoints of `--save-at-words`, exported and pushed to a branch each while the run trains."""

import json
import logging
from contextlib import suppress
from dataclasses import replace
from typing import Any

from mlm_common.hub.push import HubRepository
from mlm_common.workers import STOP_SECONDS, LatestItemWorker
from train.checkpoints.store import CheckpointStore, DamagedCheckpointError
from train.publishing.saved_model import read_saved_model
from train.runtime import supervisor
from train.runtime.run_folder import WORDS_FOLDER, RunFolder

logger = logging.getLogger(__name__)


class ExportsAtWords:
    """Exports checkpoints to `OUTPUT_DIR/words/chck_…`, and pushes each to the branch of that name.

    A thread does so as soon as a checkpoint is written, without holding up the training. `chck_….json`, written last,
    says what was exported and pushed, so nothing is done twice, and a restarted run does what is left. What fails is a
    warning, and is repeated with the next of these checkpoints. Use it as a context around `fit`.

    Args:
        run: its folder.
        steps: {step: number of words, as given}.
        repository: pushed to; None pushes nothing.
    """

    def __init__(self, run: RunFolder, steps: dict[int, str], repository: HubRepository | None) -> None:
        self._run, self._steps, self._repository = run, steps, repository
        self._store = CheckpointStore(run.checkpoints)
        self._files = run.files.subfolder(WORDS_FOLDER)
        self._worker: LatestItemWorker[int] = LatestItemWorker(self._try)

    def __enter__(self) -> "ExportsAtWords":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._worker.drop_waiting()  # it is left to the next start
            self._worker.wait(STOP_SECONDS)
        else:
            with supervisor.keep_reporting("publish"):
                self._worker.wait()

    def submit(self, step: int) -> None:
        """Have the thread make what is due up to a checkpoint that is written; does not wait for it."""
        self._worker.submit(step)

    def make(self, up_to_step: int) -> None:
        """Export and push the checkpoints up to a step for which that was not done.

        Raises:
            HubPushError: a push did not succeed; its export is complete.
            InputError: a checkpoint is damaged.
        """
        written = self._store.steps()
        for step, words in self._steps.items():
            if step > up_to_step or step not in written:
                continue
            name, made = f"chck_{words}", self._description(step)
            file = f"{name}.json"
            if not self._files.exists(file) or json.loads(self._files.read_text(file)) != made:
                branch = self._repository and replace(self._repository, branch=name, tag=None)
                read_saved_model(self._store.path(step)).publish(self._files.subfolder(name), branch)
                self._files.write_json(file, made)
                logger.info("the model after %s words, step %d, is in %s", words, step, self._files.path_of(name))

    def _try(self, step: int) -> None:
        try:
            self.make(step)
        except Exception as error:  # of the Hub, the disk, Cloud Storage, or the network
            logger.warning("a model at a number of words is not complete; training continues. %s", error)

    def _description(self, step: int) -> dict[str, Any]:
        """Describe what is exported and pushed; a checkpoint that was replaced after a divergence is another one."""
        crc32c = None
        with suppress(DamagedCheckpointError):  # which exporting it explains
            crc32c = self._store.read_record(step).crc32c
        return {"step": step, "crc32c": crc32c, "repository": self._repository and self._repository.repo_id}
