"""Programs that are measured in turns: each stays alive and runs a round of steps when it is told to.

The machine's other load then falls on all of them alike, so the ratios of a round's times mean something where the
times do not. A program calls `Rounds.step_done` after each step; nothing but the standard library is imported here,
since programs of other environments import it.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

READY, FIGURES, GO = "ready", "figures", "go"


class Times(NamedTuple):
    """What a round took."""

    seconds: float
    cpu_seconds: float  # over all cores; other load on the machine hardly changes it

    @staticmethod
    def now() -> "Times":
        """Read the clocks of this process."""
        return Times(time.perf_counter(), time.process_time())


class Rounds:
    """In a program that is measured: counts its steps, and waits after each round for the next.

    `figures`, called after each round, returns what is reported of it besides; it is not in the round's time.
    """

    def __init__(self, steps_per_round: int, warmup_steps: int, figures: Callable[[], dict[str, float]] = dict):
        self.steps_per_round = steps_per_round
        self.figures = figures
        self.num_left = warmup_steps
        self.start = Times.now()

    def step_done(self) -> None:
        """Count a step. After the last of a round report its time, and wait; does not return after the last round."""
        self.num_left -= 1
        if self.num_left:
            return
        times = [end - start for end, start in zip(Times.now(), self.start, strict=True)]
        print(json.dumps({READY: times, FIGURES: self.figures()}), flush=True)
        if sys.stdin.readline().strip() != GO:
            sys.exit(0)
        self.num_left = self.steps_per_round
        self.start = Times.now()


class MeasuredProgram:
    """A running program, as the one that measures sees it."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]):
        self.name = name
        self.figures: dict[str, float] = {}
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
        )

    def wait(self) -> Times:
        """Wait for the end of the round that runs, at first the warmup, for its times; its figures are in `figures`."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith('{"' + READY):
                report = json.loads(line)
                self.figures = report[FIGURES]
                return Times(*report[READY])
        sys.exit(f"{self.name} failed, with status {self._process.wait()}")

    def run_round(self) -> Times:
        """Run a round and return its times."""
        assert self._process.stdin is not None
        print(GO, file=self._process.stdin, flush=True)
        return self.wait()

    def end(self) -> None:
        """End the program."""
        self._process.kill()
        self._process.wait()
