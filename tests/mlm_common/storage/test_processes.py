"""Storage as programs of their own see it: what importing costs, credentials, and TensorFlow beside it."""

import os
import subprocess
import sys

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
