"""Compare stage 2 with transformers' TPU tutorial and with the tokenizer alone, and measure how it scales (Linux).

    python benchmarks/prepare.py --train-file train.jsonl.gz --tokenizer tokenizer

Each run is a new process, and the contenders take turns. The results are medians: seconds, and the megabytes of all
processes together. `ours` is the whole command. If no tokenizer is given, stage 1 first trains one. The second part
runs our command on increasing amounts of generated text (see generated_text.py).
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

# The project comes first, because this script's folder has a tokenizer_training.py that would hide the package.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.measuring.generated_text import write_generated_text
from benchmarks.measuring.measured_run import MeasuredRun, run_and_tell
from benchmarks.measuring.tables import median_and_range, print_machine, print_table

PROJECT = Path(__file__).resolve().parent.parent
TRAIN_COMMAND = [sys.executable, str(PROJECT / "tokenizer_training" / "train_unigram.py")]
PREPARE_COMMAND = [sys.executable, "-u", str(PROJECT / "tfrecord_prep" / "prepare_tfrecord_shards.py")]
PEER_COMMAND = [sys.executable, str(PROJECT / "benchmarks" / "peers" / "prepare_peers.py")]
NUM_PROCESSES = 2
OURS, TUTORIAL, TOKENIZER = "ours", "tutorial", "tokenizer"

SPEED_HEADER = "method|runs|seconds|(from-to)|peak MB"
GROWTH_HEADER = "text MB|seconds|MB/s a worker|after start|peak MB|/first|processes"


def measure(label: str, command: Sequence[str]) -> MeasuredRun:
    """Run and measure a command; stop if it failed."""
    run = run_and_tell(label, command)
    return run if run.status == 0 else sys.exit(f"{label} failed.")


def our_command(text_file: str, tokenizer: str, output: str, arguments: argparse.Namespace) -> list[str]:
    """Make the command of stage 2."""
    flags = ["--data-files", text_file, "--tokenizer-name-or-path", tokenizer, "--output-dir", output]
    return [*PREPARE_COMMAND, *flags, f"--max-length={arguments.length}", f"--num-workers={NUM_PROCESSES}"]


def compare_speed(tokenizer: str, arguments: argparse.Namespace) -> None:
    """Run the methods in turn, and print a table and the median ratios."""
    runs: dict[str, list[MeasuredRun]] = {OURS: [], TUTORIAL: [], TOKENIZER: []}
    for _ in range(arguments.repeats):
        for name, done in runs.items():
            with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
                output = f"{folder}/output"
                peer = [*PEER_COMMAND, name, arguments.train_file, tokenizer, output, f"--length={arguments.length}"]
                ours = our_command(arguments.train_file, tokenizer, output, arguments)
                done.append(measure(name, ours if name == OURS else peer))
    print_table(SPEED_HEADER, [speed_row(name, done) for name, done in runs.items()])
    for above, below in ((TUTORIAL, OURS), (OURS, TOKENIZER)):
        ratios = [a.seconds / b.seconds for a, b in zip(runs[above], runs[below], strict=True)]
        print(f"time of {above} / {below}: {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})")


def speed_row(name: str, runs: Sequence[MeasuredRun]) -> list[str]:
    """Make the cells of a method's row."""
    seconds = [run.seconds for run in runs]
    peak_bytes = statistics.median(run.peak.num_bytes for run in runs)
    return [name, str(len(runs)), *median_and_range(seconds, ".2f"), f"{peak_bytes / 1e6:,.0f}"]


def show_growth(tokenizer: str | None, arguments: argparse.Namespace) -> None:
    """Run our command on increasing amounts of generated text, and print a table.

    The column `after start` leaves out the startup.
    """
    rows: list[list[str]] = []
    first: MeasuredRun | None = None
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        for num_megabytes in arguments.generated_megabytes:
            text_file = Path(folder, "text.txt")
            write_generated_text(text_file, int(num_megabytes * 1e6))
            if tokenizer is None:
                tokenizer = train_tokenizer(str(text_file), folder, arguments.vocab_size)
            with tempfile.TemporaryDirectory(prefix="benchmark-") as output:
                command = our_command(str(text_file), tokenizer, f"{output}/shards", arguments)
                run = measure(f"{num_megabytes:g} MB", command)
            first = first or run
            rows.append(growth_row(num_megabytes, run, first))
    print(f"\nOurs on generated text, {NUM_PROCESSES} workers")
    print_table(GROWTH_HEADER, rows)


def growth_row(num_megabytes: float, run: MeasuredRun, first: MeasuredRun) -> list[str]:
    """Make the cells of a row, with the throughput of the whole command, and of its part after printing the plan."""
    working_seconds = run.seconds - run.seconds_of_line(r"^workers ")
    rates = [f"{num_megabytes / NUM_PROCESSES / seconds:.2f}" for seconds in (run.seconds, working_seconds)]
    peak = f"{run.peak.num_bytes / 1e6:,.0f}"
    ratio = f"{run.peak.num_bytes / first.peak.num_bytes:.2f}"
    processes = "+".join(f"{value / 1e6:.0f}" for value in run.peak.process_bytes)
    return [f"{num_megabytes:g}", f"{run.seconds:.1f}", *rates, peak, ratio, processes]


def train_tokenizer(text_file: str, folder: str, vocab_size: int) -> str:
    """Train a tokenizer on the file, and return its folder."""
    output = f"{folder}/tokenizer"
    flags = ["--data-files", text_file, "--vocab-size", str(vocab_size), "--output-dir", output]
    measure("training the tokenizer", [*TRAIN_COMMAND, *flags])
    return output


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train-file", help="Corpus with the key `text`: .jsonl or .jsonl.gz.")
    parser.add_argument("--tokenizer", help="Folder of a tokenizer of train-unigram. Default: train one.")
    parser.add_argument("--only", choices=("speed", "memory"), help="The part to run. Default: both.")
    parser.add_argument(
        "--vocab-size", type=int, default=16_000, help="Vocabulary size of the tokenizer if one is trained."
    )
    parser.add_argument("--length", type=int, default=512, help="Tokens per row.")
    parser.add_argument("--repeats", type=int, default=5, help="Runs of each method.")
    parser.add_argument("--generated-megabytes", type=float, nargs="+", default=[30, 300, 1000])
    arguments = parser.parse_args()
    if arguments.only != "memory" and not arguments.train_file:
        parser.error("--train-file is required, except with --only memory")
    print_machine()
    if arguments.only != "memory":
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
            tokenizer = arguments.tokenizer or train_tokenizer(arguments.train_file, folder, arguments.vocab_size)
            compare_speed(tokenizer, arguments)
    if arguments.only != "speed":
        show_growth(arguments.tokenizer, arguments)


if __name__ == "__main__":
    main()
