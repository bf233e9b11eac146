"""Training on the CPU: tokens a second of run-mlm, of transformers' TPU tutorial, and of a PyTorch loop.

    python benchmarks/train_step_cpu.py

All train the same architecture on the same rows, of random ids, in float32 on all cores. They are processes that run
rounds of a few steps in turns, so that the machine's other load falls on all; compilation and the first steps are not
counted. CPU seconds are those of all cores together: other load changes them less. `ours` and `torch gathered` compute
the head over the masked positions only, the others over all. PyTorch runs in an environment of its own, which is made
in a temporary folder where `--torch-python` names none. `taskset -c 0` before the command gives figures of one core,
which other load disturbs least.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

# Before this script's own folder, where tokenizer_training.py goes by the name of the package.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks.random_inputs import write_shard, write_tokenizer
from benchmarks.rounds import MeasuredProgram, Times
from benchmarks.tables import median_and_range, print_machine, print_table
from benchmarks.torch_environment import make_torch_environment, torch_variables
from mlm_common.tokenizer import SPECIAL_TOKENS

PEERS = Path(__file__).resolve().parent / "peers"
NUM_ROWS, SHARD_ROWS = 8192, 1024
# What each contender is: program, and its own flags.
CONTENDERS = {
    "tutorial": ("train_step_contenders.py", ["tutorial"]),
    "ours": ("train_step_contenders.py", ["ours", "--jit-compile=false"]),
    "ours with XLA": ("train_step_contenders.py", ["ours", "--jit-compile=true"]),
    "torch": ("train_step_torch.py", []),
    "torch gathered": ("train_step_torch.py", ["--gather"]),
}
RATIOS = [
    ("ours", "tutorial"), ("ours", "torch"), ("ours", "torch gathered"), ("ours with XLA", "ours"),
]  # fmt: skip


def write_inputs(folder: Path, length: int, vocab_size: int) -> None:
    """Write rows.npy, the same rows as shards, and tokenizer/ with a vocabulary of that size."""
    rows = np.random.default_rng(0).integers(len(SPECIAL_TOKENS), vocab_size, (NUM_ROWS, length), np.int32)
    np.save(folder / "rows.npy", rows)
    for number, part in enumerate(np.split(rows, NUM_ROWS // SHARD_ROWS)):
        write_shard(folder, number, part)
    write_tokenizer(folder, vocab_size)


def start(name: str, folder: Path, settings: dict[str, Any], torch_python: str) -> MeasuredProgram:
    """Start a contender and return it after its warmup."""
    program, flags = CONTENDERS[name]
    is_torch = name.startswith("torch")
    first = [torch_python if is_torch else sys.executable, str(PEERS / program)]
    data = [str(folder / "rows.npy")] if is_torch else []
    if not is_torch:
        flags = [flags[0], str(folder), *flags[1:]]
    environment = torch_variables() if is_torch else os.environ
    command = [*first, *data, *flags, "--settings", json.dumps(settings)]
    running = MeasuredProgram(name, command, {**environment, "HF_HUB_OFFLINE": "1", "TF_CPP_MIN_LOG_LEVEL": "2"})
    running.wait()
    return running


def measure(
    folder: Path, settings: dict[str, Any], torch_python: str, names: list[str], num_rounds: int
) -> dict[str, list[Times]]:
    """Measure {contender: times of each round}."""
    programs = []
    try:
        for name in names:
            print(f"{name} warms up", file=sys.stderr)
            programs.append(start(name, folder, settings, torch_python))
        times: dict[str, list[Times]] = {name: [] for name in names}
        for number in range(num_rounds):
            for program in programs:
                times[program.name].append(program.run_round())
            print(f"round {number + 1} of {num_rounds}", file=sys.stderr)
    finally:
        for program in programs:
            program.end()
    return times


def print_results(times: dict[str, list[Times]], num_steps: int, num_tokens: int) -> None:
    """Print tokens a second of each, and the medians of the rounds' ratios."""
    rows = []
    for name, rounds in times.items():
        rates = [num_steps * num_tokens / one.seconds for one in rounds]
        cpu_seconds = statistics.median(one.cpu_seconds / num_steps for one in rounds)
        rows.append([name, *median_and_range(rates, ",.0f"), f"{cpu_seconds:.2f}"])
    print_table("training|tokens/s|(from-to)|CPU s a step", rows)
    rows = []
    for one, other in RATIOS:
        if one in times and other in times:
            pairs = list(zip(times[one], times[other], strict=True))
            ratios = [theirs.seconds / mine.seconds for mine, theirs in pairs]
            cpu_ratio = statistics.median(theirs.cpu_seconds / mine.cpu_seconds for mine, theirs in pairs)
            rows.append([f"{one} / {other}", *median_and_range(ratios, ".2f"), f"{cpu_ratio:.2f}"])
    print_table("speed|median of the rounds|(from-to)|by CPU seconds", rows)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch-python", help="Interpreter of an environment with torch and transformers 4.57.")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--num-heads", type=int, default=4)
    parser.add_argument("--vocab-size", type=int, default=25_000)
    parser.add_argument("--length", type=int, default=128, help="Tokens a row.")
    parser.add_argument("--batch-rows", type=int, default=16, help="Rows a batch.")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps-per-round", type=int, default=5)
    parser.add_argument("--warmup-steps", type=int, default=3)
    arguments = parser.parse_args()
    model = {
        "vocab_size": arguments.vocab_size,
        "num_hidden_layers": arguments.num_layers,
        "hidden_size": arguments.hidden_size,
        "num_attention_heads": arguments.num_heads,
        "intermediate_size": 4 * arguments.hidden_size,
        "max_position_embeddings": arguments.length + 2,
    }
    settings = {
        "model": model,
        "length": arguments.length,
        "batch_rows": arguments.batch_rows,
        "rounds": {"steps_per_round": arguments.steps_per_round, "warmup_steps": arguments.warmup_steps},
    }
    print_machine()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        write_inputs(Path(folder), arguments.length, arguments.vocab_size)
        torch_python = arguments.torch_python or ""
        if not torch_python and any(name.startswith("torch") for name in arguments.contenders):
            torch_python = make_torch_environment(Path(folder, "torch"))
        times = measure(Path(folder), settings, torch_python, arguments.contenders, arguments.rounds)
    print_results(times, arguments.steps_per_round, arguments.batch_rows * arguments.length)


if __name__ == "__main__":
    main()
