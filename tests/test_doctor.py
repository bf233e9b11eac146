"""The doctor on a machine and on a run of which something is wrong: each error is provoked."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from tests.servers.fixtures import CloudStorageHandle, HubHandle
from tests.test_doctor_packages import install, modules
from tests.tiny_corpus import wrapped
from tests.tiny_run import run_flags, write_shards
from tokenizer_training.command_line import parse_arguments
from tokenizer_training.tokenizer import SPECIAL_TOKENS, save_tokenizer
from train import doctor
from train.config import SUBJECTS, TrainingConfig
from train.doctor_checks import cloud as cloud_checks
from train.doctor_checks import machine, packages, run_inputs, tpu
from train.doctor_checks.findings import Check, Finding
from train.presets import preset_settings

PROJECT = Path(__file__).parent.parent


def config_of(*flags: str) -> TrainingConfig:
    return TrainingConfig(*parse_arguments(SUBJECTS, flags, "", preset_settings))


def found(function: Any, *arguments: Any) -> list[Finding]:
    """Return what the doctor prints of a check: errors that it raises are findings."""
    return list(Check("x", lambda: function(*arguments)).findings())


def only_error(findings: Iterable[Finding]) -> str:
    (error,) = (one for one in findings if one.status == "error")
    return " ".join(str(error).split())


@pytest.fixture(scope="module")
def made_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def shards(made_shards: Path, tmp_path: Path) -> Path:
    """Shards that a test may damage."""
    run_inputs.inputs_of.cache_clear()
    return Path(shutil.copytree(made_shards, tmp_path / "shards"))


# Disk and memory.


def test_a_full_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = config_of("--output-dir", str(tmp_path / "not yet" / "run"))
    usage = SimpleNamespace(free=3_000_000_000)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: usage)
    assert [one.status for one in found(machine.check_disk, config)] == ["ok"]
    line = only_error(found(machine.check_disk, config, 125_000_000))
    assert f"3.0 GB free in {tmp_path}; the run writes up to 6.5 GB: 4 checkpoint(s) and the export. Free some" in line
    assert [one.status for one in found(machine.check_disk, config, 10_000_000)] == ["ok"]
    usage.free = 1_000_000_000
    assert [one.status for one in found(machine.check_disk, config)] == ["warning"]


def test_little_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config, limit = config_of(), tmp_path / "memory.max"
    monkeypatch.setattr(machine, "CONTAINER_LIMIT_FILES", (limit,))
    without_limit = machine.available_memory_bytes()
    limit.write_text("max\n")
    assert machine.available_memory_bytes() > without_limit / 2
    limit.write_text("1500000000\n")
    assert [one.status for one in found(machine.check_memory, config)] == ["warning"]
    line = only_error(found(machine.check_memory, config, 125_000_000))
    assert "1.5 GB of memory available; the run takes 3.0 GB" in line
    assert line.endswith("a smaller model (--preset).")


# The TPU.


def builds(folder: Path, *names: str) -> dict[str, Distribution]:
    for name in names:
        install(folder, name, "2.20.0")
    return packages.installed_packages([str(folder)])


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A file in the place of /dev/accel0; the machine says it is a v3-8."""
    (tmp_path / "accel0").touch()
    monkeypatch.setattr("train.tpu_devices.tpu_devices", lambda: [tmp_path / "accel0"])
    monkeypatch.setattr(tpu, "tpu_devices", lambda: [tmp_path / "accel0"])
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v3-8")
    return tmp_path / "accel0"


def test_machines_without_a_tpu(tmp_path: Path) -> None:
    assert [one.status for one in found(tpu.check_tpu, config_of(), {})] == ["ok"]
    (one,) = found(tpu.check_tpu, config_of(), builds(tmp_path, "tensorflow-tpu"))
    assert one.status == "warning"
    assert "tensorflow-tpu is installed, and there is no TPU" in one.text
    line = only_error(found(tpu.check_tpu, config_of("--tpu-name", "local"), {}))
    assert "this one has no /dev/accel* and no /dev/vfio/*. Check that this is the TPU VM" in line


def test_a_tpu_that_lies_idle(device: Path) -> None:
    (one,) = found(tpu.check_tpu, config_of(), {})
    assert (one.status, one.subject) == ("warning", "TPU")
    assert "(v3-8, 16 GiB a replica), and without --tpu-name a run computes on the CPU. Give --tpu-name" in one.text
    assert [one.status for one in found(tpu.check_tpu, config_of("--no-tpu"), {})] == ["ok"]
    assert device.exists()


def test_the_wrong_tensorflow_for_a_tpu(device: Path) -> None:
    line = only_error(found(tpu.check_tpu, config_of("--tpu-name", "local"), builds(device.parent, "tensorflow")))
    assert "--tpu-name local needs tensorflow-tpu; the TensorFlow installed is that for CPU and GPU. In an env" in line


def test_a_tpu_that_another_process_holds(device: Path) -> None:
    installed = builds(device.parent, "tensorflow-tpu")
    program = "import sys; file = open(sys.argv[1]); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program, str(device)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout
        holder.stdout.readline()
        line = only_error(found(tpu.check_tpu, config_of("--tpu-name", "local"), installed))
        assert f"is held by process {holder.pid} ({sys.executable} -c" in line
        assert line.endswith("serves one at a time. End it: kill NUMBER")
        holder.communicate(timeout=30)


def test_a_tpu_that_does_not_answer(device: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = builds(device.parent, "tensorflow-tpu")
    modules(device.parent, monkeypatch, tensorflow____init__="import os; os.abort()")
    line = only_error(found(tpu.check_tpu, config_of("--tpu-name", "local"), installed))
    assert "connecting to local crashed (SIGABRT)" in line
    assert "Restart the TPU VM" in line
    monkeypatch.setattr(tpu, "CONNECT_SECONDS", 2.0)
    modules(device.parent, monkeypatch, tensorflow____init__="import time; time.sleep(600)")
    assert "did not answer within 2 s" in only_error(found(tpu.check_tpu, config_of("--tpu-name", "local"), installed))


def test_a_tpu_that_tensorflow_does_not_find(device: Path) -> None:
    """TensorFlow itself is asked, on a machine where it has only the CPU."""
    installed = builds(device.parent, "tensorflow-tpu")
    line = only_error(found(tpu.check_tpu, config_of("--tpu-name", "local"), installed))
    assert "--tpu-name must name a TPU that can be reached; local gave" in line
    assert "that no other process holds it" in line


def test_a_tpu_that_answers(device: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu, "ask_tensorflow", lambda *_: {"num_replicas": 8})
    (one,) = found(tpu.check_tpu, config_of("--tpu-name", "local"), builds(device.parent, "tensorflow-tpu"))
    assert (one.status, one.text) == ("ok", "v3-8, 16 GiB a replica, 8 replica(s)")


def test_a_tpu_by_name_with_a_local_folder_and_with_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("--tpu-name", "pod", "--output-dir", "here")
    assert "--output-dir must be in Cloud Storage" in only_error(found(tpu.check_tpu, config, {}))
    monkeypatch.setenv("TF_CONFIG", "{")
    assert "TF_CONFIG must be like" in only_error(found(tpu.check_tpu, config, {}))


# Google Cloud.


def bucket_config(*more: str) -> TrainingConfig:
    return config_of("--train-dataset", "gs://test-bucket/train", "--output-dir", "gs://test-bucket/run", *more)


def test_buckets(cloud: CloudStorageHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:9")
    lines = [str(one) for one in found(cloud_checks.check_buckets, bucket_config())]
    assert [line.split()[:2] for line in lines] == [["ok", "bucket"], ["ok", "bucket"], ["ok", "region"]]
    assert "is in US-CENTRAL1; --tpu-zone would compare it" in lines[2]
    assert not cloud.objects()
    near, far = (bucket_config("--tpu-zone", zone) for zone in ("us-central1-b", "europe-west4-a"))
    assert str(found(cloud_checks.check_buckets, near)[-1]).endswith("is in US-CENTRAL1, the TPU in us-central1-b")
    last = found(cloud_checks.check_buckets, far)[-1]
    assert last.status == "warning"
    assert "reading is slow, and traffic between regions costs" in last.text
    assert "gcloud storage buckets create gs://NAME --location europe-west4" in last.text


def test_the_region_of_a_bucket_that_may_not_be_seen(cloud: CloudStorageHandle) -> None:
    cloud.fault(r"/b/test-bucket\?", status=403, times=10)  # the client looks once by itself
    last = found(cloud_checks.check_buckets, bucket_config("--tpu-zone", "us-central1-b"))[-1]
    assert last.status == "warning"
    assert "the account lacks storage.buckets.get. Compare it with the TPU's zone by: gcloud storage" in last.text


@pytest.mark.parametrize(
    ("location", "places", "zone", "is_near"),
    [
        ("US", None, "us-east1-d", True),
        ("EU", None, "us-east1-d", False),
        ("US", ["US-EAST1", "US-WEST1"], "us-east1-d", True),
        ("ASIA-EAST1", None, "asia-east1-c", True),
    ],
)
def test_multi_regions_and_pairs(location: str, places: list[str] | None, zone: str, is_near: bool) -> None:
    bucket = SimpleNamespace(location=location, data_locations=places)
    assert cloud_checks._is_near(bucket, zone) == is_near


def test_a_bucket_that_refuses(cloud: CloudStorageHandle) -> None:
    cloud.authorize(denied_permissions=["storage.objects.create"])
    line = only_error(found(cloud_checks.check_buckets, bucket_config()))
    assert "gs://test-bucket/run/.writable needs permission. Grant the account in use, which lacks" in line
    cloud.authorize(denied_buckets=["test-bucket"])
    assert "gs://test-bucket/train needs permission. Grant" in only_error(
        found(cloud_checks.check_buckets, bucket_config())
    )
    cloud.authorize(accepted_tokens=["another"])
    line = only_error(found(cloud_checks.check_buckets, bucket_config()))
    assert "needs Google credentials, and none were found or accepted. Run `gcloud auth application-default" in line


def test_a_bucket_that_is_not_there(cloud: CloudStorageHandle) -> None:
    line = only_error(found(cloud_checks.check_buckets, config_of("--output-dir", "gs://no-such-bucket/run")))
    assert "there is no gs://no-such-bucket. Make it with `gcloud storage buckets create gs://no-such-bucket`" in line
    assert cloud.requests()


PRINT_CREDENTIALS = """
from tests.test_doctor import bucket_config, cloud_checks, found
print(*found(cloud_checks.check_credentials, bucket_config()), sep="\\n")
"""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "ok credentials Credentials"),
        ({"NO_GCE_CHECK": "true"}, "gs://test-bucket/train needs Google credentials, and none were found or accepted."),
    ],
)
def test_credentials(cloud_storage: CloudStorageHandle, changes: dict[str, str], message: str) -> None:
    """In a process of its own, since google-auth reads where the metadata server is when it is imported."""
    environment = {**os.environ, **cloud_storage.environment, **changes, "PYTHONPATH": str(PROJECT)}
    done = subprocess.run(
        [sys.executable, "-c", PRINT_CREDENTIALS], env=environment, capture_output=True, text=True, check=True
    )
    assert message in " ".join(done.stdout.split())


# The Hub.


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


# Shards, tokenizer, model, output folder.


def save_small_tokenizer(folder: Path) -> None:
    """Write a tokenizer that knows the special tokens only."""
    ids = {token: index for index, token in enumerate(SPECIAL_TOKENS.values())}
    backend = Tokenizer(models.WordLevel(ids, unk_token=SPECIAL_TOKENS["unk"]))
    save_tokenizer(wrapped(backend), str(folder))


def test_shards_that_fit(shards: Path, tmp_path: Path) -> None:
    findings = found(run_inputs.check_data, config_of(*run_flags(shards, tmp_path / "run")))
    assert [one.status for one in findings] == ["ok", "ok"]
    assert "rows of 16 tokens, fit the tokenizer" in findings[0].text


def test_another_tokenizer(shards: Path, tmp_path: Path) -> None:
    save_small_tokenizer(tmp_path / "small")
    flags = (*run_flags(shards, tmp_path / "run"), "--tokenizer", str(tmp_path / "small"))
    line = only_error(found(run_inputs.check_data, config_of(*flags)))
    assert "--tokenizer must be the one the shards were made with" in line
    assert "Leave --tokenizer out" in line
    assert not found(run_inputs.check_run, config_of(*flags))  # said once


def test_another_tokenizer_for_shards_without_a_manifest(shards: Path, tmp_path: Path) -> None:
    save_small_tokenizer(tmp_path / "small")
    for index, path in enumerate(sorted((shards / "train").glob("*.tfrecord"))):
        num_rows = path.stem.rpartition("-")[2]
        path.rename(path.with_name(f"dataset-{index}-{num_rows}.tfrecord"))
    (shards / "train" / "manifest.json").unlink()
    flags = ("--train-dataset", str(shards / "train"), "--tokenizer", str(tmp_path / "small"))
    line = only_error(found(run_inputs.check_data, config_of(*flags)))
    assert "; the tokenizer has 5. Name the tokenizer that the shards were made with by --tokenizer." in line


def test_shards_that_tensorflow_may_not_read(
    shards: Path, cloud: CloudStorageHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The two clients find credentials each in its own way; here that of TensorFlow is not let in."""
    for path in (path for path in shards.rglob("*") if path.is_file()):
        cloud.put(f"shards/{path.relative_to(shards)}", path.read_bytes())
    cloud.authorize(accepted_tokens=[""])
    for name, value in cloud.environment.items():
        monkeypatch.setenv(name, value)
    findings = found(run_inputs.check_data, config_of("--train-dataset", f"{cloud.bucket_url}/shards/train"))
    assert findings[0].status == "ok"
    assert "TensorFlow must be able to read the shards; gs://test-bucket/shards/train/" in only_error(findings)
    assert "gave PermissionDeniedError" in only_error(findings)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: shutil.rmtree(folder), "is missing or holds none. Give the folder of one split"),
        (lambda folder: (folder / "manifest.json").unlink(), "so its preparation did not end. Run prepare-tfrecord"),
        (lambda folder: min(folder.glob("*.tfrecord")).unlink(), "lacks dataset-00000-00000-5.tfrecord. Copy the"),
        (lambda folder: min(folder.glob("*.tfrecord")).write_bytes(b""), "has 0 bytes of"),
    ],
)
def test_damaged_shards(shards: Path, tmp_path: Path, damage: Any, message: str) -> None:
    damage(shards / "train")
    line = only_error(found(run_inputs.check_data, config_of(*run_flags(shards, tmp_path / "run"))))
    assert message in line


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--per-replica-batch-size", "100000"], "must not exceed the data set's"),
        (["--config-overrides", "max_position_embeddings=8"], "Rows must fit the model's positions"),
        (["--init-from", "nowhere"], "--init-from:"),
        (["--output-dir", "{}/train"], "must be an empty folder or that of this run"),
        (["--output-dir", "/dev/null/run"], "The folder of the output must be writable"),
        (["--resume", "must"], "--resume must needs a run with a checkpoint"),
    ],
)
def test_a_run_that_would_be_refused(shards: Path, tmp_path: Path, more: list[str], message: str) -> None:
    flags = [*run_flags(shards, tmp_path / "run"), *(flag.format(shards) for flag in more)]
    assert message in only_error(found(run_inputs.check_run, config_of(*flags)))


def test_a_model_too_large_for_disk_and_memory(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_inputs, "ask_tensorflow", lambda *_: {"num_parameters": 10**12})
    findings = found(run_inputs.check_run, config_of(*run_flags(shards, tmp_path / "run")))
    assert [(one.status, one.subject) for one in findings] == [
        ("ok", "output"), ("ok", "model"), ("error", "disk"), ("error", "memory"),
    ]  # fmt: skip


def test_a_model_that_cannot_be_built(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken").mkdir()
    modules(tmp_path / "broken", monkeypatch, tensorflow____init__="import os; os.abort()")
    line = only_error(found(run_inputs.check_run, config_of(*run_flags(shards, tmp_path / "run"))))
    assert "building the model crashed (SIGABRT)" in line


# The whole command.


def test_the_command_names_all_errors_at_once(
    shards: Path, tmp_path: Path, hub_here: HubHandle, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "broken").mkdir()
    modules(tmp_path / "broken", monkeypatch, tensorflow____init__="raise ImportError('libtpu.so: missing')")
    monkeypatch.setenv("HF_TOKEN", hub_here.read_token)
    (shards / "train" / "manifest.json").unlink()
    more = ("--tpu-name", "local", "--hub-model-id", "alice/model")
    assert doctor.main(run_flags(shards, tmp_path / "run", *more)) == 1
    shown = capsys.readouterr()
    errors = [line.split()[1] for line in shown.out.splitlines() if line.startswith("error")]
    assert errors == ["import", "TPU", "data", "Hub"]
    assert "4 errors" in shown.out
    assert shown.err.splitlines()[-1].startswith("error: Not all is well")


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
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [line.split()[:2] for line in done.stdout.splitlines() if line[:5].strip() in ("ok", "warni", "error")]
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert {subject for status, subject in lines if status == "ok"} >= {
        "Python", "packages", "TensorFlow", "tf-keras", "import", "TPU", "credentials", "bucket", "region", "data",
        "output", "model", "disk", "memory", "Hub",
    }  # fmt: skip
    assert not any(name.startswith("run/") for name in cloud_storage.objects())
