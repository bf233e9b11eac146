"""Export a model with its card to a folder, local or `gs://`, and push it to the Hub, also during training.

With `--hub-strategy checkpoint` the newest checkpoint is pushed as well, to a separate branch, so that the run can
resume on another machine. The checkpoint's records are redacted: they keep the data that a run needs to resume, but not
the names of paths, buckets and machines.
"""

import hashlib
import json
import logging
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import huggingface_hub.utils
from safetensors.numpy import load_file
from transformers import PreTrainedTokenizerFast
from transformers.utils import SAFE_WEIGHTS_NAME

from mlm_common.errors import InputError, RunFailedError, error_summary
from mlm_common.hub.push import CARD_NAME, HubRepository, mark_card, push_files
from mlm_common.hub.redaction import redact, redact_except, redact_settings, redacted_hash
from mlm_common.hub.retries import configure_sessions, hub_error, one_line, repeat
from mlm_common.storage import open_folder
from mlm_common.tokenizer import vocabulary_size
from mlm_common.workers import LatestItemWorker
from tfrecord_prep.manifest import published_manifest
from train.checkpoints.store import (
    DATA_SUFFIX,
    RECORD_SUFFIX,
    CheckpointRecord,
    CheckpointStore,
    DamagedCheckpointError,
    write_safetensors,
)
from train.config.settings import SUBJECTS, HubConfig, PretrainingHub
from train.metrics.log import MetricsLog
from train.publishing.model_card import model_card
from train.publishing.pytorch_format import ModelSnapshot, export_model, take_snapshot
from train.runtime import supervisor
from train.runtime.machines import Cluster
from train.runtime.plan import Plan
from train.runtime.run_folder import (
    CHECKPOINTS_FOLDER,
    CONFUSION_NAME,
    EVENTS_FOLDER,
    FILES_OF_A_RUN,
    LOSS_CURVE_NAME,
    METRICS_NAME,
    RECORD_NAME,
    SCORES_NAME,
    TENSORBOARD_SPLITS,
    RunFolder,
)
from train.tasks.task import TaskCard

logger = logging.getLogger(__name__)

CHECKPOINTS_BRANCH = "checkpoints"
# Fields of `run.json` that are published unchanged.
PUBLIC_FIELDS = ("commit", "versions", "hardware", "computation", "hub_revision", "task", "plan")
# The key under which transformers stores the folder that a configuration was read from.
CONFIG_SOURCE = "_name_or_path"


def push_newest_checkpoint(
    run: RunFolder, repository: HubRepository, *, publish_details: bool, stop_retries: threading.Event | None = None
) -> None:
    """Push the run's newest checkpoint, if any, with record and log; the same commit deletes the previous one."""
    store = CheckpointStore(run.checkpoints)
    steps = store.steps()
    if not steps:
        return
    data_name, record_name = (
        f"{CHECKPOINTS_FOLDER}/{Path(store.path(steps[-1], suffix)).name}" for suffix in (DATA_SUFFIX, RECORD_SUFFIX)
    )
    with tempfile.TemporaryDirectory(prefix="checkpoint-") as copy:
        try:
            checkpoint, record = store.read_record(steps[-1]), run.read_record()
            if not publish_details:
                checkpoint, record = published_checkpoint(checkpoint), published_run(record)
            open_folder(copy).write_bytes(data_name, run.files.read_bytes(data_name))
        except (FileNotFoundError, DamagedCheckpointError) as error:
            logger.info(
                "the checkpoint of step %d is not pushed, because a newer one replaced it: %s", steps[-1], error
            )
            return
        files: dict[str, Path | bytes] = {
            data_name: Path(copy, data_name),
            record_name: checkpoint.to_json().encode(),
            RECORD_NAME: json.dumps(record, indent=2).encode(),
        }
        if run.files.exists(METRICS_NAME):
            files[METRICS_NAME] = run.files.read_bytes(METRICS_NAME)
        push_files(
            files,
            replace(repository, branch=CHECKPOINTS_BRANCH, tag=None),
            commit_message=f"Checkpoint of step {steps[-1]:,}",
            kept_in=run.path,
            stale=f"{CHECKPOINTS_FOLDER}/({FILES_OF_A_RUN[CHECKPOINTS_FOLDER]})",
            stop_retries=stop_retries,
        )


def published_run(record: Mapping[str, Any]) -> dict[str, Any]:
    """Redact a `run.json`; replace private values that are compared on resume with their hashes."""
    published = _published_phase(record)
    if "phases" in record:
        published["phases"] = [_published_phase(phase) for phase in record["phases"]]
    published["fingerprint"] = {
        name: value if redact(value) == value else redacted_hash(value) for name, value in record["fingerprint"].items()
    }
    if "hub_commits" in record:
        published["hub_commits"] = {redacted_hash(name): commit for name, commit in record["hub_commits"].items()}
    return published


def published_checkpoint(record: CheckpointRecord) -> CheckpointRecord:
    """Redact the settings in a checkpoint's record; the record's other fields are public."""
    return replace(record, settings=_published_settings(record.settings))


def _published_phase(record: Mapping[str, Any]) -> dict[str, Any]:
    published = redact_except(record, PUBLIC_FIELDS)
    published["model_config"] = redact_except(record["model_config"], record["model_config"].keys() - {CONFIG_SOURCE})
    published["settings"] = _published_settings(record["settings"])
    for name in ("train_data", "eval_data"):
        published[name] = record[name] and _published_data(record[name])
    return published


def _published_data(data: Mapping[str, Any]) -> dict[str, Any]:
    if "corpus" in data:
        return published_manifest(data)
    if "sources" not in data:
        return {"totals": data["totals"]}
    sources = {
        name: {"weight": source["weight"], **_published_data(source)} for name, source in data["sources"].items()
    }
    return {**data, "sources": sources}


def _published_settings(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {subject: redact_settings(values, SUBJECTS) for subject, values in settings.items()}


def resume_from_hub(run: RunFolder, config: HubConfig, cluster: Cluster) -> None:
    """Download the files of `push_newest_checkpoint` to the run's folder, unless it already contains a run."""
    if cluster.num_workers > 1:
        raise InputError(
            f"--resume-from-hub works with one worker only; received TF_CONFIG with {cluster.num_workers}. Copy the "
            f"files of the branch {CHECKPOINTS_BRANCH} to --output-dir before the workers start."
        )
    if run.has_run():
        logger.info("%s already contains a run, so none is downloaded from the Hub", run)
        return
    with _run_on_hub(config, f"{CHECKPOINTS_FOLDER}/*", METRICS_NAME) as copy:
        paths = [path.relative_to(copy) for path in Path(copy).rglob("*") if path.is_file()]
        paths = [path for path in paths if not path.parts[0].startswith(".")]
        # Upload the run's record last: a folder without the record does not count as a run.
        for path in sorted(paths, key=lambda path: path.name == RECORD_NAME):
            run.files.upload_file(str(Path(copy, path)), path.as_posix())
    logger.info("downloaded a checkpoint from the branch %s of %s", CHECKPOINTS_BRANCH, config.hub_model_id)


def record_on_hub(config: HubConfig) -> dict[str, Any]:
    """Read the `run.json` that was pushed to the Hub with the newest checkpoint."""
    with _run_on_hub(config) as copy:
        record: dict[str, Any] = json.loads(Path(copy, RECORD_NAME).read_text(encoding="utf-8"))
        return record


@contextmanager
def _run_on_hub(config: HubConfig, *patterns: str) -> Iterator[str]:
    """Download the `run.json` on the Hub and the files that match the patterns; yield their temporary folder."""
    configure_sessions()
    with tempfile.TemporaryDirectory(prefix="checkpoint-") as copy:
        try:
            download = partial(huggingface_hub.snapshot_download, str(config.hub_model_id), revision=CHECKPOINTS_BRANCH)
            repeat(lambda: download(local_dir=copy, allow_patterns=[*patterns, RECORD_NAME]), ())
            if not Path(copy, RECORD_NAME).exists():
                raise FileNotFoundError(f"it lacks {RECORD_NAME}.")
        except (OSError, ValueError) as error:
            raise hub_error(
                f"--resume-from-hub needs a checkpoint on the branch {CHECKPOINTS_BRANCH} of {config.hub_model_id}, "
                f"where --hub-strategy checkpoint pushes it: {one_line(error)} Leave it out to start from scratch.",
                error,
            ) from error
        yield copy


EVENTS_MARK = "tfevents"
# This card is written if the full card cannot be built.
MINIMAL_CARD = """---
library_name: transformers
---

The model card could not be built; the log of the training or export says why.
"""
# How long a run that ends early may continue to push. A preempted spot machine has only half of this time.
GRACE_SECONDS = 60.0


@dataclass(frozen=True)
class Publisher:
    """Exports the model of a run, and pushes it to the Hub.

    Attributes:
        run_folder: the run's folder, whose plots and TensorBoard files are exported with the model.
        record: the `run.json`; its settings determine what to push, and to which repository.
        tokenizer: the tokenizer to export with the model.
    """

    run_folder: RunFolder
    record: dict[str, Any]
    tokenizer: PreTrainedTokenizerFast

    def publish(
        self, snapshot: ModelSnapshot, title: str, *, is_last: bool = True, stop_retries: threading.Event | None = None
    ) -> None:
        """Export a model to the run's folder, and push it if the run's settings name a repository.

        Args:
            snapshot: the model.
            title: message of the commit.
            is_last: whether this is the run's final model, which gets `--hub-tag`.
            stop_retries: when this event is set, a failed push is not retried.

        Raises:
            HubPushError: the push did not succeed; the export is complete.
        """
        export, hub = self.run_folder.export, PretrainingHub(**self.record["settings"]["hub"])
        repository = hub.repository()
        with export.staging() as local_folder:
            names = self.write(snapshot, local_folder)
            export.upload_folder(local_folder)
            if repository is None:
                return
            push_files(
                {name: Path(local_folder, name) for name in names},
                repository if is_last else replace(repository, tag=None),
                commit_message=title,
                kept_in=export.path,
                stop_retries=stop_retries,
            )
        if hub.hub_strategy == "checkpoint":
            push_newest_checkpoint(
                self.run_folder, repository, publish_details=hub.publish_details, stop_retries=stop_retries
            )

    def write(self, snapshot: ModelSnapshot, folder: str) -> list[str]:
        """Write a model to a local folder, with its card and log, and return the names of the files.

        If the card cannot be built, a minimal card is written, with a warning.
        """
        names = export_model(
            snapshot,
            self.tokenizer,
            folder,
            model_max_length=Plan.from_record(self.record["plan"]).longest_row,
            vocabulary_size=vocabulary_size(self.tokenizer),
        )
        names += write_task_files(TaskCard.from_record(self.record["task"]["card"]), folder)
        files = read_log_files(self.run_folder)
        try:
            scores = read_scores(self.run_folder, Path(folder, SAFE_WEIGHTS_NAME))
            card = model_card(self.record, self.tokenizer, snapshot, files, scores)
        except Exception as error:
            logger.warning(
                "the model card cannot be built, so %s is a minimal one: %s", CARD_NAME, error_summary(error)
            )
            card = MINIMAL_CARD
        files[CARD_NAME] = mark_card(card).encode()
        for name, content in files.items():
            open_folder(folder).write_bytes(name, content)
        return [*names, *files]


def write_task_files(card: TaskCard, folder: str) -> list[str]:
    """Write the task's additional files to the folder of an exported model; return their names."""
    for name, content in card.files.items():
        open_folder(folder).write_text(name, content)
    for name, weights in card.weight_files.items():
        exported = load_file(Path(folder, SAFE_WEIGHTS_NAME))
        arrays = {weight: exported[original] for weight, original in weights.items()}
        write_safetensors(Path(folder, name), arrays, metadata={"format": "pt"})
    return [*card.files, *card.weight_files]


def read_log_files(run: RunFolder) -> dict[str, bytes]:
    """Return the plots and TensorBoard files of a run, {name in the export: content}; only warn if reading fails."""
    files = {}
    try:
        for name in (LOSS_CURVE_NAME, CONFUSION_NAME):
            if run.files.exists(name):
                files[name] = run.files.read_bytes(name)
        for split in TENSORBOARD_SPLITS:
            events = run.tensorboard.subfolder(split)
            names = [name for name in sorted(events.list_files()) if EVENTS_MARK in name]
            for number, name in enumerate(names):
                # The original names contain the name of the host.
                path = f"{EVENTS_FOLDER}/{split}/events.out.{EVENTS_MARK}.{number:05d}"
                files[path] = events.read_bytes(name)
    except (InputError, RunFailedError, OSError) as error:
        logger.warning("the export lacks some files of the log: %s", error)
    return files


def read_scores(run: RunFolder, weights: Path) -> dict[str, Any] | None:
    """Read the scores that `train/score_mlm.py` wrote to a run's folder, if they belong to these weights.

    Args:
        run: the run's folder.
        weights: the file of the exported weights.

    Returns:
        None if there are no scores or, with a warning, if their file is damaged. Otherwise a dict with:
        left_to_right: whether the rest of a word was masked with each token;
        scores: {"this model" or control: {measure: {value, standard_error, items}}};
        chance: {control: measures in which the model does not differ from the control}.
    """
    if not run.files.exists(SCORES_NAME):
        return None
    sha256 = hashlib.sha256(weights.read_bytes()).hexdigest()
    try:
        content = json.loads(run.files.read_text(SCORES_NAME))
        model = next((entry for entry in content["models"] if entry["weights_sha256"] == sha256), None)
        if model is None:
            path = run.files.path_of(SCORES_NAME)
            logger.info("the scores in %s belong to different weights, so the card has no scores", path)
            return None
        # Leave out private names: models are named by their paths, and parts after the files of pairs.
        titles = {name: name.rpartition(", ")[2] for name in model["controls"]}
        differences = content["differences"]
        chance: dict[str, list[str]] = {}
        for difference in differences:
            if difference["of"] == model["name"] and difference["from"] in titles and not difference["differs"]:
                chance.setdefault(titles[difference["from"]], []).append(difference["measure"])
        measures = dict.fromkeys(difference["measure"] for difference in differences)
        scores = {
            title: {measure: content["scores"][name][measure] for measure in measures}
            for name, title in ({model["name"]: "this model"} | titles).items()
        }
        return {"left_to_right": content["left_to_right"], "scores": scores, "chance": chance}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        path = run.files.path_of(SCORES_NAME)
        logger.warning("the card has no scores, because %s is not a file of score_mlm.py: %r", path, error)
        return None


def steps_of_pushes(config: HubConfig, plan: Plan) -> tuple[int, ...]:
    """Return the steps of a phase after which the model is pushed, except the phase's last step."""
    if config.hub_model_id is None or config.hub_strategy == "end":
        return ()
    if config.hub_strategy in ("steps", "checkpoint"):
        return tuple(range(config.push_steps or plan.save_steps, plan.num_steps, config.push_steps or plan.save_steps))
    passes = range(plan.first_row // plan.num_rows + 1, plan.row_after(plan.num_steps) // plan.num_rows + 1)
    ends = (-((plan.first_row - plan.num_rows * epoch) // plan.global_batch_rows) for epoch in passes)
    return tuple(plan.first_step + steps for steps in ends if plan.first_step + steps < plan.num_steps)


class PushToHub:
    """Pushes the model during training, without delaying or ending the training.

    The training thread copies the weights; another thread exports and uploads them. Only one push runs at a time, and
    only the newest queued push is kept. A push that fails only causes a warning. Use this object as a context around
    `fit`. On exit it waits for the running push or, after an exception, at most `GRACE_SECONDS` for the running and the
    queued push. The final model is not pushed here.

    Args:
        publisher: exports and pushes the model; None on a worker that does not push.
        steps: the steps after which to push, which are the same on all workers.
        log: the log to publish with the model.
    """

    def __init__(self, publisher: Publisher | None, steps: tuple[int, ...], log: MetricsLog):
        self.steps, self._publisher, self._log = steps, publisher, log
        self._pushes: LatestItemWorker[ModelSnapshot] = LatestItemWorker(self._push)
        self._failed_steps: list[int] = []

    def __enter__(self) -> "PushToHub":
        if self.steps:
            huggingface_hub.utils.disable_progress_bars()  # the Hub's bars would disturb the training's bar
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._pushes.drop_waiting()  # the final model will be pushed instead
            with supervisor.keep_reporting("push"):
                self._pushes.wait()
        elif not self._pushes.wait(GRACE_SECONDS):
            self._pushes.drop_waiting()
            logger.warning("gave up the last push to the Hub, which did not finish within %.0f s", GRACE_SECONDS)
        if self._failed_steps:
            steps = ", ".join(f"{step:,}" for step in self._failed_steps)
            logger.warning("pushes to the Hub that failed during training: steps %s", steps)

    def push(self, model: Any, step: int) -> None:
        if self._publisher is None:
            return
        model.runtime.pull(model.optimizer.figures)
        # After a step with a non-finite loss or gradient, the weights no longer change, and the run is about to end.
        if model.optimizer.is_stopped:
            return
        started_seconds = time.perf_counter()
        with model.runtime.on_host(model.network.variables):
            self._pushes.submit(take_snapshot(model.network, step, self._log.lines))
        logger.info("pushing step %d to the Hub; copied in %.3f s", step, time.perf_counter() - started_seconds)

    def _push(self, snapshot: ModelSnapshot) -> None:
        assert self._publisher is not None
        message = f"Step {snapshot.step:,}"
        try:
            self._publisher.publish(snapshot, message, is_last=False, stop_retries=self._pushes.newer_waits)
        except Exception as error:  # from the Hub, the disk, Cloud Storage or the network
            self._failed_steps.append(snapshot.step)
            logger.warning("step %d was not pushed to the Hub; training continues. %s", snapshot.step, error)
