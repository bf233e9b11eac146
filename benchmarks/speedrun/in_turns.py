"""Train entrants of the speedrun for fixed numbers of steps, a few seconds each in turn, and compare time and score.

    python benchmarks/speedrun/in_turns.py work/speedrun/data work/speedrun/turns \
        --entrants ours-bfloat16=350 torch-muon-bfloat16=350 --torch-python .venv-torch/bin/python

The speed of a virtual machine can change from one minute to the next. A program that trains while the machine is slow
then loses the race. Here all programs are started at once, but only one of them runs at any time; the others are
stopped. So a slow minute makes all programs slower, and the ratio of their times varies less than the times. A
program's time is the sum of its turns, from the start of its process to its end.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# The benchmarks are not an installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.measuring.tables import print_machine, print_table
from benchmarks.speedrun.entrants import read_entrants, start_on_cores
from benchmarks.speedrun.prepare import check_data
from benchmarks.speedrun.race import Race, check_export, check_torch, parser_of_runs, score
from mlm_common.errors import InputError
from mlm_common.storage.guard import guarded_read

TURN_SECONDS = 2.0


def run_in_turns(commands: Sequence[Sequence[str]], logs: Sequence[Path], turn_seconds: float) -> list[list[float]]:
    """Run commands to their end, each in its turns.

    Args:
        commands: the programs and their arguments.
        logs: for each command, the file for its output.
        turn_seconds: the length of a turn.

    Returns:
        The seconds of each turn of each command.

    Raises:
        InputError: a command failed; the others are killed.
    """
    processes: list[subprocess.Popen[bytes]] = []
    turns: list[list[float]] = [[] for _ in commands]
    try:
        for command, log in zip(commands, logs, strict=True):
            processes.append(start_on_cores(command, log))
            _stop(processes[-1])
        while any(process.returncode is None for process in processes):
            for process, seconds, log in zip(processes, turns, logs, strict=True):
                if process.returncode is not None:
                    continue
                start_seconds = time.perf_counter()
                os.killpg(process.pid, signal.SIGCONT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=turn_seconds)
                _stop(process)
                seconds.append(time.perf_counter() - start_seconds)
                if process.returncode:
                    raise InputError(f"a program ended with status {process.returncode}; its output is in {log}.")
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return turns


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Stop a process and its children, and wait until it has stopped or ended."""
    with contextlib.suppress(ProcessLookupError):  # it has ended
        os.killpg(process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    process.poll()


def main(argv: Sequence[str] | None = None) -> None:
    """Do the missing seeds, and print the table."""
    parser = parser_of_runs(__doc__)
    parser.add_argument("--entrants", nargs="+", required=True, metavar="NAME=STEPS", help="The first is compared.")
    parser.add_argument("--turn-seconds", type=float, default=TURN_SECONDS)
    arguments = parser.parse_args(argv)
    data, runs = arguments.data.resolve(), arguments.runs.resolve()
    try:
        entrants = read_entrants(arguments.entrants_file)
        num_steps = dict(_steps_of(text, tuple(entrants)) for text in arguments.entrants)
        if not arguments.any_data:
            check_data(data)
        check_torch([entrants[name] for name in num_steps], arguments.torch_python)
        print_machine()
        results = [_result(arguments, data, runs, seed, num_steps) for seed in arguments.seeds]
    except InputError as error:
        sys.exit(f"error: {error}")
    rows = []
    for index, (name, steps) in enumerate(num_steps.items()):
        bits = [result["bits_per_byte"][index] for result in results]
        seconds = [result["seconds"][index] for result in results]
        ratios = [result["seconds"][0] / result["seconds"][index] for result in results]
        rows.append([name, f"{steps:,}", f"{statistics.mean(bits):.3f}", f"({min(bits):.3f}-{max(bits):.3f})"])
        rows[-1] += [f"{statistics.mean(seconds):.1f}", f"{statistics.mean(ratios):.2f}"]
        rows[-1] += [f"({min(ratios):.2f}-{max(ratios):.2f})"]
    print_table("entrant|steps|bits per byte|of seeds|seconds|seconds of the first / its seconds|of seeds", rows)


def _steps_of(text: str, names: Sequence[str]) -> tuple[str, int]:
    name, _, steps = text.partition("=")
    if name not in names or not steps.isdecimal() or not int(steps):
        raise InputError(f"--entrants must be NAME=STEPS, with a name among {', '.join(names)}; received {text}.")
    return name, int(steps)


def _result(
    arguments: argparse.Namespace, data: Path, runs: Path, seed: int, num_steps: dict[str, int]
) -> dict[str, Any]:
    """Return the bits per byte and the seconds of each entrant for a seed, and keep them in a file."""
    path = runs / f"seed-{seed}.json"
    if path.exists():
        with guarded_read(path, "a result of this program", hint="Delete it, and run the command again."):
            result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            is_same = result["steps"] == num_steps
            lengths = [len(result[name]) for name in ("bits_per_byte", "seconds")]
        if not is_same or lengths != 2 * [len(num_steps)]:
            raise InputError(f"{path} is of other entrants or steps: {result['steps']}. Choose another folder.")
        return result
    entrants = read_entrants(arguments.entrants_file)
    race = Race(data, runs, arguments.torch_python, 0, 0)
    folders = [runs / name / f"seed-{seed}" for name in num_steps]
    commands = []
    for name, folder in zip(num_steps, folders, strict=True):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        # A program that would stop by the clock also knows --max-steps.
        command = entrants[name].command.replace("--seconds {seconds}", "--max-steps {steps}")
        commands.append(race.command(entrants[name]._replace(command=command), folder / "run", seed, num_steps[name]))
    turns = run_in_turns(commands, [folder / "log.txt" for folder in folders], arguments.turn_seconds)
    bits = [score(check_export(folder / "run", data), data, folder)["value"] for folder in folders]
    result = {"steps": num_steps, "bits_per_byte": bits, "seconds": [sum(seconds) for seconds in turns]}
    path.write_text(json.dumps(result), encoding="utf-8")
    return result


if __name__ == "__main__":
    main()
