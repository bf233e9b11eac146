"""Compare the speed of training on the CPU: run-mlm, transformers' TPU tutorial, and a PyTorch loop.

    python benchmarks/train_step_cpu.py

All train the same architecture on the same rows of random ids, on all cores, in float32 unless the name says otherwise.
The contenders are processes that take turns at running rounds of a few steps, so that other load on the machine affects
all equally; compilation and the first steps are not counted. CPU seconds are the sum over all cores, which other load
affects less. `ours` and `torch gathered` compute the head for masked positions only, the other contenders for all
positions. By default the contenders in bfloat16 run only on CPUs with instructions for it. PyTorch runs in a separate
environment, which is created in a temporary folder unless `--torch-python` names one. Put `taskset -c 0` before the
command to measure a single core, which is least disturbed by other load.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

# The project comes first, because this script's folder has a tokenizer_training.py that would hide the package.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks.measuring.random_inputs import write_shard, write_tokenizer
from benchmarks.measuring.rounds import (
    MeasuredProgram,
    Times,
    add_step_flags,
    make_torch_environment,
    measure_in_turns,
    settings_of,
    start_program,
)
from benchmarks.measuring.tables import median_and_range, print_machine, print_table, ratios_of_rounds
from mlm_common.tokenizer import SPECIAL_TOKENS
from train import multiplies_in_bfloat16

NUM_ROWS, SHARD_ROWS = 8192, 1024
# {contender: (program, additional flags)}.
TENSORFLOW, TORCH = "train_step_contenders.py", "train_step_torch.py"
CONTENDERS = {
    "tutorial": (TENSORFLOW, ["tutorial"]),
    "ours": (TENSORFLOW, ["ours", "--jit-compile=false"]),
    "ours with XLA": (TENSORFLOW, ["ours", "--jit-compile=true"]),
    "ours in bfloat16": (TENSORFLOW, ["ours", "--jit-compile=false", "--bfloat16=true"]),
    "torch": (TORCH, []),
    "torch gathered": (TORCH, ["--gather"]),
    "torch gathered in bfloat16": (TORCH, ["--gather", "--bfloat16"]),
}
RATIOS = [
    *(("ours", peer) for peer in ("tutorial", "torch", "torch gathered")),
    *(("ours with XLA", "torch gathered"), ("ours with XLA", "ours"), ("ours in bfloat16", "ours")),
    ("ours in bfloat16", "torch gathered in bfloat16"),
    ("torch gathered in bfloat16", "torch gathered"),
]


def write_inputs(folder: Path, length: int, vocab_size: int) -> None:
    """Write rows.npy, the same rows as shards, and tokenizer/ with a vocabulary of this size."""
    rows = np.random.default_rng(0).integers(len(SPECIAL_TOKENS), vocab_size, (NUM_ROWS, length), np.int32)
    np.save(folder / "rows.npy", rows)
    for number, part in enumerate(np.split(rows, NUM_ROWS // SHARD_ROWS)):
        write_shard(folder, number, part)
    write_tokenizer(folder, vocab_size)


def start(name: str, folder: Path, settings: dict[str, Any], torch_python: str) -> MeasuredProgram:
    """Start a contender and return it after its warmup."""
    program, flags = CONTENDERS[name]
    if program == TORCH:
        return start_program(name, program, [str(folder / "rows.npy"), *flags], settings, torch_python)
    return start_program(name, program, [flags[0], str(folder), *flags[1:]], settings)


def print_results(times: dict[str, list[Times]], num_steps: int, num_tokens: int) -> None:
    """Print the tokens per second of each contender, and the median ratios of their speeds."""
    rows = []
    for name, rounds in times.items():
        rates = [num_steps * num_tokens / round_times.seconds for round_times in rounds]
        cpu_seconds = statistics.median(round_times.cpu_seconds / num_steps for round_times in rounds)
        rows.append([name, *median_and_range(rates, ",.0f"), f"{cpu_seconds:.2f}"])
    print_table("training|tokens/s|(from-to)|CPU s a step", rows)
    rows = [
        [f"{first} / {second}", *ratios_of_rounds(times[first], times[second])]
        for first, second in RATIOS
        if first in times and second in times
    ]
    print_table("speed|median of the rounds|(from-to)|by CPU seconds", rows)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = [name for name in CONTENDERS if "bfloat16" not in name or multiplies_in_bfloat16()]
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=default)
    add_step_flags(parser, vocab_size=25_000, batch_rows=16, rounds=15, steps_per_round=5, warmup_steps=3)
    arguments = parser.parse_args()
    settings = settings_of(arguments)
    settings["model"] |= {"vocab_size": arguments.vocab_size, "max_position_embeddings": arguments.length + 2}
    print_machine()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        write_inputs(Path(folder), arguments.length, arguments.vocab_size)
        torch_python = arguments.torch_python
        if not torch_python and any(CONTENDERS[name][0] == TORCH for name in arguments.contenders):
            torch_python = make_torch_environment(Path(folder, "torch"))
        times = measure_in_turns(
            lambda name: start(name, Path(folder), settings, torch_python), arguments.contenders, arguments.rounds
        )
    print_results(times, arguments.steps_per_round, arguments.batch_rows * arguments.length)


if __name__ == "__main__":
    main()
