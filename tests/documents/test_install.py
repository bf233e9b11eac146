"""`install.py` and the notebooks' install cell: into an environment of its own, whatever the machine has installed."""

import os
import re
import subprocess
import sys
import venv
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import install
from tests.fixtures.notebooks import WALKTHROUGH, code_cells
from tests.fixtures.tiny_run import run_flags, write_shards
from train.runtime import machines as tpu_devices

PROJECT = Path(__file__).parents[2]
SHOW_PACKAGES = """
import importlib.metadata as metadata
import train
import tensorflow
names = {found.name.replace("_", "-") for found in metadata.distributions()}
print(tensorflow.__file__, *sorted(names & {"jax", "libtpu", "tensorflow", "tensorflow-tpu"}))
"""


@pytest.fixture(autouse=True)
def _variables_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """`install` takes them away."""
    for name in install.FOREIGN_VARIABLES:
        monkeypatch.setenv(name, os.environ.get(name, ""))


def test_the_place_is_known_by_its_variables():
    assert install.find_place({}) == "this machine"
    assert install.find_place({"COLAB_RELEASE_TAG": "release-colab_20261101"}) == "Colab"
    assert install.find_place({"KAGGLE_KERNEL_RUN_TYPE": "Interactive"}) == "Kaggle"


def test_an_environment_is_not_deleted_by_its_own_interpreter(tmp_path, monkeypatch):
    """It could not install anything afterwards."""
    venv.create(tmp_path / "environment", with_pip=False)
    record = '{"project": "/elsewhere", "declared": "", "extras": ["cpu"]}'
    (tmp_path / "environment" / install.RECORD_FILE).write_text(record, encoding="utf-8")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "environment"))
    with pytest.raises(install.InstallError, match=r"was created for another folder.* its own Python is running"):
        install.install("cpu", str(tmp_path / "environment"))
    assert (tmp_path / "environment" / "bin" / "python").exists()


@pytest.mark.parametrize(
    ("devices", "installed", "extra"),
    [
        ((), (), "cpu"),
        (("vfio/vfio",), ("tensorflow",), "cpu"),
        (("nvidia0",), (), "gpu"),
        (("accel0", "accel1"), (), "jax-tpu"),
        (("accel0",), ("tensorflow-cpu",), "jax-tpu"),
        (("accel0",), ("tensorflow",), "tpu"),
        (("vfio/vfio", "vfio/0"), (), "jax-tpu"),
        (("vfio/vfio", "vfio/0"), ("tf-nightly-tpu",), "tpu"),
    ],
)
def test_the_extra_follows_from_the_devices_and_the_image(devices, installed, extra, tmp_path, monkeypatch):
    monkeypatch.setattr(install, "_is_installed", lambda package: package in installed)
    for device in devices:
        (tmp_path / device).parent.mkdir(exist_ok=True)
        (tmp_path / device).touch()
    assert install.find_extra(tmp_path) == extra
    monkeypatch.setenv("MLM_EXTRA", "preflight")
    assert install.find_extra(tmp_path) == "preflight"


def test_facts_that_stand_in_two_places_agree():
    assert install.TPU_DEVICE_PATTERNS == tpu_devices.TPU_DEVICE_PATTERNS
    declared = (PROJECT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'name = "{install.PROJECT_NAME}"' in declared
    assert f'requires-python = "{install._python_specifier()}"' in declared
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


def test_bad_input(monkeypatch, capsys):
    monkeypatch.setenv("MLM_EXTRA", "npu")
    assert install.main([]) == 2
    assert (
        "MLM_EXTRA must be one of cpu, gpu, tpu, jax-tpu, jax-cuda, preflight; received 'npu'."
        in capsys.readouterr().err
    )


BASE_PYTHON = Path(sys._base_executable)  # type: ignore[attr-defined]
FAKE_UV = """#!/bin/sh
echo "uv $*" >> {log}
[ "$1" = venv ] || exit 0
for folder; do :; done
mkdir -p "$folder/bin" && ln -s {python} "$folder/bin/python" &&
printf 'home = {home}\\ninclude-system-site-packages = false\\n' > "$folder/pyvenv.cfg"
"""


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """A stand-in for uv on the PATH, and one for pip; returns the commands given to them."""
    log = tmp_path / "commands.log"
    log.touch()
    (tmp_path / "uv").write_text(FAKE_UV.format(log=log, python=BASE_PYTHON, home=BASE_PYTHON.parent), encoding="utf-8")
    (tmp_path / "uv").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    run = install.run_with_progress

    def record(command: Sequence[str]) -> None:
        if command[1:3] == ["-m", "venv"]:
            with log.open("a", encoding="utf-8") as file:
                file.write(f"venv {' '.join(command[3:])}\n")
            run([*command[:3], "--without-pip", *command[3:]], tmp_path / "install.log")
            (site_packages,) = Path(command[3]).glob("lib/python*/site-packages")
            (site_packages / "pip").mkdir()
            (site_packages / "pip" / "__main__.py").touch()
        elif "pip" in command[1:4] and "-m" in command:
            with log.open("a", encoding="utf-8") as file:
                file.write(f"pip {' '.join(command[5:])}\n")
        else:
            run(command, tmp_path / "install.log")

    monkeypatch.setattr(install, "run_with_progress", record)
    return lambda: log.read_text(encoding="utf-8").splitlines()


def make(folder: Path, *flags: str) -> int:
    return install.main(["--environment", str(folder), *flags])


def test_uv_makes_the_environment_once(commands, tmp_path, capsys):
    folder = tmp_path / "environment"
    assert make(folder, "--extra", "cpu") == 0
    made, installed = commands()
    assert made.startswith("uv venv --seed --python ")
    assert installed.endswith("--editable .[cpu]")
    printed = capsys.readouterr().out
    assert "Installing TensorFlow for the CPU (about 0.5 GB)" in printed
    assert printed.splitlines()[-2:] == [f"Activate it: source {folder}/bin/activate", "next: python quickstart.py"]
    assert (PROJECT / "quickstart.py").is_file()
    assert make(folder, "--extra", "cpu") == 0
    assert "is up to date." in capsys.readouterr().out
    assert len(commands()) == 2
    # More of it is added to what it has; a later command that asks for less has nothing to do.
    assert make(folder, "--extra", "cpu", "--with", "test") == 0
    assert commands()[2:] == [f"uv pip install --python {folder}/bin/python --editable .[cpu,test]"]
    assert make(folder, "--extra", "cpu") == 0
    assert len(commands()) == 3


def test_an_environment_for_a_tpu_has_its_tensorflow_alone(commands, tmp_path, capsys):
    folder = tmp_path / "environment"
    assert make(folder, "--extra", "cpu") == 0
    assert make(folder, "--extra", "tpu") == 0
    assert "it is for cpu, not tpu" in capsys.readouterr().out
    made, installed, keras = commands()[2:]
    assert made.startswith("uv venv")
    assert installed.endswith(".[tpu]")
    assert keras.endswith(f"--no-deps {install.TF_KERAS_FOR_TPU}")
    # `make test` asks for the CPU's, and leaves the TPU's as it is.
    assert make(folder, "--extra", "cpu", "--with", "test") == 0
    assert commands()[5].endswith(".[tpu,test]")


@pytest.mark.parametrize("interpreter", ["#!/bin/sh\necho 3 14\n", "#!/nowhere/python\n"], ids=["wrong", "missing"])
def test_an_environment_of_a_wrong_interpreter_is_replaced(interpreter, commands, tmp_path, capsys):
    python = tmp_path / "environment" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(interpreter, encoding="utf-8")
    python.chmod(0o755)
    assert make(tmp_path / "environment", "--extra", "cpu") == 1  # it may be anything
    assert "is not a Python environment" in capsys.readouterr().err
    (tmp_path / "environment" / "pyvenv.cfg").touch()
    assert make(tmp_path / "environment", "--extra", "cpu") == 0
    assert f"Replacing {tmp_path / 'environment'}: its Python is " in capsys.readouterr().out
    assert len(commands()) == 2
    assert python.is_symlink()


def test_a_python_that_does_not_fit_leaves_nothing(commands, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(install.sys, "version_info", (3, 14, 0))
    assert make(tmp_path / "with-uv", "--extra", "cpu") == 0
    assert "--python >=3.10,<3.14 " in commands()[0]  # uv finds or fetches one
    monkeypatch.setattr(install, "_find_uv", lambda _: None)
    assert make(tmp_path / "without", "--extra", "cpu") == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "Python 3.10, 3.11, 3.12 or 3.13 is needed" in error
    assert "is 3.14.0. Install one of them" in error
    assert not (tmp_path / "without").exists()


def test_pip_takes_over_where_uv_fails_or_is_not_to_be_had(commands, tmp_path, monkeypatch, capsys):
    uv = (tmp_path / "uv").read_text(encoding="utf-8").replace("|| exit 0", "|| { echo no route to host; exit 3; }")
    (tmp_path / "uv").write_text(uv, encoding="utf-8")
    assert make(tmp_path / "first", "--extra", "cpu") == 0
    assert "ended with status 3" in (printed := capsys.readouterr().out)
    assert "no route to host" in printed
    assert "Trying pip instead of uv." in printed
    assert f"venv {tmp_path}/first" in commands()  # uv's environment had no pip
    monkeypatch.setattr(install, "_find_uv", lambda _: None)
    assert make(tmp_path / "first", "--extra", "cpu", "--with", "test") == 0
    by_pip = [command for command in commands() if command.startswith("pip ")]
    assert len(commands()) == 3 + len(by_pip)
    assert [command.split(" ", 3)[-1] for command in by_pip] == ["--editable .[cpu]", "--editable .[cpu,test]"]


SCRIPTS = [
    path.relative_to(PROJECT)
    for folder in ("tokenizer_training", "tfrecord_prep", "train", "finetuning")
    for path in sorted((PROJECT / folder).glob("*.py"))
    if "__main__" in path.read_text(encoding="utf-8")
]


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_a_script_outside_the_environment_says_so_in_one_line(script):
    bare = [sys.executable, "-S", "-E", script]
    done = subprocess.run(bare, cwd=PROJECT, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode in (1, 2)
    (line,) = (done.stdout + done.stderr).splitlines()
    assert script.name == "doctor.py" or "source .venv/bin/activate" in line


@pytest.mark.parametrize("compiles", [False, True])
def test_an_extra_is_added_to_an_environment(compiles, commands, monkeypatch):
    """Its modules are compiled at once if the commands that import them could not save what they compile."""
    monkeypatch.setattr(sys, "dont_write_bytecode", compiles)
    install.add_extra("/env/bin/python", "finetuning")
    compiling = "--compile-bytecode " * compiles
    assert commands() == [f"uv pip install {compiling}--python /env/bin/python --editable .[finetuning]"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extra", "python", "jax", "tensorflow"),
    [
        ("preflight", "3.10", "0.6.2", "2.20."),
        ("preflight", "3.13", "0.7.1", "2.20."),
        ("jax-tpu", "3.13", "0.7.2", "2."),  # Colab's
        ("jax-cuda", "3.12", "0.7.2", "2."),
    ],
)
def test_an_extra_with_jax_can_be_installed(extra, python, jax, tensorflow):
    """With the oldest and the newest Python; those between have the JAX of the newest."""
    platform = ("--python-platform", "x86_64-manylinux_2_31", "--python-version", python)
    resolve = ["pip", "compile", "pyproject.toml", "--quiet", "--extra", extra, "--only-binary", ":all:"]
    environment = {name: value for name, value in os.environ.items() if name not in install.FOREIGN_VARIABLES}
    command = [str(install._find_uv(print)), *resolve, *platform]  # none may have to be built
    given = {"cwd": PROJECT, "env": environment, "stdout": subprocess.PIPE, "encoding": "utf-8"}
    lines = subprocess.run(command, **given, check=True).stdout.splitlines()
    device = {"preflight": "libtpu==0.0.20", "jax-tpu": "libtpu==", "jax-cuda": f"jax-cuda12-plugin=={jax}"}[extra]
    for package in (f"jax=={jax}", f"jaxlib=={jax}", f"tensorflow=={tensorflow}", device):
        assert [line for line in lines if line.startswith(package)], package
    assert not [line for line in lines if line.startswith("tensorflow-tpu")]


@pytest.mark.slow
def test_the_install_cell_on_a_service_with_other_packages(tmp_path):
    """As on Colab or Kaggle with a TPU, of which this machine has none: nothing that is there is used or changed."""
    service = tmp_path / "service"
    venv.create(service, with_pip=True)
    python = service / "bin" / "python"
    (site_packages,) = service.glob("lib/python*/site-packages")
    for package in ("numpy", "tensorflow", "transformers", "yaml"):
        (site_packages / f"{package}.py").write_text("raise ImportError('another version')\n", encoding="utf-8")
    before = sorted(path.name for path in site_packages.iterdir())

    inherited = {name: os.environ[name] for name in os.environ if not name.startswith(("PYTHON", "UV_", "TF_"))}
    cache = subprocess.run([str(install._find_uv(print)), "cache", "dir"], capture_output=True, encoding="utf-8")
    colab = {"COLAB_RELEASE_TAG": "any", "UV_SYSTEM_PYTHON": "true", "PYTHONPATH": str(site_packages)}
    environment = (
        inherited | colab | {"HOME": str(tmp_path), "MLM_EXTRA": "jax-tpu", "UV_CACHE_DIR": cache.stdout.strip()}
    )
    program = f"REPOSITORY = {str(PROJECT)!r}\n{code_cells(WALKTHROUGH)['install']}\nprint(PYTHON)"
    printed = subprocess.run(
        [python, "-c", program], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, encoding="utf-8", check=True
    ).stdout
    assert printed.startswith("Installing TensorFlow for the CPU, and JAX for the TPU")
    assert sorted(path.name for path in site_packages.iterdir()) == before

    installed = printed.splitlines()[-1]
    clone = tmp_path / "mlm-pretraining"
    assert installed == str(clone / ".venv/bin/python")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([installed, *arguments], cwd=clone, env=inherited, capture_output=True, encoding="utf-8")

    path, *names = run("-c", SHOW_PACKAGES).stdout.split()
    assert path.startswith(str(clone / ".venv"))
    assert names == ["jax", "libtpu", "tensorflow"]

    flags = run_flags(write_shards(tmp_path), tmp_path / "run", "--max-steps", "2")
    trained = run("train/run_mlm.py", *flags, "--runtime", "jax")
    assert re.search(r"^runtime +TensorFlow's step, executed by JAX 0\.\d+\.\d+ \(requested\)$", trained.stdout, re.M)
    assert trained.returncode == 0, trained.stderr
    refused = run("train/run_mlm.py", *flags, "--tpu-name", "local")
    assert refused.returncode == 2
    assert "--tpu-name local needs a machine with a TPU" in refused.stderr
    examined = run("train/doctor.py")
    assert re.search("^ok +runtime +--runtime tensorflow: it has the CPU$", examined.stdout, re.M)
    assert examined.returncode == 0, examined.stdout
