"""The manifest: written and read back; every way in which a folder can be wrong is one clear line."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlm_common.corpus.text_formats import BadRow, BadRows
from mlm_common.errors import InputError
from tfrecord_prep.manifest import (
    Manifest,
    ShardRecord,
    TokenizerRecord,
    Totals,
    open_shards,
    read_manifest,
    write_manifest,
)

SPECIAL_IDS = {"cls": 0, "pad": 1, "sep": 2, "unk": 3, "mask": 4}
SHARDS = (
    ShardRecord("dataset-00000-00000-5.tfrecord", 5, 40, 100, "0" * 8),
    ShardRecord("dataset-00001-00000-3.tfrecord", 3, 20, 70, "f" * 8),
)
MANIFEST = Manifest(
    split="train",
    max_length=8,
    chunking="concat",
    shard_size=5,
    partition_bytes=1024,
    tokenizer=TokenizerRecord("ab" * 32, 70_000, SPECIAL_IDS),
    corpus={"settings": {"dataset_name": "builtin"}},
    shards=SHARDS,
    totals=Totals(4, 1, 60, 4, 8),
    bad_rows=BadRows(2, [BadRow("a.jsonl", "line 3", "int 0")]),
    unigram_entropy_nats=6.25,
    versions={"numpy": "2.0"},
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for shard in SHARDS:
        (tmp_path / shard.name).write_bytes(b"x" * shard.num_bytes)
    write_manifest(str(tmp_path), MANIFEST)
    return tmp_path


def test_round_trip(folder: Path) -> None:
    assert read_manifest(str(folder)) == MANIFEST


def test_complete_folder(folder: Path) -> None:
    shards = open_shards(str(folder))
    assert shards.paths == tuple(f"{folder}/{shard.name}" for shard in SHARDS)
    assert (shards.num_rows_per_shard, shards.num_rows) == ((5, 3), 8)
    assert (shards.manifest, shards.tokenizer_folder) == (MANIFEST, None)


def test_tokenizer_beside_the_shards_is_named(folder: Path) -> None:
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text("{}", encoding="utf-8")
    assert open_shards(f"{folder}/").tokenizer_folder == f"{folder}/tokenizer"


def test_shards_of_the_tutorial_need_no_manifest(tmp_path: Path) -> None:
    for name in ("dataset-0-1000.tfrecord", "dataset-1-200.tfrecord"):
        (tmp_path / name).write_bytes(b"x")
    shards = open_shards(str(tmp_path))
    assert (shards.num_rows_per_shard, shards.num_rows, shards.manifest) == ((1000, 200), 1200, None)


def remove_shard(folder: Path, number: int) -> None:
    (folder / SHARDS[number].name).unlink()


def rewrite(folder: Path, **changes: Any) -> None:
    write_manifest(str(folder), dataclasses.replace(MANIFEST, **changes))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: remove_shard(folder, 0), f"lacks {SHARDS[0].name}.*--overwrite"),
        (lambda folder: remove_shard(folder, 1), f"lacks {SHARDS[1].name}.*--overwrite"),
        (lambda folder: (folder / SHARDS[1].name).write_bytes(b"x" * 69), "has 69 bytes of 70"),
        (
            lambda folder: (folder / SHARDS[1].name).rename(folder / "dataset-00001-00000-4.tfrecord"),
            f"lacks {SHARDS[1].name}",
        ),
        (lambda folder: (folder / "dataset-00002-00000-4.tfrecord").write_bytes(b"x"), "also holds dataset-00002-0"),
        (
            lambda folder: rewrite(folder, shards=(dataclasses.replace(SHARDS[0], num_rows=6), SHARDS[1])),
            "the manifest has 6",
        ),
        (
            lambda folder: rewrite(folder, totals=dataclasses.replace(MANIFEST.totals, num_rows=9)),
            "has 8 and the total 9",
        ),
        (
            lambda folder: (folder / "manifest.json").unlink(),
            r"did not end\. Run prepare-tfrecord-shards again",
        ),
    ],
)
def test_shards_that_differ_from_the_manifest(folder: Path, spoil: Callable[[Path], object], message: str) -> None:
    spoil(folder)
    with pytest.raises(InputError, match=message):
        open_shards(str(folder))


def test_preparation_that_has_just_begun(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}", encoding="utf-8")
    with pytest.raises(InputError, match=r"did not end\. Run prepare-tfrecord-shards again with the same flags"):
        open_shards(str(tmp_path))


def test_no_shards(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"empty contains no \*.tfrecord files. Pass the folder of one split"):
        open_shards(str(tmp_path / "empty"))
    with pytest.raises(InputError, match=r"There is no folder .*/emtpy; did you mean .*/empty\?"):
        open_shards(str(tmp_path / "emtpy"))


def test_name_without_a_count(tmp_path: Path) -> None:
    (tmp_path / "rows.tfrecord").write_bytes(b"x")
    with pytest.raises(InputError, match=r"holds rows\.tfrecord"):
        open_shards(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "must be JSON"),
        ("[]", "format_version 1; .* has None"),
        (json.dumps(dataclasses.asdict(MANIFEST) | {"format_version": 2}), "format_version 1; .* has 2"),
        ('{"format_version": 1}', "must have the fields"),
        (json.dumps(dataclasses.asdict(MANIFEST) | {"colour": "red"}), "must have the fields.*colour"),
    ],
)
def test_manifest_of_another_form(folder: Path, text: str, message: str) -> None:
    (folder / "manifest.json").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        open_shards(str(folder))
