"""The programs that stage 2 is compared with: `tutorial`, and `tokenizer`, whose speed is an upper bound.

    python benchmarks/peers/prepare_peers.py tutorial train.jsonl.gz tokenizer output

`tutorial` is the method of transformers' TPU tutorial in two processes: `datasets` tokenizes and groups a thousand
documents at a time, dropping tokens that do not fill a row, and a loop writes a tf.train.Example per row. `tokenizer`
runs only the tokenizer on the same documents, on all cores, and throws the ids away.
"""

import argparse
import gzip
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NUM_PROCESSES = 2
DOCUMENTS_AT_ONCE = 1_000
SHARD_ROWS = 1_000


def prepare_as_tutorial(text_file: Path, tokenizer_folder: str, output: Path, length: int) -> None:
    """Write shards of rows of `length` ids."""
    from datasets import load_dataset
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)

    def tokenize(batch: dict[str, list[str]]) -> Any:
        return tokenizer(batch["text"])

    def group(batch: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        joined = {key: list(itertools.chain.from_iterable(lists)) for key, lists in batch.items()}
        end = len(joined["input_ids"]) // length * length
        return {key: [ids[at : at + length] for at in range(0, end, length)] for key, ids in joined.items()}

    cache = str(output / "cache")
    rows = load_dataset("json", data_files=str(text_file), split="train", cache_dir=cache)
    for transform in (tokenize, group):
        rows = rows.map(transform, batched=True, num_proc=NUM_PROCESSES, remove_columns=rows.column_names)
    write_examples(rows, output)


def write_examples(rows: Any, output: Path) -> None:
    """Write a `datasets.Dataset` of `input_ids` and `attention_mask` as TFRecord shards."""
    import tensorflow as tf

    def feature(values: list[int]) -> tf.train.Feature:
        return tf.train.Feature(int64_list=tf.train.Int64List(value=values))

    for number, start in enumerate(range(0, len(rows), SHARD_ROWS)):
        shard = rows[start : start + SHARD_ROWS]
        num_rows = len(shard["input_ids"])
        with tf.io.TFRecordWriter(str(output / f"dataset-{number}-{num_rows}.tfrecord")) as file:
            for ids, mask in zip(shard["input_ids"], shard["attention_mask"], strict=True):
                features = {"input_ids": feature(ids), "attention_mask": feature(mask)}
                file.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())


def only_tokenize(text_file: Path, tokenizer_folder: str) -> None:
    """Tokenize all documents."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{tokenizer_folder}/tokenizer.json")
    read = documents(text_file)
    while texts := list(itertools.islice(read, DOCUMENTS_AT_ONCE)):
        tokenizer.encode_batch_fast(texts, add_special_tokens=False)


def documents(text_file: Path) -> Iterator[str]:
    """Yield the texts of a .jsonl or .jsonl.gz file."""
    with gzip.open(text_file) if text_file.suffix == ".gz" else text_file.open("rb") as lines:
        for line in lines:
            yield json.loads(line)["text"]


def main() -> None:
    """Run the program that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peer", choices=("tutorial", "tokenizer"))
    parser.add_argument("text_file", type=Path)
    parser.add_argument("tokenizer_folder")
    parser.add_argument("output", type=Path)
    parser.add_argument("--length", type=int, default=512)
    arguments = parser.parse_args()
    if arguments.peer == "tutorial":
        arguments.output.mkdir(parents=True)
        prepare_as_tutorial(arguments.text_file, arguments.tokenizer_folder, arguments.output, arguments.length)
    else:
        only_tokenize(arguments.text_file, arguments.tokenizer_folder)


if __name__ == "__main__":
    main()
