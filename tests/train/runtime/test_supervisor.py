"""The supervisor of training processes, with small programs that report as training does."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from mlm_common.errors import FINAL_STATUSES
from train.runtime.supervisor import Supervisor

PROJECT = Path(__file__).parents[3]
# Counts its own starts in the file `starts`, and reports steps.
PROGRAM = """
import os, signal, sys, time
from pathlib import Path
from train.runtime import heartbeat
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


def test_a_command_that_ends_well_runs_once(supervise):
    assert supervise("heartbeat.report('train', 1)") == (0, 1)


def test_a_crash_is_followed_by_another_start(supervise):
    assert supervise("heartbeat.report('train', start); start < 1 and os.kill(os.getpid(), signal.SIGKILL)") == (0, 2)


def test_tries_are_bounded_where_nothing_gets_further(supervise):
    assert supervise("heartbeat.report('train', 5); sys.exit(1)") == (1, 1 + 2)


def test_progress_gives_new_tries(supervise):
    """Starts 0 to 5 get further, 6 and 7 do not."""
    assert supervise("heartbeat.report('train', min(start, 5)); sys.exit(1)") == (1, 6 + 2)


@pytest.mark.parametrize("status", sorted(FINAL_STATUSES - {0}))
def test_what_a_retry_cannot_fix_is_not_tried_again(supervise, status):
    assert supervise(f"heartbeat.report('train', start); sys.exit({status})") == (status, 1)


def test_a_process_that_hangs_is_killed(supervise, caplog):
    assert supervise("start or time.sleep(100)", stall_seconds=1.5) == (0, 2)
    assert "no progress" in caplog.text


def test_a_process_that_reports_is_not_killed(supervise):
    assert supervise("for _ in range(9): time.sleep(0.2); heartbeat.report('evaluate')", stall_seconds=1.5) == (0, 1)


def test_a_preempted_process_is_started_again(supervise):
    assert supervise("heartbeat.report('train', start); sys.exit(0 if start else 75)") == (0, 2)


SUPERVISED = """
from train.runtime.supervisor import Supervisor
import sys
sys.exit(Supervisor([sys.executable, "-c", sys.argv[1]], stall_seconds=60, max_retries=9, retry_seconds=60).run())
"""


def test_sigterm_is_passed_on_and_ends_it(tmp_path):
    body = """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    print("ready", flush=True)
    time.sleep(60)
    """
    command = [sys.executable, "-c", SUPERVISED, PROGRAM + textwrap.dedent(body)]
    environment = os.environ | {"PYTHONPATH": str(PROJECT)}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, encoding="utf-8"
    ) as supervisor:
        assert supervisor.stdout.readline() == "ready\n"
        supervisor.send_signal(signal.SIGTERM)
        assert supervisor.wait(30) == 75
    assert (tmp_path / "starts").read_text(encoding="utf-8") == "x"


@pytest.mark.parametrize(("end", "status"), [("sys.exit(75)", 75), ("os.kill(os.getpid(), signal.SIGKILL)", 137)])
def test_sigterm_between_tries_gives_the_last_status(tmp_path, end, status):
    command = [sys.executable, "-c", SUPERVISED, PROGRAM + end]
    environment = os.environ | {"PYTHONPATH": str(PROJECT)}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, encoding="utf-8"
    ) as supervisor:
        assert "it is started again in" in supervisor.stderr.readline()
        supervisor.send_signal(signal.SIGTERM)
        assert supervisor.wait(30) == status
    assert (tmp_path / "starts").read_text(encoding="utf-8") == "x"


def test_a_process_learns_that_its_supervisor_has_ended(tmp_path):
    body = """
    print("ready", flush=True)
    while not heartbeat.is_supervisor_lost():
        heartbeat.report("train", 1)
        time.sleep(0.05)
    Path("noticed").write_text("")
    """
    command = [sys.executable, "-c", SUPERVISED, PROGRAM + textwrap.dedent(body)]
    environment = os.environ | {"PYTHONPATH": str(PROJECT)}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, encoding="utf-8"
    ) as supervisor:
        assert supervisor.stdout.readline() == "ready\n"
        supervisor.kill()
        assert supervisor.stdout.read() == ""  # ends when the process does
    assert (tmp_path / "noticed").exists()
