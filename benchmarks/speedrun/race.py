"""Run the entrants of the speedrun in turns, score the models that they export, and print a table.

    python benchmarks/speedrun/race.py work/speedrun/data work/speedrun/runs --torch-python venv/bin/python

The rules are in README.md in this folder. Results are kept in the folder of runs, so the same command continues.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# The benchmarks are not an installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.measuring.rounds import TORCH_REQUIREMENTS
from benchmarks.measuring.tables import print_machine, print_table
from benchmarks.speedrun.entrants import PLACEHOLDERS, PROJECT, Entrant, read_entrants, run_limited
from benchmarks.speedrun.prepare import ROW_LENGTH, check_data
from benchmarks.speedrun.text import SCORED
from mlm_common.errors import InputError
from mlm_common.storage.guard import guarded_read

NUM_WORDS = 4000
# The number of steps is planned from the speed of runs with these numbers of steps. The first run only reads the
# libraries from disk. The plan uses this fraction of the budget.
SPEED_STEPS = (20, 20, 120)
PLANNED_FRACTION = 0.95
TORCH = f"an interpreter with {' '.join(TORCH_REQUIREMENTS)}"


def check_export(output: Path, data: Path) -> Path:
    """Return the folder of an entrant's export; InputError unless it has a model with the speedrun's tokenizer."""
    export = output / "export"
    if not (export / "config.json").is_file():
        raise InputError(f"wrote no model; {export}/config.json does not exist.")
    vocabularies = []
    for path in (data / "tokenizer" / "tokenizer.json", export / "tokenizer.json"):
        with guarded_read(path, "a tokenizer"):
            vocabularies.append(json.loads(path.read_text(encoding="utf-8"))["model"]["vocab"])
    if vocabularies[0] != vocabularies[1]:
        raise InputError(f"wrote a model with another tokenizer; {export}/tokenizer.json must be that of {data}.")
    return export


def score(export: Path, data: Path, folder: Path) -> dict[str, Any]:
    """Score an export with score_mlm.py; return {value, standard_error} of bits per byte."""
    command = [sys.executable, str(PROJECT / "train" / "score_mlm.py"), "--model", str(export)]
    command += ["--text", str(data / "text" / f"{SCORED}.jsonl"), "--max-length", str(ROW_LENGTH)]
    command += ["--num-words", str(NUM_WORDS), "--random-networks", "2", "--output", str(folder / "score.json")]
    with (folder / "score.log").open("wb") as log:
        status = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    if status:
        raise InputError(f"wrote a model that score_mlm.py refused; its output is in {folder / 'score.log'}.")
    scores = json.loads((folder / "score.json").read_text(encoding="utf-8"))["scores"]
    return dict(scores[str(export)]["bits per byte"])


class Race:
    """Runs entrants, and keeps their results.

    Args:
        data: folder that prepare.py wrote.
        runs: folder in which each run gets a folder.
        torch_python: an interpreter with PyTorch.
        seconds: the budget of a run.
        num_steps: number of steps for entrants that need this number; 0 to plan it.
    """

    def __init__(self, data: Path, runs: Path, torch_python: str, seconds: float, num_steps: int):
        self.data, self.runs, self.seconds, self.num_steps = data, runs, seconds, num_steps
        self._torch_python = torch_python

    def folder(self, entrant: Entrant) -> Path:
        return self.runs / entrant.name / f"{self.seconds:g}s"

    def command(self, entrant: Entrant, output: Path, seed: int, num_steps: int) -> list[str]:
        values = (sys.executable, self._torch_python, self.data, output, seed, f"{self.seconds:g}", num_steps)
        return entrant.arguments(dict(zip(PLACEHOLDERS, values, strict=True)))

    def plan(self, entrant: Entrant) -> int:
        """Return how many steps fit into the budget, as measured in short runs; 0 if the entrant needs no plan."""
        if self.num_steps or not entrant.is_planned:
            return self.num_steps
        path = self.folder(entrant) / "plan.json"
        if not path.exists():
            times = []
            for num_steps in SPEED_STEPS:
                output = self.folder(entrant) / "speed"
                shutil.rmtree(output, ignore_errors=True)
                output.mkdir(parents=True)
                command = self.command(entrant, output / "run", 0, num_steps)
                times.append(run_limited(command, output / "log.txt", 10 * self.seconds).seconds)
            step_seconds = (times[-1] - times[1]) / (SPEED_STEPS[-1] - SPEED_STEPS[1])
            start_seconds = times[1] - SPEED_STEPS[1] * step_seconds
            fitting = int((PLANNED_FRACTION * self.seconds - start_seconds) / step_seconds) if step_seconds > 0 else 0
            if fitting < 1:
                raise InputError(
                    f"has no time for a step in {self.seconds:g} s: its start and end take {start_seconds:.0f} s."
                )
            plan = {"steps": fitting, "step_seconds": step_seconds, "start_seconds": start_seconds}
            path.write_text(json.dumps(plan), encoding="utf-8")
        with guarded_read(path, "a plan of this program", hint="Delete it."):
            return int(json.loads(path.read_text(encoding="utf-8"))["steps"])

    def run(self, entrant: Entrant, seed: int) -> None:
        """Run an entrant, score it and store the result, unless there already is a result."""
        folder = self.folder(entrant) / f"seed-{seed}"
        if (folder / "result.json").exists():
            return
        num_steps = self.plan(entrant)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        output = folder / "run"
        try:
            measured = run_limited(self.command(entrant, output, seed, num_steps), folder / "log.txt", self.seconds)
        except InputError:
            (self.folder(entrant) / "plan.json").unlink(missing_ok=True)  # the machine's speed may have changed
            raise
        result = {**measured._asdict(), **score(check_export(output, self.data), self.data, folder)}
        (folder / "result.json").write_text(json.dumps({**result, "steps": num_steps}), encoding="utf-8")

    def results(self, entrant: Entrant) -> list[dict[str, Any]]:
        """Read the results of all finished seeds."""
        results = []
        for path in sorted(self.folder(entrant).glob("seed-*/result.json")):
            with guarded_read(path, "a result of this program", hint="Delete it, and run the race again."):
                result = json.loads(path.read_text(encoding="utf-8"))
                results.append({name: float(result[name]) for name in ("value", "seconds", "cpu_seconds")})
        return results


def print_results(race: Race, entrants: Sequence[Entrant]) -> None:
    """Print the table: the best entrant first."""
    results = [(entrant, race.results(entrant)) for entrant in entrants]
    rows = []
    for entrant, of_seeds in results:
        if of_seeds:
            bits, seconds, cpu = ([result[name] for result in of_seeds] for name in ("value", "seconds", "cpu_seconds"))
            means = [f"{statistics.mean(values):.{places}f}" for values, places in ((bits, 3), (seconds, 1), (cpu, 0))]
            spread = f"({min(bits):.3f}-{max(bits):.3f})"
            rows.append([entrant.name, means[0], spread, str(len(bits)), *means[1:]])
    print_table("entrant|bits per byte|of seeds|seeds|seconds|CPU seconds", sorted(rows, key=lambda row: float(row[1])))


def _chosen(by_name: Mapping[str, Entrant], name: str) -> Entrant:
    if name not in by_name:
        raise InputError(f"--entrants must be among {', '.join(by_name)}; received {name}.")
    return by_name[name]


def check_torch(entrants: Sequence[Entrant], torch_python: str) -> None:
    """Raise an InputError if an entrant needs PyTorch and no interpreter with PyTorch is named."""
    with_torch = [entrant.name for entrant in entrants if "{torch_python}" in entrant.command]
    if with_torch and not torch_python:
        raise InputError(f"--torch-python is required by {', '.join(with_torch)}: {TORCH}.")


def parser_of_runs(doc: str) -> argparse.ArgumentParser:
    """Make a parser with the flags of every program that runs entrants, for a program with this docstring."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("data", type=Path, help="Folder that prepare.py wrote.")
    parser.add_argument("runs", type=Path, help="Folder in which each run gets a folder.")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--entrants-file", type=Path, default=Path(__file__).with_name("entrants.yaml"))
    parser.add_argument("--torch-python", default="", help="Interpreter of an environment with PyTorch.")
    parser.add_argument("--any-data", action="store_true", help="Skip the check of the data.")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Do the missing runs, and print the table."""
    parser = parser_of_runs(__doc__)
    parser.add_argument("--entrants", nargs="+", metavar="NAME", help="Default: all.")
    parser.add_argument("--seconds", type=float, default=120, help="Budget of a process, from its start to its end.")
    parser.add_argument("--steps", type=int, default=0, help="Steps of entrants that need a number. Default: planned.")
    arguments = parser.parse_args(argv)
    data, runs = arguments.data.resolve(), arguments.runs.resolve()
    try:
        by_name = read_entrants(arguments.entrants_file)
        entrants = [_chosen(by_name, name) for name in arguments.entrants or by_name]
        if not arguments.any_data:
            check_data(data)
        check_torch(entrants, arguments.torch_python)
    except InputError as error:
        sys.exit(f"error: {error}")
    print_machine()
    race = Race(data, runs, arguments.torch_python, arguments.seconds, arguments.steps)
    has_failed = False
    for seed in arguments.seeds:
        for entrant in entrants:
            try:
                race.run(entrant, seed)
            except InputError as error:
                has_failed = True
                print(f"error: {entrant.name}, seed {seed}: {error}", file=sys.stderr)
    try:
        print_results(race, entrants)
    except InputError as error:
        sys.exit(f"error: {error}")
    sys.exit(has_failed)


if __name__ == "__main__":
    main()
