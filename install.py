"""Install the project into its own environment, `.venv`.

    python3 install.py                     # for this machine's TPU, or else its GPU, or else its CPU
    python3 install.py --with finetuning   # with additional packages
    python3 install.py --extra preflight   # into .venv-preflight
    MLM_EXTRA=tpu python3 install.py       # if install.py does not recognize the machine's devices

It needs only Python, and does not change packages outside the environment, because notebook services come with hundreds
of packages, among them other versions of TensorFlow, transformers and NumPy. It uses uv, which it downloads from PyPI
if necessary, or pip if that fails.
"""

# Lets Python 3.8 run this file up to the error that asks for a newer version.
from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

PROJECT_FOLDER = Path(__file__).resolve().parent
PROJECT_NAME = "mlm-pretraining"
DECLARED_FILE = PROJECT_FOLDER / "pyproject.toml"
UV_FOLDER = PROJECT_FOLDER / "build" / "uv"
LOG_FILE = PROJECT_FOLDER / "build" / "install.log"
# File in an environment that records the installed extras. It is written last.
RECORD_FILE = "installed.json"
EXTRA_VARIABLE = "MLM_EXTRA"
# The main extras, one per environment, and their packages.
EXTRAS = {
    "cpu": "TensorFlow for the CPU (about 0.5 GB)",
    "gpu": "TensorFlow and CUDA for the GPU (about 3.5 GB)",
    "tpu": "TensorFlow for the TPU (about 0.7 GB)",
    "jax-tpu": "TensorFlow for the CPU, and JAX for the TPU (about 0.9 GB)",
    "jax-cuda": "TensorFlow for the CPU, and JAX and CUDA for the GPU (about 3.5 GB)",
    "preflight": "TensorFlow and the TPU's compiler (about 0.8 GB)",
}
# The same as `requires-python` in pyproject.toml.
OLDEST_PYTHON, FIRST_PYTHON_TOO_NEW = (3, 10), (3, 14)
PYTHON_RANGE = "Python 3.10, 3.11, 3.12 or 3.13"
# The same as in train/runtime/machines.py, which cannot be imported before the project is installed.
TPU_DEVICE_PATTERNS = ("accel*", "vfio/[0-9]*")
# One of these is installed in Google's images of TPU VMs for TensorFlow.
TENSORFLOW_OF_IMAGES = ("tensorflow", "tensorflow-tpu", "tf-nightly-tpu")
# Installed without its dependencies, which would replace TensorFlow for the TPU with TensorFlow for the CPU.
TF_KERAS_FOR_TPU = "tf-keras>=2.20,<2.21"
# Variables that notebook services set, and that would point uv or the new interpreter to other packages.
FOREIGN_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "UV_SYSTEM_PYTHON", "UV_CONSTRAINT", "UV_OVERRIDE", "UV_PRERELEASE")
TERMINAL_POLL_SECONDS, HEARTBEAT_SECONDS = 0.2, 30.0
NUM_LOG_LINES_SHOWN = 8
INDENT = " " * 7


class InstallError(Exception):
    """The environment cannot be created; the message says why, and what to do."""


class CommandError(InstallError):
    """A command failed; the message has its last lines, and the name of the file with its whole output."""


def find_place(environment: Mapping[str, str] = os.environ) -> str:
    """Return `Colab`, `Kaggle` or `this machine`, according to the environment variables that the services set."""
    if "COLAB_RELEASE_TAG" in environment:
        return "Colab"
    return "Kaggle" if "KAGGLE_KERNEL_RUN_TYPE" in environment else "this machine"


def find_extra(devices: Path = Path("/dev")) -> str:
    """Return the extra that `MLM_EXTRA` names, or else the extra for the device files on this machine.

    For a TPU this is `jax-tpu`, because JAX works on every TPU. If the Python that runs this has TensorFlow, as in
    Google's images for TensorFlow, it is `tpu` instead.
    """
    if EXTRA_VARIABLE in os.environ:
        return os.environ[EXTRA_VARIABLE]
    if any(path for pattern in TPU_DEVICE_PATTERNS for path in devices.glob(pattern)):
        return "tpu" if any(map(_is_installed, TENSORFLOW_OF_IMAGES)) else "jax-tpu"
    return "gpu" if (devices / "nvidia0").exists() else "cpu"


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def default_environment(extra: str) -> str:
    """Return the folder for an extra.

    The extra `preflight` has a separate folder, because its packages conflict with the packages of other extras.
    """
    return ".venv-preflight" if extra == "preflight" else ".venv"


def is_environment_of_the_project() -> bool:
    """Return whether the interpreter that runs this has the project installed."""
    return _is_installed(PROJECT_NAME)


def say_at_once(text: str) -> None:
    """Print a line and flush it, for a reader who follows the output in a file."""
    print(text, flush=True)


def install(
    extra: str | None = None,
    environment: str | Path | None = None,
    additional: Sequence[str] = (),
    say: Callable[[str], None] = say_at_once,
) -> str:
    """Create the environment, or bring it up to date, and return the path of its interpreter.

    If no extra is named and the interpreter that runs this already has the project installed, that interpreter is
    returned. Otherwise the variables that point to other packages are removed from this process's environment.

    Args:
        extra: one of `EXTRAS`. Default: the extra for this machine. `cpu` accepts an environment for a GPU or TPU.
        environment: folder, relative to the project's folder. Default: `default_environment`.
        additional: other extras of pyproject.toml, such as `test`.
        say: prints a line.

    Raises:
        ValueError: there is no such extra.
        InstallError: the environment could not be created.
    """
    if extra is None and not additional and is_environment_of_the_project():
        say(f"{find_place()}: {sys.executable} has the project installed")
        return sys.executable
    extra = extra or find_extra()
    if extra not in EXTRAS:
        raise ValueError(f"{EXTRA_VARIABLE} must be one of {', '.join(EXTRAS)}; received {extra!r}.")
    declared = re.findall(r"^([a-z-]+) = \[", DECLARED_FILE.read_text(encoding="utf-8"), flags=re.M)
    for name in additional:
        if name not in declared:
            raise ValueError(f"--with must name extras of pyproject.toml; received {name!r}.")
    for name in FOREIGN_VARIABLES:
        os.environ.pop(name, None)  # this also affects the commands that the interpreter will run
    folder = PROJECT_FOLDER / (environment or default_environment(extra))
    python = folder / "bin" / "python"
    installed = _read_record(folder)
    extra, extras = _extras_to_install(installed, extra, additional)
    record = {"project": str(PROJECT_FOLDER), "declared": _hash_of_declared_file(), "extras": extras}
    if installed == record and _is_usable(python):
        say(f"{_shown(folder)} is up to date.")
        return str(python)
    reason = _reason_to_replace(folder, installed, extra)
    if reason:
        if not (folder / "pyvenv.cfg").exists():
            raise InstallError(f"{_shown(folder)} is not a Python environment. Name another folder with --environment.")
        if Path(sys.prefix).resolve() == folder.resolve():
            raise InstallError(
                f"{_shown(folder)} must be replaced ({reason}), but its own Python is running this program. Use "
                "another one: python3 install.py ..."
            )
        say(f"Replacing {_shown(folder)}: {reason}.")
        shutil.rmtree(folder)
    others = f" with {', '.join(extras[1:])}" if extras[1:] else ""
    packages = f"{EXTRAS[extra]} and this project{others}"
    if installed and not reason:
        packages = f"what is missing for {', '.join(extras)}"
    say(f"Installing {packages} into {_shown(folder)}. This takes a minute or two on a fast connection.")
    with contextlib.suppress(FileNotFoundError):
        (folder / RECORD_FILE).unlink()  # the file must not exist until everything is installed
    _install_with_uv_or_pip(folder, extra, extras, say)
    (folder / RECORD_FILE).write_text(json.dumps(record), encoding="utf-8")
    return str(python)


def add_extra(python: str, extra: str) -> None:
    """Install the packages of another extra of the project, such as `finetuning`, into an environment.

    Raises:
        InstallError: a package could not be installed.
    """
    _install_packages(_find_uv(say_at_once), Path(python), ["--editable", f".[{extra}]"])


def _extras_to_install(installed: dict[str, Any], extra: str, additional: Sequence[str]) -> tuple[str, list[str]]:
    """Return the main extra of the environment, and all extras to install, including those already installed."""
    existing = installed.get("extras", [])
    if extra == "cpu" and existing:
        extra = existing[0]
    return extra, [extra, *sorted({name for name in existing if name not in EXTRAS} | set(additional))]


def _reason_to_replace(folder: Path, installed: dict[str, Any], extra: str) -> str | None:
    """Return why an existing environment cannot be reused; None if it can, or if there is none."""
    if not folder.exists() or not any(folder.iterdir()):
        return None
    version = _version_of(folder / "bin" / "python")
    if version is None:
        return "its Python is missing"
    if not _is_supported(version):
        return f"its Python is {version[0]}.{version[1]}, but {PYTHON_RANGE} is needed"
    if not installed:
        return None
    if installed["project"] != str(PROJECT_FOLDER):
        return "it was created for another folder"
    existing = installed["extras"][0]
    return None if (existing, extra) == ("cpu", "gpu") or existing == extra else f"it is for {existing}, not {extra}"


def _install_with_uv_or_pip(folder: Path, extra: str, extras: Sequence[str], say: Callable[[str], None]) -> None:
    python = folder / "bin" / "python"
    packages = [["--editable", f".[{','.join(extras)}]"]]
    if extra == "tpu":
        packages.append(["--no-deps", TF_KERAS_FOR_TPU])
    uv = _find_uv(say)
    if uv is not None:
        try:
            if not python.exists():
                _make_with_uv(uv, folder)
            for options in packages:
                _install_packages(uv, python, options)
            return
        except CommandError as error:
            say(f"{error}\nTrying pip instead of uv.")
    if not _has_pip(python):
        shutil.rmtree(folder, ignore_errors=True)  # uv may have left an incomplete environment
        _make_with_venv(folder)
    for options in packages:
        _install_packages(None, python, options)


def _make_with_uv(uv: str, folder: Path) -> None:
    is_supported = _is_supported(sys.version_info)
    # If this Python is not supported, uv uses another Python on the machine, or downloads one.
    python = _base_python() if is_supported else _python_specifier()
    try:
        run_with_progress([uv, "venv", "--seed", "--python", python, str(folder)])
    except CommandError as error:
        raise error if is_supported else InstallError(_wrong_python()) from error


def _make_with_venv(folder: Path) -> None:
    if not _is_supported(sys.version_info):
        raise InstallError(_wrong_python())
    try:
        run_with_progress([_base_python(), "-m", "venv", str(folder)])
    except CommandError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise InstallError(
            f"{error}\nInstall your system's package for Python environments (python3-venv on Debian and Ubuntu), or "
            "uv: https://docs.astral.sh/uv/."
        ) from error


def _install_packages(uv: str | None, python: Path, options: Sequence[str]) -> None:
    pip = [str(python), "-m", "pip", "install", "--progress-bar", "off", "--disable-pip-version-check"]
    # pip compiles all modules. uv leaves that to the first import, which cannot save the result in the many containers
    # that set PYTHONDONTWRITEBYTECODE. In such containers every command would spend ten seconds on compiling.
    compiling = ["--compile-bytecode"] if sys.dont_write_bytecode else []
    run_with_progress([*([uv, "pip", "install", *compiling, "--python", str(python)] if uv else pip), *options])


def _find_uv(say: Callable[[str], None]) -> str | None:
    """Return the path of uv, after downloading it from PyPI if it is missing; None if that fails.

    uv is faster than pip, and does not need the module `venv`, which Colab lacks.
    """
    uv = shutil.which("uv") or shutil.which("uv", path=str(UV_FOLDER / "bin"))
    if uv is None:
        # Install it into a folder of the project, since the packages of the system's Python may be write-protected.
        try:
            run_with_progress(
                [sys.executable, "-m", "pip", "install", "--retries", "1", "--target", str(UV_FOLDER), "uv"]
            )
        except CommandError:
            say("uv could not be installed; using pip, which takes longer.")
            return None
        uv = str(UV_FOLDER / "bin" / "uv")
    return uv


def _base_python() -> str:
    """Return this interpreter or, within an environment, the interpreter that created the environment."""
    return str(getattr(sys, "_base_executable", sys.executable))


def _is_supported(version: Sequence[object]) -> bool:
    return OLDEST_PYTHON <= tuple(version[:2]) < FIRST_PYTHON_TOO_NEW


def _python_specifier() -> str:
    return f">={'.'.join(map(str, OLDEST_PYTHON))},<{'.'.join(map(str, FIRST_PYTHON_TOO_NEW))}"


def _wrong_python() -> str:
    version = ".".join(map(str, sys.version_info[:3]))
    return (
        f"{PYTHON_RANGE} is needed; {sys.executable} is {version}. Install one of them, and name it: "
        "make quickstart PYTHON=python3.12, or python3.12 install.py."
    )


def _is_usable(python: Path) -> bool:
    version = _version_of(python)
    return version is not None and _is_supported(version)


def _version_of(python: Path) -> tuple[int, ...] | None:
    """Return the version of an interpreter; None if it does not run."""
    program = "import sys; print(*sys.version_info[:2])"
    try:
        output = subprocess.run([str(python), "-c", program], stdout=subprocess.PIPE, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return tuple(map(int, output.split()))


def _has_pip(python: Path) -> bool:
    try:
        return subprocess.run([str(python), "-m", "pip", "--version"], capture_output=True).returncode == 0
    except OSError:
        return False


def _read_record(folder: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((folder / RECORD_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def _hash_of_declared_file() -> str:
    return hashlib.sha256(DECLARED_FILE.read_bytes()).hexdigest()


def _shown(path: Path) -> str:
    return str(path.relative_to(PROJECT_FOLDER)) if PROJECT_FOLDER in path.parents else str(path)


def run_with_progress(command: Sequence[str], log: Path = LOG_FILE, status: Callable[[], str] | None = None) -> None:
    """Run a command in the project's folder with its output in a file, and show its progress.

    A terminal shows the elapsed seconds and the status in one line, which is erased at the end. Elsewhere such a line
    is printed every 30 seconds.

    Args:
        command: the command and its arguments.
        log: the file for its output.
        status: returns the status to show. Default: the last line of the output.

    Raises:
        CommandError: the command ended with a status other than 0.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    is_terminal = sys.stdout.isatty()
    started_seconds = shown_seconds = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=PROJECT_FOLDER, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
    while True:
        try:
            process.wait(TERMINAL_POLL_SECONDS)
            break
        except subprocess.TimeoutExpired:
            pass
        except KeyboardInterrupt:
            print(f"\n{INDENT}Stopping. Press Ctrl-C again to end at once.", flush=True)
            process.wait()  # a terminal sends Ctrl-C to the command, too
            raise
        seconds = time.monotonic()
        text = f"{INDENT}{seconds - started_seconds:3.0f} s  {(status or (lambda: last_line(log)))() or 'starting'}"
        if is_terminal:
            print("\r" + text[: shutil.get_terminal_size().columns - 1] + "\033[K", end="", flush=True)
        elif seconds - shown_seconds >= HEARTBEAT_SECONDS:
            shown_seconds = seconds
            print(text[:100], flush=True)
    if is_terminal:
        print("\r\033[K", end="", flush=True)
    if process.returncode:
        lines = log.read_text(encoding="utf-8", errors="replace").replace("\r", "\n").strip().splitlines()
        excerpt = "\n".join(f"    {line}" for line in lines[-NUM_LOG_LINES_SHOWN:])
        words = " ".join(Path(word).name for word in command[:3])
        raise CommandError(f"{words} ended with status {process.returncode}; all its output: {_shown(log)}\n{excerpt}")


def last_line(path: Path) -> str:
    """Return the last line with text in a file that is being written to."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        lines = file.read().decode(errors="replace").replace("\r", "\n").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--extra", choices=EXTRAS, help="What to install for. Default: this machine's devices.")
    parser.add_argument(
        "--with",
        dest="additional",
        nargs="+",
        default=[],
        metavar="NAME",
        help="Additional packages: finetuning, beam, wandb, mlflow, trackio, docs, legacy, test.",
    )
    parser.add_argument(
        "--environment", metavar="DIR", help="Folder of the environment. Default: .venv, or .venv-preflight."
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Install, and say how to activate the environment."""
    arguments = build_parser().parse_args(argv)
    try:
        python = install(arguments.extra or find_extra(), arguments.environment, arguments.additional)
    except (ValueError, InstallError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    except KeyboardInterrupt:
        print("Stopped. Run the same command again to continue.", file=sys.stderr)
        return 130
    print(f"Activate it: source {_shown(Path(python).parent / 'activate')}")
    if not arguments.additional and arguments.extra != "preflight":
        print("next: python quickstart.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
