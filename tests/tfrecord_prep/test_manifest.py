"""The manifest: written and read back; every way in which a folder can be wrong is one clear line."""

import dataclasses
import json
from pathlib import Path

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


OTHER, RECORD = "dataset-00002-00000-4.tfrecord", dataclasses.asdict(MANIFEST)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for shard in SHARDS:
        (tmp_path / shard.name).write_bytes(b"x" * shard.num_bytes)
    write_manifest(str(tmp_path), MANIFEST)
    return tmp_path


def test_complete_folder(folder):
    assert read_manifest(str(folder)) == MANIFEST
    shards = open_shards(str(folder))
    assert shards.paths == tuple(f"{folder}/{shard.name}" for shard in SHARDS)
    assert (shards.num_rows_per_shard, shards.num_rows) == ((5, 3), 8)
    assert (shards.manifest, shards.tokenizer_folder) == (MANIFEST, None)
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text("{}", encoding="utf-8")
    assert open_shards(f"{folder}/").tokenizer_folder == f"{folder}/tokenizer"


def test_shards_of_the_tutorial_need_no_manifest(tmp_path):
    for name in ("dataset-0-1000.tfrecord", "dataset-1-200.tfrecord"):
        (tmp_path / name).write_bytes(b"x")
    shards = open_shards(str(tmp_path))
    assert (shards.num_rows_per_shard, shards.num_rows, shards.manifest) == ((1000, 200), 1200, None)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / SHARDS[0].name).unlink(), f"{SHARDS[0].name}: no such file, .*--overwrite"),
        (lambda folder: (folder / SHARDS[1].name).write_bytes(b"x" * 69), "69 bytes, in the manifest 70 bytes"),
        (lambda folder: (folder / SHARDS[1].name).rename(folder / OTHER), f"{SHARDS[1].name}: no such file, in the "),
        (lambda folder: (folder / OTHER).write_bytes(b"x"), f"{OTHER}: 1 bytes, in the manifest no such file"),
        (lambda folder: (folder / "manifest.json").unlink(), r"did not finish\. Run prepare_tfrecord_shards\.py again"),
    ],
)
def test_shards_that_differ_from_the_manifest(folder, spoil, message):
    spoil(folder)
    with pytest.raises(InputError, match=message):
        open_shards(str(folder))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("plan.json", r"did not finish\. Run prepare_tfrecord_shards\.py again with the same flags"),
        ("rows.tfrecord", r"contains rows\.tfrecord"),
        ("notes.txt", r"empty contains no \*.tfrecord files. Pass the folder of one split"),
    ],
)
def test_no_shards(tmp_path, name, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / name).write_text("{}", encoding="utf-8")
    with pytest.raises(InputError, match=message):
        open_shards(str(tmp_path / "empty"))


def edited(path: str, value: object) -> str:
    """The manifest with another value at `shards.0.num_rows`, say; without it for `...`."""
    record = json.loads(json.dumps(RECORD))
    *keys, last = path.split(".")
    place = record
    for key in keys:
        place = place[int(key)] if isinstance(place, list) else place[key]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return json.dumps(record)


WHOLE, NUMBER = "must be a whole number of at least 0, but is", "must be a number of at least 0, but is"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("totals.num_rows", -5, f"its totals.num_rows {WHOLE} -5"),
        ("totals.num_words", 1.5, f"its totals.num_words {WHOLE} 1.5"),
        ("totals.num_documents", ..., "it has no totals.num_documents"),
        ("totals", None, "its totals must be an object, but is None"),
        ("shards.1.num_rows", True, f"its shards[1].num_rows {WHOLE} True"),
        ("shards.0.crc32c", 7, "its shards[0].crc32c must be text, but is 7"),
        ("shards", {}, "its shards must be a list, but is {}"),
        ("shards", ["a"], "its shards[0] must be an object, but is 'a'"),
        ("max_length", None, f"its max_length {WHOLE} None"),
        ("random_share", "half", f"its random_share {NUMBER} 'half'"),
        ("unigram_entropy_nats", float("nan"), f"its unigram_entropy_nats {NUMBER} nan"),
        ("tokenizer.special_ids.pad", "1", f"its tokenizer.special_ids.pad {WHOLE} '1'"),
        ("versions", [], "its versions must be an object, but is []"),
    ],
)
def test_a_manifest_that_was_edited_names_the_key_and_the_value(folder, path, value, message):
    (folder / "manifest.json").write_text(edited(path, value), encoding="utf-8")
    with pytest.raises(InputError) as refused:
        open_shards(str(folder))
    start = f"{folder}/manifest.json must be a manifest: JSON with the fields of docs/reference/shards.md; {message}."
    assert str(refused.value).startswith(start)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "must be a manifest: JSON with the fields"),
        ("[]", "must be a manifest: JSON with the fields"),
        (json.dumps(RECORD | {"format_version": 2}), r"^This version reads format_version 1; .* has 2\. Prepare the"),
        ('{"format_version": 1}', "must be a manifest: JSON with the fields"),
        (json.dumps(RECORD | {"colour": "red"}), "must be a manifest: JSON with the fields.*colour"),
    ],
)
def test_manifest_of_another_form(folder, text, message):
    (folder / "manifest.json").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        open_shards(str(folder))
