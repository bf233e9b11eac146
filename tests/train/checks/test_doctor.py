"""The doctor on a run of which something is wrong, on Cloud Storage and the Hub, and the whole command."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.fixtures.doctor_cases import PROJECT, bucket_config, config_of, install, list_findings, modules, only_error
from tests.fixtures.tiny_corpus import contents
from tests.fixtures.tiny_run import run_flags, write_shards
from tests.servers.fixtures import CloudStorageHandle
from train import doctor
from train.checks import machine
from train.checks.machine import findings_of
from train.run_mlm import main as train


@pytest.fixture(scope="module")
def made_shards(tmp_path_factory) -> Path:
    return write_shards(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def shards(made_shards, tmp_path) -> Path:
    """Shards that a test may damage."""
    return Path(shutil.copytree(made_shards, tmp_path / "shards"))


def run_doctor(*flags: str, options: Sequence[str] = (), **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, *options, str(PROJECT / "train" / "doctor.py"), *flags]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, encoding="utf-8", check=False)


def put_shards(shards: Path, cloud: CloudStorageHandle) -> None:
    for path, content in contents(shards).items():
        cloud.put(f"shards/{path}", content)


@pytest.mark.slow
def test_shards_that_tensorflow_may_not_read(shards, cloud, monkeypatch):
    """The two clients find credentials each in its own way; here that of TensorFlow is not let in."""
    put_shards(shards, cloud)
    cloud.authorize(accepted_tokens=[""])
    for name, value in cloud.environment.items():
        monkeypatch.setenv(name, value)
    config = config_of("--train-dataset", f"{cloud.bucket_url}/shards/train")
    line = only_error(list_findings(doctor.check_run, config))
    assert "TensorFlow must be able to read the shards; gs://test-bucket/shards/train/" in line
    assert "gave PermissionDeniedError" in line


def test_a_model_too_large_for_the_disk(shards, tmp_path, monkeypatch):
    answer = {"num_parameters": 10**12, "num_with_one_moment": 0, "summary": "bert"}
    monkeypatch.setattr(doctor, "ask_tensorflow", lambda *_: answer)
    config = config_of(*run_flags(shards, tmp_path / "run"))
    findings = list_findings(doctor.check_run, config)
    assert [(finding.status, finding.subject) for finding in findings] == [("ok", "run"), ("error", "disk")]
    text = f"free in {tmp_path}; the run writes up to 52000.0 GB: 4 checkpoints and the export. Free some"
    assert text in only_error(findings)
    answer["num_with_one_moment"] = 10**12 // 2
    assert "the run writes up to 44000.0 GB: 4 checkpoints" in only_error(list_findings(doctor.check_run, config))


def test_buckets(cloud, monkeypatch):
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:9")
    lines = [str(finding) for finding in list_findings(doctor.check_buckets, bucket_config())]
    assert [line.split()[:2] for line in lines] == [["ok", "bucket"], ["ok", "bucket"]]
    assert not cloud.objects()
    near, far = (bucket_config("--tpu-zone", zone) for zone in ("us-central1-b", "europe-west4-a"))
    assert str(list_findings(doctor.check_buckets, near)[-1]).endswith(
        "is in us-central1, and the TPU is in us-central1"
    )
    last = list_findings(doctor.check_buckets, far)[-1]
    assert last.status == "warning"
    assert "reading is slow, and traffic is billed" in last.text
    assert "gcloud storage buckets create gs://NAME --location europe-west4" in str(last)
    cloud.fault(r"/b/test-bucket\?", status=403, times=10)  # the client retries once
    assert [finding.subject for finding in list_findings(doctor.check_buckets, far)] == ["bucket", "bucket"]


def test_what_is_refused_is_an_error(cloud, hub_here, monkeypatch):
    """A bucket that may not be written to, and a token."""
    cloud.authorize(denied_permissions=["storage.objects.create"])
    line = only_error(list_findings(doctor.check_buckets, bucket_config()))
    assert "Access to gs://test-bucket/run/.writable is denied. Grant the account in use, which lacks" in line
    pushing = config_of("--hub-model-id", "alice/model")
    assert [finding.text for finding in list_findings(doctor.check_hub, pushing)] == [
        "the token may write to alice/model"
    ]
    monkeypatch.setenv("HF_TOKEN", hub_here.read_token)
    assert "the role 'read'. Create one with the role 'write'" in only_error(list_findings(doctor.check_hub, pushing))


def test_a_check_that_breaks_is_an_error_and_ends_alone():
    def broken():
        raise RuntimeError("no such device")
        yield

    (finding,) = findings_of("GPU", broken)
    assert (finding.status, finding.subject) == ("error", "GPU")
    assert "could not be checked: RuntimeError: no such device" in finding.text


def test_a_folder_with_other_files_is_refused_as_by_the_run(shards, tmp_path, run):
    other = tmp_path / "other"
    (tmp_path / "empty").mkdir()
    other.mkdir()
    (other / "notes.txt").write_text("mine", encoding="utf-8")
    for folder in ("empty", "new"):
        assert list_findings(doctor.check_folder, config_of("--output-dir", str(tmp_path / folder))) == []
    refused = run(train, *run_flags(shards, other)).refusal
    assert "contains notes.txt but no run.json" in refused
    line = only_error(list_findings(doctor.check_folder, config_of("--output-dir", str(other))))
    assert line.endswith(refused.removeprefix("error: "))


def test_the_command_names_all_errors_at_once(shards, tmp_path, hub_here, monkeypatch, run):
    (tmp_path / "broken").mkdir()
    modules(tmp_path / "broken", monkeypatch, tensorflow____init__="raise ImportError('libtpu.so: missing')")
    monkeypatch.setenv("HF_TOKEN", hub_here.read_token)
    extra_flags = ("--tpu-name", "local", "--hub-model-id", "alice/model")
    outcome = run(doctor.main, *run_flags(shards, tmp_path / "run", *extra_flags))
    assert outcome.status == 1
    errors = [line.split()[1] for line in outcome.out.splitlines() if line.startswith("error")]
    assert errors == ["import", "TPU", "Hub"]
    assert "warning  run            was not checked: fix the errors above first." in outcome.out
    assert "3 errors" in outcome.out
    assert outcome.error.startswith("error: Some checks failed")


def test_without_its_tpu_here_the_rest_of_a_run_is_checked(shards, tmp_path, monkeypatch, run):
    def ask_here(task, config, *_):
        return machine.TASKS[task](config)

    for module in (machine, doctor):
        monkeypatch.setattr(module, "ask_tensorflow", ask_here)
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5e-4")
    flags = run_flags(shards, tmp_path / "run", "--tpu-name", "local")
    for batch_flags, statuses in (((), ["ok", "ok"]), (("--global-batch-size", "4"), ["error"])):
        outcome = run(doctor.main, *flags, *batch_flags)
        lines = [line.split(maxsplit=2) for line in outcome.out.splitlines() if line]
        assert [status for status, subject, _ in lines if subject in ("run", "disk")] == statuses
        assert [text for status, subject, text in lines if (status, subject) == ("error", "TPU")]
    assert "the 16 rows that 4 replicas process at once" in outcome.out


@pytest.mark.slow
def test_the_command_on_a_run_that_is_well(shards, cloud_storage, hub_server):
    """Everything is asked as it is: TensorFlow, Cloud Storage and the Hub."""
    put_shards(shards, cloud_storage)
    url = cloud_storage.bucket_url
    flags = [flag.replace(str(shards), f"{url}/shards") for flag in run_flags(shards, f"{url}/run")]
    environment = hub_server.environment | cloud_storage.environment
    done = run_doctor(*flags, "--hub-model-id", "alice/tiny", **environment)
    lines = [line.split()[:2] for line in done.stdout.splitlines() if line[:5].strip() in ("ok", "warni", "error")]
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert {subject for status, subject in lines if status == "ok"} >= {
        "Python", "packages", "TensorFlow", "tf-keras", "import", "TPU", "bucket", "Hub", "run", "disk",
    }  # fmt: skip
    assert not any(name.startswith("run/") for name in cloud_storage.objects())


@pytest.mark.slow
def test_the_command_without_transformers(tmp_path):
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text("", encoding="utf-8")
    install(tmp_path, "tensorflow-tpu", "2.20.0")
    done = run_doctor("--tpu-name", "local", PYTHONPATH=f"{tmp_path}{os.pathsep}{PROJECT}")
    assert done.returncode == 1
    assert "tensorflow-tpu 2.20.0 are both installed" in done.stdout
    assert done.stderr.splitlines()[-1] == "error: Some checks failed; each error line says how to fix it."


def test_the_command_without_the_project():
    done = run_doctor(options=("-I", "-S"))
    assert done.returncode == 1
    assert "python3 install.py" in done.stdout
