"""The TensorFlow side of benchmarks/embedding_step.py: it trains embeddings, in rounds.

    python benchmarks/peers/embedding_contenders.py ours FOLDER --settings '{"length": 256, …}'

`prepare` writes FOLDER/tokenizer and FOLDER/start, a model with random weights, from FOLDER/pairs.jsonl. `ours` is
`run_embedding.py`.
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

# The benchmarks are no package that is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import train  # noqa: F401, I001  (before TensorFlow)
import numpy as np

from benchmarks.peers.finetune_contenders import LEARNING_RATE, NUM_EPOCHS, write_start
from benchmarks.peers.train_step_contenders import fit_in_rounds, our_trainer
from benchmarks.rounds import Rounds
from finetuning.config.embedding import EmbeddingConfig
from finetuning.config.settings import parse_finetuning_config
from finetuning.data.buckets import bucket_of_rows, training_batches
from finetuning.data.texts import TextInputs
from finetuning.tasks.embedding import EmbeddingJob
from train.checkpoints.resume import ResumePoint
from train.loop import lifecycle
from train.loop.trainer import Trainer
from train.runtime.strategy import distribute_batches


def prepare(folder: Path, settings: dict[str, Any]) -> None:
    """Write what both sides start from."""
    lines = (folder / "pairs.jsonl").read_text(encoding="utf-8").splitlines()
    write_start(folder, [text for line in lines for text in json.loads(line).values()], settings)


def ours(folder: Path, settings: dict[str, Any], flags: list[str]) -> None:
    """Train as run_embedding.py does, with its log, and without validation."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as output_dir:
        config = parse_finetuning_config(
            EmbeddingConfig,
            [
                *("--train-file", str(folder / "pairs.jsonl"), "--init-from", str(folder / "start")),
                *("--output-dir", f"{output_dir}/run", "--max-seq-length", str(settings["length"])),
                *("--per-replica-batch-size", str(settings["batch_rows"]), "--num-epochs", str(NUM_EPOCHS)),
                *("--learning-rate", str(LEARNING_RATE), *flags),
            ],
            "",
        )
        trainer = replace(our_trainer(lifecycle.prepare(config, EmbeddingJob())), evaluate=None)
        trainer.load_initial_weights()
        started_seconds = time.perf_counter()
        figures = {"programs": float(compile_all(trainer)), "seconds to compile": time.perf_counter() - started_seconds}
        fit_in_rounds(trainer, Rounds(**settings["rounds"], figures=lambda: figures))


def compile_all(trainer: Trainer) -> int:
    """Make a step with each pair of lengths, so that no program is compiled later; return how many there are."""
    inputs, plan = trainer.phase.inputs, trainer.plan
    assert isinstance(inputs, TextInputs)
    rows = inputs.train_rows
    batches = training_batches(
        rows.lengths,
        inputs.lengths,
        batch_rows=plan.global_batch_rows,
        seed=trainer.run.config.run.seed,
        first=0,
        num_batches=plan.num_steps,
        groups=rows.groups,
    )
    longest = np.where(batches.rows < 0, 0, np.diff(rows.starts)[batches.rows]).max(axis=1)
    shapes = np.stack([batches.lengths, bucket_of_rows(longest, inputs.lengths)])
    _, first_steps = np.unique(shapes, axis=1, return_index=True)
    train_function = trainer.model.make_train_function()
    for step in first_steps:
        make_batches = trainer.batches_from(ResumePoint(int(step)))
        train_function(iter(distribute_batches(trainer.model.distribute_strategy, make_batches)))
    return len(first_steps)


def main() -> None:
    """Write what both sides start from, or train until the other side ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", choices=["prepare", "ours"])
    parser.add_argument("folder", type=Path, help="With pairs.jsonl.")
    parser.add_argument("--settings", type=json.loads, required=True, help="JSON: model, length, batch_rows, …")
    arguments, flags = parser.parse_known_args()
    if arguments.program == "prepare":
        prepare(arguments.folder, arguments.settings)
    else:
        ours(arguments.folder, arguments.settings, flags)


if __name__ == "__main__":
    main()
