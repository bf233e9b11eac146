"""Train PyTorch's ModernBERT for comparison with a step of accelerator_step.py. Needs torch and transformers.

    python benchmarks/peers/accelerator_torch.py FOLDER NAME \\
        --settings '{"steps_per_round": 20, "attention": "sdpa"}'

The model and the batch have the same shape as in our step, with rows of random ids and the same number of predictions.
This program uses `sparse_prediction`, which computes the head for masked tokens only, PyTorch's fused attention,
autocast to bfloat16, `torch.compile`, fused AdamW, and gradient clipping.
"""

import argparse
import json
import sys
import time
from pathlib import Path

# The benchmarks are not an installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from transformers import ModernBertConfig, ModernBertForMaskedLM

from benchmarks.measuring.rounds import Rounds

IGNORED = -100
MASK_ID = 4


def main() -> None:
    """Run steps until the measuring process ends this one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("name")
    parser.add_argument("--settings", type=json.loads, required=True, help="JSON: steps_per_round, attention.")
    arguments = parser.parse_args()
    entry = json.loads((arguments.folder / "index.json").read_text(encoding="utf-8"))["steps"][arguments.name]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    config = {name: value for name, value in entry["model"].items() if name not in ("architectures", "model_type")}
    model = ModernBertForMaskedLM(
        ModernBertConfig(**config | {"sparse_prediction": True, "attn_implementation": arguments.settings["attention"]})
    ).to(device)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.98), eps=1e-6, fused=True)
    ((shape, _),) = entry["batch"].values()
    ids = torch.randint(5, entry["vocab_size"], shape, device=device)
    is_masked = torch.zeros(shape, dtype=torch.bool, device=device).flatten()
    # The number of masked tokens is the same in each step, so that nothing is compiled again.
    is_masked[torch.randperm(ids.numel(), device=device)[: round(0.3 * ids.numel())]] = True
    is_masked = is_masked.reshape(shape)
    inputs, labels = ids.masked_fill(is_masked, MASK_ID), ids.masked_fill(~is_masked, IGNORED)
    torch._dynamo.config.capture_dynamic_output_shape_ops = True  # so that choosing masked tokens keeps a single graph
    compiled = torch.compile(model)
    start_seconds = time.perf_counter()

    def step() -> None:
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = compiled(input_ids=inputs, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    step()
    compile_seconds = time.perf_counter() - start_seconds

    def figures() -> dict[str, float]:
        peak_bytes = torch.cuda.max_memory_allocated() if device == "cuda" else 0
        return {"compile_seconds": compile_seconds, "peak_bytes": peak_bytes}

    rounds = Rounds(steps_per_round=1, warmup_steps=1, figures=figures)
    while True:
        for _ in range(arguments.settings["steps_per_round"]):
            step()
        if device == "cuda":
            torch.cuda.synchronize()
        rounds.step_done()


if __name__ == "__main__":
    main()
