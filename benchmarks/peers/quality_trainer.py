"""Train in rounds with transformers' Trainer on PyTorch, for benchmarks/time_to_quality.py. Needs torch and accelerate.

    python benchmarks/peers/quality_trainer.py FOLDER --settings '{"num_steps": 1000, …}'

FOLDER was written by benchmarks/peers/quality_handover.py. The training follows
examples/pytorch/language-modeling/run_mlm.py: the default attention, fused AdamW, the head over all positions, and
masks drawn by DataCollatorForLanguageModeling. The preset sets the model, the batch size, the learning rate and the
other settings of the optimizer.
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
    AutoConfig,
    AutoModelForMaskedLM,
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from benchmarks.measuring.rounds import Rounds

EVALUATION_ROWS = 32
# The tanh form of GELU as one operation. transformers computes the preset's activation, the same function, in six
# operations.
FUSED_ACTIVATIONS = {"gelu_new": "gelu_pytorch_tanh"}


class Rows(torch.utils.data.Dataset):
    """Rows as run_mlm.py prepares them, with the tokenizer's attention mask and special tokens mask."""

    def __init__(self, input_ids: np.ndarray, tokenizer: PreTrainedTokenizerFast):
        self.input_ids = input_ids
        self.attended = (input_ids != tokenizer.pad_token_id).astype(np.int64)
        self.special = np.isin(input_ids, tokenizer.all_special_ids).astype(np.int64)

    def __len__(self) -> int:
        return len(self.input_ids)

    def __getitem__(self, index: int) -> dict[str, Any]:
        columns = {
            "input_ids": self.input_ids,
            "attention_mask": self.attended,
            "special_tokens_mask": self.special,
        }
        return {name: column[index].tolist() for name, column in columns.items()}


# Settings of finetune_trainer.py and embedding_trainer.py, as in the examples of both libraries.
TRAINING: dict[str, Any] = {
    "num_train_epochs": 3, "learning_rate": 2e-5, "warmup_ratio": 0.1, "weight_decay": 0.01, "save_strategy": "no",
    "report_to": "none", "disable_tqdm": True, "use_cpu": True,
}  # fmt: skip


class RoundsCallback(TrainerCallback):
    """Counts the steps of the Trainer."""

    def __init__(self, rounds: Rounds):
        self.rounds = rounds

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.rounds.step_done()


def training_arguments(recipe: dict[str, Any], num_steps: int, output_dir: str) -> TrainingArguments:
    """Convert the preset's settings to the Trainer's arguments."""
    settings = recipe["optimization"]
    schedule, options, num_warmup_steps = settings["schedule"], {}, settings["warmup_steps"]
    if num_warmup_steps is None:
        num_warmup_steps = int(num_steps * settings["warmup_ratio"])
    if schedule == "wsd":
        schedule = "warmup_stable_decay"
        options = {"num_decay_steps": int(num_steps * settings["decay_ratio"]), "decay_type": "1-sqrt"}
    return TrainingArguments(
        output_dir=output_dir,
        max_steps=num_steps,
        per_device_train_batch_size=settings["per_replica_batch_size"],
        gradient_accumulation_steps=settings["gradient_accumulation_steps"],
        learning_rate=settings["learning_rate"],
        lr_scheduler_type=schedule,
        lr_scheduler_kwargs=options,
        warmup_steps=num_warmup_steps,
        weight_decay=settings["weight_decay_rate"],
        adam_beta1=settings["adam_beta1"],
        adam_beta2=settings["adam_beta2"],
        adam_epsilon=settings["adam_epsilon"],
        max_grad_norm=settings["max_grad_norm"],
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )


def build_model(recipe: dict[str, Any]) -> torch.nn.Module:
    """Build the preset's model with fresh weights."""
    fused = {name: FUSED_ACTIVATIONS.get(value, value) for name, value in recipe["model"].items() if "act" in name}
    return AutoModelForMaskedLM.from_config(AutoConfig.for_model(**(recipe["model"] | fused)))


@torch.no_grad()
def evaluation_loss(model: torch.nn.Module, rows: dict[str, np.ndarray]) -> float:
    """Compute the mean loss over the masked tokens, in nats."""
    pad_token_id = model.config.pad_token_id
    model.eval()
    total = 0.0
    for start in range(0, len(rows["input_ids"]), EVALUATION_ROWS):
        batch = {name: torch.from_numpy(array[start : start + EVALUATION_ROWS]) for name, array in rows.items()}
        input_ids, labels = batch["input_ids"].long(), batch["original_ids"].long()
        hidden = model.base_model(input_ids, attention_mask=(input_ids != pad_token_id).long()).last_hidden_state
        hidden, labels = hidden[batch["is_masked"]], labels[batch["is_masked"]]
        logits = model.lm_head(hidden) if hasattr(model, "lm_head") else model.decoder(model.head(hidden))
        total += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
    model.train()
    return total / int(rows["is_masked"].sum())


def main() -> None:
    """Train until the measuring process ends this one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="Folder that quality_handover.py wrote.")
    parser.add_argument("--settings", type=json.loads, required=True, help="num_steps, steps_per_round, evaluates.")
    parser.add_argument("--model", type=json.loads, default={}, help="Model settings that override the preset's.")
    arguments = parser.parse_args()
    folder, settings = arguments.folder, arguments.settings
    recipe = json.loads((folder / "recipe.json").read_text(encoding="utf-8"))
    recipe["model"] |= arguments.model
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
    torch.manual_seed(0)
    model = build_model(recipe)
    validation = dict(np.load(folder / "validation.npz"))

    def figures() -> dict[str, float]:
        return {"loss": evaluation_loss(model, validation)} if settings["evaluates"] else {}

    rounds = Rounds(settings["steps_per_round"], warmup_steps=1, figures=figures)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as output_dir:
        Trainer(
            model=model,
            args=training_arguments(recipe, settings["num_steps"], output_dir),
            train_dataset=Rows(np.load(folder / "train.npy"), tokenizer),
            data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=recipe["mlm_probability"]),
            callbacks=[RoundsCallback(rounds)],
        ).train()


if __name__ == "__main__":
    main()
