"""Install the project into an environment of its own, beside whatever else the machine has installed.

    python install.py                   # what suits this machine: its TPU, else its GPU, else its CPU
    MLM_EXTRA=tpu python install.py     # where its devices do not tell
    python install.py --extra preflight

It needs the standard library and pip, and changes no package that is there: notebook services have hundreds, among them
other versions of TensorFlow, transformers and NumPy. The last line that it prints is the environment's interpreter.
"""

import argparse
import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

PROJECT_FOLDER = Path(__file__).resolve().parent
PROJECT_NAME = "mlm-pretraining"
UV_FOLDER = PROJECT_FOLDER / "build" / "uv"
EXTRA_VARIABLE = "MLM_EXTRA"
EXTRAS = ("cpu", "gpu", "tpu", "preflight")
# Those of train/runtime/tpu.py, which cannot be imported before the project is installed.
TPU_DEVICE_PATTERNS = ("accel*", "vfio/[0-9]*")
# Installed without its dependencies, which would replace the TPU's TensorFlow by that for the CPU.
TF_KERAS_FOR_TPU = "tf-keras>=2.20,<2.21"
# What services set for their own environment, and what would lead uv or the new interpreter there.
FOREIGN_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "UV_SYSTEM_PYTHON", "UV_CONSTRAINT", "UV_OVERRIDE", "UV_PRERELEASE")


def find_place(environment: Mapping[str, str] = os.environ) -> str:
    """Tell `Colab`, `Kaggle` or `this machine` by the variables that the services set."""
    if "COLAB_RELEASE_TAG" in environment:
        return "Colab"
    return "Kaggle" if "KAGGLE_KERNEL_RUN_TYPE" in environment else "this machine"


def find_extra(devices: Path = Path("/dev")) -> str:
    """Choose what `MLM_EXTRA` says, else `tpu`, `gpu` or `cpu`, by the device files of the kernel's drivers."""
    if EXTRA_VARIABLE in os.environ:
        return os.environ[EXTRA_VARIABLE]
    if any(path for pattern in TPU_DEVICE_PATTERNS for path in devices.glob(pattern)):
        return "tpu"
    return "gpu" if (devices / "nvidia0").exists() else "cpu"


def is_environment_of_the_project() -> bool:
    """Tell whether the interpreter that runs this has the project installed."""
    try:
        importlib.metadata.distribution(PROJECT_NAME)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def install(extra: str | None = None, environment: str | Path | None = None) -> str:
    """Make the environment, or bring it up to date, and return the path of its interpreter.

    The interpreter that runs this is returned as it is when the project is installed for it, and no extra is named.
    Otherwise the variables that lead to other packages are taken out of this process's environment.

    Args:
        extra: one of `EXTRAS`; by default what suits the machine.
        environment: folder, relative to the project's; by default `.venv-` and the extra.

    Raises:
        ValueError: there is no such extra.
        subprocess.CalledProcessError: a package could not be installed; what pip or uv said stands above.
    """
    if extra is None and is_environment_of_the_project():
        print(f"{find_place()}: {sys.executable} has the project installed")
        return sys.executable
    extra = extra or find_extra()
    if extra not in EXTRAS:
        raise ValueError(f"{EXTRA_VARIABLE} must be one of {', '.join(EXTRAS)}; received {extra!r}.")
    folder = PROJECT_FOLDER / (environment or default_environment(extra))
    print(f"{find_place()}: installing for {extra} into {folder}", flush=True)
    for name in FOREIGN_VARIABLES:
        os.environ.pop(name, None)  # also for the commands that the interpreter is to run
    uv = _find_uv()
    python = folder / "bin" / "python"
    if not python.exists():
        # In the project's folder uv takes an interpreter that pyproject.toml allows, and fetches one if there is none.
        _run(uv, "venv", "--quiet", folder)
    install_here = (uv, "pip", "install", "--quiet", "--python", python)
    _run(*install_here, "--editable", f".[{extra}]")
    if extra == "tpu":
        _run(*install_here, "--no-deps", TF_KERAS_FOR_TPU)
    return str(python)


def add_extra(python: str, extra: str) -> None:
    """Install into an environment what an extra of the project needs besides, such as `finetuning`.

    Raises:
        subprocess.CalledProcessError: a package could not be installed; what uv said stands above.
    """
    _run(_find_uv(), "pip", "install", "--quiet", "--python", python, "--editable", f".[{extra}]")


def default_environment(extra: str) -> str:
    """Name an extra's environment: they differ, since those of two extras may exclude each other."""
    return f".venv-{extra}"


def _find_uv() -> str:
    """Find the path of uv, which makes environments where Python's own `venv` cannot, as on Colab."""
    found = shutil.which("uv") or shutil.which("uv", path=str(UV_FOLDER / "bin"))
    if found is None:
        # Into a folder of its own: also allowed where the system's Python may not be changed.
        _run(sys.executable, "-m", "pip", "install", "--quiet", "--target", UV_FOLDER, "uv")
        found = str(UV_FOLDER / "bin" / "uv")
    return found


def _run(*command: str | Path) -> None:
    subprocess.run([str(word) for word in command], cwd=PROJECT_FOLDER, check=True)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extra", choices=EXTRAS, help="What to install; by default what suits the machine.")
    parser.add_argument("--environment", help="Folder of the environment; by default .venv- and the extra.")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Install, and print the interpreter."""
    arguments = build_parser().parse_args(argv)
    try:
        print(install(arguments.extra or find_extra(), arguments.environment))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        print(f"error: {' '.join(error.cmd[:4])} … ended with status {error.returncode}.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
