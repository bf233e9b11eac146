"""Push the newest training checkpoint to a branch of the model's repository, to resume the run on another machine.

Its records are redacted: what a run needs to resume stays, what tells where it was made does not.
"""

import json
import logging
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub

from mlm_common.errors import InputError
from mlm_common.hub.push import HubRepository, push_files
from mlm_common.hub.redaction import redact, redact_except, redact_settings, redacted_hash
from mlm_common.hub.retries import configure_sessions, hub_error, one_line
from mlm_common.storage import open_folder
from tfrecord_prep.manifest import published_manifest
from train.checkpoints.store import (
    DATA_SUFFIX,
    RECORD_SUFFIX,
    CheckpointRecord,
    CheckpointStore,
    DamagedCheckpointError,
)
from train.config.settings import SUBJECTS, HubConfig
from train.runtime.machines import Cluster
from train.runtime.run_folder import CHECKPOINTS_FOLDER, FILES_OF_A_RUN, METRICS_NAME, RECORD_NAME, RunFolder

logger = logging.getLogger(__name__)

CHECKPOINTS_BRANCH = "checkpoints"
# Fields of `run.json` that are published as they are.
PUBLIC_FIELDS = ("commit", "versions", "hardware", "computation", "hub_revision", "task", "plan")
# Where transformers keeps the folder that a configuration came from.
CONFIG_SOURCE = "_name_or_path"


def push_newest_checkpoint(
    run: RunFolder,
    repository: HubRepository,
    *,
    publish_details: bool,
    stop_retries: threading.Event | None = None,
) -> None:
    """Push the run's newest checkpoint, with its record and log, in one commit that deletes the one before.

    Args:
        run: its folder; nothing is pushed of one without a checkpoint.
        repository: of the model.
        publish_details: do not redact the records.
        stop_retries: as in `push_files`.

    Raises:
        HubPushError: it did not succeed.
    """
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
            logger.info("the checkpoint of step %d is not pushed, a newer one replaced it: %s", steps[-1], error)
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
    """Redact a `run.json`; of text in the fingerprint a hash stays, for the run to be resumed."""
    published = _published_phase(record)
    if "phases" in record:
        published["phases"] = [_published_phase(phase) for phase in record["phases"]]
    published["fingerprint"] = {
        name: value if redact(value) == value else redacted_hash(value) for name, value in record["fingerprint"].items()
    }
    return published


def published_checkpoint(record: CheckpointRecord) -> CheckpointRecord:
    """Redact the settings in a checkpoint's record; its other fields are public."""
    return replace(record, settings=_published_settings(record.settings))


def _published_phase(record: Mapping[str, Any]) -> dict[str, Any]:
    published = redact_except(record, PUBLIC_FIELDS)
    published["model_config"] = redact_except(record["model_config"], record["model_config"].keys() - {CONFIG_SOURCE})
    published["settings"] = _published_settings(record["settings"])
    for name in ("train_data", "eval_data"):
        data = record[name]
        is_manifest = data and "corpus" in data
        published[name] = published_manifest(data) if is_manifest else data and {"totals": data["totals"]}
    return published


def _published_settings(settings: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    return {subject: redact_settings(values, SUBJECTS) for subject, values in settings.items()}


def resume_from_hub(run: RunFolder, config: HubConfig, cluster: Cluster) -> None:
    """Download what `push_newest_checkpoint` pushed to the run's folder, unless it already has a run.

    Raises:
        InputError: the repository has no checkpoint; or there are several workers, which would find the folder in
            different states.
        HubAwayError: the Hub cannot be reached.
    """
    if cluster.num_workers > 1:
        raise InputError(
            f"--resume-from-hub is for one worker; received TF_CONFIG with {cluster.num_workers}. Copy the files of "
            f"the branch {CHECKPOINTS_BRANCH} to --output-dir before they start."
        )
    if run.has_run():
        logger.info("%s has a run, so none is fetched from the Hub", run)
        return
    configure_sessions()
    patterns = [f"{CHECKPOINTS_FOLDER}/*", METRICS_NAME, RECORD_NAME]
    with tempfile.TemporaryDirectory(prefix="checkpoint-") as copy:
        try:
            huggingface_hub.snapshot_download(
                str(config.hub_model_id), revision=CHECKPOINTS_BRANCH, local_dir=copy, allow_patterns=patterns
            )
            if not Path(copy, RECORD_NAME).exists():
                raise FileNotFoundError(f"it lacks {RECORD_NAME}.")
        except (OSError, ValueError) as error:
            raise hub_error(
                f"--resume-from-hub needs a checkpoint on the branch {CHECKPOINTS_BRANCH} of {config.hub_model_id}, "
                f"where --hub-strategy checkpoint puts it: {one_line(error)} Leave the flag out to start from scratch.",
                error,
            ) from error
        paths = [path.relative_to(copy) for path in Path(copy).rglob("*") if path.is_file()]
        wanted = [path for path in paths if not path.parts[0].startswith(".")]
        # The run's record last: without it the folder holds no run.
        for path in sorted(wanted, key=lambda path: path.name == RECORD_NAME):
            run.files.upload_file(str(Path(copy, path)), path.as_posix())
    logger.info("fetched a checkpoint from the branch %s of %s", CHECKPOINTS_BRANCH, config.hub_model_id)
