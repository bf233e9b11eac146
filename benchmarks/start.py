"""Measure how long commands take to start, compared with another checkout: a run up to its first step, and stage 2.

    python benchmarks/start.py --quickstart runs/quickstart --beside ../other-checkout

The run trains the quick start's model on its shards, and is timed from the start of the process to the end of the first
step. Stage 2 prepares half a megabyte of text, 2% of it for validation. The checkouts take turns.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

# The project comes first, because this script's folder has a tokenizer_training.py that would hide the package.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.measuring.generated_text import write_generated_text
from benchmarks.measuring.tables import median_and_range, print_machine, print_table
from benchmarks.resume import PROJECT, seconds_to_first_step

TEXT_BYTES = 500_000


def start_run(checkout: Path, quickstart: str, folder: str) -> float:
    """Time a run of the quick start's model up to its first step."""
    flags = ["--preset", "tiny-cpu", "--train-dataset", f"{quickstart}/shards/train", "--max-steps", "600"]
    flags += ["--eval-dataset", f"{quickstart}/shards/validation", "--output-dir", f"{folder}/run"]
    return seconds_to_first_step(flags, 0, checkout)


def write_shards(checkout: Path, quickstart: str, folder: str) -> float:
    """Time stage 2 on a small text."""
    write_generated_text(Path(folder, "text.txt"), TEXT_BYTES)
    flags = ["--data-files", f"{folder}/text.txt", "--sample-by", "line", "--validation-percent", "2"]
    flags += ["--tokenizer-name-or-path", f"{quickstart}/tokenizer", "--max-length", "64"]
    script = str(checkout / "tfrecord_prep" / "prepare_tfrecord_shards.py")
    command = [sys.executable, script, *flags, "--output-dir", f"{folder}/shards"]
    start_seconds = time.perf_counter()
    subprocess.run(command, env=os.environ | {"PYTHONPATH": str(checkout)}, check=True, capture_output=True)
    return time.perf_counter() - start_seconds


STARTS: dict[str, Callable[[Path, str, str], float]] = {"first step": start_run, "shards": write_shards}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quickstart", type=Path, required=True, metavar="DIR", help="Output of quickstart.py.")
    parser.add_argument("--beside", type=Path, default=PROJECT, metavar="DIR", help="Checkout of another commit.")
    parser.add_argument("--starts", nargs="+", choices=STARTS, default=list(STARTS))
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    print_machine()
    checkouts, quickstart = [PROJECT, arguments.beside.resolve()], str(arguments.quickstart.resolve())
    rows = []
    for name in arguments.starts:
        seconds: list[list[float]] = [[], []]
        for _ in range(arguments.repeats):
            for times, checkout in zip(seconds, checkouts, strict=True):
                with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
                    times.append(STARTS[name](checkout, quickstart, folder))
        ratio = statistics.median(this / beside for this, beside in zip(*seconds, strict=True))
        rows.append([name, *(cell for times in seconds for cell in median_and_range(times, ".2f")), f"{ratio:.2f}"])
    print_table("to|this: s|(from-to)|beside: s|(from-to)|this / beside", rows)


if __name__ == "__main__":
    main()
