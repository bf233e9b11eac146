"""Train in rounds with sentence-transformers' trainer on PyTorch, for benchmarks/embedding_step.py.

    python benchmarks/peers/embedding_trainer.py FOLDER --settings '{"batch_rows": 32, …}'

FOLDER was written by `embedding_contenders.py prepare`. The training follows the documentation of
`MultipleNegativesRankingLoss`: mean pooling, a scale of 20, no duplicates in a batch, fused AdamW, and each column
padded to its longest text.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

# The benchmarks are not an installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
    models,
)
from sentence_transformers.training_args import BatchSamplers

from benchmarks.measuring.rounds import Rounds
from benchmarks.peers.quality_trainer import TRAINING, RoundsCallback


def main() -> None:
    """Train until the measuring process ends this one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="Folder that embedding_contenders.py wrote.")
    parser.add_argument("--settings", type=json.loads, required=True, help="JSON: length, batch_rows, rounds.")
    arguments = parser.parse_args()
    folder, settings = arguments.folder, arguments.settings
    torch.manual_seed(0)
    encoder = models.Transformer(str(folder / "start"), max_seq_length=settings["length"])
    pooling = models.Pooling(settings["model"]["hidden_size"], pooling_mode="mean")
    model = SentenceTransformer(modules=[encoder, pooling], device="cpu")
    rows = [json.loads(line) for line in (folder / "pairs.jsonl").read_text(encoding="utf-8").splitlines()]
    with tempfile.TemporaryDirectory(prefix="benchmark-") as output_dir:
        training = SentenceTransformerTrainingArguments(
            output_dir=output_dir,
            per_device_train_batch_size=settings["batch_rows"],
            batch_sampler=BatchSamplers.NO_DUPLICATES,
            **TRAINING,
        )
        SentenceTransformerTrainer(
            model=model,
            args=training,
            train_dataset=Dataset.from_dict({name: [row[name] for row in rows] for name in ("query", "passage")}),
            loss=losses.MultipleNegativesRankingLoss(model, scale=20.0),
            callbacks=[RoundsCallback(Rounds(**settings["rounds"]))],
        ).train()


if __name__ == "__main__":
    main()
