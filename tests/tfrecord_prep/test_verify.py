"""--verify: right folders are called right, and every single difference is found, with its file and row."""

import dataclasses
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import google_crc32c
import numpy as np
import pytest

from tests.fixtures.tiny_corpus import flags, write_source
from tests.servers.fixtures import CloudStorageHandle
from tfrecord_prep.chunking import CHUNKINGS, PADDING_CHUNKINGS, PAIRS
from tfrecord_prep.manifest import ShardRecord, read_manifest, write_manifest
from tfrecord_prep.prepare_tfrecord_shards import main
from tfrecord_prep.records import LABEL_KEY, decode_rows, encode_rows, read_records

CLS, PAD, SEP, MASK = 0, 1, 2, 4


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of all ways to cut, made of the same corpus."""
    folder = tmp_path_factory.mktemp("prepared")
    source = write_source(folder)
    for chunking in CHUNKINGS:
        assert main(flags(source, folder / chunking, "--chunking", chunking, "--validation-percent", "20")) == 0
    return folder


@pytest.fixture(params=CHUNKINGS)
def folder(request: pytest.FixtureRequest, prepared: Path, tmp_path: Path) -> Path:
    shutil.copytree(prepared / request.param, tmp_path / request.param)
    return tmp_path / request.param


def verify(folder: Path | str) -> int:
    return main(["--verify", "--output-dir", str(folder), "--num-workers", "1"])


@pytest.mark.parametrize("chunking", CHUNKINGS)
def test_right_folder_needs_no_other_flag(prepared: Path, capsys: pytest.CaptureFixture, chunking: str) -> None:
    capsys.readouterr()
    workers = ["--num-workers", "1"] if chunking != "concat" else []
    assert main(["--verify", "--output-dir", str(prepared / chunking), *workers]) == 0
    lines = capsys.readouterr().out.splitlines()
    for line, split in zip(lines, ("train", "validation"), strict=True):
        totals = read_manifest(str(prepared / chunking / split)).totals
        assert line.startswith(f"{prepared / chunking / split}: right. Checked ")
        assert f" {totals.num_rows:,} rows, {totals.num_tokens:,} tokens: " in line


def test_one_split_can_be_verified(prepared: Path) -> None:
    assert verify(prepared / "concat" / "validation") == 0


def test_folder_on_cloud_storage(prepared: Path, cloud: CloudStorageHandle, capsys: pytest.CaptureFixture) -> None:
    for path in (prepared / "documents").rglob("*"):
        if path.is_file():
            cloud.put(f"run/{path.relative_to(prepared / 'documents')}", path.read_bytes())
    assert verify("gs://test-bucket/run") == 0
    assert capsys.readouterr().out.count("right.") == 2


def test_no_preparation(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert verify(tmp_path) == 2
    assert "--verify needs the --output-dir of a preparation" in capsys.readouterr().err


Rows = np.ndarray
Change = Callable[[Rows, np.ndarray], tuple[Rows, np.ndarray]]


def rewrite_shard(folder: Path, number: int, change: Change, **counts: int) -> None:
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
    new = dataclasses.replace(record, **(sums | counts))
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


def check_found(folder: Path, capsys: pytest.CaptureFixture, problem: str) -> None:
    capsys.readouterr()
    assert verify(folder) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert re.search(problem, line), line


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (put(2, 5, 48), r"dataset-00000-00001-5\.tfrecord, row 2: an id is outside the vocabulary of 48"),
        (put(3, 5, PAD), r"row 3: padding is not where the attention mask is 0"),
        (put(0, 7, MASK), r"row 0: text holds the mask token"),
        (put(4, 5, CLS), r"row 4: (documents are not framed|a cls token stands within)"),
        (shorten(1, 0), r"row 1: the row is empty"),
    ],
)
def test_wrong_rows(folder: Path, capsys: pytest.CaptureFixture, change: Change, problem: str) -> None:
    rewrite_shard(folder, 1, change)
    check_found(folder, capsys, problem)


def test_wrong_framing(folder: Path, capsys: pytest.CaptureFixture) -> None:
    is_concat = folder.name == "concat"
    rewrite_shard(folder, 0, put(0, 0, 9))
    framing = "documents are not framed by a cls and a sep token each" if is_concat else "does not begin with the cls"
    check_found(folder, capsys, rf"dataset-00000-00000-5\.tfrecord, row 0: .*{framing}")


def test_pairs(prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = tmp_path / PAIRS
    for change, problem in (
        (
            lambda ids, num: (np.where(np.arange(16) == 15, ids, np.where(ids == SEP, 9, ids)), num),
            r", row \d: .* is no pair of",
        ),
        (lambda ids, num: (np.where(np.arange(16) == 1, SEP, ids), num), ", row 0: a segment is empty"),
    ):
        shutil.copytree(prepared / PAIRS, folder, dirs_exist_ok=True)
        rewrite_shard(folder, 1, change)
        check_found(folder, capsys, rf"dataset-00000-00001-5\.tfrecord{problem}")
    shutil.copytree(prepared / PAIRS, folder, dirs_exist_ok=True)
    manifest = read_manifest(str(folder / "train"))
    totals = dataclasses.replace(manifest.totals, num_random_pairs=1)
    write_manifest(str(folder / "train"), dataclasses.replace(manifest, totals=totals))
    check_found(folder, capsys, r"manifest\.json has num_random_pairs 1; the shards have ")


@pytest.mark.parametrize("folder", [name for name in CHUNKINGS if name != PAIRS], indirect=True)
def test_padding_within_a_partition(folder: Path, capsys: pytest.CaptureFixture) -> None:
    row_end = None if folder.name == "concat" else SEP

    def change(ids: Rows, num_tokens: np.ndarray) -> tuple[Rows, np.ndarray]:
        row = next(
            row for row in range(1, 5) if num_tokens[row] == 16 and not {CLS, SEP} & set(ids[row, 8:15].tolist())
        )
        ids[row, 10] = row_end or ids[row, 10]
        return shorten(row, 11)(ids, num_tokens)

    rewrite_shard(folder, 1, change)
    expected = (
        r"unigram_entropy|num_tokens" if folder.name in PADDING_CHUNKINGS else r"row \d: padding in a row that is not"
    )
    check_found(folder, capsys, expected)


def test_another_document_in_a_shard(folder: Path, capsys: pytest.CaptureFixture) -> None:
    def change(ids: Rows, num_tokens: np.ndarray) -> tuple[Rows, np.ndarray]:
        row, column = np.argwhere(ids > MASK)[3]
        ids[row, column] = 5 if ids[row, column] != 5 else 6
        return ids, num_tokens

    rewrite_shard(folder, 0, change)
    check_found(folder, capsys, r"manifest\.json has unigram_entropy_nats")


def same(ids: Rows, num_tokens: np.ndarray) -> tuple[Rows, np.ndarray]:
    return ids, num_tokens


def test_wrong_checksum(folder: Path, capsys: pytest.CaptureFixture) -> None:
    rewrite_shard(folder, 2, same, crc32c="0" * 8)
    check_found(folder, capsys, r"dataset-00000-00002-5\.tfrecord has the CRC32C \w{8}, the manifest 00000000")


def test_wrong_number_of_tokens(folder: Path, capsys: pytest.CaptureFixture) -> None:
    rewrite_shard(folder, 2, same, num_tokens=7)
    check_found(folder, capsys, r"dataset-00000-00002-5\.tfrecord has \d+ tokens, the manifest 7")


def test_flipped_bit(folder: Path, capsys: pytest.CaptureFixture) -> None:
    path = next((folder / "train").glob("dataset-00001-00000-*"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    check_found(folder, capsys, rf"{path.name}, row 2: the record at byte \d+ is truncated or corrupted")


def test_lost_row(folder: Path, capsys: pytest.CaptureFixture) -> None:
    rewrite_shard(folder, 0, lambda ids, num_tokens: (ids[1:], num_tokens[1:]))
    check_found(folder, capsys, r"dataset-00000-00000-5\.tfrecord has 4 rows, the manifest 5")


def test_rows_of_another_length(folder: Path, capsys: pytest.CaptureFixture) -> None:
    rewrite_shard(folder, 0, lambda ids, num_tokens: (ids[:, 1:], np.minimum(num_tokens, 15)))
    check_found(folder, capsys, r"dataset-00000-00000-5\.tfrecord: row 0 has 15 values of input_ids, not 16")


@pytest.mark.parametrize("name", ["num_tokens", "num_padding_tokens"])
def test_wrong_totals(folder: Path, capsys: pytest.CaptureFixture, name: str) -> None:
    manifest = read_manifest(str(folder / "train"))
    totals = dataclasses.replace(manifest.totals, **{name: 1})
    write_manifest(str(folder / "train"), dataclasses.replace(manifest, totals=totals))
    check_found(folder, capsys, rf"manifest\.json has {name} 1; the shards have ")


def test_another_tokenizer(folder: Path, capsys: pytest.CaptureFixture) -> None:
    path = folder / "train" / "tokenizer" / "tokenizer.json"
    path.write_text(
        path.read_text(encoding="utf-8").replace('"strip_right": true', '"strip_right": false'), encoding="utf-8"
    )
    check_found(folder, capsys, "train/tokenizer is not the tokenizer of the manifest")


def test_truncated_and_missing_shards(folder: Path, capsys: pytest.CaptureFixture) -> None:
    path = next((folder / "train").glob("dataset-00001-00000-*"))
    path.write_bytes(path.read_bytes()[:-1])
    check_found(folder, capsys, rf"{path.name} has \S+ bytes of")
    path.unlink()
    check_found(folder, capsys, rf"lacks {path.name}")


def test_unfinished_folder(folder: Path, capsys: pytest.CaptureFixture) -> None:
    (folder / "validation" / "manifest.json").rename(folder / "validation" / "plan.json")
    check_found(folder, capsys, "validation has none, so its preparation did not end")
