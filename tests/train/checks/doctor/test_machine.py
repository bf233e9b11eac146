"""The doctor on disk, memory and TPU of which something is wrong."""

import subprocess
import sys
from importlib.metadata import Distribution
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.fixtures.doctor_cases import config_of, found, install, modules, only_error
from train.checks.doctor import packages, run_inputs, tpu


def test_a_full_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = config_of("--output-dir", str(tmp_path / "not yet" / "run"))
    monkeypatch.setattr(run_inputs.shutil, "disk_usage", lambda _: SimpleNamespace(free=3_000_000_000))
    line = only_error(found(run_inputs.check_disk, config, 125_000_000))
    assert f"3.0 GB free in {tmp_path}; the run writes up to 6.5 GB: 4 checkpoints and the export. Free some" in line
    assert [one.status for one in found(run_inputs.check_disk, config, 10_000_000)] == ["ok"]


def test_little_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run_inputs, "MEMORY_FILE", tmp_path / "meminfo")
    run_inputs.MEMORY_FILE.write_text("MemTotal: 9 kB\nMemAvailable: 1500000 kB\n", encoding="utf-8")
    assert [one.status for one in found(run_inputs.check_memory, config_of(), 10_000_000)] == ["ok"]
    line = only_error(found(run_inputs.check_memory, config_of(), 125_000_000))
    assert "1.5 GB of memory available; the run needs 3.0 GB" in line
    assert line.endswith("a smaller model (--preset).")


def builds(folder: Path, *names: str) -> dict[str, Distribution]:
    for name in names:
        install(folder, name, "2.20.0")
    return packages.installed_packages([str(folder)])


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A file instead of /dev/accel0; the machine says it is a v3-8."""
    (tmp_path / "accel0").touch()
    monkeypatch.setattr("train.runtime.machines.tpu_devices", lambda: [tmp_path / "accel0"])
    monkeypatch.setattr(tpu, "tpu_devices", lambda: [tmp_path / "accel0"])
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v3-8")
    return tmp_path / "accel0"


def test_machines_without_a_tpu(tmp_path: Path) -> None:
    assert [one.status for one in found(tpu.check_tpu, config_of(), {})] == ["ok"]
    (one,) = found(tpu.check_tpu, config_of(), builds(tmp_path, "tensorflow-tpu"))
    assert one.status == "warning"
    assert "tensorflow-tpu is installed, but this machine has no TPU" in one.text
    line = only_error(found(tpu.check_tpu, config_of("--tpu-name", "local"), {}))
    assert "this one has no /dev/accel* and no /dev/vfio/*. Check that this is the TPU VM" in line


def test_a_tpu_that_lies_idle(device: Path) -> None:
    (one,) = found(tpu.check_tpu, config_of(), {})
    assert (one.status, one.subject) == ("warning", "TPU")
    assert "(v3-8, 16 GiB per replica), but without --tpu-name a run trains on the CPU. Pass --tpu-name" in one.text
    assert [one.status for one in found(tpu.check_tpu, config_of("--no-tpu"), {})] == ["ok"]
    assert device.exists()


def test_the_wrong_tensorflow_for_a_tpu(device: Path) -> None:
    line = only_error(found(tpu.check_tpu, config_of("--tpu-name", "local"), builds(device.parent, "tensorflow")))
    assert "--tpu-name local needs tensorflow-tpu; the installed TensorFlow is the one for CPUs and GPUs. Make" in line


def test_a_tpu_that_another_process_holds(device: Path) -> None:
    installed = builds(device.parent, "tensorflow-tpu")
    program = "import sys; file = open(sys.argv[1]); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program, str(device)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout
        holder.stdout.readline()
        line = only_error(found(tpu.check_tpu, config_of("--tpu-name", "local"), installed))
        assert f"is in use by process {holder.pid} ({sys.executable} -c" in line
        assert line.endswith("only one process can use it. End that process: kill NUMBER")
        holder.communicate(timeout=30)


def test_a_tpu_that_does_not_answer(device: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = builds(device.parent, "tensorflow-tpu")
    modules(device.parent, monkeypatch, tensorflow____init__="import os; os.abort()")
    line = only_error(found(tpu.check_tpu, config_of("--tpu-name", "local"), installed))
    assert "connecting to local crashed (SIGABRT)" in line
    assert "Restart the TPU VM" in line
    monkeypatch.setattr(tpu, "CONNECT_SECONDS", 1.0)
    modules(device.parent, monkeypatch, tensorflow____init__="import time; time.sleep(600)")
    assert "did not answer within 1 s" in only_error(found(tpu.check_tpu, config_of("--tpu-name", "local"), installed))


@pytest.mark.slow
def test_a_tpu_that_tensorflow_does_not_find(device: Path) -> None:
    """TensorFlow itself is asked, on a machine where it has only the CPU."""
    installed = builds(device.parent, "tensorflow-tpu")
    line = only_error(found(tpu.check_tpu, config_of("--tpu-name", "local"), installed))
    assert "--tpu-name must name a TPU that can be reached; local gave" in line
    assert "that no other process holds it" in line


def test_a_tpu_that_answers(device: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tpu, "ask_tensorflow", lambda *_: {"num_replicas": 8})
    (one,) = found(tpu.check_tpu, config_of("--tpu-name", "local"), builds(device.parent, "tensorflow-tpu"))
    assert (one.status, one.text) == ("ok", "v3-8, 16 GiB per replica, 8 replicas")


def test_a_tpu_by_name_with_a_local_folder_and_with_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("--tpu-name", "pod", "--output-dir", "here")
    assert "--output-dir must be in Cloud Storage" in only_error(found(tpu.check_tpu, config, {}))
    monkeypatch.setenv("TF_CONFIG", "{")
    assert "TF_CONFIG must be like" in only_error(found(tpu.check_tpu, config, {}))
