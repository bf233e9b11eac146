"""The doctor on packages that do not fit together, a TensorFlow that is broken, and a TPU that cannot be used."""

import shutil
import subprocess
import sys
import venv
from importlib.metadata import requires
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from tests.fixtures.doctor_cases import config_of, install, list_findings, modules, only_error
from train.checks import machine


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({}, "ok import TensorFlow 2.21.0, "),
        ({"tensorflow____init__": "raise ImportError('libcudart.so.12: missing')"}, "failed: ImportError: libcudart"),
        ({"tensorflow____init__": "import os, signal; os.kill(os.getpid(), signal.SIGILL)"}, "this CPU lacks (AVX)"),
        ({"tensorflow____init__": "import time; time.sleep(600)"}, "did not end within 1 s."),
        ({"tf_keras____init__": "raise ValueError('needs TensorFlow')"}, "failed: ValueError: needs TensorFlow"),
    ],
    ids=["well", "broken", "illegal", "hangs", "tf-keras"],
)
def test_importing(tmp_path, monkeypatch, changed, message):
    modules(tmp_path, monkeypatch, **changed)
    monkeypatch.setattr(machine, "TIMEOUT_SECONDS", 1.0 if "sleep" in str(changed) else 100.0)
    (line,) = list_findings(machine.check_import, config_of())
    assert message in " ".join(str(line).split())


def test_remains_of_a_tensorflow(tmp_path, monkeypatch):
    """In an environment with all else: a folder without `__init__.py` gives way to a whole TensorFlow anywhere."""
    venv.create(tmp_path / "venv")
    modules(tmp_path, monkeypatch, tensorflow____init__=None, tensorflow__core="")
    for package in Path(yaml.__file__).parents[1].iterdir():
        if not package.name.startswith("tensorflow") and not (tmp_path / package.name).exists():
            (tmp_path / package.name).symlink_to(package)
    monkeypatch.setattr(machine.sys, "executable", str(tmp_path / "venv" / "bin" / "python"))
    line = only_error(list_findings(machine.check_import, config_of()))
    assert "failed: ImportError: only the remains of an uninstalled TensorFlow" in line
    shutil.rmtree(tmp_path / "tensorflow")
    line = only_error(list_findings(machine.check_import, config_of()))
    assert "failed: ModuleNotFoundError: No module named 'tensorflow'" in line


NO_GPUS: dict[str, list[str]] = {"gpus": []}
BY_JAX = {"runtime": "jax"}


def test_gpus_that_tensorflow_does_not_see(tmp_path, monkeypatch):
    assert not list(machine.check_gpus(config_of(), tmp_path))
    (tmp_path / "nvidia0").touch()
    config = "class config: list_physical_devices = staticmethod(lambda kind: {})"
    modules(tmp_path, monkeypatch, tensorflow____init__=config.format("[]"))
    (line,) = machine.check_gpus(config_of(), tmp_path)
    assert line.status == "warning"
    assert "the machine has 1, but TensorFlow sees none" in line.text
    assert "install.py --extra jax-cuda, or TensorFlow for it" in line.fix
    monkeypatch.setattr(
        machine, "ask_tensorflow", lambda task, *_: {"list_gpus": NO_GPUS, "name_runtime": BY_JAX}[task]
    )
    (line,) = machine.check_gpus(config_of(), tmp_path)
    assert line.status == "ok"
    assert line.text.endswith("so a run uses them through JAX")
    monkeypatch.undo()
    devices = "[type('Device', (), {'name': kind})]"
    modules(tmp_path, monkeypatch, tensorflow____init__=config.format(devices))
    assert [line.status for line in machine.check_gpus(config_of(), tmp_path)] == ["ok"]


LOCAL = config_of("--tpu-name", "local")


@pytest.fixture
def device(monkeypatch, tmp_path) -> Path:
    """A file instead of /dev/accel0; the machine says it is a v3-8, and has the TPU's TensorFlow."""
    (tmp_path / "accel0").touch()
    for module in ("train.runtime.machines", "train.checks.machine"):
        monkeypatch.setattr(f"{module}.tpu_devices", lambda: [tmp_path / "accel0"])
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v3-8")
    monkeypatch.setattr("train.runtime.machines.has_tensorflow_for_tpus", lambda: True)
    monkeypatch.setattr(machine, "tensorflow_builds", lambda _: ["tensorflow-tpu"])
    return tmp_path / "accel0"


@pytest.mark.parametrize(
    ("flags", "build", "has_tpu", "line"),
    [
        ("", "tensorflow", False, "ok TPU none on this machine"),
        ("", "tensorflow-tpu", False, "warning TPU tensorflow-tpu is installed, but this machine has no TPU"),
        ("--tpu-name local", "tensorflow", False, "error x --tpu-name local needs a machine with a TPU; this one has"),
        ("", "tensorflow-tpu", True, "warning TPU this machine has one (v3-8, 16 GiB per replica), but without --tpu"),
        ("--no-tpu", "tensorflow-tpu", True, "ok TPU v3-8, 16 GiB per replica; not used, because of --no-tpu"),
        ("--tpu-name local --runtime tensorflow", "tensorflow", True, "error TPU --runtime tensorflow needs tensor"),
        ("--tpu-name local", "tensorflow-tpu", True, "ok TPU v3-8, 16 GiB per replica, 8 replicas"),
        ("--tpu-name pod --output-dir here", "tensorflow-tpu", False, "error x --output-dir must be in Cloud Storage"),
    ],
)
def test_the_tpu_of_a_machine(flags, build, has_tpu, line, request, monkeypatch):
    if has_tpu:
        request.getfixturevalue("device")
    monkeypatch.setattr(machine, "tensorflow_builds", lambda _: [build])
    monkeypatch.setattr(machine, "ask_tensorflow", lambda *_: {"num_replicas": 8})
    (finding,) = list_findings(machine.check_tpu, config_of(*flags.split()))
    assert " ".join(str(finding).split()).startswith(line)


def test_a_tpu_that_another_process_holds(device):
    program = "import sys; file = open(sys.argv[1]); print(flush=True); sys.stdin.read()"
    command, pipes = [sys.executable, "-c", program, str(device)], {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as holder:
        holder.stdout.readline()
        line = only_error(list_findings(machine.check_tpu, LOCAL))
        assert f"is in use by process {holder.pid} ({sys.executable} -c" in line
        assert line.endswith("only one process can use it at a time. End that process: kill NUMBER")
        holder.communicate(timeout=30)


CHECKS = (machine.check_python, machine.check_requirements, machine.check_tensorflow_build, machine.check_tf_keras)
# What each requirement of the project allows.
WELL = {"tensorflow": "2.21.0", "tf-keras": "2.21.0", "transformers": "4.57.6", "huggingface-hub": "0.36.2"}


@pytest.fixture
def site(tmp_path) -> Path:
    """A folder of packages in which all is well."""
    needed = requires("mlm-pretraining") or ()
    lines = [f"Requires-Dist: {text}" for text in needed]
    install(tmp_path, "mlm-pretraining", "0.2.0", "Requires-Python: >=3.10,<3.13", *lines)
    for requirement in map(Requirement, needed):
        if requirement.marker is None and requirement.name not in WELL:
            lowest = next(specifier.version for specifier in requirement.specifier if specifier.operator == ">=")
            install(tmp_path, requirement.name, lowest)
    for name, version in WELL.items():
        install(tmp_path, name, version)
    return tmp_path


@pytest.mark.parametrize(
    ("missing", "versions", "message"),
    [
        ("", {}, ""),
        ("tensorflow tf-keras", {"tensorflow-tpu": "2.20.0", "tf-keras": "2.20.1"}, ""),
        ("transformers", {"transformers": "4.30.0"}, "transformers<6,>=4.57 is needed; 4.30.0 is installed"),
        ("sentencepiece", {}, "sentencepiece>=0.2 is needed; it is not installed. pip install 'sentencepiece>=0.2'"),
        ("tensorflow", {}, "error TensorFlow is not installed. To install it, run python3 install.py"),
        ("tf-keras", {"tf-keras": "2.20.1"}, "have TensorFlow's version 2.21; 2.20.1 is installed. pip install 'tf-k"),
        ("", {"tensorflow-tpu": "2.20.0"}, "tensorflow 2.21.0 and tensorflow-tpu 2.20.0 are both installed. … rm -rf"),
        ("tensorflow", {"tensorflow-tpu": "2.20.0"}, "must have TensorFlow's version 2.20; 2.21.0 is installed. … rm"),
        ("tensorflow", {"tf-nightly": "2.22.0"}, "warning TensorFlow tf-nightly 2.22.0 … uninstall -y tf-nightly, "),
        ("mlm-pretraining", {}, "mlm-pretraining is not installed … python3 install.py"),
    ],
)
def test_packages_that_fit_together_and_others(site, missing, versions, message):
    """Some are missing, or are there in another version; or there is one more."""
    for name in missing.split():
        for path in site.glob(f"{name.replace('-', '_')}-*.dist-info/*"):
            path.unlink()
    for other, version in versions.items():
        install(site, other, version)
    installed = machine.installed_packages([str(site)])
    lines = [" ".join(str(line).split()) for check in CHECKS for line in list_findings(check, installed)]
    wrong = " ".join(line for line in lines if not line.startswith("ok"))
    assert all(part in wrong for part in message.split(" … ")), wrong
    if not message:
        assert [line.split()[1] for line in lines] == ["Python", "packages", "TensorFlow", "tf-keras"]
        assert not wrong
