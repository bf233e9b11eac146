"""Restart the training command after a crash, a lost TPU or a shutdown, as long as a retry can help.

A training process reports its progress to its supervisor, as lines `PHASE STEP` on a pipe. This module does not import
TensorFlow, so that the supervisor does not crash or hang together with the training process.
"""

import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from mlm_common.errors import EXIT_FAILED, FINAL_STATUSES
from train.config.settings import RunConfig

logger = logging.getLogger(__name__)

# Environment variables of a training process: the id of its supervisor, and the file descriptor of the pipe.
VARIABLE = "RUN_MLM_SUPERVISION"
PIPE_VARIABLE = "RUN_MLM_HEARTBEAT_FD"
# The `PHASE` of a report that training has reached a step.
TRAIN = "train"
# Interval between reports of `keep_reporting`, and its time limit: an upload that takes longer has hung.
INTERVAL_SECONDS = 1.0
MAX_REPORTED_SECONDS = 6 * 3600.0
MAX_RETRY_SECONDS = 600.0
POLL_SECONDS = 1.0


def supervision() -> str | None:
    """Return the id of the supervisor that started this process; None without a supervisor."""
    return os.environ.get(VARIABLE)


_lost = threading.Event()


def report(phase: str, step: int = 0) -> None:
    """Report to the supervisor, if there is one, that `phase` has started, or that training has reached `step`."""
    if descriptor := os.environ.get(PIPE_VARIABLE):
        try:
            os.write(int(descriptor), f"{phase} {step}\n".encode())
        except BrokenPipeError:
            _lost.set()


@contextmanager
def keep_reporting(phase: str, step: int = 0) -> Iterator[None]:
    """Report `phase` repeatedly during the context, for work that may take long and has separate timeouts."""
    ended = threading.Event()
    end_seconds = time.monotonic() + MAX_REPORTED_SECONDS

    def keep_up() -> None:
        while not ended.wait(INTERVAL_SECONDS) and time.monotonic() < end_seconds:
            report(phase, step)

    report(phase, step)
    threading.Thread(target=keep_up, name="heartbeat", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def is_lost() -> bool:
    """Return whether the supervisor of this process has ended."""
    return _lost.is_set()


def supervise_if_asked(config: RunConfig, command_file: str, argv: Sequence[str] | None) -> None:
    """With `--supervise`, run the command in child processes until it is done, and exit with its status."""
    if not config.supervise or config.dry_run or supervision() is not None:
        return
    arguments = sys.argv[1:] if argv is None else argv
    supervisor = Supervisor(
        [sys.executable, str(Path(command_file).resolve()), *arguments],
        stall_seconds=config.stall_minutes * 60,
        max_retries=config.max_retries,
        retry_seconds=config.retry_seconds,
    )
    sys.exit(supervisor.run())


class Supervisor:
    """Runs a command until it succeeds, fails in a way that a retry cannot fix, or fails too often without progress.

    Args:
        command: the command and its arguments.
        stall_seconds: a process that reports nothing for this long is killed.
        max_retries: number of restarts in a row without a new step.
        retry_seconds: wait before the first restart in a row; the wait doubles with each further restart.
    """

    def __init__(self, command: Sequence[str], *, stall_seconds: float, max_retries: int, retry_seconds: float):
        self._command, self._stall_seconds = list(command), stall_seconds
        self._max_retries, self._retry_seconds = max_retries, retry_seconds
        self._name = uuid.uuid4().hex
        self._furthest_step = -1  # over all processes; -1 until a process has reported a step
        self._process: subprocess.Popen[bytes] | None = None
        self._is_asked_to_stop = False

    def run(self) -> int:
        """Run the command until it is done. Return the last process's exit status, or 1 if no retries are left."""
        before = {number: signal.signal(number, self._pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            return self._run_until_done()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _run_until_done(self) -> int:
        num_failures = 0
        while True:
            furthest_step = self._furthest_step
            status = self._run_once()
            exit_status = status if status >= 0 else 128 - status  # as in shells
            if status in FINAL_STATUSES or self._is_asked_to_stop:
                return exit_status
            num_failures = 1 if self._furthest_step > furthest_step else num_failures + 1
            if num_failures > self._max_retries:
                logger.error(
                    "giving up: the training process ended %d times in a row without getting past step %d",
                    num_failures,
                    max(0, self._furthest_step),
                )
                return EXIT_FAILED
            wait_seconds = min(MAX_RETRY_SECONDS, self._retry_seconds * 2 ** (num_failures - 1))
            logger.warning(
                "the training process ended with status %d; restarting it in %.0f s (restart %d of at most %d since "
                "step %d)",
                *(status, wait_seconds, num_failures, self._max_retries, max(0, self._furthest_step)),
            )
            end_seconds = time.monotonic() + wait_seconds
            while not self._is_asked_to_stop and (seconds_left := end_seconds - time.monotonic()) > 0:
                time.sleep(min(seconds_left, POLL_SECONDS))
            if self._is_asked_to_stop:
                return exit_status

    def _run_once(self) -> int:
        """Run one process to its end, and return its exit status; below 0 if a signal ended it."""
        reading, writing = os.pipe()
        environment = os.environ | {PIPE_VARIABLE: str(writing), VARIABLE: self._name}
        try:
            self._process = subprocess.Popen(self._command, env=environment, pass_fds=(writing,))
        finally:
            os.close(writing)
        if self._is_asked_to_stop:  # the request came just before the process was started
            self._process.terminate()
        try:
            self._watch(self._process, reading)
            return self._process.wait()
        finally:
            os.close(reading)
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()

    def _watch(self, process: "subprocess.Popen[bytes]", reading: int) -> None:
        """Read the reports of a process until it ends; kill it if it stops reporting."""
        reported_seconds = time.monotonic()
        text = ""
        while True:
            has_ended = process.poll() is not None
            ready, _, _ = select.select([reading], [], [], 0 if has_ended else POLL_SECONDS)
            content = os.read(reading, 1 << 16) if ready else b""
            if content:
                reported_seconds = time.monotonic()
                *lines, text = (text + content.decode()).split("\n")
                steps = [int(line.removeprefix(f"{TRAIN} ")) for line in lines if line.startswith(f"{TRAIN} ")]
                self._furthest_step = max(self._furthest_step, *steps, -1)
            elif has_ended:
                return
            elif ready:  # the pipe is closed a moment before the process ends
                time.sleep(POLL_SECONDS / 10)
            if time.monotonic() - reported_seconds > self._stall_seconds:
                logger.warning("the training process has shown no progress for %.0f s: killed", self._stall_seconds)
                process.kill()
                process.wait()

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        """Ask the training process to stop. Ctrl-C in a terminal reaches that process directly."""
        self._is_asked_to_stop = True
        if number == signal.SIGTERM and self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)
