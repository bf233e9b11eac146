"""The doctor on folders of installed packages that do not fit together."""

from importlib.metadata import metadata, requires
from pathlib import Path

import pytest

from tests.fixtures.doctor_cases import found, install
from train.checks import machine

CHECKS = (machine.check_python, machine.check_requirements, machine.check_tensorflow_build, machine.check_tf_keras)
# What each requirement of the project allows.
WELL = {"tensorflow": "2.21.0", "tf-keras": "2.21.0", "transformers": "4.57.6", "huggingface-hub": "0.36.2"}


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
    installed = machine.installed_packages([str(site)])
    return [str(line) for check in CHECKS for line in found(check, installed)]


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
    installed = machine.installed_packages([str(site)])
    (found,) = machine.check_python(installed, "3.13.1")
    assert found.status == "error"
    assert "must be" in found.text
    assert "is 3.13.1. Run python3 install.py" in str(found)


def test_a_project_that_is_not_installed(tmp_path: Path) -> None:
    lines = errors_of(tmp_path)
    assert "mlm-pretraining is not installed" in lines[0]
    assert "python3 install.py" in lines[0]
    assert lines[1].startswith("error TensorFlow is not installed.")


@pytest.mark.parametrize(
    ("name", "version", "message"),
    [
        ("transformers", "5.23.0", "(4.57 is the last with TensorFlow classes; 5 has none); 5.23.0 is installed. pip"),
        ("huggingface-hub", "1.2.0", "(transformers 4 needs one below 1); 1.2.0 is installed. pip install 'hugging"),
        ("sentencepiece", None, "sentencepiece>=0.2 is needed; it is not installed. pip install 'sentencepiece>=0.2'"),
        ("tensorflow", "2.15.1", "tensorflow<2.22,>=2.20 is needed; 2.15.1 is installed. pip install 'tensorflow<"),
        ("tensorflow", None, "error TensorFlow is not installed. To install it, run python3 install.py"),
        ("tf-keras", "2.20.1", "must have TensorFlow's version 2.21; 2.20.1 is installed. pip install 'tf-keras==2."),
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
    assert line.endswith("rm -rf .venv && python3 install.py --extra tpu")


def test_the_tpu_build_alone_is_well_with_its_keras(site: Path) -> None:
    uninstall(site, "tensorflow")
    install(site, "tensorflow-tpu", "2.20.0")
    (line,) = errors_of(site)
    assert "must have TensorFlow's version 2.20; 2.21.0 is installed." in line
    assert line.endswith("rm -rf .venv && python3 install.py --extra tpu")
    uninstall(site, "tf-keras")
    install(site, "tf-keras", "2.20.1")
    assert not errors_of(site)


def test_a_build_that_was_never_tried(site: Path) -> None:
    uninstall(site, "tensorflow")
    install(site, "tf-nightly", "2.22.0.dev20260101")
    (line,) = errors_of(site, "warning")
    assert "tf-nightly 2.22.0.dev20260101 is not a build that this project is tested with." in line
    assert "pip uninstall -y tf-nightly, then run python3 install.py" in line


def test_the_metadata_of_this_project_names_the_builds() -> None:
    extras = metadata("mlm-pretraining").get_all("Provides-Extra") or []
    assert {extra for extra in machine.TENSORFLOW_BUILDS.values() if extra} <= set(extras)
