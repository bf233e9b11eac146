"""Compare the trainer's input pipeline with that of transformers' TPU tutorial: rows per CPU second, memory (Linux).

    python benchmarks/input_pipeline.py
    python benchmarks/input_pipeline.py --contenders ours --length 8192 --num-rows 24000 --shard-rows 1024

Each run is a new process that reads an epoch. The contenders take turns, and the results are medians over their runs.
CPU seconds are the sum over all threads, counted from the first batch on, so they do not depend on other load on the
machine. Memory is given twice: as the peak of the whole process, and as this peak minus the memory that TensorFlow used
before the input was built. Unless a folder of shards is given, the rows have random ids, and there are more rows than
fit into the tutorial's shuffle buffer.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# The project comes first, because this script's folder has a tokenizer_training.py that would hide the package.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.measuring.measured_run import MeasuredRun, run_measured
from benchmarks.measuring.random_inputs import write_random_shards
from benchmarks.measuring.tables import median_and_range, print_machine, print_table
from benchmarks.peers.input_contenders import CONTENDERS, START_LINE

PROGRAM = str(Path(__file__).resolve().parent / "peers" / "input_contenders.py")
HEADER = "input|runs|rows/CPU s|(from-to)|tokens/CPU s|first batch s|input MB|process MB"


@dataclass(frozen=True)
class Figures:
    """The results of one run."""

    rows_per_cpu_second: float
    first_batch_seconds: float
    input_bytes: int
    process_bytes: int


def figures(run: MeasuredRun) -> Figures:
    """Read the results of a successful run."""
    read = json.loads(run.lines[-1][1])
    start_seconds = run.seconds_of_line(START_LINE)
    before = max(sample.num_bytes for sample in run.samples if sample.seconds < start_seconds)
    return Figures(
        read["rows"] / read["cpu_seconds"], read["first_seconds"], run.peak.num_bytes - before, run.peak.num_bytes
    )


def compare(folder: str, arguments: argparse.Namespace) -> dict[str, list[Figures]]:
    """Measure several runs of each contender. The contenders take turns."""
    results: dict[str, list[Figures]] = {name: [] for name in arguments.contenders}
    flags = [f"--length={arguments.length}", f"--batch-rows={arguments.batch_rows}"]
    for _ in range(arguments.repeats):
        for name in arguments.contenders:
            run = run_measured([sys.executable, PROGRAM, name, folder, *flags, f"--vocab-size={arguments.vocab_size}"])
            if run.status:
                sys.exit(f"{name} failed:\n{run.output}")
            results[name].append(figures(run))
            print(f"{name}: {results[name][-1].rows_per_cpu_second:,.0f} rows/CPU s", file=sys.stderr)
    return results


def row(name: str, runs: Sequence[Figures], length: int) -> list[str]:
    """Make the cells of a contender's row."""
    rates = [run.rows_per_cpu_second for run in runs]
    return [
        name,
        str(len(runs)),
        *median_and_range(rates, ",.0f"),
        f"{statistics.median(rates) * length:,.0f}",
        f"{statistics.median(run.first_batch_seconds for run in runs):.2f}",
        f"{statistics.median(run.input_bytes for run in runs) / 1e6:,.0f}",
        f"{statistics.median(run.process_bytes for run in runs) / 1e6:,.0f}",
    ]


def print_ratios(results: dict[str, list[Figures]]) -> None:
    """Print the median ratios of paired runs."""
    ratios = [*itertools.product(("ours", "ours-masked"), ("tutorial", "tutorial-unmasked"))]
    for ours, theirs in (*ratios, ("ours-10", "ours"), ("ours-100", "ours")):
        if pairs := list(zip(results.get(ours, []), results.get(theirs, []), strict=False)):
            rate = statistics.median(a.rows_per_cpu_second / b.rows_per_cpu_second for a, b in pairs)
            memory = statistics.median(a.input_bytes / b.input_bytes for a, b in pairs)
            print(f"{f'{ours} / {theirs}':32s} rows/CPU s {rate:.2f}, input memory {memory:.3f}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shards", help="Folder of shards with rows of --length. Default: random shards in a temporary folder."
    )
    parser.add_argument("--num-rows", type=int, default=400_000, help="Rows to make if no shards are given.")
    parser.add_argument(
        "--shard-rows", type=int, default=1024, help="Rows per shard; each source must have at least one shard."
    )
    parser.add_argument("--length", type=int, default=512, help="Tokens per row.")
    parser.add_argument("--batch-rows", type=int, default=256, help="Rows per batch.")
    parser.add_argument("--vocab-size", type=int, default=16_000)
    parser.add_argument("--repeats", type=int, default=3, help="Runs of each contender.")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    arguments = parser.parse_args()
    print_machine()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        if not arguments.shards:
            sizes = (arguments.num_rows, arguments.length, arguments.vocab_size, arguments.shard_rows)
            write_random_shards(Path(folder), *sizes)
        results = compare(arguments.shards or folder, arguments)
    print_table(HEADER, [row(name, runs, arguments.length) for name, runs in results.items()])
    print_ratios(results)


if __name__ == "__main__":
    main()
