"""Validation loss over training time: the recipe of transformers' TPU tutorial and a preset of ours, on the CPU.

    python benchmarks/time_to_quality.py --shards runs/quickstart/shards

Same shards, tokenizer, size of the model, and time: the speed of each recipe is measured first, and each is then
planned for as many steps as fit into `--minutes`. They train in rounds, in turns, so that the machine's other load
falls on all; evaluation (the same fixed masks, float32) and compilation are not counted.
peers/quality_contenders.py says what each recipe is.
"""

import argparse
import json
import os
import statistics
import sys
from pathlib import Path

# Before this script's own folder, where tokenizer_training.py goes by the name of the package.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.rounds import MeasuredProgram
from benchmarks.tables import print_machine, print_table

PROGRAM = Path(__file__).resolve().parent / "peers" / "quality_contenders.py"
RECIPES = ("tutorial", "tutorial-tuned", "ours")
NUM_SPEED_ROUNDS, STEPS_PER_SPEED_ROUND = 5, 10


def start(
    recipe: str, arguments: argparse.Namespace, num_steps: int, steps_per_round: int, evaluates: bool
) -> MeasuredProgram:
    """Start a recipe and return it after its first step."""
    settings = {"num_steps": num_steps, "steps_per_round": steps_per_round, "evaluates": evaluates}
    flags = [recipe, arguments.shards, "--preset", arguments.preset, "--settings", json.dumps(settings)]
    program = MeasuredProgram(recipe, [sys.executable, str(PROGRAM), *flags], os.environ)
    program.wait()
    return program


def step_seconds(arguments: argparse.Namespace) -> dict[str, float]:
    """Measure the median seconds of a step of each recipe, in turns."""
    programs = [start(recipe, arguments, 10**6, STEPS_PER_SPEED_ROUND, evaluates=False) for recipe in arguments.recipes]
    try:
        rounds = [[program.run_round().seconds for program in programs] for _ in range(NUM_SPEED_ROUNDS)]
    finally:
        for program in programs:
            program.end()
    medians = [statistics.median(column) / STEPS_PER_SPEED_ROUND for column in zip(*rounds, strict=True)]
    return dict(zip(arguments.recipes, medians, strict=True))


def losses_over_time(arguments: argparse.Namespace, num_steps: dict[str, int]) -> dict[str, list[tuple[float, float]]]:
    """Measure for each recipe, after each round, the seconds trained and the validation loss in nats."""
    programs = []
    curves: dict[str, list[tuple[float, float]]] = {recipe: [] for recipe in num_steps}
    try:
        for recipe, steps in num_steps.items():
            steps_per_round = (steps - 1) // arguments.rounds
            programs.append(start(recipe, arguments, num_steps=steps, steps_per_round=steps_per_round, evaluates=True))
        seconds = dict.fromkeys(num_steps, 0.0)
        for _ in range(arguments.rounds):
            for program in programs:
                seconds[program.name] += program.run_round().seconds
                curves[program.name].append((seconds[program.name], program.figures["loss"]))
            line = ", ".join(f"{name} {curve[-1][1]:.3f} at {curve[-1][0]:.0f} s" for name, curve in curves.items())
            print(line, file=sys.stderr)
    finally:
        for program in programs:
            program.end()
    return curves


def seconds_to(loss: float, curve: list[tuple[float, float]]) -> float | None:
    """Find when a curve first comes to a loss, between rounds by a straight line; None if it never does."""
    before: tuple[float, float] | None = None
    for at_seconds, at_loss in curve:
        if at_loss <= loss:
            if before is None or before[1] == at_loss:
                return at_seconds
            return before[0] + (at_seconds - before[0]) * (before[1] - loss) / (before[1] - at_loss)
        before = (at_seconds, at_loss)
    return None


def print_results(curves: dict[str, list[tuple[float, float]]], num_steps: dict[str, int]) -> None:
    """Print the curves, and when ours comes to the final loss of each other recipe."""
    names = list(curves)
    columns = "|".join(f"{name} s|loss" for name in names)
    print_table(
        f"round|{columns}",
        [
            [str(number), *(cell for seconds, loss in points for cell in (f"{seconds:.0f}", f"{loss:.3f}"))]
            for number, points in enumerate(zip(*curves.values(), strict=True), 1)
        ],
    )
    print("steps planned: " + ", ".join(f"{name} {num_steps[name]:,}" for name in names))
    for name in names:
        if name == "ours" or "ours" not in curves:
            continue
        total_seconds, final_loss = curves[name][-1]
        needed = seconds_to(final_loss, curves["ours"])
        share = "never" if needed is None else f"after {needed:.0f} s, {needed / total_seconds:.2f} of its time"
        print(f"ours comes to the final loss of {name}, {final_loss:.3f}, {share}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shards", default="runs/quickstart/shards", help="Folder with train/ and validation/.")
    parser.add_argument("--preset", default="tiny-cpu", help="Our recipe, and the size of all models.")
    parser.add_argument("--minutes", type=float, default=5, help="Training time of each recipe.")
    parser.add_argument("--rounds", type=int, default=20, help="Turns, each with an evaluation.")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    arguments = parser.parse_args()
    print_machine()
    speed = step_seconds(arguments)
    for recipe, seconds in speed.items():
        print(f"{recipe}: {1000 * seconds:.1f} ms a step", file=sys.stderr)
    steps_per_round = {
        name: max(1, round(arguments.minutes * 60 / one / arguments.rounds)) for name, one in speed.items()
    }
    num_steps = {name: 1 + arguments.rounds * steps for name, steps in steps_per_round.items()}
    print_results(losses_over_time(arguments, num_steps), num_steps)


if __name__ == "__main__":
    main()
