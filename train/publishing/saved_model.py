"""Read and export saved models: checkpoints of runs (including `--save-at-words`) and transformers' formats."""

import json
import logging
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig, PreTrainedTokenizerFast

from mlm_common.errors import InputError
from mlm_common.hub.push import MAIN_BRANCH, HubRepository, push_files
from mlm_common.hub.redaction import REDACTED
from mlm_common.storage import PARTIAL_SUFFIX, Folder, local_or_hub
from mlm_common.tokenizer import load_tokenizer, vocabulary_size
from mlm_common.workers import STOP_SECONDS, LatestItemWorker
from train.checkpoints.store import CHECKPOINT_NAME, CheckpointStore, DamagedCheckpointError, find_checkpoint
from train.metrics.log import read_metrics
from train.model.architectures import ARCHITECTURES, max_positions, pytorch_class
from train.model.configurations import make_config
from train.model.from_pretrained import load_model
from train.model.pretrained_files import TF2_WEIGHTS_NAME, read_config
from train.model.weight_files import write_h5
from train.publishing.publisher import Publisher
from train.publishing.pytorch_format import ModelSnapshot, export_model, take_snapshot
from train.runtime import supervisor
from train.runtime.plan import Plan
from train.runtime.run_folder import RECORD_NAME, WORDS_FOLDER, RunFolder, record_of_phase
from train.tasks.masked_lm import MaskedLanguageModeling
from train.tasks.pair_pretraining import NextSentencePrediction

logger = logging.getLogger(__name__)

# Prefix of the weights in a checkpoint, which also contains moments and means.
WEIGHTS_PREFIX = "model/"


@dataclass(frozen=True)
class SavedModel:
    """A saved model.

    Attributes:
        snapshot: the weights, the configuration and the training log.
        tokenizer: the model's tokenizer.
        model_max_length: the longest input, in tokens.
        model_class: name of the auto class of transformers that has the model's head.
        run_folder: folder of the run that trained the model; None for a folder in transformers' formats.
        record: that run's `run.json`; None for a folder in transformers' formats.
    """

    snapshot: ModelSnapshot
    tokenizer: PreTrainedTokenizerFast
    model_max_length: int
    model_class: str = MaskedLanguageModeling.model_class
    run_folder: RunFolder | None = None
    record: dict[str, Any] | None = None

    def write(self, folder: str, repository: HubRepository | None) -> list[str]:
        """Write the model to a local folder and return the names of the files.

        A model of a run gets its card, plots and TensorBoard files as well. The card names the `repository`.
        """
        if self.run_folder is None or self.record is None:
            length, size = self.model_max_length, vocabulary_size(self.tokenizer)
            return export_model(self.snapshot, self.tokenizer, folder, model_max_length=length, vocabulary_size=size)
        if repository is not None:
            branch = None if repository.branch == MAIN_BRANCH else repository.branch
            self.record["settings"]["hub"] |= {"hub_model_id": repository.repo_id, "hub_revision": branch}
        return Publisher(self.run_folder, self.record, self.tokenizer).write(self.snapshot, folder)

    def publish(self, output: Folder, repository: HubRepository | None, *, with_tf_weights: bool = False) -> None:
        """Export the model to a folder, and push it to `repository` if there is one.

        Raises:
            HubPushError: the push did not succeed; the export is complete.
        """
        with output.staging() as local_folder:
            names = self.write(local_folder, repository)
            if with_tf_weights:
                names.append(write_tf_weights(local_folder, self.model_class))
            output.upload_folder(local_folder)
            if repository is not None:
                files = {name: Path(local_folder, name) for name in names}
                push_files(files, repository, commit_message=f"Step {self.snapshot.step:,}", kept_in=output.path)


def write_tf_weights(folder: str, model_class: str) -> str:
    """Convert the exported weights in `folder` to TensorFlow's format; return the name of the file."""
    with tempfile.TemporaryDirectory(dir=folder, suffix=PARTIAL_SUFFIX) as staging:
        write_h5(Path(staging, TF2_WEIGHTS_NAME), take_snapshot(load_model(folder, model_class)).arrays)
        Path(staging, TF2_WEIGHTS_NAME).replace(Path(folder, TF2_WEIGHTS_NAME))
    return TF2_WEIGHTS_NAME


@contextmanager
def transformers_folder(path: str) -> Iterator[str]:
    """Yield a local folder or Hub id that transformers can load; a checkpoint is exported to a temporary folder."""
    if not CHECKPOINT_NAME.fullmatch(path.rpartition("/")[2]):
        with local_or_hub(path) as folder:
            yield folder
        return
    saved = read_saved_model(path)
    length, size = saved.model_max_length, vocabulary_size(saved.tokenizer)
    with tempfile.TemporaryDirectory(prefix="export-") as folder:
        export_model(saved.snapshot, saved.tokenizer, folder, model_max_length=length, vocabulary_size=size)
        yield folder


def read_saved_model(path: str, tokenizer: str | None = None) -> SavedModel:
    """Read the model saved at `path`.

    Args:
        path: `OUTPUT_DIR/checkpoints/step-…` of a run, `OUTPUT_DIR` for its newest checkpoint, or a folder or Hub id
            with config.json and weights; local or `gs://`.
        tokenizer: folder or Hub id of the tokenizer, if it has moved since the run.

    Raises:
        InputError: the model is missing or damaged.
    """
    checkpoint = find_checkpoint(path)
    return _read_folder(path, tokenizer) if checkpoint is None else _read_checkpoint(*checkpoint, tokenizer)


def _read_checkpoint(run_folder: RunFolder, step: int, tokenizer_name: str | None) -> SavedModel:
    store = CheckpointStore(run_folder.checkpoints)
    try:
        checkpoint = store.read_record(step)
        arrays = store.read_arrays(checkpoint)
    except DamagedCheckpointError as error:
        others = ", ".join(str(other) for other in store.steps() if other != step)
        raise InputError(
            f"The checkpoint of step {step} in {store.folder} is damaged: {error}. Other checkpoints: "
            f"{others or 'none'}."
        ) from error
    with run_folder.guarded_record():
        record = record_of_phase(run_folder.read_record(), checkpoint.plan.phase_index)
        if tokenizer_name is None and record["tokenizer"] == REDACTED:
            raise InputError(
                f"--tokenizer is required, because the {RECORD_NAME} in {run_folder} comes from the Hub and does not "
                "name a tokenizer."
            )
        config = make_config(record["model_config"])
        model_class = record["task"]["model_class"]
        class_name = pytorch_class(model_class, config)
        max_length = Plan.from_record(record["plan"]).longest_row
    weights = {name: array for name, array in arrays.items() if name.startswith(WEIGHTS_PREFIX)}
    lines = read_metrics(run_folder, checkpoint.num_written_log_lines, checkpoint.unwritten_log_lines)
    metrics = [line for line in lines if line["step"] <= checkpoint.step]
    return SavedModel(
        ModelSnapshot(class_name, config, weights, checkpoint.step, metrics),
        load_tokenizer(tokenizer_name or record["tokenizer"]),
        max_length,
        model_class,
        run_folder,
        record,
    )


def _read_folder(path: str, tokenizer_name: str | None) -> SavedModel:
    with local_or_hub(path) as name:
        model_class = _class_of(read_config(name))
        snapshot = take_snapshot(load_model(name, model_class))
        tokenizer = load_tokenizer(tokenizer_name or name)
    max_length = min(tokenizer.model_max_length, max_positions(snapshot.config) or tokenizer.model_max_length)
    return SavedModel(snapshot, tokenizer, max_length, model_class)


def _class_of(config: PretrainedConfig) -> str:
    """Return the auto class of a folder's model, whose heads predict masked tokens, or masked tokens and pairs."""
    architecture = ARCHITECTURES.get(config.model_type)
    has_pair_head = architecture is not None and architecture.has_pair_head
    names = config.architectures or ()
    if has_pair_head and any(name.endswith("ForPreTraining") for name in names):
        return NextSentencePrediction.model_class
    return MaskedLanguageModeling.model_class


class ExportsAtWords(AbstractContextManager["ExportsAtWords"]):
    """Exports checkpoints to `OUTPUT_DIR/words/chck_…`, and pushes each to the branch with the same name.

    A thread exports a checkpoint as soon as it is written, without delaying the training. `chck_….json`, written last,
    says what was exported and pushed. So nothing is done twice, and a restarted run exports and pushes only the missing
    checkpoints. After a failure, only a warning is logged, and the next of these checkpoints triggers another attempt.
    Use this object as a context around `fit`.

    Args:
        run: the run's folder.
        steps: {step: number of words, as the user wrote it}.
        repository: the repository to push to; None to push nothing.
    """

    def __init__(self, run: RunFolder, steps: dict[int, str], repository: HubRepository | None) -> None:
        self._run, self._steps, self._repository = run, steps, repository
        self._store = CheckpointStore(run.checkpoints)
        self._files = run.files.subfolder(WORDS_FOLDER)
        self._worker: LatestItemWorker[int] = LatestItemWorker(self._try)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._worker.drop_waiting()  # the next start exports the checkpoint
            self._worker.wait(STOP_SECONDS)
        else:
            with supervisor.keep_reporting("publish"):
                self._worker.wait()

    def submit(self, step: int) -> None:
        self._worker.submit(step)

    def make(self, up_to_step: int) -> None:
        """Export and push the checkpoints up to a step that were not yet exported and pushed.

        Raises:
            HubPushError: a push did not succeed; its export is complete.
            InputError: a checkpoint is damaged.
        """
        saved_steps = self._store.steps()
        for step, words in self._steps.items():
            if step > up_to_step or step not in saved_steps:
                continue
            name, description = f"chck_{words}", self._description(step)
            file = f"{name}.json"
            if not self._files.exists(file) or json.loads(self._files.read_text(file)) != description:
                branch = self._repository and replace(self._repository, branch=name, tag=None)
                read_saved_model(self._store.path(step)).publish(self._files.subfolder(name), branch)
                self._files.write_json(file, description)
                logger.info("the model after %s words, step %d, is in %s", words, step, self._files.path_of(name))

    def _try(self, step: int) -> None:
        try:
            self.make(step)
        except Exception as error:  # from the Hub, the disk, Cloud Storage or the network
            logger.warning("exporting or pushing a model of --save-at-words failed; training continues. %s", error)

    def _description(self, step: int) -> dict[str, Any]:
        """Describe what is exported and pushed. Include the checksum, as a rollback may replace the checkpoint."""
        crc32c = None
        with suppress(DamagedCheckpointError):  # exporting the checkpoint will raise the error again
            crc32c = self._store.read_record(step).crc32c
        return {"step": step, "crc32c": crc32c, "repository": self._repository and self._repository.repo_id}
