"""Checks of what a run needs: buckets, shards, the Hub, disk and memory, and all that `run_mlm.py --dry-run` checks."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mlm_common.errors import InputError
from mlm_common.storage import Folder, gcs_client, open_folder
from train.checkpoints.store import CheckpointStore, DamagedCheckpointError, newest_record
from train.checks.doctor.findings import Finding, error, ok, warning
from train.checks.doctor.libraries import IMPORT_SECONDS, ProcessFailedError, ask_tensorflow
from train.config.settings import TrainingConfig
from train.data.shards import open_inputs
from train.loop.lifecycle import check_can_push
from train.runtime.machines import read_metadata
from train.runtime.phases import naming_phase, phases_of
from train.runtime.plan import STATE_BYTES_PER_PARAMETER
from train.runtime.run_folder import RunFolder

EMULATOR_VARIABLE = "STORAGE_EMULATOR_HOST"
SCOPE = "https://www.googleapis.com/auth/cloud-platform"
# A checkpoint: float32 weights and the optimizer's two moments. An export: float32 weights.
CHECKPOINT_BYTES_PER_PARAMETER = 4 * 3
EXPORT_BYTES_PER_PARAMETER = 4
# TensorFlow with transformers, before there is a model.
LIBRARIES_BYTES = 1_000_000_000
MEMORY_FILE = Path("/proc/meminfo")


def cloud_folders(config: TrainingConfig) -> dict[str, Folder]:
    """Find the folders of a run that are in Cloud Storage: {flag: folder}."""
    paths: dict[str, str | None] = {}
    for phase in phases_of(config):
        of_phase = f" of phase `{phase.name}`" if phase.name else ""
        data = phase.config.data
        paths |= {f"--train-dataset{of_phase}": data.train_dataset, f"--eval-dataset{of_phase}": data.eval_dataset}
    paths["--output-dir"] = config.run.output_dir
    folders = {flag: open_folder(path) for flag, path in paths.items() if path}
    return {flag: folder for flag, folder in folders.items() if not folder.is_local}


def check_credentials(config: TrainingConfig) -> Iterator[Finding]:
    """Check that Google accepts the credentials of this machine or login, if a run needs them."""
    import google.auth
    from google.auth.transport.requests import Request

    folders = cloud_folders(config)
    if not folders or os.environ.get(EMULATOR_VARIABLE):  # with which the client asks for none
        return
    with gcs_client.explained_errors(next(iter(folders.values())).path):
        credentials, project = google.auth.default(scopes=[SCOPE])
        credentials.refresh(Request())
    account = getattr(credentials, "service_account_email", None) or "of a login"
    yield ok("credentials", f"{type(credentials).__name__} {account}, project {project or 'unknown'}")


def check_buckets(config: TrainingConfig) -> Iterator[Finding]:
    """Check that each folder in Cloud Storage can be read, and written if a run writes to it; compare the regions."""
    folders = cloud_folders(config)
    for flag, folder in folders.items():
        num_files = len(folder.list_files())
        if flag == "--output-dir":
            folder.check_writable()
            yield ok("bucket", f"{flag} {folder} can be read and written")
        else:
            yield ok("bucket", f"{flag} {folder} can be read, {num_files} files")
    zone = config.hardware.tpu_zone or (read_metadata("instance/zone", 2.0) or "").rpartition("/")[2]
    for bucket in sorted({gcs_client.PREFIX + gcs_client.bucket_and_name(one.path)[0] for one in folders.values()}):
        if zone:
            yield from _check_region(bucket, zone.rpartition("-")[0])


def _check_region(bucket: str, region: str) -> Iterator[Finding]:
    """Compare the region of a bucket with the TPU's; one that is in several regions is not compared."""
    try:
        with gcs_client.explained_errors(bucket):
            details = gcs_client.blob_at(f"{bucket}/x").bucket
            details.reload()
    except (InputError, FileNotFoundError):
        return  # the account may read the files, but not the bucket's own data
    location = details.location.lower()
    if "-" in location and location != region:
        text = f"{bucket} is in {location}, the TPU in {region}: reading is slow, and traffic is billed."
        fix = f"Create a bucket there and copy the data: gcloud storage buckets create gs://NAME --location {region}"
        yield warning("region", text, fix)
    else:
        yield ok("region", f"{bucket} is in {location}, the TPU in {region}")


def check_data(config: TrainingConfig) -> Iterator[Finding]:
    """Check that shards are complete, have rows of one length, and were made with the tokenizer."""
    for phase in phases_of(config):
        with naming_phase(phase.name):
            inputs = open_inputs(phase.config.data)
        for flag, shards in (("--train-dataset", inputs.train_shards), ("--eval-dataset", inputs.eval_shards)):
            if shards is not None:
                text = f"{flag} {shards.folder}: {shards.num_rows:,} rows of {inputs.max_length} tokens"
                yield ok("data", f"{text}, fit the tokenizer {inputs.tokenizer_source}")


def check_run(config: TrainingConfig) -> Iterator[Finding]:
    """Check what `run_mlm.py --dry-run` checks, and that the run fits disk and memory."""
    try:
        answer = ask_tensorflow("check_run", config, IMPORT_SECONDS)
    except ProcessFailedError as failed:
        fix = "This machine may have too little memory for the model."
        yield error("run", f"preparing the run {failed}", fix)
        return
    yield ok("run", answer["summary"])
    yield from check_disk(config, answer["num_parameters"])
    yield from check_memory(config, answer["num_parameters"])


def check_folder(config: TrainingConfig) -> Iterator[Finding]:
    """Check which run the folder contains, of pretraining or fine-tuning, and that its newest checkpoint is intact."""
    folder = RunFolder(str(config.run.output_dir))
    if not folder.has_run():
        return
    run, newest = folder.read_record(), newest_record(folder)
    task = run.get("task", {}).get("card", {}).get("task_name", "masked language modeling")
    if newest is None:
        yield ok("run", f"{folder} contains a run ({task}) without a checkpoint")
        return
    store = CheckpointStore(folder.checkpoints)
    try:
        store.read_arrays(newest)
    except DamagedCheckpointError as damage:
        text = f"the newest checkpoint of {folder}, {store.path(newest.step)}, is damaged: {damage}."
        yield warning("run", text, "A run resumes from the one before it, if there is one.")
        return
    exported = "exported" if folder.has_export() else "not exported yet"
    steps = f"saved after step {newest.step:,} of {newest.plan['num_steps']:,}, intact, {exported}"
    yield ok("run", f"{folder} contains a run ({task}), {steps}")


def check_hub(config: TrainingConfig) -> Iterator[Finding]:
    """Check that the token may write to the repository that the run pushes to."""
    repository = config.hub.repository()
    if repository is not None:
        check_can_push(config.hub)
        yield ok("Hub", f"the token may write to {repository.repo_id}")


def check_disk(config: TrainingConfig, num_parameters: int) -> Iterator[Finding]:
    """Check that there is room for checkpoints and export.

    A run that writes to Cloud Storage makes each file in the folder for temporary files first.
    """
    output_dir = config.run.output_dir
    is_local = output_dir is None or open_folder(output_dir).is_local
    wanted = Path(output_dir or ".").absolute()
    folder = next(one for one in (wanted, *wanted.parents) if one.exists()) if is_local else Path(tempfile.gettempdir())
    free_bytes = shutil.disk_usage(folder).free
    # The newest, that of the lowest loss, and the one being written.
    num_checkpoints = config.run.keep_checkpoints + 2 if is_local else 1
    needed_bytes = num_parameters * (num_checkpoints * CHECKPOINT_BYTES_PER_PARAMETER + EXPORT_BYTES_PER_PARAMETER)
    needs = f"the run writes up to {_gb(needed_bytes)}: {num_checkpoints} checkpoints and the export"
    text = f"{_gb(free_bytes)} free in {folder.resolve()}; {needs}"
    if free_bytes < needed_bytes:
        more = "or keep fewer with --keep-checkpoints 1" if is_local else "(or with TMPDIR)"
        yield error("disk", f"{text}.", f"Free some space, name a larger disk with --output-dir {more}.")
    else:
        yield ok("disk", text)


def check_memory(config: TrainingConfig, num_parameters: int) -> Iterator[Finding]:
    """Check that the host's memory is enough for a run.

    On the CPU that is weights, gradients and moments; with a TPU or GPU the copy that becomes a checkpoint.
    """
    available_bytes = available_memory_bytes()
    per_parameter = CHECKPOINT_BYTES_PER_PARAMETER if config.hardware.wants_tpu else STATE_BYTES_PER_PARAMETER
    needed_bytes = LIBRARIES_BYTES + num_parameters * per_parameter
    needs = f"the run needs {_gb(needed_bytes)}, plus activations if it trains on the CPU"
    text = f"{_gb(available_bytes)} of memory available; {needs}"
    if available_bytes < needed_bytes:
        fix = "End other programs, use a machine with more, or a smaller model (--preset)."
        yield error("memory", f"{text}.", fix)
    else:
        yield ok("memory", text)


def available_memory_bytes() -> int:
    """Measure what programs may still take of this machine's memory."""
    if not MEMORY_FILE.exists():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    fields = dict(line.split(":", 1) for line in MEMORY_FILE.read_text(encoding="utf-8").splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
