"""Commands of the project in processes of their own, which start in a moment, and can be signalled at any other.

Run as `python -m tests.campaign.processes`: imports what the commands need once, and forks for each line of JSON that
it reads, before TensorFlow sets up any device. It writes `ID`, and at the process's end `ID STATUS`, below 0 for a
signal's number.
"""

import ctypes
import functools
import importlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from mlm_common.cli.process import begin_script, run_as_script
from train import load_tensorflow

PROJECT = Path(__file__).parents[2]
COMMANDS = ("tokenizer_training.train_unigram", "tfrecord_prep.prepare_tfrecord_shards", "train.run_mlm")
# What those import when they need it.
LIBRARIES = (
    *("train.loop.lifecycle", "train.loop.trainer", "train.publishing.publisher", "tokenizer_training.trainer"),
)
INTERRUPTS = {signal.SIGINT, signal.SIGTERM}
TIMEOUT_SECONDS = 300.0
POLL_SECONDS = 0.005
# Of <sched.h>: what a process has for itself.
CLONE_NEWNS, CLONE_NEWUSER = 0x00020000, 0x10000000


class Processes:
    """Starts commands in one environment, since TensorFlow reads parts of it when it is imported.

    Args:
        folder: gets what they print.
        environment: laid over that of the tests.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]):
        self._folder = folder
        self._num_started = 0
        self._statuses: dict[int, int] = {}
        self._afresh: dict[int, subprocess.Popen[bytes]] = {}
        self._environment = {**os.environ, **environment}
        command = [sys.executable, "-m", "tests.campaign.processes"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
        self._server = subprocess.Popen(command, cwd=PROJECT, env=self._environment, **pipes)

    def __enter__(self) -> "Processes":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.communicate(timeout=60)

    def start_afresh(self, words: Sequence[str]) -> "Process":
        """Start a command, its module first, as a user does: in a process that imports everything itself."""
        module, *flags = words
        self._num_started += 1
        streams = [self._folder / f"{name}-{self._num_started:04d}.txt" for name in ("output", "errors")]
        with streams[0].open("wb") as output, streams[1].open("wb") as errors:
            options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": errors}
            options |= {"cwd": PROJECT, "env": self._environment, "start_new_session": True}
            process = subprocess.Popen([sys.executable, f"{module.replace('.', '/')}.py", *flags], **options)
        self._afresh[process.pid] = process
        return Process(self, process.pid, *streams)

    def start(
        self,
        module: str,
        flags: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        constants: Mapping[str, Any] | None = None,
        seconds_back: float = 0.0,
        disk: Mapping[str, str] | None = None,
        as_script: bool = False,
    ) -> "Process":
        """Start a command.

        Args:
            module: that has its `main`.
            flags: its arguments.
            environment: laid over that of all processes.
            constants: {"module:name": value} that this process has in place of the project's, such as waits.
            seconds_back: its clock is set back by so much, half a second after the start.
            disk: `folder`, where it finds a small disk mounted with `options`; `copy` gets what the disk holds at the
                end.
            as_script: it begins and ends its process as a script does, which is ready for signals once it has a pid.
        """
        self._num_started += 1
        streams = [self._folder / f"{name}-{self._num_started:04d}.txt" for name in ("output", "errors")]
        order = {"module": module, "flags": [*flags], "streams": [*map(str, streams)], "seconds_back": seconds_back}
        order |= {
            "as_script": as_script,
            "environment": {**(environment or {})},
            "constants": {**(constants or {})},
            "disk": {**(disk or {})},
        }
        self._server.stdin.write(json.dumps(order).encode() + b"\n")
        pid = None
        while pid is None:
            pid = self._read_line()
        self._statuses.pop(pid, None)  # of an earlier process of the same number
        self._afresh.pop(pid, None)
        return Process(self, pid, *streams)

    def status(self, pid: int, timeout_seconds: float) -> int | None:
        """Wait so long for the exit status of a process; None while it runs."""
        if pid in self._afresh:
            try:
                return self._afresh[pid].wait(timeout_seconds)
            except subprocess.TimeoutExpired:
                return None
        end_seconds = time.monotonic() + timeout_seconds
        while pid not in self._statuses:
            if not select.select([self._server.stdout], [], [], max(0.0, end_seconds - time.monotonic()))[0]:
                return None
            self._read_line()
        return self._statuses[pid]

    def _read_line(self) -> int | None:
        """Read the id of a process that was started; None for the status of one that ended, which is kept."""
        pid, *status = map(int, self._server.stdout.readline().split())
        if status:
            self._statuses[pid] = status[0]
            return None
        return pid


class Process:
    """A command that was started; `pid` is also the id of its group, to which its workers belong."""

    def __init__(self, processes: Processes, pid: int, output: Path, errors: Path):
        self.pid = pid
        self._processes = processes
        self._output = output
        self._errors = errors

    @property
    def printed(self) -> str:
        """What it has printed so far."""
        return self._output.read_text(errors="replace", encoding="utf-8") if self._output.exists() else ""

    @property
    def errors(self) -> str:
        """What it has said so far, on the stream for errors."""
        return self._errors.read_text(errors="replace", encoding="utf-8") if self._errors.exists() else ""

    @property
    def output(self) -> str:
        """Both."""
        return self.printed + self.errors

    @property
    def error_lines(self) -> list[str]:
        """The lines that tell the user what went wrong."""
        return [line for line in self.errors.splitlines() if line.startswith("error: ")]

    @property
    def quiet_seconds(self) -> float:
        """How long it has written nothing."""
        written = [path.stat().st_mtime for path in (self._output, self._errors) if path.exists()]
        return time.time() - max(written, default=time.time())

    def wait(self, timeout_seconds: float = TIMEOUT_SECONDS) -> int | None:
        """Wait so long for the exit status; None while it runs."""
        return self._processes.status(self.pid, timeout_seconds)

    def wait_for_handlers(self) -> None:
        """Wait until it is ready for signals, or has ended: until then it is Python that starts, not the command."""
        while self.wait(0.002) is None:
            status = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii", errors="replace")
            if int(status.partition("SigCgt:")[2].split()[0], 16) >> (signal.SIGTERM - 1) & 1:
                break

    def send(self, number: int, *, with_workers: bool = True) -> None:
        """Send a signal, which a process that has just ended does not get."""
        if self.wait(0) is None:
            (os.killpg if with_workers else os.kill)(self.pid, number)

    def kill_after(self, seconds: float, number: int = signal.SIGKILL, *, with_workers: bool = True) -> int:
        """Let it run so long, then send the signal; return its exit status, which may be of its own end before."""
        if self.wait(seconds) is None:
            self.send(number, with_workers=with_workers)
        status = self.wait()
        assert status is not None, f"still running: {self.output}"
        return status


def serve() -> None:
    load_tensorflow()  # without JAX, which reads the environment of its process when it is imported
    mains = {name: importlib.import_module(name).main for name in COMMANDS}
    for name in LIBRARIES:
        importlib.import_module(name)
    running: set[int] = set()
    while True:
        if select.select([sys.stdin], [], [], POLL_SECONDS)[0]:
            line = sys.stdin.readline()
            if not line:
                break
            order = json.loads(line)
            signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTS)  # until the new process is ready for them
            pid = os.fork()
            if pid == 0:
                become(order, mains[order["module"]])
            signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPTS)
            running.add(pid)
            print(pid, flush=True)
        for pid in [*running]:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                running.remove(pid)
                print(pid, os.waitstatus_to_exitcode(status), flush=True)


def become(order: dict[str, Any], main: Any) -> None:
    """Be the process of a command, and end with its status."""
    os.setsid()
    for number, path in enumerate(order["streams"], start=1):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(order["environment"])
    for place, value in order["constants"].items():
        module, _, name = place.partition(":")
        *parents, name = name.split(".")
        setattr(functools.reduce(getattr, parents, importlib.import_module(module)), name, value)
    if order["seconds_back"]:
        set_clock_back(order["seconds_back"])
    if order["as_script"]:
        begin_script()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPTS)
    if order["as_script"]:
        run_as_script(functools.partial(main, order["flags"]))
    status: Any = 1
    try:
        if order["disk"]:
            mount_disk(order["disk"]["folder"], order["disk"]["options"])
        status = main(order["flags"])
    except SystemExit as error:
        status = error.code
    except BaseException:
        traceback.print_exc()
    if order["disk"]:
        shutil.copytree(order["disk"]["folder"], order["disk"]["copy"], dirs_exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status if isinstance(status, int) else 1)


def set_clock_back(seconds: float) -> None:
    clock, is_back = time.time, threading.Event()
    threading.Timer(0.5, is_back.set).start()
    time.time = lambda: clock() - seconds * is_back.is_set()


def mount_disk(folder: str, options: str) -> None:
    """Mount a disk that this process and its workers alone see."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(CLONE_NEWUSER | CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    Path("/proc/self/setgroups").write_text("deny", encoding="utf-8")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1", encoding="utf-8")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1", encoding="utf-8")
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], check=True)


if __name__ == "__main__":
    serve()
