"""Training runs in processes of their own, on two logical devices, that can be killed in the middle of what they do.

Run as `python -m tests.killable_runs`: imports TensorFlow once, and forks for each line of flags in JSON that it reads,
before any device is set up. It writes `PID`, and at the process's end `STATUS`, below 0 for a signal's number.
"""

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from train import heartbeat

PROJECT = Path(__file__).parent.parent
# A report after which a process is killed, and how many of it are waited for at most.
PHASES = {"train": 7, "save": 3, "evaluate": 5}
MAX_DELAY_SECONDS = 0.05


class KillableRuns:
    """Starts training processes one after the other."""

    def __init__(self, environment: Mapping[str, str] | None = None):
        self._reports, writing = os.pipe()
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.killable_runs"],
            cwd=PROJECT,
            env={**os.environ, **(environment or {}), heartbeat.VARIABLE: str(writing)},
            pass_fds=(writing,),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        os.close(writing)

    def __enter__(self) -> "KillableRuns":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._server.stdin.close()
        self._server.wait(60)
        self._server.stdout.close()
        os.close(self._reports)

    def run(self, flags: list[str]) -> int:
        """Return the exit status of a run to its end."""
        self._start(flags)
        return self._status()

    def run_and_signal(self, flags: list[str], phase: str, num_reports: int, number: int, delay_seconds: float) -> int:
        """Send a signal so long after so many reports of a phase, or let the run end before; return its status."""
        pid = self._start(flags)
        while num_reports:
            # Either a report, or the status.
            ready, _, _ = select.select([self._reports, self._server.stdout], [], [])
            if self._reports not in ready:
                return self._status()
            reports = os.read(self._reports, 1 << 16).decode().split("\n")
            num_reports = max(0, num_reports - sum(report.startswith(f"{phase} ") for report in reports))
        time.sleep(delay_seconds)
        os.kill(pid, number)
        return self._status()

    def run_killed(self, flags: list[str], seed: int, num_kills: int) -> list[str]:
        """Kill a run at random moments, and let it go on each time; return the phases in which it was killed."""
        draw = random.Random(seed)
        phases = []
        while len(phases) < num_kills:
            phase = draw.choice(list(PHASES))
            moment = draw.randint(1, PHASES[phase]), signal.SIGKILL, draw.uniform(0, MAX_DELAY_SECONDS)
            status = self.run_and_signal(flags, phase, *moment)
            if status == -signal.SIGKILL:
                phases.append(phase)
            else:
                assert status == 0, f"status {status}"
                break
        return phases

    def _start(self, flags: list[str]) -> int:
        while select.select([self._reports], [], [], 0)[0]:
            os.read(self._reports, 1 << 16)  # of a process before
        self._server.stdin.write(json.dumps(flags) + "\n")
        self._server.stdin.flush()
        return int(self._server.stdout.readline())

    def _status(self) -> int:
        return int(self._server.stdout.readline())


def serve() -> None:
    import tensorflow as tf

    import train.export
    import train.rollback
    import train.run
    import train.trainer  # noqa: F401
    from train.run_mlm import main

    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            os.dup2(2, 1)
            cpu = tf.config.list_physical_devices("CPU")[0]
            tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
            os._exit(main(json.loads(line)))
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
