"""The newest training checkpoint on a branch of the model's repository, for resuming a run on another machine."""

import json
import logging
import tempfile
from dataclasses import replace
from pathlib import Path

from mlm_common.errors import InputError
from mlm_common.hub.push import HubRepository, push_files
from mlm_common.hub.retries import Interruption, configure_sessions, hub_error, one_line
from mlm_common.storage import open_folder
from train.checkpoints.store import DATA_SUFFIX, RECORD_SUFFIX, CheckpointStore, DamagedCheckpointError
from train.config.settings import HubConfig
from train.publishing.published_record import published_checkpoint, published_run
from train.runtime.cluster import Cluster
from train.runtime.run_folder import CHECKPOINTS_FOLDER, METRICS_NAME, RECORD_NAME, read_run_record

logger = logging.getLogger(__name__)

CHECKPOINTS_BRANCH = "checkpoints"


def push_newest_checkpoint(
    run_folder: str,
    repository: HubRepository,
    *,
    publish_details: bool = False,
    interruption: Interruption | None = None,
) -> None:
    """Push the run's newest checkpoint, with its record and log, in one commit that deletes the one before.

    Args:
        run_folder: `OUTPUT_DIR`, local or `gs://`; nothing is pushed of one without a checkpoint.
        repository: of the model.
        publish_details: push the records as they are.
        interruption: by which another thread ends the push sooner.

    Raises:
        HubPushError: it did not succeed.
    """
    run = open_folder(run_folder)
    store = CheckpointStore(run.subfolder(CHECKPOINTS_FOLDER))
    steps = store.steps()
    if not steps:
        return
    data_name, record_name = (
        f"{CHECKPOINTS_FOLDER}/{Path(store.path(steps[-1], suffix)).name}" for suffix in (DATA_SUFFIX, RECORD_SUFFIX)
    )
    with tempfile.TemporaryDirectory(prefix="checkpoint-") as copy:
        try:
            checkpoint, record = store.read_record(steps[-1]), read_run_record(run_folder)
            if not publish_details:
                checkpoint, record = published_checkpoint(checkpoint), published_run(record)
            open_folder(copy).write_bytes(data_name, run.read_bytes(data_name))
        except (FileNotFoundError, DamagedCheckpointError) as error:
            logger.info("the checkpoint of step %d is not pushed, a newer one replaced it: %s", steps[-1], error)
            return
        files: dict[str, Path | bytes] = {
            data_name: Path(copy, data_name),
            record_name: checkpoint.to_json().encode(),
            RECORD_NAME: json.dumps(record, indent=2).encode(),
        }
        if run.exists(METRICS_NAME):
            files[METRICS_NAME] = run.read_bytes(METRICS_NAME)
        push_files(
            files,
            replace(repository, branch=CHECKPOINTS_BRANCH, tag=None),
            commit_message=f"Checkpoint of step {steps[-1]:,}",
            kept_in=run_folder,
            replaced=f"{CHECKPOINTS_FOLDER}/",
            interruption=interruption,
        )


def resume_from_hub(run_folder: str, config: HubConfig, cluster: Cluster) -> None:
    """Write what `push_newest_checkpoint` pushed to the run's folder, unless a run is there already.

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
    run = open_folder(run_folder)
    if run.exists(RECORD_NAME):
        logger.info("%s holds a run, so none is fetched from the Hub", run_folder)
        return
    configure_sessions()
    with tempfile.TemporaryDirectory(prefix="checkpoint-") as copy:
        _download(str(config.hub_model_id), copy)
        paths = [path.relative_to(copy) for path in Path(copy).rglob("*") if path.is_file()]
        wanted = [path for path in paths if not path.parts[0].startswith(".")]
        # The run's record last: without it the folder holds no run.
        for path in sorted(wanted, key=lambda path: path.name == RECORD_NAME):
            run.upload_file(str(Path(copy, path)), path.as_posix())
    logger.info("fetched a checkpoint from the branch %s of %s", CHECKPOINTS_BRANCH, config.hub_model_id)


def _download(repo_id: str, folder: str) -> None:
    from huggingface_hub import snapshot_download

    patterns = [f"{CHECKPOINTS_FOLDER}/*", METRICS_NAME, RECORD_NAME]
    try:
        snapshot_download(repo_id, revision=CHECKPOINTS_BRANCH, local_dir=folder, allow_patterns=patterns)
        if not Path(folder, RECORD_NAME).exists():
            raise FileNotFoundError(f"it lacks {RECORD_NAME}.")
    except (OSError, ValueError) as error:
        raise hub_error(
            f"--resume-from-hub needs a checkpoint on the branch {CHECKPOINTS_BRANCH} of {repo_id}, where "
            f"--hub-strategy checkpoint puts it: {one_line(error)} Leave it out to start anew.",
            error,
        ) from error
