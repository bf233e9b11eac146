"""Write shards of random ids, and a tokenizer with the same vocabulary size."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mlm_common.tokenizer import SPECIAL_TOKENS
from tfrecord_prep.records import encode_rows

SHARD_ROWS = 16_384


def write_random_shards(
    folder: Path, num_rows: int, length: int, vocab_size: int, shard_rows: int = SHARD_ROWS
) -> None:
    """Write shards of rows without padding, with the number of rows in their names."""
    generator = np.random.default_rng(0)
    for number, start in enumerate(range(0, num_rows, shard_rows)):
        shape = min(shard_rows, num_rows - start), length
        write_shard(folder, number, generator.integers(len(SPECIAL_TOKENS), vocab_size, shape, np.int32))


def write_shard(folder: Path, number: int, rows: NDArray[np.int32]) -> None:
    """Write rows without padding, (rows, length), as a shard."""
    path = folder / f"dataset-{number:05d}-{len(rows)}.tfrecord"
    path.write_bytes(encode_rows(rows, np.full(len(rows), rows.shape[1])))


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write tokenizer/ with a vocabulary of this size."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL_TOKENS.values(), *(f"w{number}" for number in range(vocab_size - len(SPECIAL_TOKENS)))]
    model = models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=SPECIAL_TOKENS["unk"])
    special = {f"{name}_token": token for name, token in SPECIAL_TOKENS.items()}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(model), **special).save_pretrained(folder / "tokenizer")
