"""Use JAX to execute a step that accelerator_step.py has lowered. Needs JAX, NumPy and one device, but not TensorFlow.

    python benchmarks/peers/accelerator_program.py FOLDER NAME --settings '{"steps_per_round": 20}'

Prints the seconds of each round of steps, as benchmarks/measuring/rounds.py describes. With `--losses`, it instead
runs the steps whose rows are in the folder, and prints their losses.
"""

import argparse
import gzip
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

# Otherwise JAX would take most of the device's memory, and leave too little for the other measured programs.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# The benchmarks are not an installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import numpy as np
from numpy.typing import NDArray

from benchmarks.measuring.rounds import Rounds
from train.runtime.jax_programs import compile_program, place, set_up_jax, sharding_over, values_of

Batch = dict[str, NDArray[Any]]


class Step:
    """A step with its state on the device."""

    def __init__(self, folder: Path, name: str):
        set_up_jax()
        self.device = jax.devices()[0]
        self._sharding = sharding_over([self.device])
        self.entry = json.loads((folder / "index.json").read_text(encoding="utf-8"))["steps"][name]
        self.arrays = np.load(folder / f"{name}.npz")
        text = gzip.decompress((folder / f"{name}.mlir.gz").read_bytes()).decode()
        self.compile_seconds: list[float] = []  # without JAX's cache, and with it
        with TemporaryDirectory() as cache:
            jax.config.update("jax_compilation_cache_dir", cache)
            for _ in range(2):
                start_seconds = time.perf_counter()
                self._program = compile_program(text, [self.device])
                self.compile_seconds.append(time.perf_counter() - start_seconds)
        self._state = [place([value], self._sharding) for value in self._initial_values()]

    def _initial_values(self) -> Iterator[NDArray[Any]]:
        generator = np.random.default_rng(0)
        for number, parameter in enumerate(self.entry["parameters"]):
            if (spread := parameter.get("spread")) is None:
                yield self.arrays[f"parameters/{number}"]
            elif spread:
                yield (spread * generator.standard_normal(parameter["shape"], np.float32)).astype(parameter["dtype"])
            else:
                yield np.zeros(parameter["shape"], parameter["dtype"])

    def random_batch(self) -> Batch:
        generator, ids = np.random.default_rng(1), (5, self.entry["vocab_size"])
        return {
            name: generator.integers(*ids, shape).astype(kind) for name, (shape, kind) in self.entry["batch"].items()
        }

    def batches(self) -> Iterator[Batch]:
        """Yield the rows of the steps of a short run."""
        rows = {name: self.arrays[f"rows/{name}"] for name in self.entry["batch"]}
        for number in range(len(next(iter(rows.values())))):
            yield {name: array[number] for name, array in rows.items()}

    def make(self, batch: Batch) -> Any:
        """Start a step; return its loss, which the device may still be computing."""
        placed = [place([batch[name]], self._sharding) for name in sorted(batch)]
        results = self._program.execute([*placed, *self._state])
        for result, parameter in self._program.assigned.items():
            self._state[parameter - len(placed)] = results[result]
        return values_of(results[0])[0]


def main() -> None:
    """Run steps until the measuring process ends this one, or print the losses of a short run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("name")
    parser.add_argument("--settings", type=json.loads, default={}, help="JSON: steps_per_round.")
    parser.add_argument("--losses", action="store_true")
    arguments = parser.parse_args()
    step = Step(arguments.folder, arguments.name)
    if arguments.losses:
        losses = [step.make(batch) for batch in step.batches()]
        print(json.dumps([float(loss) for loss in losses]))
        return
    batch, num_steps = step.random_batch(), arguments.settings["steps_per_round"]
    host_seconds: list[float] = []

    def figures() -> dict[str, float]:
        peak_bytes = (step.device.memory_stats() or {}).get("peak_bytes_in_use", 0)
        compiled, cached = step.compile_seconds
        host_ms = 1e3 * min(host_seconds)
        return {"compile_seconds": compiled, "cached_seconds": cached, "peak_bytes": peak_bytes, "host_ms": host_ms}

    # A round waits for the device only once.
    rounds = Rounds(steps_per_round=1, warmup_steps=1, figures=figures)
    while True:
        for _ in range(num_steps):
            start_seconds = time.perf_counter()
            loss = step.make(batch)
            host_seconds.append(time.perf_counter() - start_seconds)
        loss.block_until_ready()
        rounds.step_done()


if __name__ == "__main__":
    main()
