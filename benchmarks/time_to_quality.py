"""Compare validation loss over training time on the CPU: our presets, transformers' Trainer, and the TPU tutorial.

    python benchmarks/time_to_quality.py --shards runs/quickstart/shards --picture curves.svg

All recipes use the same shards, tokenizer, model size, training time, and all cores. The speed of each recipe is
measured first, and its number of steps is the number that fits into `--minutes`. The recipes take turns at training for
a round, so that other load on the machine affects all equally. Evaluation (on the same masked rows, in float32) and
compilation are not counted. peers/quality_contenders.py and peers/quality_trainer.py define the recipes. PyTorch runs
in a separate environment, which is created in a temporary folder unless `--torch-python` names one. With
`--steps-per-round`, which tries the program out, no speed is measured.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

# The project comes first, because this script's folder has a tokenizer_training.py that would hide the package.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.measuring.rounds import PEERS, MeasuredProgram, make_torch_environment, start_program
from benchmarks.measuring.tables import print_machine, print_table
from mlm_common.figures import (
    COLORS,
    MUTED,
    EndLabel,
    image_of,
    label_ends,
    new_figure,
    set_titles,
    without_box,
)
from tfrecord_prep.manifest import open_shards

NUM_SPEED_ROUNDS, STEPS_PER_SPEED_ROUND = 5, 10
PLANNED_STEPS = 10_000  # speed is measured on the first steps; a plan of this length makes XLA worthwhile
PICTURE_INCHES = (11, 5)
# Presets of about the same size.
ROBERTA, MODERNBERT = "tiny-roberta-cpu", "tiny-cpu"
TRAINER = "trainer"


class Recipe(NamedTuple):
    """A program, `TRAINER` or a contender of peers/quality_contenders.py, and the preset whose model it trains."""

    program: str
    preset: str
    # Model settings that override the preset's, for `TRAINER`.
    model: Mapping[str, Any] = MappingProxyType({})

    @property
    def is_ours(self) -> bool:
        return self.program == "ours"


RECIPES = {
    "tutorial": Recipe("tutorial", ROBERTA),
    "tutorial-tuned": Recipe("tutorial-tuned", ROBERTA),
    "trainer-roberta": Recipe(TRAINER, ROBERTA),
    "trainer-modernbert": Recipe(TRAINER, MODERNBERT),
    "trainer-modernbert-sparse": Recipe(TRAINER, MODERNBERT, {"sparse_prediction": True}),
    "ours-roberta": Recipe("ours", ROBERTA),
    "ours-modernbert": Recipe("ours", MODERNBERT),
}
# Names of the recipes in the plot.
LABELS = {
    "tutorial": "RoBERTa, TPU tutorial",
    "tutorial-tuned": "RoBERTa, TPU tutorial with our batch and rate",
    "trainer-roberta": "RoBERTa, Hugging Face Trainer",
    "trainer-modernbert": "ModernBERT, Hugging Face Trainer",
    "trainer-modernbert-sparse": "ModernBERT, Hugging Face Trainer, sparse_prediction",
    "ours-roberta": "RoBERTa, this project",
    "ours-modernbert": "ModernBERT, this project",
}
OURS = "ours-modernbert"
Curve = list[tuple[float, float]]  # seconds trained, validation loss in nats


class Contest(NamedTuple):
    """The inputs of all recipes: the shards, a folder for files that PyTorch reads, and PyTorch's interpreter."""

    shards: str
    folder: Path
    torch_python: str

    def hand_over(self, preset: str) -> None:
        """Write rows, masks and settings for programs without TensorFlow."""
        folder = self.folder / preset
        folder.mkdir()
        command = [sys.executable, str(PEERS / "quality_handover.py"), self.shards, preset, str(folder)]
        subprocess.run(command, check=True)

    def start(self, name: str, num_steps: int, steps_per_round: int, evaluates: bool) -> MeasuredProgram:
        """Start a recipe and return it after its first step."""
        recipe = RECIPES[name]
        settings = {"num_steps": num_steps, "steps_per_round": steps_per_round, "evaluates": evaluates}
        if recipe.program == TRAINER:
            arguments = [str(self.folder / recipe.preset), "--model", json.dumps(dict(recipe.model))]
            return start_program(name, "quality_trainer.py", arguments, settings, self.torch_python)
        arguments = [recipe.program, self.shards, "--preset", recipe.preset]
        return start_program(name, "quality_contenders.py", arguments, settings)


def step_seconds(contest: Contest, names: list[str]) -> dict[str, float]:
    """Measure the median seconds per step of each recipe. The recipes take turns."""
    programs = [contest.start(name, PLANNED_STEPS, STEPS_PER_SPEED_ROUND, evaluates=False) for name in names]
    try:
        rounds = [[program.run_round().seconds for program in programs] for _ in range(NUM_SPEED_ROUNDS)]
    finally:
        for program in programs:
            program.end()
    medians = [statistics.median(column) / STEPS_PER_SPEED_ROUND for column in zip(*rounds, strict=True)]
    return dict(zip(names, medians, strict=True))


def losses_over_time(contest: Contest, num_rounds: int, steps_per_round: dict[str, int]) -> dict[str, Curve]:
    """Measure for each recipe, after each round, the seconds trained and the validation loss in nats."""
    programs: list[MeasuredProgram] = []
    curves: dict[str, Curve] = {name: [] for name in steps_per_round}
    try:
        for name, steps in steps_per_round.items():
            programs.append(contest.start(name, 1 + num_rounds * steps, steps, evaluates=True))
        seconds = dict.fromkeys(curves, 0.0)
        for _ in range(num_rounds):
            for program in programs:
                seconds[program.name] += program.run_round().seconds
                curves[program.name].append((seconds[program.name], program.figures["loss"]))
            line = ", ".join(f"{name} {curve[-1][1]:.3f} at {curve[-1][0]:.0f} s" for name, curve in curves.items())
            print(line, file=sys.stderr)
    finally:
        for program in programs:
            program.end()
    return curves


def seconds_to(loss: float, curve: Curve) -> float | None:
    """Return when a curve first reaches a loss, interpolated linearly between rounds; None if it never does."""
    before: tuple[float, float] | None = None
    for at_seconds, at_loss in curve:
        if at_loss <= loss:
            if before is None or before[1] == at_loss:
                return at_seconds
            return before[0] + (at_seconds - before[0]) * (before[1] - loss) / (before[1] - at_loss)
        before = (at_seconds, at_loss)
    return None


def print_results(curves: dict[str, Curve], entropy: float) -> None:
    """Print the curves, and when each of our recipes reaches the final loss of each other recipe."""
    columns = "|".join(f"{name} s|loss" for name in curves)
    print_table(
        f"round|{columns}",
        [
            [str(number), *(cell for seconds, loss in points for cell in (f"{seconds:.0f}", f"{loss:.3f}"))]
            for number, points in enumerate(zip(*curves.values(), strict=True), 1)
        ],
    )
    print(f"entropy of the token frequencies: {entropy:.3f}")
    ours = [name for name in curves if RECIPES[name].is_ours]
    for recipe, other in product(ours, (name for name in curves if name not in ours)):
        total_seconds, final_loss = curves[other][-1]
        needed = seconds_to(final_loss, curves[recipe])
        share = (
            "never" if needed is None else f"after {needed:.0f} s ({needed / total_seconds:.2f} of that recipe's time)"
        )
        print(f"{recipe} reaches the final loss of {other}, {final_loss:.3f}, {share}")


def message(curves: dict[str, Curve]) -> tuple[str, str]:
    """Say when our ModernBERT reaches the final loss of each other ModernBERT; the title names the best of these."""
    ours = curves.get(OURS, [])
    others = [name for name in curves if RECIPES[name].preset == MODERNBERT and not RECIPES[name].is_ours]
    sentences = []
    for name in sorted(others, key=lambda name: curves[name][-1][1]):
        total_seconds, final_loss = curves[name][-1]
        needed_seconds = seconds_to(final_loss, ours)
        loss = f"the final loss of {LABELS[name].partition(', ')[2]} ({final_loss:.2f})"
        if needed_seconds is None:
            sentences.append(f"does not reach {loss}")
        else:
            sentences.append(f"reaches {loss} in {needed_seconds:.0f} s instead of {total_seconds:.0f} s")
    if not ours or not sentences:
        return "Validation loss over training time", ""
    title, *subtitle_sentences = sentences
    subtitle = "".join(f"It {sentence}. " for sentence in subtitle_sentences)
    return f"This project's ModernBERT {title}", subtitle.strip()


def draw(curves: dict[str, Curve], entropy: float, path: str) -> None:
    """Draw loss over time: our recipes as solid lines, other recipes dashed or dotted, one color per architecture."""
    colors = {ROBERTA: COLORS[0], MODERNBERT: COLORS[1]}
    with new_figure(figsize=PICTURE_INCHES) as figure:
        axes = figure.subplots()
        without_box(axes)
        labels = []
        for name, curve in curves.items():
            recipe, (seconds, loss) = RECIPES[name], curve[-1]
            style = "-" if recipe.is_ours else ":" if recipe.program == "tutorial" or recipe.model else "--"
            width = 2.4 if recipe.is_ours else 1.6
            axes.plot(*zip(*curve, strict=True), style, color=colors[recipe.preset], linewidth=width, clip_on=False)
            text = f"{LABELS[name]}: {loss:.2f} after {seconds:.0f} s"
            labels.append(EndLabel(seconds, loss, text, colors[recipe.preset]))
        axes.set_xlim(0, max(curve[-1][0] for curve in curves.values()))
        axes.axhline(entropy, linestyle=":", color=MUTED)
        labels.append(EndLabel(axes.get_xlim()[1], entropy, f"frequency baseline: {entropy:.2f}", MUTED))
        axes.set(xlabel="seconds of training", ylabel="validation loss, nats per masked token")
        note = "Solid: this project. Same rows, tokenizer, size of the model and machine; evaluation is not counted."
        set_titles(figure, *message(curves), note)
        label_ends(axes, labels, in_column=True)
        Path(path).write_bytes(image_of(figure, Path(path).suffix[1:]))


def main() -> None:
    """Print the table, and draw the plot if requested."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shards", default="runs/quickstart/shards", help="Folder with train/ and validation/.")
    parser.add_argument("--minutes", type=float, default=5, help="Training time of each recipe.")
    parser.add_argument("--our-minutes", type=float, help="Training time of our recipes, if different.")
    parser.add_argument("--rounds", type=int, default=20, help="Number of rounds, each followed by an evaluation.")
    parser.add_argument("--steps-per-round", type=int, help="Default: what fits into the training time.")
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument(
        "--torch-python", help="Interpreter of an environment with torch, transformers 4.57 and accelerate."
    )
    parser.add_argument("--picture", help="File to draw the curves to, .svg or .png.")
    arguments = parser.parse_args()
    manifest = open_shards(f"{arguments.shards}/validation").manifest
    if manifest is None:
        parser.error(f"--shards must be written by prepare_tfrecord_shards.py; {arguments.shards} has no manifest.")
    names, entropy = arguments.recipes, manifest.unigram_entropy_nats
    print_machine()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        contest = Contest(arguments.shards, Path(folder), arguments.torch_python or "")
        presets = {RECIPES[name].preset for name in names if RECIPES[name].program == TRAINER}
        if presets and not contest.torch_python:
            contest = contest._replace(torch_python=make_torch_environment(Path(folder, "environment")))
        for preset in presets:
            contest.hand_over(preset)
        steps_per_round = dict.fromkeys(names, arguments.steps_per_round)
        speed = {} if arguments.steps_per_round else step_seconds(contest, names)
        for name, seconds in speed.items():
            print(f"{name}: {1000 * seconds:.1f} ms per step", file=sys.stderr)
            minutes = arguments.our_minutes if RECIPES[name].is_ours and arguments.our_minutes else arguments.minutes
            steps_per_round[name] = max(1, round(minutes * 60 / seconds / arguments.rounds))
        curves = losses_over_time(contest, arguments.rounds, steps_per_round)
    print_results(curves, entropy)
    print("steps: " + ", ".join(f"{name} {1 + arguments.rounds * steps:,}" for name, steps in steps_per_round.items()))
    if arguments.picture:
        draw(curves, entropy, arguments.picture)


if __name__ == "__main__":
    main()
