"""The doctor on the PJRT API of TensorFlow and libtpu, the variables of a TPU, and the devices that are seen."""

from pathlib import Path

import pytest

from tests.fixtures.doctor_cases import config_of, list_findings, modules
from tests.fixtures.fake_tpus import FINDS_EIGHT, NO_PLATFORM, TENSORFLOW, compiled_libtpu, needs_compiler
from train.checks import machine, platforms
from train.runtime import machines, pjrt_settings, runtime_choice


def lines_of(check, *flags: str) -> list[str]:
    return [" ".join(str(finding).split()) for finding in list_findings(check, config_of(*flags))]


@needs_compiler
@pytest.mark.parametrize(
    ("minor", "status", "end"),
    [(69, "warning", "It should not be older. Create the environment again"), (73, "ok", "")],
)
def test_both_versions_of_the_pjrt_api(minor, status, end, tpu_machine, tmp_path, monkeypatch):
    tpu_machine("vfio/0", TPU_LIBRARY_PATH=str(compiled_libtpu(tmp_path, minor)))
    monkeypatch.setattr(platforms, "has_tensorflow_for_tpus", lambda: True)
    monkeypatch.setattr(platforms, "tensorflow_api_version", lambda: "0.72")
    (line,) = lines_of(platforms.check_pjrt)
    said = f"{status} PJRT TensorFlow was built for the API 0.72; the API of libtpu (not installed) is 0.{minor}, "
    assert line.startswith(said)
    assert end in line
    monkeypatch.setattr(platforms, "has_tensorflow_for_tpus", lambda: False)
    (line,) = lines_of(platforms.check_pjrt)
    assert line.startswith(f"ok PJRT the API of libtpu (not installed) is 0.{minor}")


def test_a_libtpu_that_is_missing_or_broken(tpu_machine, tmp_path, monkeypatch):
    monkeypatch.setattr(platforms, "library_path", lambda: None)
    tpu_machine()
    assert not lines_of(platforms.check_pjrt)
    tpu_machine("vfio/0")
    assert "no libtpu.so is installed" in lines_of(platforms.check_pjrt)[0]
    (tmp_path / "libtpu.so").write_bytes(b"no library")
    monkeypatch.setattr(platforms, "library_path", lambda: tmp_path / "libtpu.so")
    (line,) = lines_of(platforms.check_pjrt)
    assert "was asked for the version of its PJRT API, and failed: OSError: " in line


SEES = """
from types import SimpleNamespace
class config:
    list_physical_devices = staticmethod(lambda: [SimpleNamespace(device_type=one) for one in {}])
def devices():
    import os
    {}
"""


def test_what_both_frameworks_see(tpu_machine, tmp_path, monkeypatch):
    tpu_machine("vfio/0")
    monkeypatch.setattr(platforms, "has_accelerator", lambda: True)
    eight = "return [SimpleNamespace(platform='tpu')] * 8"
    jax, tensorflow = SEES.format([], eight), SEES.format(["CPU", "TPU_SYSTEM"], "")
    modules(tmp_path, monkeypatch, tensorflow____init__=tensorflow, jax____init__=jax)
    of_tensorflow, of_jax = lines_of(platforms.check_platforms)
    assert of_tensorflow.startswith("warning devices TensorFlow sees 1 CPU, 1 TPU_SYSTEM: the TPU's system without its")
    assert of_jax == "ok devices JAX sees 8 tpu"
    modules(tmp_path, monkeypatch, tensorflow____init__=tensorflow, jax____init__=SEES.format([], "os.abort()"))
    assert lines_of(platforms.check_platforms)[1].startswith("warning devices asking JAX for its devices crashed (SIGA")


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (FINDS_EIGHT, "warning TPU With --pjrt on, TensorFlow finds the 8 cores. Pass --pjrt on."),
        (NO_PLATFORM, "warning TPU A trial of TensorFlow's PJRT settings failed: RuntimeError: No TPU platform found."),
        ("os.kill(os.getpid(), 11)", "warning TPU A trial of TensorFlow's PJRT settings crashed (SIGSEGV)"),
    ],
)
def test_where_connecting_fails_the_other_way_is_tried(program, said, tpu_machine, tmp_path, monkeypatch):
    """On what calls itself a v4, where a run would not use PJRT."""

    def fail(*_):
        raise machine.RunFailedError("no TPU platform")

    tpu_machine("accel0", TPU_ACCELERATOR_TYPE="v4-8", TPU_LIBRARY_PATH=str(Path(__file__)))
    modules(tmp_path, monkeypatch, tensorflow____init__=TENSORFLOW.format(program))
    monkeypatch.setattr(machine, "ask_tensorflow", fail)
    monkeypatch.setattr(machine, "tensorflow_builds", lambda _: ["tensorflow-tpu"])
    for module in (machines, pjrt_settings):
        monkeypatch.setattr(module, "has_tensorflow_for_tpus", lambda: True)
    monkeypatch.setattr(machines, "read_metadata", None)
    error, other = lines_of(machine.check_tpu, "--tpu-name", "local")
    assert error == "error TPU no TPU platform"
    assert other.startswith(said)


def test_the_runtime_of_a_run_is_named(monkeypatch):
    monkeypatch.setattr(platforms, "ask_tensorflow", lambda task, config, *_: machine.TASKS[task](config))
    assert lines_of(platforms.check_runtime, "--runtime", "jax") == ["ok runtime --runtime jax: requested"]
    monkeypatch.setattr(runtime_choice, "_tensorflow_has_gpus", lambda: False)
    (line,) = lines_of(platforms.check_runtime)
    assert line.startswith("ok runtime --runtime tensorflow: ")


@pytest.fixture
def tpu_for_jax(tpu_machine, monkeypatch):
    """A machine as Colab's, whose TPU JAX alone reaches; the doctor asks JAX in this process."""
    tpu_machine("vfio/0", TPU_ACCELERATOR_TYPE="v5litepod-1")
    monkeypatch.setattr(machine, "ask_tensorflow", lambda *_: {"num_replicas": 1})
    monkeypatch.setattr(machine, "tensorflow_builds", lambda _: ["tensorflow"])
    for module in (machines, platforms):
        monkeypatch.setattr(module, "has_tensorflow_for_tpus", lambda: False)
    monkeypatch.setattr(platforms, "ask_tensorflow", lambda task, config, *_: machine.TASKS[task](config))
    monkeypatch.setattr(platforms, "library_path", lambda: None)
    monkeypatch.setattr(runtime_choice, "GPU_DEVICE_PATTERNS", ())
    monkeypatch.setattr(runtime_choice, "is_installed", lambda names: names == runtime_choice.JAX_FOR_TPUS)


@pytest.mark.usefixtures("tpu_for_jax")
@pytest.mark.parametrize("flags", ["", "--tpu-name local --runtime jax"])
def test_a_tpu_that_jax_alone_reaches(flags, monkeypatch):
    """A run takes it without --tpu-name, too."""
    assert lines_of(machine.check_tpu, *flags.split()) == ["ok TPU v5litepod-1, 16 GiB per replica, 1 replica, by JAX"]
    assert lines_of(platforms.check_runtime, *flags.split())[0].startswith("ok runtime --runtime jax: ")
    assert "--extra jax-tpu" in lines_of(platforms.check_pjrt)[0]
    monkeypatch.setattr(runtime_choice, "is_installed", lambda _: False)
    monkeypatch.setattr(runtime_choice, "find_spec", lambda _: None)
    (line,) = lines_of(machine.check_tpu, *flags.split())
    assert line.startswith("error x --" if flags else "warning TPU this machine has one (v5litepod-1, ")
    assert "install.py --extra jax-tpu" in line


@pytest.mark.usefixtures("tpu_for_jax")
def test_a_tpu_that_tensorflow_is_to_reach_without_its_build():
    (line,) = lines_of(machine.check_tpu, "--tpu-name", "local", "--runtime", "tensorflow")
    assert line.startswith("error TPU --runtime tensorflow needs tensorflow-tpu; ")
