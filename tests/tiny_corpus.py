"""A tiny corpus and tokenizer for tests of stage 2, and what reads its output back."""

import json
from pathlib import Path

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from tfrecord_prep.manifest import open_shards
from tfrecord_prep.records import decode_feature, read_records
from tokenizer_training.normalization import NormalizationConfig
from tokenizer_training.tokenizer import SPECIAL_TOKENS, save_tokenizer
from tokenizer_training.unigram import train_unigram
from tokenizer_training.unigram_config import UnigramConfig
from tokenizer_training.word_counts import count_words

SENTENCE = "a corpus of small words makes many rows when each document says something else about [MASK] and <pad>"
WORDS = SENTENCE.split()
BLANK = ["", " \t "]
DOCUMENTS = [" ".join(WORDS[(i * j) % len(WORDS)] for j in range(1, 3 + i % 23)) for i in range(90)]
DOCUMENTS[10:10] = BLANK


def wrapped(backend: Tokenizer) -> PreTrainedTokenizerFast:
    names = {f"{name}_token": token for name, token in SPECIAL_TOKENS.items()}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def train_tiny_tokenizer() -> PreTrainedTokenizerFast:
    normalization = NormalizationConfig()
    config = UnigramConfig(vocab_size=48, byte_fallback=False)
    return train_unigram(count_words(DOCUMENTS, normalization), 0, config, normalization)


def write_source(folder: Path) -> Path:
    """Write a corpus, `docs.jsonl`, and a tokenizer, and return their folder."""
    (folder / "docs.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS))
    save_tokenizer(train_tiny_tokenizer(), str(folder / "tokenizer"))
    return folder


def flags(source: Path, output: Path | str, *more: str) -> list[str]:
    """Return arguments that make several partitions, and several shards of each."""
    tokenizer, corpus = str(source / "tokenizer"), str(source / "docs.jsonl")
    paths = ["--tokenizer-name-or-path", tokenizer, "--data-files", corpus, "--output-dir", str(output)]
    sizes = ["--max-length", "16", "--shard-size", "5", "--partition-bytes", "2048", "--num-workers", "1"]
    return [*paths, *sizes, *more]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def read_rows(folder: Path) -> list[list[int]]:
    """Return all rows without their padding, having checked files, masks and counts against each other."""
    shards, rows = open_shards(str(folder)), []
    pad_id = shards.manifest.tokenizer.special_ids["pad"]
    for path, num_rows in zip(shards.paths, shards.num_rows_per_shard, strict=True):
        records = list(read_records(Path(path).read_bytes()))
        assert len(records) == num_rows
        for record in records:
            ids, mask = decode_feature(record, "input_ids"), decode_feature(record, "attention_mask")
            assert len(ids) == shards.manifest.max_length
            assert (ids == pad_id).tolist() == (mask == 0).tolist()
            rows.append(ids[mask == 1].tolist())
    return rows
