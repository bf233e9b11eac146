"""The supervisor of training processes, with small programs that report as training does."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlm_common.errors import FINAL_STATUSES
from train.publishing.publisher import PushToHub
from train.runtime import supervisor
from train.runtime.supervisor import Supervisor

PROJECT = Path(__file__).parents[3]
# Counts its own starts in the file `starts`, and reports steps.
PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from train.runtime import supervisor
starts = Path("starts")
start = len(starts.read_text()) if starts.exists() else 0
starts.write_text("x" * (start + 1))
"""


@pytest.fixture
def supervise(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))
    monkeypatch.setattr("train.runtime.supervisor.POLL_SECONDS", 0.05)

    def run(body, *, stall_seconds=60.0, max_retries=2):
        command = [sys.executable, "-c", PROGRAM + textwrap.dedent(body)]
        status = Supervisor(command, stall_seconds=stall_seconds, max_retries=max_retries, retry_seconds=0.01).run()
        return status, len((tmp_path / "starts").read_text(encoding="utf-8"))

    return run


@pytest.mark.parametrize(
    ("body", "status", "num_starts"),
    [
        ("supervisor.report('train', 1)", 0, 1),
        ("supervisor.report('train', start); start < 1 and os.kill(os.getpid(), signal.SIGKILL)", 0, 2),
        ("supervisor.report('train', start); sys.exit(0 if start else 75)", 0, 2),  # preempted
        ("supervisor.report('train', 5); sys.exit(1)", 1, 1 + 1),
        ("supervisor.report('train', min(start, 2)); sys.exit(1)", 1, 3 + 1),  # starts 0 to 2 get further
        *(
            (f"supervisor.report('train', start); sys.exit({exit_status})", exit_status, 1)
            for exit_status in sorted(FINAL_STATUSES - {0})
        ),
    ],
)
def test_a_command_is_started_again_while_that_can_help(supervise, body, status, num_starts):
    """One retry is left after each start that made progress."""
    assert supervise(body, max_retries=1) == (status, num_starts)


def set_clock(monkeypatch, seconds):
    """Give the supervisor a clock: a function without arguments."""
    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=seconds, sleep=time.sleep))


def test_a_process_that_hangs_is_killed(supervise, monkeypatch, caplog):
    late_seconds = [0.0]

    def seconds():
        if Path("hangs").exists() and late_seconds[0] < 200:  # once before or once after the watch begins
            late_seconds[0] += 100
        return time.monotonic() + late_seconds[0]

    set_clock(monkeypatch, seconds)
    assert supervise("if start == 0: Path('hangs').touch(); time.sleep(600)", stall_seconds=60) == (0, 2)
    assert "no progress" in caplog.text


def test_a_process_that_reports_is_not_killed(supervise, tmp_path, monkeypatch):
    """Its reports come 40 seconds apart."""
    num_read, read = [0], os.read

    def counting(descriptor, num_bytes):
        content = read(descriptor, num_bytes)
        num_read[0] += content.count(b"evaluate 0\n")
        (tmp_path / f"read-{num_read[0]}").touch()
        return content

    monkeypatch.setattr(os, "read", counting)
    set_clock(monkeypatch, lambda: 40.0 * num_read[0])
    body = """
    for number in range(1, 5):
        supervisor.report("evaluate")
        while not Path(f"read-{number}").exists():
            time.sleep(0.01)
    """
    assert supervise(body, stall_seconds=60) == (0, 1)
    assert num_read == [4]


SUPERVISED = """
from train.runtime.supervisor import Supervisor
import sys
sys.exit(Supervisor([sys.executable, "-c", sys.argv[1]], stall_seconds=60, max_retries=9, retry_seconds=60).run())
"""


@pytest.fixture
def start(tmp_path):
    """Start a supervisor of a program in a process of its own, whose stdout and stderr can be read."""

    def run(body):
        command = [sys.executable, "-c", SUPERVISED, PROGRAM + textwrap.dedent(body)]
        environment = os.environ | {"PYTHONPATH": str(PROJECT)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8"}
        return subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes)

    return run


def test_sigterm_is_passed_on_and_ends_it(start, tmp_path):
    body = """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    print("ready", flush=True)
    time.sleep(60)
    """
    with start(body) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 75
    assert (tmp_path / "starts").read_text(encoding="utf-8") == "x"


@pytest.mark.parametrize(("end", "status"), [("sys.exit(75)", 75), ("os.kill(os.getpid(), signal.SIGKILL)", 137)])
def test_sigterm_between_tries_gives_the_last_status(start, tmp_path, end, status):
    with start(end) as process:
        assert "restarting it in" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == status
    assert (tmp_path / "starts").read_text(encoding="utf-8") == "x"


def test_a_process_learns_that_its_supervisor_has_ended(start, tmp_path):
    body = """
    print("ready", flush=True)
    while not supervisor.is_lost():
        supervisor.report("train", 1)
        time.sleep(0.05)
    Path("noticed").write_text("")
    """
    with start(body) as process:
        assert process.stdout.readline() == "ready\n"
        process.kill()
        assert process.stdout.read() == ""  # ends when the process does
    assert (tmp_path / "noticed").exists()


@pytest.fixture
def reports(monkeypatch):
    """The end of the pipe that a supervisor reads; reports are repeated every 10 ms."""
    reading, writing = os.pipe()
    monkeypatch.setenv(supervisor.PIPE_VARIABLE, str(writing))
    monkeypatch.setattr(supervisor, "INTERVAL_SECONDS", 0.01)
    yield reading
    os.close(reading)
    os.close(writing)


def wait_for_reports(reports: int, line: str) -> None:
    """Read five reports or more, all of them that line."""
    text = ""
    while text.count("\n") < 5:
        text += os.read(reports, 1 << 16).decode()
    assert set(text.splitlines()) == {line}


def wait_for_the_last_report() -> None:
    for thread in threading.enumerate():
        if thread.name == "heartbeat":
            thread.join()


def test_what_takes_long_is_reported_over_and_over_until_it_ends(reports):
    with supervisor.keep_reporting("publish", 6):
        wait_for_reports(reports, "publish 6")
    wait_for_the_last_report()
    supervisor.report("train", 7)
    assert os.read(reports, 1 << 16).decode().splitlines()[-1] == "train 7"


def test_what_hangs_for_hours_is_not_reported_for_ever(reports, monkeypatch):
    monkeypatch.setattr(supervisor, "MAX_REPORTED_SECONDS", 0.05)
    with supervisor.keep_reporting("publish", 6):
        wait_for_the_last_report()
        assert os.read(reports, 1 << 16)
        supervisor.report("train", 1)
        assert os.read(reports, 1 << 16) == b"train 1\n"


def test_a_push_that_is_waited_for_is_reported(reports):
    pushing = PushToHub(None, (), log=None)  # type: ignore[arg-type]
    is_taken = threading.Event()

    def handle(_):
        is_taken.set()
        wait_for_reports(reports, "push 0")

    pushing._pushes._handle = handle
    with pushing:
        pushing._pushes.submit("a snapshot")  # type: ignore[arg-type]
        is_taken.wait()
