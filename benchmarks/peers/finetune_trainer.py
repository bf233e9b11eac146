"""Train in rounds with transformers' Trainer on PyTorch, for benchmarks/finetune_step.py. Needs torch and accelerate.

    python benchmarks/peers/finetune_trainer.py FOLDER --settings '{"batch_rows": 32, …}'

FOLDER was written by `finetune_contenders.py prepare`. The training follows
examples/pytorch/text-classification/run_glue.py with `--pad_to_max_length False`: the default attention, fused AdamW,
and batches padded to their longest row. With `--group`, rows of similar length share a batch.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

# The benchmarks are not an installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

from benchmarks.measuring.rounds import Rounds
from benchmarks.peers.quality_trainer import TRAINING, RoundsCallback


class Rows(torch.utils.data.Dataset):
    """Rows as the tokenizer encodes them, without padding."""

    def __init__(self, rows: dict[str, np.ndarray]):
        self.ids = [row.tolist() for row in np.split(rows["ids"], rows["starts"][1:-1])]
        self.labels = rows["labels"].tolist()

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = self.ids[index]
        return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": self.labels[index]}


def main() -> None:
    """Train until the measuring process ends this one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="Folder that finetune_contenders.py wrote.")
    parser.add_argument("--settings", type=json.loads, required=True, help="JSON: batch_rows, rounds.")
    parser.add_argument("--group", action="store_true", help="Put rows of similar length into a batch.")
    arguments = parser.parse_args()
    folder, settings = arguments.folder, arguments.settings
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "start")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as output_dir:
        training = TrainingArguments(
            output_dir=output_dir,
            per_device_train_batch_size=settings["batch_rows"],
            group_by_length=arguments.group,
            **TRAINING,
        )
        Trainer(
            model=AutoModelForSequenceClassification.from_pretrained(folder / "start", num_labels=2),
            args=training,
            train_dataset=Rows(dict(np.load(folder / "rows.npz"))),
            data_collator=DataCollatorWithPadding(tokenizer),
            callbacks=[RoundsCallback(Rounds(**settings["rounds"]))],
        ).train()


if __name__ == "__main__":
    main()
