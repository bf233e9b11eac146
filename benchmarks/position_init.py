"""Measure how soon a small RoBERTa leaves the unigram plateau, with random and with sinusoidal initial positions.

    python benchmarks/position_init.py --shards runs/quickstart/shards

Trains the preset tiny-roberta-cpu twice on the same shards, batches and masks, and prints the validation losses.
"""

import argparse
import contextlib
import os
import sys
import tempfile
from pathlib import Path

from train.metrics.log import read_metrics
from train.run_mlm import main as run_mlm
from train.runtime.run_folder import RunFolder

STARTS = ("random", "sinusoidal")


def validation_losses(shards: str, start: str, num_steps: int) -> dict[int, float]:
    """Train a model and return {step: validation loss in nats}."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        datasets = ["--train-dataset", f"{shards}/train", "--eval-dataset", f"{shards}/validation"]
        settings = ["--preset", "tiny-roberta-cpu", "--position-init", start, "--max-steps", str(num_steps)]
        with contextlib.redirect_stdout(open(os.devnull, "w", encoding="utf-8")):  # noqa: PTH123
            status = run_mlm([*datasets, *settings, "--output-dir", str(run)])
        if status:
            sys.exit(status)
        lines = read_metrics(RunFolder(run))
        return {line["step"]: line["loss"] for line in lines if line["split"] == "validation"}


def main() -> None:
    """Print a line for each evaluation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shards", default="runs/quickstart/shards", help="Folder with train/ and validation/.")
    parser.add_argument("--num-steps", type=int, default=3000)
    arguments = parser.parse_args()
    losses = {start: validation_losses(arguments.shards, start, arguments.num_steps) for start in STARTS}
    print(f"{'step':>8}  {STARTS[0]:>12}  {STARTS[1]:>12}")
    for step in losses[STARTS[0]]:
        print(f"{step:>8}  " + "  ".join(f"{losses[start][step]:>12.4f}" for start in STARTS))


if __name__ == "__main__":
    main()
