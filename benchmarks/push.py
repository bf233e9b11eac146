"""Measure what pushing to the Hub costs a run: how long training is interrupted, and how long steps take meanwhile.

    python benchmarks/push.py

A model with 110 million parameters (BERT-base) is trained on rows of random ids, in rounds of a few steps, and every
second round starts with a push. The Hub is the tests' stand-in, a separate process on loopback. `stall` is the time
that `PushToHub` takes on the training thread; `copy` is the time for reading all weights from the device. On a CPU,
export and upload share the cores with the training, so the steps during a push are slowed down more than on an
accelerator; `CPU s of a push` shows by how much.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# The project comes first, because this script's folder has a tokenizer_training.py that would hide the package.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import train  # noqa: F401, I001  (before TensorFlow)

from benchmarks.measuring.rounds import Times
from benchmarks.measuring.tables import median_and_range, print_machine, print_table
from benchmarks.train_step_cpu import write_inputs
from tests.servers.hub import WRITE_TOKEN
from tests.servers.process import ServerProcess

LENGTH = 64
VOCABULARY = 30_000
NUM_STEPS = 100_000


def reach(server: ServerProcess, folder: str) -> None:
    """Make huggingface_hub, which is not imported yet, use the stand-in."""
    assert "huggingface_hub" not in sys.modules or os.environ.get("HF_ENDPOINT") == server.url
    os.environ |= {"HF_ENDPOINT": server.url, "HF_TOKEN": WRITE_TOKEN, "HF_HOME": folder, "HF_HUB_DISABLE_XET": "1"}


def build(folder: str, arguments: argparse.Namespace) -> tuple[Any, Any]:
    """Build a trainer of the model, and the callback that pushes it after every step."""
    from benchmarks.peers.train_step_contenders import our_trainer
    from train.config.settings import parse_training_config
    from train.loop.lifecycle import Pretraining, prepare
    from train.publishing.publisher import Publisher, PushToHub

    model = f"num_hidden_layers={arguments.num_layers},max_position_embeddings={LENGTH}"
    flags = ["--preset", "bert-base", "--config-overrides", model, "--max-steps", str(NUM_STEPS)]
    flags += ["--train-dataset", folder, "--tokenizer", f"{folder}/tokenizer", "--output-dir", f"{folder}/run"]
    flags += ["--hub-model-id", "alice/big"]
    config = parse_training_config([*flags, "--per-replica-batch-size", str(arguments.batch_rows)], "")
    run = prepare(config, Pretraining())
    trainer = our_trainer(run)
    publisher = Publisher(run.folder, trainer.record_run(), run.phases[0].inputs.tokenizer)
    pushing = PushToHub(publisher, tuple(range(NUM_STEPS)), trainer.log)
    return trainer, pushing


class Steps:
    """Runs steps one by one, and waits for each."""

    def __init__(self, trainer: Any):
        self.trainer = trainer
        self._run_steps = trainer.model.make_train_function()
        self._iterator = iter(trainer.runtime.distribute(trainer.batches_from(trainer.start)))

    def step(self) -> float:
        """Run a step and return its duration in seconds."""
        started_seconds = time.perf_counter()
        self._run_steps(self._iterator)
        self.trainer.model.optimizer.iterations.numpy()
        return time.perf_counter() - started_seconds

    def copy(self) -> float:
        """Return how many seconds it takes to read all weights."""
        started_seconds = time.perf_counter()
        arrays = [variable.numpy() for variable in self.trainer.model.network.weights]
        assert sum(array.nbytes for array in arrays) > 0
        return time.perf_counter() - started_seconds


def measure(steps: Steps, pushing: Any, num_rounds: int, steps_per_round: int) -> dict[str, list[float]]:
    """Measure all rounds; return {what was measured: seconds in each round or step}."""
    figures: dict[str, list[float]] = {name: [] for name in ("plain", "pushing", "stall", "copy", "push CPU")}
    for number in range(num_rounds):
        plain_start = Times.now()
        figures["plain"] += [steps.step() for _ in range(steps_per_round)]
        plain_cpu_seconds = Times.now().cpu_seconds - plain_start.cpu_seconds
        figures["copy"].append(steps.copy())
        start = Times.now()
        before_seconds = time.perf_counter()
        pushing.push(steps.trainer.model, number + 1)
        figures["stall"].append(time.perf_counter() - before_seconds)
        figures["pushing"] += [steps.step() for _ in range(steps_per_round)]
        pushing._pushes.wait()
        figures["push CPU"].append(Times.now().cpu_seconds - start.cpu_seconds - plain_cpu_seconds)
        print(f"round {number + 1} of {num_rounds}", file=sys.stderr)
    return figures


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-layers", type=int, default=12)
    parser.add_argument("--batch-rows", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps-per-round", type=int, default=5)
    arguments = parser.parse_args()
    print_machine()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder, ServerProcess("tests.servers.hub") as server:
        reach(server, folder)
        write_inputs(Path(folder), LENGTH, VOCABULARY)
        trainer, pushing = build(folder, arguments)
        steps = Steps(trainer)
        steps.step()  # compiles
        pushing.push(trainer.model, 1)  # imports, and makes the repository
        pushing._pushes.wait()
        num_parameters = trainer.model.network.count_params()
        print(f"{num_parameters:,} parameters, {num_parameters * 4 / 1e6:,.0f} MB")
        with pushing:
            figures = measure(steps, pushing, arguments.rounds, arguments.steps_per_round)
    names = {
        "plain": "a step, nothing pushed",
        "pushing": "a step of a round with a push",
        "copy": "copy",
        "stall": "stall",
        "push CPU": "CPU s of a push",
    }
    rows = []
    for key, name in names.items():
        rows.append([name, *median_and_range(figures[key], ".3f")])
    print_table("seconds|median|(from-to)", rows)


if __name__ == "__main__":
    main()
