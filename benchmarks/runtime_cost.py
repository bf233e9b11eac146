"""Measure what the runtimes TensorFlow and JAX cost: startup, host time per step, and memory.

    python benchmarks/runtime_cost.py

Each run is a process of run-mlm with a model of many tiny layers. The process is timed from its start to its first
step, and then over the steps after the warmup. Host time is the CPU time of Python's thread; on a CPU both runtimes
also do a part of the computation in this thread. Memory is measured in the process after these steps. The runs take
turns. JAX runs twice, first without a cache of compiled programs, and then with it.
"""

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

# The project comes first, because this script's folder has a tokenizer_training.py that would hide the package.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.measuring.measured_run import memory_of
from benchmarks.measuring.random_inputs import write_random_shards, write_tokenizer
from benchmarks.measuring.tables import median_and_range, print_machine, print_table
from benchmarks.resume import training
from train.runtime import supervisor

CACHE_VARIABLE = "JAX_COMPILATION_CACHE_DIR"
NUM_ROWS, LENGTH, VOCAB_SIZE, BATCH_ROWS = 20_000, 16, 1000, 8
# {name: flags}. The last run uses the programs that the previous run has compiled.
RUNS = {
    "TensorFlow": ["--runtime", "tensorflow"],
    "TensorFlow with XLA": ["--runtime", "tensorflow", "--jit-compile", "true"],
    "JAX, cold cache": ["--runtime", "jax"],
    "JAX, warm cache": ["--runtime", "jax"],
}
HEADER = "run|starts|s to first step|(from-to)|step: ms|(from-to)|host: ms|(from-to)|MB|(from-to)"


class Cost(NamedTuple):
    """The cost of a run. Step and host seconds are per step."""

    start_seconds: float
    step_seconds: float
    host_seconds: float  # CPU time of Python's thread
    num_bytes: int


def measure(flags: Sequence[str], num_steps: int, warmup_steps: int) -> Cost:
    """Train until `num_steps` steps after the warmup are done."""
    seconds = {}
    host_seconds = {}
    begun_seconds = time.perf_counter()
    with training([*flags, "--max-steps", str(warmup_steps + num_steps + 1)]) as (process, reports):
        for report in reports:
            if not report.startswith(supervisor.TRAIN):
                continue
            step = int(report.split()[1])
            if step in (1, warmup_steps, warmup_steps + num_steps):
                seconds[step], host_seconds[step] = time.perf_counter() - begun_seconds, thread_seconds(process.pid)
            if step == warmup_steps + num_steps:
                num_bytes = memory_of(process.pid)
                break
        else:
            sys.exit("the training process ended early")
    of_step, of_host = ((times[step] - times[warmup_steps]) / num_steps for times in (seconds, host_seconds))
    return Cost(seconds[1], of_step, of_host, num_bytes)


def thread_seconds(pid: int) -> float:
    """Read the CPU time of a process's first thread (Linux)."""
    nanoseconds = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text(encoding="ascii").split()[0]
    return int(nanoseconds) / 1e9


def cells_of(name: str, costs: Sequence[Cost]) -> list[str]:
    starts, steps, hosts, sizes = zip(*costs, strict=True)
    milliseconds = [[1000 * seconds for seconds in times] for times in (steps, hosts)]
    cells = [cell for times in milliseconds for cell in median_and_range(times, ".2f")]
    megabytes = median_and_range([size / 1e6 for size in sizes], ",.0f")
    return [name, str(len(costs)), *median_and_range(starts, ".1f"), *cells, *megabytes]


def main() -> None:
    """Print the table, and the ratios of JAX to TensorFlow."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-layers", type=int, default=12)
    parser.add_argument("--hidden-size", type=int, default=32)
    parser.add_argument("--num-steps", type=int, default=500, help="Number of timed steps.")
    parser.add_argument("--warmup-steps", type=int, default=50, help="Number of steps before the timed steps.")
    parser.add_argument("--rounds", type=int, default=5, help="Number of times each run is started.")
    parser.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS))
    arguments = parser.parse_args()
    size = arguments.hidden_size
    model = f"num_hidden_layers={arguments.num_layers},hidden_size={size},intermediate_size={size}"
    costs: dict[str, list[Cost]] = {name: [] for name in arguments.runs}
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        shards = Path(folder, "shards")
        shards.mkdir()
        write_random_shards(shards, NUM_ROWS, LENGTH, VOCAB_SIZE)
        write_tokenizer(Path(folder), VOCAB_SIZE)
        for number in range(arguments.rounds):
            os.environ[CACHE_VARIABLE] = f"{folder}/cache-{number}"
            for name in costs:
                flags = [
                    *(*RUNS[name], "--preset", "tiny-roberta-cpu"),
                    *("--config-overrides", f"{model},num_attention_heads=2"),
                    *("--train-dataset", str(shards), "--tokenizer", f"{folder}/tokenizer"),
                    *("--output-dir", f"{folder}/run-{number}-{name}", "--per-replica-batch-size", str(BATCH_ROWS)),
                    *("--no-tpu", "--save-steps", "1000000", "--log-steps", "50"),
                ]
                costs[name].append(measure(flags, arguments.num_steps, arguments.warmup_steps))
                print(f"{name}: {costs[name][-1]}", file=sys.stderr)
    print_machine()
    print(f"{arguments.num_layers} layers of width {size}, {BATCH_ROWS} rows of {LENGTH} tokens per step")
    print_table(HEADER, [cells_of(name, of_run) for name, of_run in costs.items()])
    of_jax = [name for name in costs if name.startswith("JAX")]
    for name, other in itertools.product(of_jax, (name for name in costs if name not in of_jax)):
        pairs = list(zip(costs[name], costs[other], strict=True))
        ratios = [statistics.median(ours[index] / theirs[index] for ours, theirs in pairs) for index in range(4)]
        print(f"{name} / {other}", "start {:.2f}, step {:.2f}, host {:.2f}, memory {:.2f}".format(*ratios))


if __name__ == "__main__":
    main()
