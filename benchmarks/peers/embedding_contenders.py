"""The TensorFlow side of benchmarks/embedding_step.py, which trains embeddings in rounds.

    python benchmarks/peers/embedding_contenders.py ours FOLDER --settings '{"length": 256, …}'

`prepare` writes FOLDER/tokenizer and FOLDER/start, a model with random weights, from FOLDER/pairs.jsonl. `ours` is
`run_embedding.py`.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# The benchmarks are not an installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import train  # noqa: F401, I001  (before TensorFlow)
import numpy as np

from benchmarks.peers.finetune_contenders import LEARNING_RATE, train_in_rounds, write_start
from finetuning.config.embedding import EmbeddingConfig
from finetuning.data.buckets import bucket_of_rows, training_batches
from finetuning.data.texts import TextInputs
from finetuning.tasks.embedding import EmbeddingJob
from train.loop.trainer import Trainer


def prepare(folder: Path, settings: dict[str, Any]) -> None:
    """Write the files that both sides start from."""
    lines = (folder / "pairs.jsonl").read_text(encoding="utf-8").splitlines()
    write_start(folder, [text for line in lines for text in json.loads(line).values()], settings)


def ours(folder: Path, settings: dict[str, Any], flags: list[str]) -> None:
    """Train as run_embedding.py does, with its log, and without validation."""
    of_rows = ["--train-file", str(folder / "pairs.jsonl"), "--learning-rate", str(LEARNING_RATE)]
    train_in_rounds(EmbeddingConfig, EmbeddingJob(), folder, settings, [*of_rows, *flags], new_pairs_of_lengths)


def new_pairs_of_lengths(trainer: Trainer) -> Sequence[int]:
    """Find the first step with each combination of query length and passage length."""
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
    return np.unique(shapes, axis=1, return_index=True)[1].tolist()


def main() -> None:
    """Write the files that both sides start from, or train until the measuring process ends this one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", choices=["prepare", "ours"])
    parser.add_argument("folder", type=Path, help="Folder with pairs.jsonl.")
    parser.add_argument("--settings", type=json.loads, required=True, help="JSON: model, length, batch_rows, …")
    arguments, flags = parser.parse_known_args()
    if arguments.program == "prepare":
        prepare(arguments.folder, arguments.settings)
    else:
        ours(arguments.folder, arguments.settings, flags)


if __name__ == "__main__":
    main()
