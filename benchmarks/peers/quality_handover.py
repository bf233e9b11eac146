"""Write the parts of shards and a preset that benchmarks/peers/quality_trainer.py needs, because it has no TensorFlow.

    python benchmarks/peers/quality_handover.py SHARDS PRESET FOLDER

The files in FOLDER are `train.npy`, int32 (rows, length); `validation.npz`, the rows as our evaluation masks them;
`tokenizer/`; and `recipe.json`, the preset's model and settings.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

# The benchmarks are not an installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import train  # noqa: F401, I001  (before TensorFlow)
import numpy as np

from benchmarks.peers.quality_contenders import our_config
from tfrecord_prep.manifest import ShardSet, open_shards
from mlm_common.tokenizer import vocabulary_size, write_tokenizer
from train.data.pipeline import evaluation_batches
from train.loop.lifecycle import Pretraining, prepare
from train.loop.phase import Phase
from train.model.configurations import settings_of
from train.tasks.masking import MaskedRows

READ_ROWS = 256


def masked_rows(phase: Phase, shards: ShardSet) -> MaskedRows:
    """Read all rows of shards, masked as in our evaluation, into arrays (rows, length)."""
    features = phase.task.features(phase.inputs.max_length)
    batches = evaluation_batches(shards, features, phase.task.prepare_row, global_batch_rows=READ_ROWS)
    columns = zip(*batches.as_numpy_iterator(), strict=True)
    return MaskedRows(*(np.concatenate(column)[: shards.num_rows] for column in columns))


def recipe(phase: Phase) -> dict[str, object]:
    """Collect the settings that another program needs to train the same model in the same way."""
    return {
        # The vocabulary size without padding for a TPU.
        "model": settings_of(phase.model_config) | {"vocab_size": vocabulary_size(phase.inputs.tokenizer)},
        "optimization": asdict(phase.config.optimization),
        "mlm_probability": phase.config.as_dict()["masking"]["mlm_probability"],
    }


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shards", help="Folder with train/ and validation/.")
    parser.add_argument("preset", help="Preset whose model and settings are written.")
    parser.add_argument("folder", type=Path, help="Folder for the files.")
    arguments = parser.parse_args()
    folder = arguments.folder
    with tempfile.TemporaryDirectory(prefix="benchmark-") as output_dir:
        config = our_config(arguments.shards, arguments.preset, 100, output_dir)
        (phase,) = prepare(config, Pretraining()).phases
    np.save(folder / "train.npy", masked_rows(phase, open_shards(f"{arguments.shards}/train")).original_ids)
    validation = masked_rows(phase, open_shards(f"{arguments.shards}/validation"))
    np.savez(folder / "validation.npz", **validation._asdict())
    (folder / "tokenizer").mkdir()
    write_tokenizer(phase.inputs.tokenizer, str(folder / "tokenizer"))
    (folder / "recipe.json").write_text(json.dumps(recipe(phase)), encoding="utf-8")


if __name__ == "__main__":
    main()
