"""Requests to stop from signals and from a metadata server on loopback."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlm_common.errors import EXIT_INTERRUPTED, EXIT_STOPPED
from train.runtime.preemption import POLL_SECONDS, InFlight, StopRequest, listening

PROJECT = Path(__file__).parents[3]


def wait_until(holds, timeout_seconds=30):
    end_seconds = time.monotonic() + timeout_seconds
    while not holds() and time.monotonic() < end_seconds:
        time.sleep(0.01)
    return holds()


@pytest.mark.parametrize(
    ("number", "in_words"), [(signal.SIGTERM, " (received SIGTERM)"), (signal.SIGINT, "")], ids=["SIGTERM", "Ctrl-C"]
)
def test_a_signal_makes_the_request_and_its_handler_goes_away(number, in_words):
    request = StopRequest()
    before = signal.getsignal(number)
    with listening(request, on_cloud_machine=False):
        assert not request.is_agreed()
        os.kill(os.getpid(), number)
        assert wait_until(lambda: request.is_agreed())
        if number == signal.SIGINT:
            assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL  # the next one kills
    assert request.in_words == in_words
    assert signal.getsignal(number) == before


def test_ctrl_c_stays_ignored_where_it_was():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with listening(StopRequest(), on_cloud_machine=False):
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


# Saves when it is asked to stop, or takes for ever; its command line is that of its supervisor.
INTERRUPTED = """
import sys, time
from train.runtime.preemption import RunStoppedError, StopRequest, listening
from mlm_common.cli.command_line import command
@command
def main(argv):
    request = StopRequest()
    with listening(request, on_cloud_machine=False):
        print("ready", flush=True)
        while HANGS or not request.check():
            time.sleep(0.01)
        raise RunStoppedError("Stopped at step 2 of 3, saved. Run the same command again to continue.")
sys.exit(main([]))
"""
SUPERVISED = """
import sys
from train.runtime.supervisor import Supervisor
command = [sys.executable, "-c", sys.argv[1]]
sys.exit(Supervisor(command, stall_seconds=600, max_retries=9, retry_seconds=0.01).run())
"""


@pytest.mark.parametrize("is_supervised", [False, True])
@pytest.mark.parametrize(("hangs", "status"), [(False, EXIT_STOPPED), (True, EXIT_INTERRUPTED)])
def test_the_first_ctrl_c_saves_and_the_second_ends_at_once(is_supervised, hangs, status):
    """As a terminal does, it is sent to all processes; the supervisor starts nothing again."""
    program = INTERRUPTED.replace("HANGS", str(hangs))
    command = [sys.executable, "-c", *((SUPERVISED,) if is_supervised else ()), program]
    environment = os.environ | {"PYTHONPATH": str(PROJECT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8"}
    with subprocess.Popen(command, env=environment, start_new_session=True, **pipes) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            os.killpg(process.pid, signal.SIGINT)
            assert [process.stderr.readline() for _ in range(2)][1].startswith("Stopping after this step")
            if hangs:
                os.killpg(process.pid, signal.SIGINT)
            process.wait(timeout=60)
            output, errors = process.stdout.read(), process.stderr.read()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode in (status, -signal.SIGINT if hangs else status)
    assert output == ""  # it was not started again
    assert errors == ("" if hangs else "Stopped at step 2 of 3, saved. Run the same command again to continue.\n")


def test_a_notice_of_a_spot_machine_leaves_time_for_a_checkpoint():
    """A Spot machine is stopped 30 seconds after its notice."""
    assert POLL_SECONDS <= 3


@pytest.mark.parametrize("before", [{}, {"instance/maintenance-event": "MIGRATE_ON_HOST_MAINTENANCE"}])
@pytest.mark.parametrize(
    ("name", "value"), [("instance/maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE"), ("instance/preempted", "TRUE")]
)
def test_a_new_notice_makes_the_request(metadata, before, name, value):
    metadata.update(before)
    request = StopRequest()
    with listening(request, on_cloud_machine=False):
        time.sleep(0.2)
        assert not request.check()
        metadata[name] = value
        assert wait_until(lambda: request.check())
    assert request.reason == f"the machine's {name} is {value}"


def test_workers_stop_once_they_have_compared():
    compared = []

    def max_over_workers(values):
        compared.append(values)
        return [1.0, 0.0, 7.0]  # another one was asked to stop, whose steps take longer

    request = StopRequest(max_over_workers)
    assert not request.is_agreed()
    assert request.compare(5.0) == 7.0
    assert compared == [[0.0, 0.0, 5.0]]
    assert request.is_agreed()
    other = StopRequest(lambda values: values)
    other.make("a reason")
    assert not other.is_agreed()
    other.compare()
    assert other.is_agreed()


def test_workers_save_together_by_the_clock_of_any():
    assert StopRequest().take_agreement_to_save(True)
    compared, maxima = [], [0.0, 1.0, 0.0]
    request = StopRequest(lambda values: compared.append(values) or maxima)
    assert not request.take_agreement_to_save(True)
    request.compare()
    assert compared == [[0.0, 1.0, 0.0]]
    assert request.take_agreement_to_save(True)
    maxima[1] = 0.0
    request.compare()
    assert compared[1] == [0.0, 0.0, 0.0]  # once is enough
    assert not request.take_agreement_to_save(False)


class Device:
    """Makes the pieces that were handed out in turn, `seconds` for each, while a clock runs that a test moves."""

    def __init__(self, monkeypatch, seconds):
        self.seconds = seconds
        self.now = self.is_free_at = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def hand_out(self, num_pieces):
        self.is_free_at = max(self.now, self.is_free_at) + num_pieces * self.seconds

    def wait(self):
        self.now = max(self.now, self.is_free_at)

    def seconds_in_flight(self):
        return self.is_free_at - self.now


@pytest.mark.parametrize("step_seconds", [0.004, 0.3, 1.52, 30.0])
@pytest.mark.parametrize("max_steps", [1, 32])
def test_a_second_of_steps_or_one_step_is_in_flight(monkeypatch, step_seconds, max_steps):
    """After the first step, for which XLA compiles for 100 s."""
    device = Device(monkeypatch, 100.0)
    in_flight = InFlight(device.wait, StopRequest())
    longest_seconds = []
    for number in range(1000):
        num_steps = min(max_steps, in_flight.num_allowed)
        device.hand_out(num_steps)
        longest_seconds.append(device.seconds_in_flight())
        in_flight.add(num_steps)
        if number == 0:
            device.seconds = step_seconds
    assert max(longest_seconds[1:]) == pytest.approx(max(1.0, step_seconds), rel=0.4)
    assert max(longest_seconds[1:]) < max(1.0, step_seconds) + 1e-6


def test_slower_steps_are_in_flight_too_long_only_once(monkeypatch):
    device = Device(monkeypatch, 0.01)
    in_flight = InFlight(device.wait, StopRequest())
    in_flight_seconds = []
    for number in range(7):
        device.seconds = 0.01 if number < 4 else 0.5
        device.hand_out(in_flight.num_allowed)
        in_flight_seconds.append(device.seconds_in_flight())
        in_flight.add(in_flight.num_allowed)
    assert in_flight_seconds[5:] == pytest.approx([1.0, 1.0])


def test_all_workers_hand_out_what_the_slowest_makes_in_a_second(monkeypatch):
    device = Device(monkeypatch, 0.01)
    in_flight = InFlight(device.wait, StopRequest(lambda values: [*values[:2], 0.25]))
    for allowed in (1, 1, 4, 4):
        assert in_flight.num_allowed == allowed
        device.hand_out(allowed)
        assert in_flight.add(allowed)
