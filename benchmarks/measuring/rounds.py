"""Measure programs in turn: each program stays alive, and runs a round of steps on request.

Other load on the machine then affects all programs equally, so the ratios of their times in a round are meaningful even
if the times are not. A program calls `Rounds.step_done` after each step. This module imports only the standard library,
because programs in other environments import it, such as programs with PyTorch but without TensorFlow.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

PEERS = Path(__file__).resolve().parents[1] / "peers"
READY, FIGURES, GO = "ready", "figures", "go"
TORCH_REQUIREMENTS = ("torch==2.13.0", "transformers==4.57.*", "accelerate==1.*")


class Times(NamedTuple):
    """The duration of a round."""

    seconds: float
    cpu_seconds: float  # sum over all cores; other load on the machine hardly affects it

    @staticmethod
    def now() -> "Times":
        return Times(time.perf_counter(), time.process_time())


class Rounds:
    """Counts the steps of the program that is measured, and waits after each round until the next round is requested.

    `figures` is called after each round, outside the measured time, and returns further values to report.
    """

    def __init__(self, steps_per_round: int, warmup_steps: int, figures: Callable[[], dict[str, float]] = dict):
        self.steps_per_round = steps_per_round
        self.figures = figures
        self.num_left = warmup_steps
        self.start = Times.now()

    def step_done(self) -> None:
        """Count a step.

        After the last step of a round, report the time and wait. Does not return after the last round.
        """
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
    """A running program, from the point of view of the measuring process."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]):
        self.name = name
        self.figures: dict[str, float] = {}
        self._process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
        )

    def wait(self) -> Times:
        """Wait for the end of the current round. The first round is the warmup.

        Return the times of the round, and store its values in `figures`.
        """
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


def start_program(
    name: str,
    script: str,
    arguments: Sequence[str],
    settings: Mapping[str, Any],
    torch_python: str = "",
    *,
    wait: bool = True,
) -> MeasuredProgram:
    """Start a program in peers/, with the interpreter for PyTorch if one is given; return it after its warmup."""
    environment = dict(os.environ)
    if torch_python:  # there these variables would make transformers look for TensorFlow
        environment = {
            key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "FORCE_TF_AVAILABLE")
        }
    command = [torch_python or sys.executable, str(PEERS / script), *arguments, "--settings", json.dumps(settings)]
    program = MeasuredProgram(name, command, environment | {"HF_HUB_OFFLINE": "1", "TF_CPP_MIN_LOG_LEVEL": "2"})
    if wait:
        program.wait()
    return program


def print_start(program: MeasuredProgram) -> None:
    figures = ", ".join(f"{figure} {value:g}" for figure, value in program.figures.items())
    print(f"{program.name} is warm{f': {figures}' if figures else ''}", flush=True)


def measure_in_turns(
    start: Callable[[str], MeasuredProgram], names: Sequence[str], num_rounds: int, *, started_warm: bool = True
) -> dict[str, list[Times]]:
    """Return {name: times of each round}, and print the programs' reports about their start.

    If `started_warm`, `start` waits for the warmup. Otherwise all programs warm up at the same time.
    """
    programs = []
    try:
        for name in names:
            programs.append(start(name))
            if started_warm:
                print_start(programs[-1])
        for program in [] if started_warm else programs:
            program.wait()
            print_start(program)
        times: dict[str, list[Times]] = {name: [] for name in names}
        for number in range(num_rounds):
            for program in programs:
                times[program.name].append(program.run_round())
            print(f"round {number + 1} of {num_rounds}", file=sys.stderr)
    finally:
        for program in programs:
            program.end()
    return times


def add_step_flags(parser: argparse.ArgumentParser, **defaults: int) -> None:
    """Add the flags for model size, batches and rounds, with these defaults."""
    defaults = {"num_layers": 4, "hidden_size": 256, "num_heads": 4, "length": 128, **defaults}
    for name, default in defaults.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--torch-python", default="", help="Interpreter that has torch and transformers 4.57.")


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": {
            "num_hidden_layers": arguments.num_layers,
            "hidden_size": arguments.hidden_size,
            "num_attention_heads": arguments.num_heads,
            "intermediate_size": 4 * arguments.hidden_size,
        },
        "vocab_size": arguments.vocab_size,
        "length": arguments.length,
        "batch_rows": arguments.batch_rows,
        "rounds": {"steps_per_round": arguments.steps_per_round, "warmup_steps": arguments.warmup_steps},
    }


def make_torch_environment(folder: Path, *packages: str) -> str:
    """Install PyTorch, transformers and further packages in a new environment, and return its interpreter."""
    venv.create(folder, with_pip=True)
    interpreter = str(folder / "bin" / "python")
    subprocess.run([interpreter, "-m", "pip", "install", "--quiet", *TORCH_REQUIREMENTS, *packages], check=True)
    return interpreter
