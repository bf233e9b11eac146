"""The PyTorch program that benchmarks/train_step_cpu.py measures. Needs torch and transformers.

The program trains transformers' RobertaForMaskedLM in its default form, with PyTorch's fused attention, the masks of
transformers' collator, fused AdamW, and gradient clipping and a linear schedule as in transformers' Trainer. The rows
are in memory. With `--gather` the head is computed for masked positions only, which transformers does not offer; with
`--bfloat16` the forward pass runs under autocast, as with `bf16` of the Trainer.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

# The benchmarks are not an installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from transformers import RobertaConfig, RobertaForMaskedLM, get_linear_schedule_with_warmup

from benchmarks.measuring.rounds import Rounds

CLS_ID, PAD_ID, SEP_ID, UNK_ID, MASK_ID = range(5)
NUM_STEPS = 100_000
IGNORED = -100


def masked(rows: torch.Tensor, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make inputs and labels, int64 (rows, length), as DataCollatorForLanguageModeling draws them."""
    labels, inputs = rows.clone(), rows.clone()
    probability = torch.full(labels.shape, 0.15)
    probability.masked_fill_(rows < MASK_ID, 0.0)
    is_masked = torch.bernoulli(probability).bool()
    labels[~is_masked] = IGNORED
    is_replaced = torch.bernoulli(torch.full(labels.shape, 0.8)).bool() & is_masked
    inputs[is_replaced] = MASK_ID
    is_random = torch.bernoulli(torch.full(labels.shape, 0.5)).bool() & is_masked & ~is_replaced
    inputs[is_random] = torch.randint(vocab_size, labels.shape)[is_random]
    return inputs, labels


def gathered_loss(
    model: RobertaForMaskedLM, inputs: torch.Tensor, attended: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """Compute the loss, with the head applied to masked positions only."""
    hidden = model.roberta(input_ids=inputs, attention_mask=attended).last_hidden_state  # (rows, length, hidden)
    is_masked = labels != IGNORED
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[is_masked]), labels[is_masked])


def train(rows: np.ndarray, settings: dict[str, Any], rounds: Rounds, is_gathered: bool, bfloat16: bool) -> None:
    """Train until the measuring process ends this one."""
    torch.manual_seed(0)
    model = RobertaForMaskedLM(
        RobertaConfig(**settings["model"], pad_token_id=PAD_ID, bos_token_id=CLS_ID, eos_token_id=SEP_ID)
    )
    model.train()
    no_decay = ("bias", "LayerNorm.weight", "layer_norm.weight")
    decayed = [parameter for name, parameter in model.named_parameters() if not name.endswith(no_decay)]
    others = [parameter for name, parameter in model.named_parameters() if name.endswith(no_decay)]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.98), eps=1e-6, fused=True)
    schedule = get_linear_schedule_with_warmup(optimizer, NUM_STEPS // 20, NUM_STEPS)
    batch_rows, order = settings["batch_rows"], np.random.default_rng(0)
    for _ in range(NUM_STEPS):
        batch = torch.from_numpy(rows[order.integers(len(rows), size=batch_rows)].astype(np.int64))
        inputs, labels = masked(batch, settings["model"]["vocab_size"])
        attended = (batch != PAD_ID).long()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bfloat16):
            if is_gathered:
                loss = gathered_loss(model, inputs, attended, labels)
            else:
                loss = model(input_ids=inputs, attention_mask=attended, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        rounds.step_done()


def main() -> None:
    """Train until the measuring process ends this one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", help="NumPy file of int32 (rows, length).")
    parser.add_argument("--settings", type=json.loads, required=True, help="JSON: model, length, batch_rows, rounds.")
    parser.add_argument("--gather", action="store_true", help="Compute the head for masked positions only.")
    parser.add_argument("--bfloat16", action="store_true", help="Run the forward pass under autocast.")
    arguments = parser.parse_args()
    rows, rounds = np.load(arguments.rows), Rounds(**arguments.settings["rounds"])
    train(rows, arguments.settings, rounds, arguments.gather, arguments.bfloat16)


if __name__ == "__main__":
    main()
