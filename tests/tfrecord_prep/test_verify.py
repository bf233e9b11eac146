"""--verify: right folders are called right, and every single difference is found, with its file and row."""

import dataclasses
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest

from tests.fixtures.run_command import Run
from tests.fixtures.tiny_corpus import flags
from tfrecord_prep.chunking import CHUNKINGS
from tfrecord_prep.manifest import PAIRS, ShardRecord, read_manifest, write_manifest
from tfrecord_prep.prepare_tfrecord_shards import main
from tfrecord_prep.records import LABEL_KEY, decode_rows, encode_rows, read_records

PAD, MASK = 1, 4


@pytest.fixture(scope="module")
def prepared(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of all ways to cut, made of the same corpus."""
    folder = tmp_path_factory.mktemp("prepared")
    for chunking in CHUNKINGS:
        assert main(flags(source, folder / chunking, "--chunking", chunking, "--validation-percent", "20")) == 0
    return folder


@pytest.fixture(params=["concat", PAIRS])
def folder(request: pytest.FixtureRequest, prepared: Path, tmp_path: Path) -> Path:
    shutil.copytree(prepared / request.param, tmp_path / request.param)
    return tmp_path / request.param


@pytest.fixture
def verify(run: Run) -> Run:
    return lambda folder, num_workers=1: run(main, "--verify", "--output-dir", folder, "--num-workers", num_workers)


@pytest.mark.parametrize("chunking", CHUNKINGS)
def test_right_folders(prepared, verify, chunking):
    outcome = verify(prepared / chunking, 1 + (chunking == "concat"))
    assert outcome.status == 0
    for line, split in zip(outcome.out.splitlines(), ("train", "validation"), strict=True):
        totals = read_manifest(str(prepared / chunking / split)).totals
        assert line.startswith(f"{prepared / chunking / split}: correct. Checked ")
        assert f" {totals.num_rows:,} rows, {totals.num_tokens:,} tokens: " in line
    assert verify(prepared / chunking / "validation").out == outcome.out.splitlines(keepends=True)[1]


def test_folder_on_cloud_storage(prepared, cloud, verify):
    for path in (prepared / "documents").rglob("*"):
        if path.is_file():
            cloud.put(f"run/{path.relative_to(prepared / 'documents')}", path.read_bytes())
    outcome = verify("gs://test-bucket/run")
    assert (outcome.status, outcome.out.count("correct.")) == (0, 2)


def test_no_preparation(tmp_path, verify):
    outcome = verify(tmp_path)
    assert (outcome.status, "--verify needs the --output-dir of a preparation" in outcome.error) == (2, True)


Rows = np.ndarray
Change = Callable[[Rows, np.ndarray], tuple[Rows, np.ndarray]]


def rewrite_shard(folder: Path, number: int, change: Change, counts: dict[str, Any] | None = None) -> None:
    """Write a shard with changed rows, and a manifest that fits it but for what `counts` says."""
    manifest = read_manifest(str(folder / "train"))
    record = manifest.shards[number]
    path = folder / "train" / record.name
    examples = list(read_records(path.read_bytes()))
    ids, mask = (decode_rows(examples, key, manifest.max_length) for key in ("input_ids", "attention_mask"))
    ids, num_tokens = change(ids.astype(np.int32), mask.sum(axis=1))
    labels = decode_rows(examples, LABEL_KEY, 1)[-len(ids) :, 0] if manifest.chunking == PAIRS else None
    data = encode_rows(ids, num_tokens, labels)
    path.write_bytes(data)
    sums = {"num_bytes": len(data), "num_tokens": int(num_tokens.sum()), "crc32c": f"{google_crc32c.value(data):08x}"}
    new = dataclasses.replace(record, **(sums | (counts or {})))
    shards: list[ShardRecord] = list(manifest.shards)
    shards[number] = new
    write_manifest(str(folder / "train"), dataclasses.replace(manifest, shards=tuple(shards)))


def put(row: int, column: int, value: int) -> Change:
    def change(ids: Rows, num_tokens: np.ndarray) -> tuple[Rows, np.ndarray]:
        ids[row, column] = value
        return ids, num_tokens

    return change


def shorten(row: int, num_tokens_left: int) -> Change:
    def change(ids: Rows, num_tokens: np.ndarray) -> tuple[Rows, np.ndarray]:
        ids[row, num_tokens_left:] = PAD
        num_tokens[row] = num_tokens_left
        return ids, num_tokens

    return change


def same(ids: Rows, num_tokens: np.ndarray) -> tuple[Rows, np.ndarray]:
    return ids, num_tokens


def change_word(ids: Rows, num_tokens: np.ndarray) -> tuple[Rows, np.ndarray]:
    row, column = np.argwhere(ids > MASK)[3]
    ids[row, column] = 5 if ids[row, column] != 5 else 6
    return ids, num_tokens


def change_totals(folder: Path, totals: dict[str, int]) -> None:
    manifest = read_manifest(str(folder / "train"))
    changed = dataclasses.replace(manifest, totals=dataclasses.replace(manifest.totals, **totals))
    write_manifest(str(folder / "train"), changed)


def change_file(folder: Path, pattern: str, change: Callable[[bytes], bytes]) -> None:
    path = next((folder / "train").glob(pattern))
    path.write_bytes(change(path.read_bytes()))


def flip_bit(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :]


def flip_last(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def unfinish(folder: Path) -> None:
    (folder / "validation" / "manifest.json").rename(folder / "validation" / "plan.json")


SHARD = r"dataset-00000-0000{}-5\.tfrecord"
FIRST_OF_SECOND = "dataset-00001-00000-*"
IS_RIGHT, IS_NOT = b'"strip_right": true', b'"strip_right": false'


@pytest.mark.parametrize(
    ("spoil", "arguments", "problem"),
    [
        (rewrite_shard, [1, put(2, 5, 48)], SHARD.format(1) + ", row 2: an id is outside the vocabulary of 48"),
        (rewrite_shard, [1, put(3, 5, PAD)], "row 3: padding does not match the zeros of the attention mask"),
        (rewrite_shard, [1, put(0, 7, MASK)], "row 0: the text contains the mask token"),
        (rewrite_shard, [1, shorten(1, 0)], "row 1: the row is empty"),
        (rewrite_shard, [0, change_word], r"manifest\.json has unigram_entropy_nats"),
        (
            rewrite_shard,
            [2, same, {"crc32c": "0" * 8}],
            SHARD.format(2) + r" has the CRC32C \w{8}, but the manifest says 0{8}",
        ),
        (rewrite_shard, [2, same, {"num_tokens": 7}], SHARD.format(2) + r" has \d+ tokens, but the manifest says 7"),
        (
            rewrite_shard,
            [0, lambda ids, num: (ids[1:], num[1:])],
            SHARD.format(0) + " has 4 rows, but the manifest says 5",
        ),
        (
            rewrite_shard,
            [0, lambda ids, num: (ids[:, 1:], np.minimum(num, 15))],
            SHARD.format(0) + ": row 0 has 15 values of input_ids, not 16",
        ),
        (change_totals, [{"num_tokens": 1}], r"manifest\.json has num_tokens 1; the shards have "),
        (change_totals, [{"num_padding_tokens": 1}], r"manifest\.json has num_padding_tokens 1; the shards have "),
        (change_totals, [{"num_random_pairs": 1}], r"manifest\.json has num_random_pairs 1; the shards have "),
        (change_file, [FIRST_OF_SECOND, flip_bit], r"row 2: the record at byte \d+ is truncated or corrupted"),
        (change_file, [FIRST_OF_SECOND, lambda data: data[:-1]], r"dataset-00001-00000-\d\.tfrecord: \S+ bytes, in"),
        (
            change_file,
            ["tokenizer/tokenizer.json", lambda data: data.replace(IS_RIGHT, IS_NOT)],
            "train/tokenizer is not the tokenizer of the manifest",
        ),
        (
            change_file,
            ["tokenizer/word_starts.npy", flip_last],
            r"word_starts\.npy does not fit the tokenizer\. Delete this file",
        ),
        (
            change_file,
            ["tokenizer/word_starts.npy", lambda data: data[:-1]],
            r"word_starts\.npy must be one truth value",
        ),
        (unfinish, [], r"validation has no manifest\.json, which is written last, so its preparation did not finish"),
    ],
)
def test_every_difference_is_found(folder, verify, spoil, arguments, problem):
    spoil(folder, *arguments)
    outcome = verify(folder)
    assert (outcome.status, outcome.error[:7]) == (1, "error: ")
    assert re.search(problem, outcome.error), outcome.error
