"""Compare the speed of training embeddings on the CPU: run-embedding, and sentence-transformers' trainer on PyTorch.

    python benchmarks/embedding_step.py --squad-file squad/train-v1.1.json.gz

Both train the same model on the same questions and paragraphs in batches of equal size, in float32 on all cores, with
the same loss. The two programs are processes that take turns at running rounds of steps, so that other load on the
machine affects both equally; tracing, compiling and the first steps are not counted. Without `--squad-file` the texts
are made-up words, with the lengths of SQuAD's texts. PyTorch runs in a separate environment, which is created in a
temporary folder unless `--torch-python` names one.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# The project comes first, because this script's folder has a tokenizer_training.py that would hide the package.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

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

OURS, TRAINER = "embedding_contenders.py", "embedding_trainer.py"
# {contender: (program, additional flags)}.
CONTENDERS = {
    "ours": (OURS, []),
    "ours with XLA": (OURS, ["--jit-compile=true"]),
    "ours without XLA": (OURS, ["--jit-compile=false"]),
    "sentence-transformers": (TRAINER, []),
}
REQUIREMENTS = ("sentence-transformers[train]>=5,<6",)
# Median numbers of words in SQuAD's questions and paragraphs, and the spreads of the logarithms of these numbers.
WORDS = {"query": (10, 0.35), "passage": (110, 0.41)}
BYTES_PER_PAIR = 1_200


def write_stand_in(path: Path, num_rows: int) -> None:
    """Write pairs of texts of made-up words, with the lengths of SQuAD's texts."""
    generator = np.random.default_rng(0)
    write_generated_text(path.with_suffix(".txt"), num_rows * BYTES_PER_PAIR)
    words = path.with_suffix(".txt").read_text(encoding="ascii").split()
    with path.open("w", encoding="utf-8") as file:
        for _ in range(num_rows):
            lengths = {
                name: int(median * np.exp(spread * generator.normal())) for name, (median, spread) in WORDS.items()
            }
            row = {name: " ".join(words.pop() for _ in range(max(1, length))) for name, length in lengths.items()}
            file.write(json.dumps(row) + "\n")


def write_squad(path: Path, squad_file: str, num_rows: int) -> None:
    """Write questions drawn at random from SQuAD's file, with their paragraphs."""
    from finetuning.tasks.squad import read_questions_to_predict

    questions = read_questions_to_predict(squad_file, "--squad-file")
    chosen = np.random.default_rng(0).permutation(len(questions))[:num_rows]
    rows = [{"query": questions[index].question, "passage": questions[index].context} for index in chosen]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def start(name: str, folder: Path, settings: dict[str, Any], torch_python: str) -> MeasuredProgram:
    """Start a contender and return it after its warmup."""
    program, flags = CONTENDERS[name]
    if program == TRAINER:
        return start_program(name, program, [str(folder)], settings, torch_python)
    return start_program(name, program, ["ours", str(folder), *flags], settings)


def print_results(times: dict[str, list[Times]], num_pairs: int) -> None:
    """Print the pairs per second of each contender, and the median ratios of the first speed to each other speed."""
    rows = []
    for name, rounds in times.items():
        milliseconds = statistics.median(1000 * round_times.cpu_seconds / num_pairs for round_times in rounds)
        rates = median_and_range([num_pairs / round_times.seconds for round_times in rounds], ",.1f")
        rows.append([name, *rates, f"{milliseconds:.1f}"])
    print_table("embeddings|pairs/s|(from-to)|CPU ms a pair", rows)
    first, *others = times
    rows = [[f"{first} / {other}", *ratios_of_rounds(times[first], times[other])] for other in others]
    print_table("speed|median of the rounds|(from-to)|by CPU seconds", rows)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--squad-file", help="Questions in SQuAD's format. Default: made-up words.")
    parser.add_argument("--num-rows", type=int, default=20_000, help="Pairs to train on.")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=["ours", "sentence-transformers"])
    add_step_flags(parser, vocab_size=8192, batch_rows=32, length=256, rounds=8, steps_per_round=10, warmup_steps=5)
    arguments = parser.parse_args()
    settings = settings_of(arguments)
    print_machine()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as name:
        folder = Path(name)
        if arguments.squad_file:
            write_squad(folder / "pairs.jsonl", arguments.squad_file, arguments.num_rows)
        else:
            write_stand_in(folder / "pairs.jsonl", arguments.num_rows)
        command = [sys.executable, str(PEERS / OURS), "prepare", str(folder), "--settings", json.dumps(settings)]
        subprocess.run(command, check=True, stdout=sys.stderr)
        print(f"{arguments.num_rows:,} pairs of {'SQuAD' if arguments.squad_file else 'a stand-in for SQuAD'}")
        torch_python = arguments.torch_python
        if not torch_python and any(CONTENDERS[contender][0] == TRAINER for contender in arguments.contenders):
            torch_python = make_torch_environment(folder / "torch", *REQUIREMENTS)
        times = measure_in_turns(
            lambda name: start(name, folder, settings, torch_python), arguments.contenders, arguments.rounds
        )
    print_results(times, arguments.steps_per_round * arguments.batch_rows)


if __name__ == "__main__":
    main()
