"""Google Cloud: credentials, and the buckets of a run: readable, writable, in the TPU's region."""

import os
from collections.abc import Iterator
from typing import Any

from mlm_common.errors import InputError
from mlm_common.storage import Folder, gcs_client, open_folder
from train.checks.doctor.findings import Finding, ok, warning
from train.config.settings import TrainingConfig
from train.runtime.phases import phases_of
from train.runtime.tpu import read_metadata

EMULATOR_VARIABLE = "STORAGE_EMULATOR_HOST"
SCOPE = "https://www.googleapis.com/auth/cloud-platform"
# https://cloud.google.com/storage/docs/locations: how the regions begin that a multi-region is made of.
MULTI_REGIONS = {"us": "us-", "eu": "europe-", "asia": "asia-"}
# The same page: pairs of regions that have names; of other pairs the bucket names both regions.
NAMED_PAIRS = {
    "asia1": ("asia-northeast1", "asia-northeast2"),
    "eur4": ("europe-north1", "europe-west4"),
    "eur5": ("europe-west1", "europe-west2"),
    "eur7": ("europe-west2", "europe-west3"),
    "eur8": ("europe-west3", "europe-west6"),
    "nam4": ("us-central1", "us-east1"),
}


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
    """Check each folder in Cloud Storage: readable, writable if a run writes to it, and in the TPU's region."""
    for flag, folder in cloud_folders(config).items():
        num_files = len(folder.list_files())
        if flag == "--output-dir":
            folder.check_writable()
            yield ok("bucket", f"{flag} {folder} can be read and written")
        else:
            yield ok("bucket", f"{flag} {folder} can be read, {num_files} files")
    zone = tpu_zone(config)
    buckets = {gcs_client.PREFIX + gcs_client.bucket_and_name(one.path)[0] for one in cloud_folders(config).values()}
    for bucket in sorted(buckets):
        yield from _check_region(bucket, zone)


def tpu_zone(config: TrainingConfig) -> str | None:
    """Find the zone of the TPU that is named, or of this machine where it is one of Google Cloud."""
    return config.hardware.tpu_zone or (read_metadata("instance/zone", 2.0) or "").rpartition("/")[2] or None


def _check_region(bucket: str, zone: str | None) -> Iterator[Finding]:
    show = f"gcloud storage buckets describe {bucket} --format='value(location)'"
    try:
        with gcs_client.explained_errors(bucket):
            details = gcs_client.blob_at(f"{bucket}/x").bucket
            details.reload()
    except (InputError, FileNotFoundError):
        text = f"the region of {bucket} cannot be seen: the account lacks storage.buckets.get."
        yield warning("region", text, f"Compare it with the TPU's zone: {show}")
        return
    location = details.location
    if zone is None:
        yield ok("region", f"{bucket} is in {location}; --tpu-zone would compare it with the TPU's")
    elif _is_near(details, zone):
        yield ok("region", f"{bucket} is in {location}, the TPU in {zone}")
    else:
        region = zone.rpartition("-")[0]
        text = f"{bucket} is in {location}, the TPU in {zone}: reading is slow, and traffic between regions is billed."
        fix = f"Create a bucket there and copy the data: gcloud storage buckets create gs://NAME --location {region}"
        yield warning("region", text, fix)


def _is_near(bucket: Any, zone: str) -> bool:
    """Return whether a zone is in the bucket's region, multi-region, or pair of regions."""
    region = zone.rpartition("-")[0]
    places = [place.lower() for place in (bucket.data_locations or [bucket.location])]
    begins = tuple(MULTI_REGIONS[place] for place in places if place in MULTI_REGIONS)
    return region.startswith(begins) or any(region in NAMED_PAIRS.get(place, (place,)) for place in places)
