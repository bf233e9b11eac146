"""`install.py` and the notebooks' install cell: into an environment of its own, whatever the machine has installed."""

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import install
from tests.fixtures.notebooks import COMPARISON, WALKTHROUGH, code_cells
from tests.fixtures.tiny_run import run_flags, write_shards
from train.checks.preflight.tpu_compiler import COMPILER_ENVIRONMENT
from train.runtime import tpu as tpu_devices

PROJECT = Path(__file__).parents[2]
SHOW_TENSORFLOW = """
import importlib.metadata as metadata
import train
import tensorflow
names = {found.name.replace("_", "-") for found in metadata.distributions()}
print(tensorflow.__version__, tensorflow.__file__, "tensorflow" in names, "tensorflow-tpu" in names)
"""


@pytest.fixture(autouse=True)
def _variables_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """`install` takes them away."""
    for name in install.FOREIGN_VARIABLES:
        monkeypatch.setenv(name, os.environ.get(name, ""))


def test_the_place_is_known_by_its_variables() -> None:
    assert install.find_place({}) == "this machine"
    assert install.find_place({"COLAB_RELEASE_TAG": "release-colab_20261101"}) == "Colab"
    assert install.find_place({"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}) == "Kaggle"


@pytest.mark.parametrize(
    ("devices", "extra"),
    [
        ((), "cpu"),
        (("vfio/vfio",), "cpu"),
        (("nvidia0",), "gpu"),
        (("accel0", "accel1"), "tpu"),
        (("vfio/vfio", "vfio/0"), "tpu"),
    ],
)
def test_the_extra_follows_from_the_devices(
    devices: tuple[str, ...], extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for device in devices:
        (tmp_path / device).parent.mkdir(exist_ok=True)
        (tmp_path / device).touch()
    assert install.find_extra(tmp_path) == extra
    monkeypatch.setenv("MLM_EXTRA", "preflight")
    assert install.find_extra(tmp_path) == "preflight"


def test_facts_that_stand_in_two_places_agree() -> None:
    assert install.TPU_DEVICE_PATTERNS == tpu_devices.TPU_DEVICE_PATTERNS
    declared = (PROJECT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'name = "{install.PROJECT_NAME}"' in declared
    for extra in install.EXTRAS:
        assert re.search(rf"^{extra} = \[", declared, flags=re.M)
    # tf-keras is of TensorFlow's own minor version, and the preflight computes by what a TPU VM has.
    (tensorflow_range,) = re.findall(r'"tensorflow-tpu(.+?)"', declared)
    assert f"tf-keras{tensorflow_range}" == install.TF_KERAS_FOR_TPU
    (preflight,) = re.findall(r"^preflight = \[\n(.+?)^\]", declared, flags=re.M | re.S)
    for requirement in (f"tensorflow{tensorflow_range}", install.TF_KERAS_FOR_TPU):
        assert f'"{requirement}"' in preflight
    of_the_vm, of_the_preflight = re.findall(r'"libtpu(==[\d.]+)', declared)
    assert of_the_vm == of_the_preflight


def test_in_the_projects_environment_nothing_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert install.install() == sys.executable
    assert "has the project installed" in capsys.readouterr().out


def test_bad_input(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MLM_EXTRA", "npu")
    assert install.main([]) == 2
    assert "MLM_EXTRA must be one of cpu, gpu, tpu, preflight; received 'npu'." in capsys.readouterr().err


def test_a_failed_installation_says_which_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(install, "_find_uv", lambda: "false")
    assert install.main(["--extra", "cpu", "--environment", str(tmp_path)]) == 1
    assert "error: false venv" in capsys.readouterr().err


def test_both_notebooks_install_alike() -> None:
    cells = [code_cells(path)["install"] for path in (WALKTHROUGH, COMPARISON)]
    first, second = ([line for line in cell.splitlines() if "import" not in line] for cell in cells)
    assert first == second


def test_an_extra_is_added_to_an_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[tuple] = []
    monkeypatch.setattr(install, "_find_uv", lambda: "uv")
    monkeypatch.setattr(install, "_run", lambda *command: commands.append(command))
    install.add_extra("/env/bin/python", "finetuning")
    ((*_, python, editable, project),) = commands
    assert (python, editable, project) == ("/env/bin/python", "--editable", ".[finetuning]")


@pytest.mark.slow
@pytest.mark.parametrize(("python_version", "jax"), [("3.10", "0.6.2"), ("3.11", "0.7.1"), ("3.12", "0.7.1")])
def test_the_preflight_can_be_installed_for_each_python(python_version: str, jax: str) -> None:
    platform = ("--python-platform", "x86_64-manylinux_2_31", "--python-version", python_version)
    resolve = [install._find_uv(), "pip", "compile", "--quiet", "pyproject.toml", "--extra", "preflight", *platform]
    environment = {name: value for name, value in os.environ.items() if name not in install.FOREIGN_VARIABLES}
    # None may have to be built.
    command = [*resolve, "--only-binary", ":all:"]
    resolved = subprocess.run(
        command, cwd=PROJECT, env=environment, stdout=subprocess.PIPE, encoding="utf-8", check=True
    ).stdout
    lines = resolved.splitlines()
    assert {f"jax=={jax}", f"jaxlib=={jax}", "libtpu==0.0.20"} <= set(lines)
    assert [line for line in lines if line.startswith("tensorflow==2.20.")]


@pytest.mark.slow
def test_the_install_cell_on_a_service_with_other_packages(tmp_path: Path) -> None:
    """As on Colab or Kaggle with a TPU, of which this machine has none: nothing that is there is used or changed."""
    service = tmp_path / "service"
    venv.create(service, with_pip=True)
    python = service / "bin" / "python"
    (site_packages,) = service.glob("lib/python*/site-packages")
    for package in ("numpy", "tensorflow", "transformers", "yaml"):
        (site_packages / f"{package}.py").write_text("raise ImportError('another version')\n", encoding="utf-8")
    before = sorted(path.name for path in site_packages.iterdir())

    inherited = {name: os.environ[name] for name in os.environ if not name.startswith(("PYTHON", "UV_", "TF_"))}
    colab = {"COLAB_RELEASE_TAG": "any", "UV_SYSTEM_PYTHON": "true", "PYTHONPATH": str(site_packages)}
    environment = inherited | colab | {"HOME": str(tmp_path), "MLM_EXTRA": "tpu", "UV_CACHE_DIR": str(tmp_path / "uv")}
    program = f"REPOSITORY = {str(PROJECT)!r}\n{code_cells(WALKTHROUGH)['install']}\nprint(PYTHON)"
    printed = subprocess.run(
        [python, "-c", program], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, encoding="utf-8", check=True
    ).stdout
    assert printed.startswith("Colab: installing for tpu")
    assert sorted(path.name for path in site_packages.iterdir()) == before

    installed = printed.splitlines()[-1]
    clone = tmp_path / "mlm-pretraining"
    assert installed == str(clone / ".venv-tpu/bin/python")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([installed, *arguments], cwd=clone, env=inherited, capture_output=True, encoding="utf-8")

    inherited |= COMPILER_ENVIRONMENT  # with it libtpu looks for no TPU and for no metadata server
    version, path, has_tensorflow, has_tensorflow_tpu = run("-c", SHOW_TENSORFLOW).stdout.split()
    assert version.startswith("2.20.")
    assert path.startswith(str(clone / ".venv-tpu"))
    assert (has_tensorflow, has_tensorflow_tpu) == ("False", "True")

    flags = run_flags(write_shards(tmp_path), tmp_path / "run")
    planned = run("train/run_mlm.py", *flags, "--dry-run")
    assert "parameters " in planned.stdout, planned.stderr
    refused = run("train/run_mlm.py", *flags, "--tpu-name", "local")
    assert refused.returncode == 2
    assert "--tpu-name local needs a machine with a TPU" in refused.stderr
    examined = run("train/doctor.py")
    assert "tensorflow-tpu is installed, and there is no TPU" in examined.stdout
    assert examined.returncode == 0, examined.stdout
