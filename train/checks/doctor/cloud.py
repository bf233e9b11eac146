"""Checks of Google Cloud: credentials, and the buckets of a run: readable, writable, in the TPU's region."""

import os
from collections.abc import Iterator

from mlm_common.errors import InputError
from mlm_common.storage import Folder, gcs_client, open_folder
from train.checks.doctor.findings import Finding, ok, warning
from train.config.settings import TrainingConfig
from train.runtime.phases import phases_of
from train.runtime.tpu import read_metadata

EMULATOR_VARIABLE = "STORAGE_EMULATOR_HOST"
SCOPE = "https://www.googleapis.com/auth/cloud-platform"


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
