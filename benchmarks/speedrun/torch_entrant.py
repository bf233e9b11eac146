"""Train a ModernBERT of the preset's size with PyTorch as an expert would. Needs torch and transformers.

    python benchmarks/speedrun/torch_entrant.py DATA OUTPUT --seed 0 --seconds 120 --optimizer muon

The head is computed for masked tokens only (`sparse_prediction`), attention is PyTorch's fused implementation, and rows
are packed. The learning rate follows the clock: it warms up, and then falls to 0 at the end of the budget, so that no
second is wasted.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path

# The benchmarks are not an installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
import yaml
from transformers import (
    DataCollatorForLanguageModeling,
    ModernBertConfig,
    ModernBertForMaskedLM,
    PreTrainedTokenizerFast,
)

PRESET = Path(__file__).resolve().parents[2] / "train" / "config" / "presets" / "tiny-cpu.yaml"
# Time for the export and the end of the process.
SPARE_SECONDS = 3.0
# The same function as the preset's activation, but computed in one operation.
FUSED = "gelu_pytorch_tanh"


def process_seconds() -> float:
    """Return the seconds since this process was started, including imports (Linux)."""
    started_ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK")


def build_model(tokenizer: PreTrainedTokenizerFast) -> ModernBertForMaskedLM:
    """Build the preset's model with fresh weights."""
    sizes = yaml.safe_load(PRESET.read_text(encoding="utf-8"))["model"]
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "cls", "sep", "mask")}
    activations = {"hidden_activation": FUSED, "classifier_activation": FUSED}
    return ModernBertForMaskedLM(
        ModernBertConfig(**(sizes | ids | activations), vocab_size=len(tokenizer), sparse_prediction=True)
    )


def build_optimizers(model: ModernBertForMaskedLM, flags: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Build AdamW and, with --optimizer muon, Muon for the matrices of the layers and of the head's dense layer."""
    in_muon = {
        name: weights
        for name, weights in model.named_parameters()
        if flags.optimizer == "muon" and weights.ndim == 2 and (".layers." in name or name.startswith("head."))
    }
    others = [(name, weights) for name, weights in model.named_parameters() if name not in in_muon]
    groups = [
        {"params": [weights for _, weights in others if weights.ndim > 1], "weight_decay": flags.weight_decay},
        {"params": [weights for _, weights in others if weights.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (0.9, flags.beta2)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(groups, lr=flags.learning_rate, betas=betas, eps=1e-6, fused=True)
    ]
    if in_muon:
        optimizers.append(
            torch.optim.Muon(
                in_muon.values(),
                lr=flags.muon_learning_rate,
                momentum=flags.momentum,
                weight_decay=flags.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    return optimizers


def orthogonalized(
    gradient: torch.Tensor, coefficients: tuple[float, float, float], num_steps: int, eps: float
) -> torch.Tensor:
    """Do the iterations of `torch.optim.Muon` in float32 instead of bfloat16."""
    a, b, c = coefficients
    is_tall = gradient.size(0) > gradient.size(1)
    x = gradient.T if is_tall else gradient
    x = x / x.norm().clamp(min=eps)
    for _ in range(num_steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def batches(rows: np.ndarray, batch_rows: int, seed: int) -> Iterable[torch.Tensor]:
    """Yield batches, int64 (rows, length), without end, in a new order in each epoch."""
    order = np.random.default_rng(seed)
    while True:
        shuffled = order.permutation(len(rows))
        for start in range(0, len(rows) - batch_rows + 1, batch_rows):
            yield torch.from_numpy(rows[shuffled[start : start + batch_rows]].astype(np.int64))


def train(model: ModernBertForMaskedLM, tokenizer: PreTrainedTokenizerFast, flags: argparse.Namespace) -> int:
    """Train until the budget ends, and return the number of steps."""
    collator = DataCollatorForLanguageModeling(tokenizer, mlm_probability=flags.mlm_probability)
    special = torch.tensor(tokenizer.all_special_ids)
    optimizers = build_optimizers(model, flags)
    peaks = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    begin, end = process_seconds(), flags.seconds - SPARE_SECONDS
    planned_seconds = max(end - begin, 1e-3)  # the imports may have used up the budget
    model.train()
    for step, rows in enumerate(batches(np.load(flags.data / "rows" / "train.npy"), flags.batch_rows, flags.seed)):
        done = step / flags.max_steps if flags.max_steps else (process_seconds() - begin) / planned_seconds
        if done >= 1:
            break
        rate = min(done / flags.warmup, (1 - done) / (1 - flags.warmup), 1.0)
        groups = (group for optimizer in optimizers for group in optimizer.param_groups)
        for group, peak in zip(groups, peaks, strict=True):
            group["lr"] = peak * max(rate, 1e-4)
        inputs, labels = collator.torch_mask_tokens(rows.clone(), torch.isin(rows, special))
        attended = (rows != tokenizer.pad_token_id).long()
        with torch.autocast("cpu", torch.bfloat16, enabled=flags.bfloat16):
            loss = model(input_ids=inputs, attention_mask=attended, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step % 100 == 0:
            print(f"step {step:,}, {process_seconds():.0f} s: loss {loss.item():.3f}", flush=True)
    return step


def main() -> None:
    """Train, and write OUTPUT/export."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="Folder that prepare.py wrote.")
    parser.add_argument("output", type=Path, help="Folder for export/.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=120, help="Budget of the process.")
    parser.add_argument("--max-steps", type=int, default=0, help="Train for this number of steps instead.")
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--batch-rows", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--muon-learning-rate", type=float, default=12e-3)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--beta2", type=float, default=0.98)
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--warmup", type=float, default=0.1, help="Fraction of the time.")
    parser.add_argument("--mlm-probability", type=float, default=0.3)
    parser.add_argument("--bfloat16", action="store_true", help="Run the forward pass under autocast.")
    parser.add_argument(
        "--float32-muon", action="store_true", help="Orthogonalize in float32: faster on a CPU without bfloat16."
    )
    flags = parser.parse_args()
    if flags.float32_muon:
        torch.optim._muon._zeropower_via_newtonschulz = orthogonalized
    torch.manual_seed(flags.seed)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(flags.data / "tokenizer")
    model = build_model(tokenizer)
    num_steps = train(model, tokenizer, flags)
    model.config.hidden_activation = model.config.classifier_activation = "gelu_new"
    for saved in (model, tokenizer):
        saved.save_pretrained(flags.output / "export")
    print(f"{num_steps:,} steps, {process_seconds():.1f} s", flush=True)
    os._exit(0)  # freeing all objects would take up to a second


if __name__ == "__main__":
    main()
