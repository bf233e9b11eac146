"""Compare the speed of fine-tuning on the CPU: run-classification, and transformers' Trainer and TensorFlow script.

    python benchmarks/finetune_step.py --glue-dir work/glue

All train the same classifier on the rows of SST-2 in batches of equal size, in float32 on all cores. The contenders are
processes that take turns at running rounds of steps, so that other load on the machine affects all equally; tracing,
compiling and the first steps are not counted. `trainer` uses PyTorch, and pads rows to the longest row of their batch;
`trainer grouped` puts rows of similar length into a batch (`group_by_length`). `tf script` pads all rows to the longest
row of the data, `tf script dynamic` to the longest row of the batch. Without `--glue-dir` the sentences are made-up
words, with the lengths of SST-2's sentences. PyTorch runs in a separate environment, which is created in a temporary
folder unless `--torch-python` names one.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# The project comes first, because this script's folder has a tokenizer_training.py that would hide the package.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from numpy.typing import NDArray

from benchmarks.measuring.generated_text import write_generated_text
from benchmarks.measuring.rounds import (
    PEERS,
    MeasuredProgram,
    Times,
    add_step_flags,
    make_torch_environment,
    measure_in_turns,
    settings_of,
    start_program,
)
from benchmarks.measuring.tables import median_and_range, print_machine, print_table, ratios_of_rounds

# {contender: (program, additional flags)}.
OURS, TRAINER = "finetune_contenders.py", "finetune_trainer.py"
CONTENDERS = {
    "ours": (OURS, ["ours"]),
    "ours with XLA": (OURS, ["ours", "--jit-compile=true"]),
    "ours without XLA": (OURS, ["ours", "--jit-compile=false"]),
    "trainer": (TRAINER, []),
    "trainer grouped": (TRAINER, ["--group"]),
    "tf script": (OURS, ["script"]),
    "tf script dynamic": (OURS, ["script", "--dynamic"]),
}
DEFAULT_CONTENDERS = ["ours", "trainer", "trainer grouped", "tf script", "tf script dynamic"]
# {fraction of SST-2's training sentences: their maximum number of words}, counted in GLUE's download.
WORDS_OF_SENTENCES = {
    0.0: 1, 0.1: 2, 0.2: 3, 0.3: 4, 0.4: 5, 0.5: 7, 0.6: 9, 0.7: 12, 0.8: 15, 0.9: 21, 0.95: 26, 0.99: 36, 1.0: 52,
}  # fmt: skip
NUM_ROWS, NUM_DEV_ROWS = 67_349, 872
BYTES_PER_SENTENCE = 100


def write_stand_in(folder: Path, num_rows: int) -> None:
    """Write files like SST-2's, with made-up words, sentences of SST-2's lengths, and random labels."""
    generator = np.random.default_rng(0)
    write_generated_text(folder / "text", (num_rows + NUM_DEV_ROWS) * BYTES_PER_SENTENCE)
    words = (folder / "text").read_text(encoding="ascii").split()
    (folder / "SST-2").mkdir(parents=True)
    for file, count in (("train", num_rows), ("dev", NUM_DEV_ROWS)):
        shares, most = zip(*WORDS_OF_SENTENCES.items(), strict=True)
        nums = np.interp(generator.random(count), shares, most).astype(int)
        lines = [f"{' '.join(words.pop() for _ in range(num))}\t{generator.integers(2)}\n" for num in nums]
        (folder / "SST-2" / f"{file}.tsv").write_text("sentence\tlabel\n" + "".join(lines), encoding="utf-8")


def prepare(folder: Path, glue_dir: str | None, num_rows: int, settings: dict[str, Any]) -> NDArray[np.int64]:
    """Write glue/, tokenizer/, rows.npz, and the initial model start/; return the number of tokens of each row."""
    if glue_dir:
        shutil.copytree(Path(glue_dir) / "SST-2", folder / "glue" / "SST-2")
    else:
        (folder / "glue").mkdir()
        write_stand_in(folder / "glue", num_rows)
    command = [sys.executable, str(PEERS / OURS), "prepare", str(folder), "--settings", json.dumps(settings)]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return np.diff(np.load(folder / "rows.npz")["starts"])


def start(name: str, folder: Path, settings: dict[str, Any], torch_python: str) -> MeasuredProgram:
    """Start a contender and return it after its warmup."""
    program, flags = CONTENDERS[name]
    if program == TRAINER:
        return start_program(name, program, [str(folder), *flags], settings, torch_python)
    return start_program(name, program, [flags[0], str(folder), *flags[1:]], settings)


def tokens_of_rows(names: list[str], lengths: NDArray[np.int64], settings: dict[str, Any]) -> dict[str, float]:
    """Compute for each contender the average number of tokens per row, including padding."""
    from finetuning.data.buckets import bucket_of_rows, fitted_lengths

    batch_rows = settings["batch_rows"]
    shuffled = np.random.default_rng(0).permutation(lengths)[: len(lengths) // batch_rows * batch_rows]
    grouped = np.concatenate(
        [np.sort(some) for some in np.split(shuffled, range(0, len(shuffled), 50 * batch_rows)[1:])]
    )
    buckets = np.asarray(fitted_lengths(lengths, settings["length"]))
    tokens = {
        "ours": buckets[bucket_of_rows(lengths, buckets.tolist())].mean(),
        "trainer": shuffled.reshape(-1, batch_rows).max(axis=1).mean(),
        "trainer grouped": grouped.reshape(-1, batch_rows).max(axis=1).mean(),
        "tf script": lengths.max(),
    }
    tokens["tf script dynamic"] = tokens["trainer"]
    return {name: float(tokens["ours" if name.startswith("ours") else name]) for name in names}


def print_results(times: dict[str, list[Times]], num_rows: int, tokens: dict[str, float]) -> None:
    """Print the examples per second of each contender, and the median ratios of the first speed to each other speed."""
    rows = []
    for name, rounds in times.items():
        rates = [num_rows / round_times.seconds for round_times in rounds]
        milliseconds = statistics.median(1000 * round_times.cpu_seconds / num_rows for round_times in rounds)
        rows.append([name, *median_and_range(rates, ",.0f"), f"{milliseconds:.2f}", f"{tokens[name]:.1f}"])
    print_table("fine-tuning|examples/s|(from-to)|CPU ms an example|tokens a row", rows)
    first, *others = times
    rows = [[f"{first} / {other}", *ratios_of_rounds(times[first], times[other])] for other in others]
    print_table("speed|median of the rounds|(from-to)|by CPU seconds", rows)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--glue-dir", help="Folder of GLUE's download with SST-2/. Default: made-up words.")
    parser.add_argument("--num-rows", type=int, default=NUM_ROWS, help="Rows of the stand-in.")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=DEFAULT_CONTENDERS)
    add_step_flags(parser, vocab_size=8192, batch_rows=32, rounds=12, steps_per_round=40, warmup_steps=20)
    arguments = parser.parse_args()
    settings = settings_of(arguments)
    print_machine()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        folder = Path(name)
        lengths = prepare(folder, arguments.glue_dir, arguments.num_rows, settings)
        source = "SST-2" if arguments.glue_dir else "a stand-in for SST-2 with made-up words"
        size = f"{lengths.mean():.1f} tokens on average and at most {lengths.max()}"
        print(f"{len(lengths):,} rows of {source}, with {size}")
        torch_python = arguments.torch_python
        if not torch_python and any(CONTENDERS[contender][0] == TRAINER for contender in arguments.contenders):
            torch_python = make_torch_environment(folder / "torch")
        times = measure_in_turns(
            lambda name: start(name, folder, settings, torch_python), arguments.contenders, arguments.rounds
        )
    tokens = tokens_of_rows(arguments.contenders, lengths, settings)
    print_results(times, arguments.steps_per_round * arguments.batch_rows, tokens)


if __name__ == "__main__":
    main()
