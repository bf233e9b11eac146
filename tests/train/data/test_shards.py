"""Shards to train and to evaluate on: compared with each other before anything is read."""

import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from mlm_common.errors import InputError
from mlm_common.tokenizer import SPECIAL_TOKENS, save_tokenizer
from tests.fixtures.tiny_corpus import flags, wrapped, write_source
from tfrecord_prep.prepare_tfrecord_shards import main as prepare
from train.config.learning import DataConfig
from train.data.shards import open_inputs


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    """Prepare one corpus whole (`all`), in two parts (`drawn`), and another file to evaluate on (`other`)."""
    folder = tmp_path_factory.mktemp("prepared")
    source = write_source(folder)
    (folder / "other.txt").write_text("another text of small words\n" * 20, encoding="utf-8")
    assert prepare(flags(source, folder / "all")) == 0
    assert prepare(flags(source, folder / "drawn", "--validation-percent", "20")) == 0
    assert prepare(flags(source, folder / "other", "--validation-files", str(folder / "other.txt"))) == 0
    return folder


def open_parts(train: Path, evaluation: Path | str, **settings: str) -> None:
    open_inputs(DataConfig(str(train), str(evaluation), **settings))


def test_rows_that_are_trained_on_are_not_evaluated_on(prepared):
    train, evaluation = prepared / "all" / "train", prepared / "drawn" / "validation"
    message = (
        "^--eval-dataset must not contain text of --train-dataset, in any phase; .*"
        rf"{evaluation} and {train}: both were made from {prepared}/docs.jsonl \(.*"
        "made by the same prepare_tfrecord_shards.py command"
    )
    with pytest.raises(InputError, match=message):
        open_parts(train, evaluation)


@pytest.mark.parametrize("part", ["train", "validation"])
def test_the_training_folder_is_not_evaluated_on(prepared, tmp_path, monkeypatch, part):
    train = prepared / "drawn" / part
    monkeypatch.chdir(prepared)
    (tmp_path / "link").symlink_to(train)
    shutil.copytree(train, tmp_path / "copy")
    for name in (str(train), f"{train}/", f"drawn/../drawn/{part}", str(tmp_path / "link")):
        with pytest.raises(InputError, match=rf"both have the shard {train}/dataset-00000-00000-"):
            open_parts(train, name)
    with pytest.raises(InputError, match="both have the rows of a shard"):
        open_parts(train, tmp_path / "copy")


def test_shards_without_a_manifest_are_compared_with_each_other(prepared, tmp_path):
    for part in ("train", "validation"):
        (tmp_path / part).mkdir()
        for index, path in enumerate(sorted((prepared / "drawn" / part).glob("*.tfrecord"))):
            num_rows = path.stem.rpartition("-")[2]
            shutil.copy(path, tmp_path / part / f"dataset-{index}-{num_rows}.tfrecord")
    shutil.copytree(tmp_path / "train", tmp_path / "copy")
    tokenizer = str(prepared / "tokenizer")
    open_parts(tmp_path / "train", tmp_path / "validation", tokenizer=tokenizer)
    open_parts(prepared / "drawn" / "train", tmp_path / "validation")
    open_parts(tmp_path / "train", prepared / "drawn" / "validation", tokenizer=tokenizer)
    with pytest.raises(InputError, match="both have the shard "):
        open_parts(tmp_path / "train", f"{tmp_path}/train/", tokenizer=tokenizer)
    with pytest.raises(InputError, match=r"both have the rows of dataset-0-5\.tfrecord"):
        open_parts(tmp_path / "train", tmp_path / "copy", tokenizer=tokenizer)
    ids = {token: index for index, token in enumerate(SPECIAL_TOKENS.values())}
    save_tokenizer(wrapped(Tokenizer(WordLevel(ids, unk_token=SPECIAL_TOKENS["unk"]))), str(tmp_path / "small"))
    with pytest.raises(InputError, match=r"--tokenizer must be the one .* but the tokenizer has only 5 ids\."):
        open_parts(tmp_path / "train", tmp_path / "validation", tokenizer=str(tmp_path / "small"))
