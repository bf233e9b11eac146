"""Programs that enter the speedrun: read from a table, run on two cores within a budget of seconds."""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

from mlm_common.errors import InputError
from mlm_common.storage.guard import guarded_read

PROJECT = Path(__file__).resolve().parents[2]
NUM_CORES = 2
PLACEHOLDERS = ("python", "torch_python", "data", "output", "seed", "seconds", "steps")


class Entrant(NamedTuple):
    """A program that enters the speedrun."""

    name: str
    about: str
    command: str

    @property
    def is_planned(self) -> bool:
        """Whether the program must be given its number of steps."""
        return "{steps}" in self.command

    def arguments(self, values: Mapping[str, object]) -> list[str]:
        """Fill in the placeholders."""
        return shlex.split(self.command.format(**{name: shlex.quote(str(value)) for name, value in values.items()}))


class Measured(NamedTuple):
    """The time that a process and its children took."""

    seconds: float
    cpu_seconds: float


def read_entrants(path: Path) -> dict[str, Entrant]:
    """Read the entrants of a YAML file; InputError if an entry is malformed."""
    with guarded_read(path, "a YAML file", flag="--entrants-file"):
        read = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(read, dict):
        raise InputError(f"--entrants-file: {path} must be a table of entrants by name; it is {type(read).__name__}.")
    entrants = {}
    for name, entry in read.items():
        form = f"--entrants-file: {path}: {name!r} must have a plain name, and `about` and `command`, each a text"
        is_table = isinstance(entry, dict) and sorted(map(str, entry)) == ["about", "command"]
        if not is_table or not all(isinstance(value, str) for value in (name, *entry.values())):
            raise InputError(f"{form}; received {entry!r}.")
        entrants[name] = Entrant(name, **entry)
        try:
            is_filled = bool(entrants[name].arguments(dict.fromkeys(PLACEHOLDERS, "")))
        except (LookupError, ValueError, AttributeError) as error:
            placeholders = ", ".join(f"{{{placeholder}}}" for placeholder in PLACEHOLDERS)
            raise InputError(f"{form} with {placeholders}; the command is refused: {error}.") from error
        if not is_filled or not re.fullmatch(r"[\w-]+", name):
            raise InputError(f"{form}; received {entry!r}.")
    return entrants


def start_on_cores(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own on two cores, with its output in a file."""
    cores = sorted(os.sched_getaffinity(0))[:NUM_CORES]
    if len(cores) < NUM_CORES:
        raise InputError(f"The speedrun needs {NUM_CORES} cores; this process may use {len(cores)}.")
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "FORCE_TF_AVAILABLE")}
    with log.open("wb") as output:
        try:
            return subprocess.Popen(
                ["taskset", "--cpu-list", ",".join(map(str, cores)), *command],
                cwd=PROJECT,
                env=variables | {"HF_HUB_OFFLINE": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise InputError(f"taskset could not be started: {error}. It is part of util-linux.") from error


def run_limited(command: Sequence[str], log: Path, seconds: float) -> Measured:
    """Run a command on two cores, with its output in a file; InputError if it fails, or takes longer than `seconds`."""
    before, start_seconds = os.times(), time.perf_counter()
    process = start_on_cores(command, log)
    try:
        status: int | None = process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        # Also kill the command's children, such as a process that would continue to train.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    after = os.times()
    if status is None:
        raise InputError(f"took more than its {seconds:g} s, and was killed; its output is in {log}.")
    if status:
        raise InputError(f"ended with status {status}; its output is in {log}.")
    cpu_seconds = after.children_user + after.children_system - before.children_user - before.children_system
    return Measured(time.perf_counter() - start_seconds, cpu_seconds)
