"""What a run leaves of its figures, without the run: `run.json` and `metrics.jsonl` as far as comparing reads them."""

import json
from pathlib import Path
from typing import Any

LENGTH = 16


def train_line(step: int, loss: float, step_seconds: float, tokens_per_second: float) -> dict[str, Any]:
    figures = {"loss": loss, "masked_accuracy": 0.1, "grad_norm": 1.0, "perplexity": 50.0, "learning_rate": 1e-3}
    rates = {"epoch": 0.1, "step_seconds": step_seconds, "tokens_per_second": tokens_per_second}
    return {"step": step, "split": "train", **figures, **rates, "input_wait_share": 0.0}


def validation_line(step: int, loss: float, masked_accuracy: float = 0.25) -> dict[str, Any]:
    figures = {"loss": loss, "perplexity": 50.0, "masked_accuracy": masked_accuracy, "num_masked_tokens": 100}
    return {"step": step, "split": "validation", **figures}


def write_run(
    folder: Path,
    *,
    global_batch_rows: int = 8,
    unigram_entropy_nats: float | None = 6.0,
    lines: list[dict[str, Any]] | None = None,
) -> Path:
    """Write a run of 30 updates of which the first ten took 2 s each, the others 1 s, and return its folder."""
    folder.mkdir()
    tokens = global_batch_rows * LENGTH
    if lines is None:
        lines = [
            train_line(10, 7.0, 2.0, tokens / 2),
            train_line(20, 6.0, 1.0, tokens),
            validation_line(20, 5.0),
            train_line(30, 5.5, 1.0, tokens),
            validation_line(30, 5.25),
        ]
    eval_data = None if unigram_entropy_nats is None else {"unigram_entropy_nats": unigram_entropy_nats}
    record = {"plan": {"global_batch_rows": global_batch_rows, "max_length": LENGTH}, "eval_data": eval_data}
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder
