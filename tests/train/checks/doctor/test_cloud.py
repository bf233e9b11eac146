"""The doctor on Google Cloud and the Hub: credentials, permissions, regions, tokens."""

import os
import subprocess
import sys

import pytest

from tests.fixtures.doctor_cases import PROJECT, bucket_config, config_of, found, only_error
from tests.servers.fixtures import CloudStorageHandle, HubHandle
from train.checks.doctor import run_inputs


def test_buckets(cloud: CloudStorageHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:9")
    lines = [str(one) for one in found(run_inputs.check_buckets, bucket_config())]
    assert [line.split()[:2] for line in lines] == [["ok", "bucket"], ["ok", "bucket"]]
    assert not cloud.objects()
    near, far = (bucket_config("--tpu-zone", zone) for zone in ("us-central1-b", "europe-west4-a"))
    assert str(found(run_inputs.check_buckets, near)[-1]).endswith("is in us-central1, the TPU in us-central1")
    last = found(run_inputs.check_buckets, far)[-1]
    assert last.status == "warning"
    assert "reading is slow, and traffic is billed" in last.text
    assert "gcloud storage buckets create gs://NAME --location europe-west4" in last.text
    cloud.fault(r"/b/test-bucket\?", status=403, times=10)  # the client retries once
    assert [one.subject for one in found(run_inputs.check_buckets, far)] == ["bucket", "bucket"]


def test_a_bucket_that_refuses(cloud: CloudStorageHandle) -> None:
    cloud.authorize(denied_permissions=["storage.objects.create"])
    line = only_error(found(run_inputs.check_buckets, bucket_config()))
    assert "gs://test-bucket/run/.writable needs permission. Grant the account in use, which lacks" in line
    cloud.authorize(denied_buckets=["test-bucket"])
    assert "gs://test-bucket/train needs permission. Grant" in only_error(
        found(run_inputs.check_buckets, bucket_config())
    )
    cloud.authorize(accepted_tokens=["another"])
    line = only_error(found(run_inputs.check_buckets, bucket_config()))
    assert "needs Google credentials, and none were found or accepted. Run `gcloud auth application-default" in line


def test_a_bucket_that_is_not_there(cloud: CloudStorageHandle) -> None:
    line = only_error(found(run_inputs.check_buckets, config_of("--output-dir", "gs://no-such-bucket/run")))
    assert "there is no gs://no-such-bucket. Create it with `gcloud storage buckets create gs://no-such-bucket`" in line
    assert cloud.requests()


PRINT_CREDENTIALS = """
from tests.fixtures.doctor_cases import bucket_config, found
from train.checks.doctor.run_inputs import check_credentials
print(*found(check_credentials, bucket_config()), sep="\\n")
"""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "ok credentials Credentials"),
        ({"NO_GCE_CHECK": "true"}, "gs://test-bucket/train needs Google credentials, and none were found or accepted."),
    ],
)
def test_credentials(cloud_storage: CloudStorageHandle, changes: dict[str, str], message: str) -> None:
    """In a separate process, since google-auth reads where the metadata server is when it is imported."""
    environment = {**os.environ, **cloud_storage.environment, **changes, "PYTHONPATH": str(PROJECT)}
    done = subprocess.run(
        [sys.executable, "-c", PRINT_CREDENTIALS], env=environment, capture_output=True, encoding="utf-8", check=True
    )
    assert message in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("token", "message"),
    [
        ("", "needs a Hub token; log in with `hf auth login`"),
        ("hf_unknown", "refused this one. Log in again"),
        (HubHandle.read_token, "role is 'read'. Make one with the role 'write'"),
        (HubHandle.fine_grained_token, "role is 'fineGrained'"),
        (HubHandle.write_token, ""),
    ],
)
def test_tokens(hub_here: HubHandle, monkeypatch: pytest.MonkeyPatch, token: str, message: str) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    findings = found(run_inputs.check_hub, config_of("--hub-model-id", "alice/model"))
    if message:
        assert message in only_error(findings)
    else:
        assert [one.text for one in findings] == ["the token may write to alice/model"]
    assert hub_here.repository("alice/model") is None
