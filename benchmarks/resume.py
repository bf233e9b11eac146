"""Measure what resuming and saving cost: time to the first step, checkpoint size, and how long each save stalls.

    python benchmarks/resume.py

For the first table, a tiny model is resumed on many rows, in turns from a checkpoint of step 100 and from a checkpoint
of a late step. The time is measured from the start of the process to the end of its first step. The late checkpoint is
a copy of the early checkpoint with a different step number, because everything else is computed from the step. For the
second table, BERT-base and its optimizer are saved by run-mlm and by TensorFlow's CheckpointManager. `stall` is how
long training waits, and `whole` is when the files are complete.
"""

import argparse
import dataclasses
import functools
import operator
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

# The project comes first, because this script's folder has a tokenizer_training.py that would hide the package.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks.measuring.random_inputs import write_random_shards, write_tokenizer
from benchmarks.measuring.tables import median_and_range, print_machine, print_table
from train.runtime import supervisor
from train.runtime.plan import Plan
from train.runtime.run_folder import RunFolder

PROJECT = Path(__file__).resolve().parent.parent
BATCH_ROWS, EARLY_STEP = 8, 100
MODEL = "num_hidden_layers=1,hidden_size=32,num_attention_heads=2,intermediate_size=64"
START_HEADER = "first step|runs|s from start|(from-to)"
SAVE_HEADER = "saved by|saves|MB|stall s|(from-to)|whole s"


@contextmanager
def training(flags: list[str], checkout: Path = PROJECT) -> Iterator[tuple[subprocess.Popen[bytes], Iterator[str]]]:
    """Start run-mlm, and yield the process and its progress reports as they arrive.

    The process is killed at the end.
    """
    reading, writing = os.pipe()
    environment = os.environ | {supervisor.PIPE_VARIABLE: str(writing), "PYTHONPATH": str(checkout)}
    script = str(checkout / "train" / "run_mlm.py")
    process = subprocess.Popen(
        [sys.executable, script, *flags], env=environment, pass_fds=(writing,), stdout=subprocess.DEVNULL
    )
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as reports:
        try:
            yield process, reports
        finally:
            process.kill()
            process.wait()


def seconds_to_first_step(flags: list[str], step: int, checkout: Path = PROJECT) -> float:
    """Measure how long a process takes from its start to the end of its first step, which must be `step` + 1."""
    start_seconds = time.perf_counter()
    with training(flags, checkout) as (_, reports):
        for report in reports:
            if report.startswith(supervisor.TRAIN):
                assert report.split()[1] == str(step + 1), report
                return time.perf_counter() - start_seconds
    sys.exit("the training process ended before its first step")


def prepare_runs(folder: Path, flags_of: Callable[[Path], list[str]], late_step: int) -> dict[int, Path]:
    """Make two runs that were stopped at an early and at a late step; return {step: folder}."""
    from mlm_common.storage import open_folder
    from train.checkpoints.store import CheckpointStore

    early, late = folder / "early", folder / "late"
    with training(flags_of(early)) as (process, reports):
        for report in reports:
            if report.startswith(f"{supervisor.TRAIN} {EARLY_STEP}\n"):
                process.send_signal(signal.SIGTERM)
        process.wait()
    store = CheckpointStore(open_folder(str(early / "checkpoints")))
    step = store.steps()[-1]
    record = store.read_record(step)
    arrays = store.read_arrays(record)
    shutil.copytree(early, late)
    for run, new_step in ((early, EARLY_STEP), (late, late_step)):
        moved = dataclasses.replace(record, step=new_step, logged_step=new_step, row=new_step * BATCH_ROWS)
        moved_store = CheckpointStore(open_folder(str(run / "checkpoints")))
        moved_store.write(moved, arrays | {"optimizer/iterations": np.array(new_step)})
        moved_store.delete(functools.partial(operator.ne, new_step))
    return {EARLY_STEP: early, late_step: late}


def show_starts(folder: Path, arguments: argparse.Namespace) -> None:
    """Print how long it takes to start from each checkpoint."""
    shards = folder / "shards"
    shards.mkdir()
    write_random_shards(shards, arguments.num_rows, arguments.length, arguments.vocab_size)
    write_tokenizer(folder, arguments.vocab_size)

    def flags_of(run: Path) -> list[str]:
        return [
            *("--preset", "tiny-roberta-cpu", "--config-overrides", MODEL, "--train-dataset", str(shards)),
            *("--tokenizer", str(folder / "tokenizer"), "--output-dir", str(run)),
            *("--per-replica-batch-size", str(BATCH_ROWS), "--max-steps", str(2 * arguments.late_step)),
            *("--save-steps", str(2 * arguments.late_step), "--log-steps", "1000"),
        ]

    runs = prepare_runs(folder, flags_of, arguments.late_step)
    seconds: dict[int, list[float]] = {step: [] for step in runs}
    for _ in range(arguments.repeats):
        for step, run in runs.items():
            seconds[step].append(seconds_to_first_step(flags_of(run), step))
            print(f"step {step:,}: {seconds[step][-1]:.2f} s", file=sys.stderr)
    print(f"{arguments.num_rows:,} rows, {BATCH_ROWS} per step")
    rows = [[f"{step + 1:,}", str(len(times)), *median_and_range(times, ".2f")] for step, times in seconds.items()]
    print_table(START_HEADER, rows)


def show_saves(folder: Path, arguments: argparse.Namespace) -> None:
    """Print the cost of saving BERT-base."""
    import tensorflow as tf
    from transformers import AutoConfig

    from train.checkpoints.manager import Checkpoints, TrainingState
    from train.checkpoints.store import CheckpointRecord
    from train.config.learning import OptimizationConfig
    from train.model.build import build_network
    from train.step.optimizer import build_optimizer
    from train.step.train_step import PretrainingModel
    from train.tasks.masked_lm import MaskedLanguageModeling
    from train.tasks.masking_rule import MaskingRule

    config = AutoConfig.for_model("bert", num_hidden_layers=arguments.num_layers)
    network = build_network(config, vocabulary_size=config.vocab_size, seed=0)
    task = MaskedLanguageModeling(MaskingRule(4, (0, 1, 2, 3, 4), config.vocab_size), config.pad_token_id)
    model = PretrainingModel(network, task, seed=0)
    optimizer = build_optimizer(OptimizationConfig(), num_steps=10, num_warmup_steps=0)
    optimizer.build(network.trainable_variables)
    model.compile(optimizer=optimizer)
    state, checkpoints = TrainingState(model), Checkpoints(RunFolder(folder), num_kept=1)
    manager = tf.train.CheckpointManager(
        tf.train.Checkpoint(network=network, optimizer=optimizer), str(folder / "tensorflow"), max_to_keep=1
    )

    plan = Plan(1, 1, 1, 1, 10, 0, 0, 10, 10, None, 1, 0, 10)  # any

    def save_ours(step: int) -> None:
        record = CheckpointRecord(step, 0, "", plan, {}, {}, 0)
        checkpoints.save(lambda: (record, state.read()))

    print(f"{network.count_params():,} parameters")
    contenders = {
        "run-mlm": (save_ours, checkpoints.wait, folder / "checkpoints"),
        "CheckpointManager": (lambda step: manager.save(checkpoint_number=step), lambda: None, folder / "tensorflow"),
    }
    rows = []
    for name, (save, wait, saved) in contenders.items():
        stalls, wholes = [], []
        for step in range(1, arguments.saves + 1):
            started_seconds = time.perf_counter()
            save(step)
            stalls.append(time.perf_counter() - started_seconds)
            wait()
            wholes.append(time.perf_counter() - started_seconds)
        checkpoints.wait()
        num_bytes = sum(path.stat().st_size for path in saved.iterdir())
        times = [*median_and_range(stalls, ".2f"), f"{statistics.median(wholes):.2f}"]
        rows.append([name, str(len(stalls)), f"{num_bytes / 1e6:,.0f}", *times])
    print_table(SAVE_HEADER, rows)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-rows", type=int, default=300_000, help="Rows of the data set.")
    parser.add_argument("--length", type=int, default=64, help="Tokens per row.")
    parser.add_argument("--vocab-size", type=int, default=1000)
    parser.add_argument("--late-step", type=int, default=100_000, help="Step number of the late checkpoint.")
    parser.add_argument("--repeats", type=int, default=3, help="Starts from each checkpoint.")
    parser.add_argument("--num-layers", type=int, default=12, help="Layers of the BERT to save.")
    parser.add_argument("--saves", type=int, default=5, help="How often to save it.")
    arguments = parser.parse_args()
    print_machine()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        if arguments.repeats:
            show_starts(Path(folder), arguments)
        if arguments.saves:
            show_saves(Path(folder), arguments)


if __name__ == "__main__":
    main()
