"""A tiny training run: shards made by stage 2 from the tiny corpus, and the flags that train on them in seconds."""

import shutil
from pathlib import Path

from tests.tiny_corpus import flags, write_source
from tfrecord_prep.prepare_tfrecord_shards import main as prepare

MODEL = "num_hidden_layers=1,hidden_size=32,num_attention_heads=2,intermediate_size=64"
NUM_STEPS = 6


def write_shards(folder: Path) -> Path:
    """Write `train/` and `validation/` of 16-token rows, with their tokenizer, and return the folder."""
    source = write_source(folder)
    assert prepare(flags(source, folder / "shards", "--validation-percent", "20")) == 0
    return folder / "shards"


def run_flags(shards: Path, output_dir: Path | str, *more: str) -> list[str]:
    return [
        *("--preset", "tiny-cpu", "--config-overrides", MODEL, "--output-dir", str(output_dir)),
        *("--train-dataset", str(shards / "train"), "--eval-dataset", str(shards / "validation")),
        *("--per-replica-batch-size", "4", "--max-steps", str(NUM_STEPS), "--log-steps", "2", "--eval-steps", "3"),
        *more,
    ]


def forget_checkpoint(run: Path, step: int) -> None:
    """Delete a checkpoint and the export of a run, as if it had been stopped before."""
    for path in (run / "checkpoints").glob(f"step-{step:08d}.*"):
        path.unlink()
    shutil.rmtree(run / "export")
