"""Prepare the data of the speedrun: text, tokenizer, shards, and the rows of the shards as arrays.

    python benchmarks/speedrun/prepare.py work/speedrun/data

The folder then contains packages/, text/SPLIT.jsonl, tokenizer/, shards/train, shards/validation and rows/. rows/
contains `train.npy`, int32 (rows, 64), and `validation_NAME.npy` for the names `input_ids`, `original_ids` and
`is_masked`. The files `validation_NAME.npy` contain the rows of the validation split, in which our evaluation has
masked 15% of the tokens. The SHA-256 of text, tokenizer and rows is checked.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

# The benchmarks are not an installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.speedrun import text
from mlm_common.errors import InputError

ROW_LENGTH, VOCAB_SIZE = 64, 4096
TOKENIZER_FLAGS = ("--vocab-size", str(VOCAB_SIZE), "--max-bytes", "4000000")
SHA256 = {
    "tokenizer/tokenizer.json": "98e0bdb063ebacf3c3d9e766b7755e719193061f9915df52f837c4a47bbe116a",
    "rows/train.npy": "a1fd7cc13292035b23d584ab50d9a8e2bfb6d40ae2908538626bba0d91a452b3",
    "rows/validation_input_ids.npy": "e62d9395b39f91e943a247fa2f941314bcabdf597a57036e674efa2ed62901c1",
    "rows/validation_original_ids.npy": "216eab28377d968c99dc39db7d9c8502ab3e9c83f1f4f7fdb6cc928da94d705f",
    "rows/validation_is_masked.npy": "e37e80a113aacdc1e8516fff5f1640d0b861227f7e12658a89c13da1721d8f2e",
}
LAST_WRITTEN = "rows/validation_is_masked.npy"
CHANGED = (
    "Delete the folder and prepare it again. If that does not help, this version of the project makes different data."
)


def prepare_text(folder: Path) -> None:
    """Download the packages, write the text, and check both."""
    for name in ("packages", "text"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for packages in text.PACKAGES.values():
        text.download(folder / "packages", packages)
    if not (folder / "text" / f"{text.SCORED}.jsonl").exists():
        text.write_text(folder / "packages", folder / "text")
    text.check_text(folder / "text")


def write_tokens(folder: Path) -> None:
    """Train the tokenizer, and write the shards."""
    from tfrecord_prep.prepare_tfrecord_shards import main as prepare_shards
    from tokenizer_training.train_unigram import main as train_tokenizer

    def run(main: Callable[[Sequence[str]], int], *flags: str) -> None:
        if status := main(flags):
            sys.exit(status)

    texts = [str(folder / "text" / f"{split}.jsonl") for split in (text.TRAIN, text.VALIDATION)]
    tokenizer = str(folder / "tokenizer")
    corpus = ("--data-files", texts[0], "--validation-files", texts[1])
    run(train_tokenizer, *corpus, *TOKENIZER_FLAGS, "--output-dir", tokenizer)
    shards = ("--max-length", str(ROW_LENGTH), "--output-dir", str(folder / "shards"))
    run(prepare_shards, "--tokenizer-name-or-path", tokenizer, *shards)


def write_rows(folder: Path) -> None:
    """Write the rows of the shards as arrays. Write the rows of the validation split with their masks."""
    import numpy as np

    import train  # noqa: F401  (before TensorFlow)
    from benchmarks.peers.quality_handover import masked_rows
    from tfrecord_prep.manifest import open_shards
    from train.config.settings import parse_training_config
    from train.loop.lifecycle import Pretraining, prepare

    shards, rows = folder / "shards", folder / "rows"
    rows.mkdir(exist_ok=True)
    datasets = ("--train-dataset", f"{shards}/train", "--eval-dataset", f"{shards}/validation")
    masks = ("--preset", "tiny-cpu", "--mlm-probability", "0.15", "--seed", "0", "--max-steps", "1")
    with tempfile.TemporaryDirectory(prefix="benchmark-") as output_dir:
        config = parse_training_config([*datasets, *masks, "--output-dir", f"{output_dir}/run"], "")
        (phase,) = prepare(config, Pretraining()).phases
    np.save(rows / "train.npy", masked_rows(phase, open_shards(f"{shards}/train")).original_ids)
    validation = masked_rows(phase, open_shards(f"{shards}/validation"))
    for name in ("input_ids", "original_ids", "is_masked"):
        np.save(rows / f"validation_{name}.npy", getattr(validation, name))


def prepare(folder: Path, make_text: Callable[[Path], None] = prepare_text) -> None:
    """Prepare the parts that are missing in a folder of data."""
    make_text(folder)
    if not (folder / "shards" / "train" / "manifest.json").exists():
        write_tokens(folder)
    if not (folder / LAST_WRITTEN).exists():
        write_rows(folder)


def check_data(folder: Path) -> None:
    """Raise InputError unless the folder contains the unchanged data of the speedrun."""
    if not (folder / LAST_WRITTEN).exists():
        command = f"python benchmarks/speedrun/prepare.py {folder}"
        raise InputError(f"data must be a folder that prepare.py wrote; received {folder}. Run: {command}")
    text.check_text(folder / "text")
    for name, expected in SHA256.items():
        text.check_sha256(folder / name, expected, CHANGED)


def main() -> None:
    """Prepare the folder, and check it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="Folder for the data, 120 MB.")
    arguments = parser.parse_args()
    try:
        prepare(arguments.folder)
        check_data(arguments.folder)
    except InputError as error:
        sys.exit(f"error: {error}")
    print(f"{arguments.folder} has the speedrun's data.")


if __name__ == "__main__":
    main()
