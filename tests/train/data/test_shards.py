"""Shards to train and to evaluate on: held against each other before anything is read."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from mlm_common.errors import InputError
from tests.fixtures.tiny_corpus import flags, write_source
from tfrecord_prep.prepare_tfrecord_shards import main as prepare
from train.config.settings import DataConfig
from train.data.shards import open_inputs


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare one corpus whole (`all`), in two parts (`drawn`), and a file of its own to evaluate on (`other`)."""
    folder = tmp_path_factory.mktemp("prepared")
    source = write_source(folder)
    (folder / "other.txt").write_text("another text of small words\n" * 20)
    assert prepare(flags(source, folder / "all")) == 0
    assert prepare(flags(source, folder / "drawn", "--validation-percent", "20")) == 0
    assert prepare(flags(source, folder / "other", "--validation-files", str(folder / "other.txt"))) == 0
    return folder


def open_parts(train: Path, evaluation: Path) -> None:
    open_inputs(dataclasses.replace(DataConfig(str(train)), eval_dataset=str(evaluation)))


def test_rows_of_one_draw_or_of_other_files_are_evaluated_on(prepared: Path) -> None:
    open_parts(prepared / "drawn" / "train", prepared / "drawn" / "validation")
    open_parts(prepared / "drawn" / "train", prepared / "other" / "validation")
    open_parts(prepared / "all" / "train", prepared / "other" / "validation")


def test_rows_that_are_trained_on_are_not_evaluated_on(prepared: Path) -> None:
    train, evaluation = prepared / "all" / "train", prepared / "drawn" / "validation"
    with pytest.raises(InputError) as caught:
        open_parts(train, evaluation)
    message = str(caught.value)
    assert message.startswith(f"--eval-dataset must hold no text of --train-dataset; {evaluation} is not of ")
    assert f"preparation of {train}, and both were made of {prepared}/docs.jsonl (" in message
    assert message.endswith("Prepare both by one command.")


def test_records_that_do_not_tell_are_named(prepared: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(prepared / "drawn", tmp_path / "old")
    for part in ("train", "validation"):
        path = tmp_path / "old" / part / "manifest.json"
        manifest = json.loads(path.read_text())
        manifest["corpus"]["data_files"] = [{"name": "docs.jsonl", "num_bytes": 5, "fingerprint": "blake2b 00"}]
        path.write_text(json.dumps(manifest))
    open_parts(tmp_path / "old" / "train", tmp_path / "old" / "validation")
    assert not caplog.messages, "both parts are of one record"
    open_parts(tmp_path / "old" / "train", prepared / "other" / "validation")
    assert "is unknown: a record of an older version does not tell the content of its files" in caplog.text
