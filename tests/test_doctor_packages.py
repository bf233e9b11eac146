"""The doctor on folders of installed packages that do not fit together, and on a TensorFlow that cannot be used."""

import os
import shutil
import subprocess
import sys
import venv
from importlib.metadata import metadata, requires
from pathlib import Path

import pytest
import yaml

from train.config import SUBJECTS, TrainingConfig
from train.doctor_checks import libraries, packages
from train.doctor_checks.findings import Check

PROJECT = Path(__file__).parent.parent
CONFIG = TrainingConfig(*(subject() for subject in SUBJECTS))
CHECKS = (
    packages.check_python,
    packages.check_requirements,
    packages.check_tensorflow_build,
    packages.check_companions,
    packages.check_tf_keras,
)
# What each requirement of the project allows.
WELL = {"tensorflow": "2.21.0", "tf-keras": "2.21.0", "transformers": "4.57.6", "huggingface-hub": "0.36.2"}


def install(folder: Path, name: str, version: str, *lines: str) -> None:
    """Write what pip leaves of a package for those who ask for its version."""
    information = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    information.mkdir(parents=True)
    text = "\n".join(["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *lines])
    (information / "METADATA").write_text(text + "\n")


def uninstall(folder: Path, name: str) -> None:
    for path in folder.glob(f"{name.replace('-', '_')}-*.dist-info/*"):
        path.unlink()


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder of packages in which all is well."""
    from packaging.requirements import Requirement

    needed = [f"Requires-Dist: {text}" for text in requires("mlm-pretraining") or ()]
    install(tmp_path, "mlm-pretraining", "0.2.0", "Requires-Python: >=3.10,<3.13", *needed)
    for requirement in map(Requirement, requires("mlm-pretraining") or ()):
        if requirement.marker is None and requirement.name not in WELL:
            lowest = next(one.version for one in requirement.specifier if one.operator == ">=")
            install(tmp_path, requirement.name, lowest)
    for name, version in WELL.items():
        install(tmp_path, name, version)
    return tmp_path


def findings_of(site: Path) -> list[str]:
    installed = packages.installed_packages([str(site)])
    return [str(found) for check in CHECKS for found in Check("x", lambda check=check: check(installed)).findings()]


def errors_of(site: Path, status: str = "error") -> list[str]:
    return [" ".join(line.split()) for line in findings_of(site) if line.startswith(status)]


def test_packages_that_fit_together(site: Path) -> None:
    assert [line.split()[:2] for line in findings_of(site)] == [
        ["ok", "Python"],
        ["ok", "packages"],
        ["ok", "TensorFlow"],
        ["ok", "tf-keras"],
    ]


def test_a_python_that_tensorflow_has_no_packages_for(site: Path) -> None:
    installed = packages.installed_packages([str(site)])
    (found,) = packages.check_python(installed, "3.13.1")
    assert found.status == "error"
    assert "must be" in found.text
    assert "is 3.13.1. Make an environment with another: python3.11 -m venv" in found.text


def test_a_project_that_is_not_installed(tmp_path: Path) -> None:
    lines = errors_of(tmp_path)
    assert "mlm-pretraining is not installed" in lines[0]
    assert "pip install -e '.[cpu]'" in lines[0]
    assert lines[1].startswith("error TensorFlow is not installed.")


@pytest.mark.parametrize(
    ("name", "version", "message"),
    [
        ("transformers", "5.23.0", "(4.57 is the last with TensorFlow classes; 5 has none); 5.23.0 is installed. pip"),
        ("huggingface-hub", "1.2.0", "(transformers 4 needs one below 1); 1.2.0 is installed. pip install 'hugging"),
        ("sentencepiece", None, "sentencepiece>=0.2 is needed; none is installed. pip install 'sentencepiece>=0.2'"),
        ("tensorflow", "2.15.1", "tensorflow<2.22,>=2.20 is needed; 2.15.1 is installed. pip install 'tensorflow<"),
        ("tensorflow", None, "error TensorFlow is not installed. Install the project in its checkout"),
        ("tf-keras", "2.20.1", "must be of TensorFlow's version 2.21; 2.20.1 is installed. pip install 'tf-keras==2."),
        ("tf-keras", None, "without it transformers finds Keras 3, which its TensorFlow classes cannot use. pip"),
    ],
)
def test_a_package_that_does_not_fit(site: Path, name: str, version: str | None, message: str) -> None:
    uninstall(site, name)
    if version:
        install(site, name, version)
    assert any(message in line for line in errors_of(site)), errors_of(site)


def test_the_tpu_build_that_was_overwritten(site: Path) -> None:
    install(site, "tensorflow-tpu", "2.20.0")
    (line,) = (line for line in errors_of(site) if "TensorFlow" in line.split()[1])
    assert "tensorflow 2.21.0 and tensorflow-tpu 2.20.0 are both installed" in line
    assert "pip uninstall -y tensorflow tensorflow-tpu, then pip install -e '.[tpu]' && pip install --no-deps" in line


def test_the_tpu_build_alone_is_well_with_its_keras(site: Path) -> None:
    uninstall(site, "tensorflow")
    install(site, "tensorflow-tpu", "2.20.0", "Requires-Dist: libtpu==0.0.17", "Requires-Dist: numpy>=1.26")
    (line,) = errors_of(site)
    assert line.endswith("2.21.0 is installed. pip install --no-deps 'tf-keras==2.20.*'")
    uninstall(site, "tf-keras")
    install(site, "tf-keras", "2.20.1")
    assert not errors_of(site)
    install(site, "libtpu", "0.0.51")  # which the preflight brings
    (line,) = errors_of(site, "warning")
    assert "tensorflow-tpu asks for libtpu==0.0.17; 0.0.51 is installed." in line


def test_a_build_that_was_never_tried(site: Path) -> None:
    uninstall(site, "tensorflow")
    install(site, "tf-nightly", "2.22.0.dev20260101")
    assert "tf-nightly 2.22.0.dev20260101 is not among the builds" in errors_of(site, "warning")[0]


def test_the_metadata_of_this_project_names_the_builds() -> None:
    extras = metadata("mlm-pretraining").get_all("Provides-Extra") or []
    assert {extra for extra in packages.TENSORFLOW_BUILDS.values() if extra} <= set(extras)


WORKING = {
    "tensorflow/__init__.py": "__version__ = '2.21.0'",
    "tf_keras/__init__.py": "",
    "transformers/__init__.py": "from transformers import utils",
    "transformers/utils.py": "is_tf_available = lambda: True",
    "transformers/modeling_tf_utils.py": "",
}


def modules(folder: Path, monkeypatch: pytest.MonkeyPatch, **changed: str | None) -> None:
    """Put modules before those installed; `changed` are the programs of some of them, None where one is missing."""
    for name, program in (WORKING | {key.replace("__", "/", 1) + ".py": text for key, text in changed.items()}).items():
        if program is not None:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(program)
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{PROJECT}")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({}, "ok import TensorFlow 2.21.0, "),
        ({"tensorflow____init__": "raise ImportError('libcudart.so.12: missing')"}, "failed: ImportError: libcudart"),
        ({"tensorflow____init__": "import os, signal; os.kill(os.getpid(), signal.SIGILL)"}, "this CPU lacks (AVX)"),
        ({"tensorflow____init__": "import os; os.abort()"}, "crashed (SIGABRT): "),
        ({"tensorflow____init__": "import time; time.sleep(600)"}, "did not answer within 3 s."),
        ({"transformers__utils": "is_tf_available = lambda: False"}, "transformers does not see TensorFlow 2.21.0"),
        ({"transformers__modeling_tf_utils": None}, "No module named 'transformers.modeling_tf_utils'"),
        ({"transformers__modeling_tf_utils": "raise ValueError('is Keras 3')"}, "failed: ValueError: is Keras 3"),
    ],
    ids=["well", "broken", "illegal", "abort", "hangs", "unseen", "transformers 5", "keras 3"],
)
def test_importing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, str | None], message: str
) -> None:
    modules(tmp_path, monkeypatch, **changed)
    monkeypatch.setattr(libraries, "IMPORT_SECONDS", 3.0 if "sleep" in str(changed) else 100.0)
    (found,) = libraries.check_import(CONFIG)
    assert message in " ".join(str(found).split())


def test_remains_of_a_tensorflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an environment without any other: a folder without `__init__.py` gives way to a whole one anywhere."""
    venv.create(tmp_path / "venv")
    modules(tmp_path, monkeypatch, tensorflow____init__=None, tensorflow__core="")
    (tmp_path / "yaml").symlink_to(Path(yaml.__file__).parent)
    monkeypatch.setattr(libraries.sys, "executable", str(tmp_path / "venv" / "bin" / "python"))
    (found,) = libraries.check_import(CONFIG)
    assert "failed: ImportError: only remains of a TensorFlow that was uninstalled" in found.text
    shutil.rmtree(tmp_path / "tensorflow")
    (found,) = libraries.check_import(CONFIG)
    assert "failed: ModuleNotFoundError: No module named 'tensorflow'" in found.text


def test_a_check_that_breaks_is_an_error_and_ends_alone() -> None:
    def broken():
        raise RuntimeError("no such device")
        yield

    (found,) = Check("GPU", broken).findings()
    assert (found.status, found.subject) == ("error", "GPU")
    assert "could not be checked: RuntimeError: no such device" in found.text


def test_gpus_that_tensorflow_does_not_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not list(libraries.check_gpus(CONFIG, tmp_path))
    (tmp_path / "nvidia0").touch()
    config = "class config: list_physical_devices = staticmethod(lambda kind: {})"
    modules(tmp_path, monkeypatch, tensorflow____init__=config.format("[]"))
    (found,) = libraries.check_gpus(CONFIG, tmp_path)
    assert found.status == "warning"
    assert "the machine has 1, and TensorFlow sees none" in found.text
    one = "[type('Device', (), {'name': kind})]"
    modules(tmp_path, monkeypatch, tensorflow____init__=config.format(one))
    assert [str(found.status) for found in libraries.check_gpus(CONFIG, tmp_path)] == ["ok"]


def run_doctor(*flags: str, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(PROJECT / "train" / "doctor.py"), *flags]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)


def test_the_command_without_transformers(tmp_path: Path) -> None:
    """It says what is wrong although nothing can read its flags."""
    (tmp_path / "transformers").mkdir()
    (tmp_path / "transformers" / "__init__.py").write_text("")
    install(tmp_path, "tensorflow-tpu", "2.20.0")
    done = run_doctor("--tpu-name", "local", PYTHONPATH=f"{tmp_path}{os.pathsep}{PROJECT}")
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[0].startswith(
        "error    flags          not read, because of No module named 'transformers.hf_argparser'"
    )
    assert any("tensorflow-tpu 2.20.0 are both installed" in line for line in lines)
    assert done.stderr.splitlines()[-1] == "error: Not all is well; each line that says error says what cures it."


def test_the_command_without_the_project() -> None:
    script = str(PROJECT / "train" / "doctor.py")
    done = subprocess.run([sys.executable, "-I", "-S", script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Install the project in its checkout: pip install -e '.[cpu]'" in done.stdout


def test_bad_flags() -> None:
    assert run_doctor("--no-such-flag").returncode == 2
    done = run_doctor("--log-steps", "0")
    assert (done.returncode, done.stderr.strip()) == (2, "error: --log-steps must be at least 1; received 0.")
