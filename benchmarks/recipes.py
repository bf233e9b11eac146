"""Compare variants of a preset's settings by their validation loss, with several seeds, after equal CPU time or steps.

    python benchmarks/recipes.py --results recipes.jsonl --cpu-seconds 240

recipes.yaml, or the file named by `--arms`, lists the variants (arms): {name: flags of run_mlm.py}. The first arm is
the baseline. All arms are evaluated on the same rows with the same masks. Results are appended to a file, so a queue
that was stopped continues where it was. A seed determines the initial weights and the rows in all arms, so the
difference from the first arm is computed for each seed. An arm counts as better or worse if the mean difference is more
than twice its standard error.
"""

import argparse
import json
import math
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

# The project comes first, because this script's folder has a tokenizer_training.py that would hide the package.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.measuring.rounds import MeasuredProgram, start_program
from benchmarks.measuring.tables import print_machine, print_table

# Rows are evaluated with BERT's fraction of masked tokens, whatever fraction an arm trains with.
EVALUATION_FLAGS = ["--mlm-probability", "0.15"]
NUM_COST_ROUNDS, STEPS_PER_COST_ROUND = 5, 10
PLANNED_STEPS = 10_000
NUM_STANDARD_ERRORS = 2


def start(arguments: argparse.Namespace, flags: Sequence[str], num_steps: int, **settings: int) -> MeasuredProgram:
    """Start an arm and return it after its first step, which includes compilation."""
    given = [
        *("ours", arguments.shards, "--preset", arguments.preset, "--flags", json.dumps(list(flags))),
        *("--evaluation-flags", json.dumps(EVALUATION_FLAGS)),
    ]
    return start_program(shlex.join(flags), "quality_contenders.py", given, {"num_steps": num_steps, **settings})


def cost_of_steps(arguments: argparse.Namespace, arms: Sequence[Sequence[str]]) -> list[float]:
    """Measure the CPU seconds per step of each arm. The arms take turns."""
    rounds_settings = {"steps_per_round": STEPS_PER_COST_ROUND, "evaluates": False}
    programs = [start(arguments, flags, PLANNED_STEPS, **rounds_settings) for flags in arms]
    try:
        rounds = [[program.run_round().cpu_seconds for program in programs] for _ in range(NUM_COST_ROUNDS)]
    finally:
        for program in programs:
            program.end()
    return [statistics.median(column) / STEPS_PER_COST_ROUND for column in zip(*rounds, strict=True)]


def train(arguments: argparse.Namespace, flags: Sequence[str], num_steps: int) -> tuple[float, float]:
    """Train an arm for some steps; return its validation loss in nats and the CPU seconds after the first step."""
    program = start(arguments, flags, num_steps, steps_per_round=num_steps - 1, evaluates=True)
    try:
        times = program.run_round()
        return program.figures["loss"], times.cpu_seconds
    finally:
        program.end()


def length_of(arguments: argparse.Namespace) -> str:
    return f"{arguments.steps} steps" if arguments.steps else f"{arguments.cpu_seconds:g} CPU seconds"


def run_queue(arguments: argparse.Namespace, arms: dict[str, list[str]], results: list[dict[str, Any]]) -> None:
    """Do the runs that are missing in the results, seed by seed for all arms, and append each result to the file."""
    first = next(iter(arms.values()))
    cost = {str(result["flags"]): result["step_cpu_seconds"] for result in results}
    for seed in range(1, arguments.num_seeds + 1):
        for name, flags in arms.items():
            if any((result["arm"], result["flags"], result["seed"]) == (name, flags, seed) for result in results):
                continue
            num_steps = arguments.steps
            if num_steps is None:
                if str(flags) not in cost:
                    # Costs are relative to a single measurement of the first arm, because the machine's speed may
                    # change.
                    measured = cost_of_steps(arguments, [first] if flags == first else [first, flags])
                    cost.setdefault(str(first), measured[0])
                    cost[str(flags)] = cost[str(first)] * measured[-1] / measured[0]
                num_steps = max(2, round(arguments.cpu_seconds / cost[str(flags)]))
            loss, cpu_seconds = train(arguments, [*flags, "--seed", str(seed)], num_steps)
            result = {
                "arm": name,
                "flags": flags,
                "length": length_of(arguments),
                "seed": seed,
                "num_steps": num_steps,
                "step_cpu_seconds": cost.get(str(flags), cpu_seconds / (num_steps - 1)),
                "cpu_seconds": round(cpu_seconds, 1),
                "loss": loss,
            }
            results.append(result)
            with Path(arguments.results).open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
            print(f"{name}, seed {seed}: {num_steps:,} steps, loss {loss:.3f}", file=sys.stderr)


def verdict(difference: float, error: float) -> str:
    """Judge a difference in loss by its standard error, which is NaN for a single seed."""
    if math.isnan(error) or abs(difference) <= NUM_STANDARD_ERRORS * error:
        return "cannot tell"
    return "better" if difference < 0 else "worse"


def table_of(results: list[dict[str, Any]], arms: Sequence[str]) -> list[list[str]]:
    """Make a row per arm: steps, CPU ms per step, mean loss, mean difference from the first arm, error, verdict."""
    losses = {name: {result["seed"]: result["loss"] for result in results if result["arm"] == name} for name in arms}
    first, *_ = losses.values()
    rows = []
    for name, by_seed in losses.items():
        of_arm = [result for result in results if result["arm"] == name]
        judged = ["", "", ""]
        if by_seed is not first:
            differences = [loss - first[seed] for seed, loss in by_seed.items() if seed in first]
            mean = statistics.mean(differences)
            error = statistics.stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else math.nan
            judged = [f"{mean:+.3f}", f"{error:.3f}", verdict(mean, error)]
        cost = statistics.median(result["step_cpu_seconds"] for result in of_arm)
        steps = statistics.median(result["num_steps"] for result in of_arm)
        loss = statistics.mean(by_seed.values())
        rows.append([name, str(len(by_seed)), f"{steps:,.0f}", f"{1000 * cost:.0f}", f"{loss:.3f}", *judged])
    return rows


def main() -> None:
    """Do the missing runs and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--arms",
        default=str(Path(__file__).with_suffix(".yaml")),
        metavar="FILE",
        help="YAML file, {name: flags of run_mlm.py}. The first arm is the baseline. Default: recipes.yaml.",
    )
    parser.add_argument("--shards", default="runs/quickstart/shards", help="Folder with train/ and validation/.")
    parser.add_argument("--preset", default="tiny-cpu")
    parser.add_argument("--results", required=True, help="File (.jsonl) to which a line is appended for each run.")
    parser.add_argument("--num-seeds", type=int, default=5)
    length = parser.add_mutually_exclusive_group(required=True)
    length.add_argument("--steps", type=int, help="Steps of each arm.")
    length.add_argument(
        "--cpu-seconds", type=float, help="CPU seconds of each arm, converted to steps by their measured cost."
    )
    arguments = parser.parse_args()
    listed = yaml.safe_load(Path(arguments.arms).read_text(encoding="utf-8"))
    if not isinstance(listed, dict) or not all(isinstance(flags, str) for flags in listed.values()):
        parser.error(f"{arguments.arms} must map names of arms to flags of run_mlm.py, each given as one string.")
    arms = {str(name): shlex.split(flags) for name, flags in listed.items()}
    path = Path(arguments.results)
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    try:
        results = [json.loads(line) for line in lines]
    except ValueError as error:
        parser.error(f"{path} must hold a JSON object on each line: {error}. Remove the line that was cut off.")
    for other in {result["length"] for result in results} - {length_of(arguments)}:
        parser.error(f"{path} has runs of {other}; received {length_of(arguments)}. Use a different file.")
    print_machine()
    run_queue(arguments, arms, results)
    print_table("arm|seeds|steps|CPU ms a step|loss|difference|error|verdict", table_of(results, list(arms)))


if __name__ == "__main__":
    main()
