"""Storage as programs of their own see it: what importing costs, credentials, and TensorFlow beside it."""

import os
import subprocess
import sys

import pytest

from tests.servers.fixtures import CloudStorageHandle

BUCKET = CloudStorageHandle.bucket_url


def run_python(code: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, encoding="utf-8", timeout=120)


def test_import_is_light():
    code = "import sys, mlm_common.corpus.corpus; print(*sys.modules)"
    modules = run_python(code, {}).stdout.split()
    assert "mlm_common.storage" in modules
    assert not {"mlm_common.storage.gcs", "google.cloud.storage", "pyarrow", "datasets", "tensorflow"} & set(modules)


def test_no_credentials(cloud_storage, tmp_path):
    environment = cloud_storage.environment | {"NO_GCE_CHECK": "true", "HOME": str(tmp_path)}
    code = f"from mlm_common.storage import open_folder; open_folder('{BUCKET}').exists('x')"
    assert "InputError: gs://test-bucket/x needs Google credentials" in run_python(code, environment).stderr


@pytest.mark.slow
def test_tensorflow_reads_what_storage_wrote(cloud_storage):
    """As on a cloud machine: Google's addresses, credentials from the metadata server, TensorFlow's own client."""
    cloud_storage.authorize(accepted_tokens=[cloud_storage.token])
    code = f"""
import tempfile
import tensorflow as tf
from mlm_common.storage import open_folder
files = open_folder("{BUCKET}/data/train")
records = [b"record %d" % number for number in range(5)]
with tempfile.TemporaryDirectory() as folder:
    with tf.io.TFRecordWriter(folder + "/dataset-0-5.tfrecord") as writer:
        for record in records:
            writer.write(record)
    files.upload_folder(folder)
files.write_text("manifest.json", "manifest")
(shard,) = tf.io.gfile.glob("{BUCKET}/data/train/*.tfrecord")
assert list(tf.data.TFRecordDataset(shard).as_numpy_iterator()) == records
assert tf.io.gfile.GFile("{BUCKET}/data/train/manifest.json").read() == "manifest"
assert files.list_files()["manifest.json"] == 8
"""
    result = run_python(code, cloud_storage.environment)
    assert result.returncode == 0, result.stderr
    assert {entry["host"] for entry in cloud_storage.requests(path="test-bucket")} <= {
        "storage.googleapis.com",
        "www.googleapis.com",
    }
    assert {entry["token"] for entry in cloud_storage.requests(path="test-bucket")} == {cloud_storage.token}
