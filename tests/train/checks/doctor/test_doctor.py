"""The doctor on a run of which something is wrong, and the whole command."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.doctor_cases import PROJECT, config_of, found, install, modules, only_error
from tests.fixtures.tiny_phases import phases_flags, phases_with
from tests.fixtures.tiny_run import run_flags, write_shards
from tests.servers.fixtures import CloudStorageHandle, HubHandle
from train import doctor
from train.checks.doctor import run_inputs


@pytest.fixture(scope="module")
def made_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def shards(made_shards: Path, tmp_path: Path) -> Path:
    """Shards that a test may damage."""
    return Path(shutil.copytree(made_shards, tmp_path / "shards"))


def test_shards_that_fit(shards: Path, tmp_path: Path) -> None:
    findings = found(run_inputs.check_data, config_of(*run_flags(shards, tmp_path / "run")))
    assert [one.status for one in findings] == ["ok", "ok"]
    assert "rows of 16 tokens, fit the tokenizer" in findings[0].text


def test_shards_of_phases(phase_shards: Path, tmp_path: Path) -> None:
    findings = found(run_inputs.check_data, config_of(*phases_flags(phase_shards, tmp_path / "run")))
    assert [one.status for one in findings] == ["ok"] * 6
    assert "rows of 32 tokens, fit the tokenizer" in findings[5].text
    wrong = phases_with(2, max_length=16)
    findings = found(run_inputs.check_data, config_of(*phases_flags(phase_shards, tmp_path / "run", wrong)))
    assert "Phase `long rows`: --max-length must be the shards' 32" in only_error(findings)


@pytest.mark.slow
def test_shards_that_tensorflow_may_not_read(
    shards: Path, cloud: CloudStorageHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two clients find credentials each in its own way; here that of TensorFlow is not let in."""
    for path in (path for path in shards.rglob("*") if path.is_file()):
        cloud.put(f"shards/{path.relative_to(shards)}", path.read_bytes())
    cloud.authorize(accepted_tokens=[""])
    for name, value in cloud.environment.items():
        monkeypatch.setenv(name, value)
    config = config_of("--train-dataset", f"{cloud.bucket_url}/shards/train")
    assert [one.status for one in found(run_inputs.check_data, config)] == ["ok"]
    line = only_error(found(run_inputs.check_run, config))
    assert "TensorFlow must be able to read the shards; gs://test-bucket/shards/train/" in line
    assert "gave PermissionDeniedError" in line


def test_shards_whose_preparation_did_not_end(shards: Path, tmp_path: Path) -> None:
    (shards / "train" / "manifest.json").unlink()
    line = only_error(found(run_inputs.check_data, config_of(*run_flags(shards, tmp_path / "run"))))
    assert "so its preparation did not end. Run prepare-tfrecord" in line


def test_a_run_that_would_be_refused(shards: Path, tmp_path: Path) -> None:
    flags = run_flags(shards, tmp_path / "run", "--per-replica-batch-size", "100000")
    assert "must not exceed the data set's" in only_error(found(run_inputs.check_run, config_of(*flags)))


def test_a_model_too_large_for_disk_and_memory(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_inputs, "ask_tensorflow", lambda *_: {"num_parameters": 10**12, "summary": "bert"})
    findings = found(run_inputs.check_run, config_of(*run_flags(shards, tmp_path / "run")))
    assert [(one.status, one.subject) for one in findings] == [("ok", "run"), ("error", "disk"), ("error", "memory")]


def test_a_model_that_cannot_be_built(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken").mkdir()
    modules(tmp_path / "broken", monkeypatch, tensorflow____init__="import os; os.abort()")
    line = only_error(found(run_inputs.check_run, config_of(*run_flags(shards, tmp_path / "run"))))
    assert "preparing the run crashed (SIGABRT)" in line


def test_the_command_names_all_errors_at_once(
    shards: Path, tmp_path: Path, hub_here: HubHandle, monkeypatch: pytest.MonkeyPatch, run: Any
) -> None:
    (tmp_path / "broken").mkdir()
    modules(tmp_path / "broken", monkeypatch, tensorflow____init__="raise ImportError('libtpu.so: missing')")
    monkeypatch.setenv("HF_TOKEN", hub_here.read_token)
    (shards / "train" / "manifest.json").unlink()
    more = ("--tpu-name", "local", "--hub-model-id", "alice/model")
    outcome = run(doctor.main, *run_flags(shards, tmp_path / "run", *more))
    assert outcome.status == 1
    errors = [line.split()[1] for line in outcome.out.splitlines() if line.startswith("error")]
    assert errors == ["import", "TPU", "data", "Hub"]
    assert "warning  run            was not checked: fix the errors above first." in outcome.out
    assert "4 errors" in outcome.out
    assert outcome.error.startswith("error: Some checks failed")


@pytest.mark.slow
def test_the_command_on_a_run_that_is_well(
    shards: Path, cloud_storage: CloudStorageHandle, hub_server: HubHandle
) -> None:
    """Everything is asked as it is: TensorFlow, Cloud Storage and the Hub."""
    for path in (path for path in shards.rglob("*") if path.is_file()):
        cloud_storage.put(f"shards/{path.relative_to(shards)}", path.read_bytes())
    url = cloud_storage.bucket_url
    flags = [flag.replace(str(shards), f"{url}/shards") for flag in run_flags(shards, f"{url}/run")]
    command = [sys.executable, str(PROJECT / "train" / "doctor.py"), *flags, "--hub-model-id", "alice/tiny"]
    environment = os.environ | hub_server.environment | cloud_storage.environment
    done = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", check=False)
    lines = [line.split()[:2] for line in done.stdout.splitlines() if line[:5].strip() in ("ok", "warni", "error")]
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert {subject for status, subject in lines if status == "ok"} >= {
        "Python", "packages", "TensorFlow", "tf-keras", "import", "TPU", "credentials", "bucket", "data", "Hub", "run",
        "disk", "memory",
    }  # fmt: skip
    assert not any(name.startswith("run/") for name in cloud_storage.objects())


def run_doctor(*flags: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(PROJECT / "train" / "doctor.py"), *flags]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, encoding="utf-8", check=False)


def test_the_command_without_transformers(tmp_path: Path) -> None:
    """It says what is wrong although nothing can read its flags."""
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text("", encoding="utf-8")
    install(tmp_path, "tensorflow-tpu", "2.20.0")
    done = run_doctor("--tpu-name", "local", PYTHONPATH=f"{tmp_path}{os.pathsep}{PROJECT}")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[0].startswith("error    flags          cannot be read: No module named 'transformers.hf_argparser'")
    assert any("tensorflow-tpu 2.20.0 are both installed" in line for line in lines)
    assert done.stderr.splitlines()[-1] == "error: Some checks failed; each error line says how to fix it."


def test_the_command_without_the_project() -> None:
    script = str(PROJECT / "train" / "doctor.py")
    done = subprocess.run([sys.executable, "-I", "-S", script], capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 1
    assert "python3 install.py" in done.stdout


def test_bad_flags() -> None:
    assert run_doctor("--no-such-flag").returncode == 2
    done = run_doctor("--log-steps", "0")
    assert (done.returncode, done.stderr.strip()) == (2, "error: --log-steps must be at least 1; received 0.")
