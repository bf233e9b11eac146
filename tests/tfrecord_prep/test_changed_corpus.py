"""Corpora that are not the recorded one: of shards, unfinished or complete, of parts beside them, of a tokenizer."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from mlm_common.corpus.config import CorpusConfig
from mlm_common.corpus.corpus import open_corpus
from mlm_common.errors import InputError
from mlm_common.tokenizer import RECORD_FILE
from tests.fixtures.tiny_corpus import contents, flags
from tfrecord_prep import prepare_tfrecord_shards, split
from tfrecord_prep.manifest import read_manifest
from tfrecord_prep.prepare_tfrecord_shards import main


def with_record(source: Path, folder: Path, record: dict) -> Path:
    """Copy the tokenizer, with the record of the corpus that it was trained on."""
    shutil.copytree(source / "tokenizer", folder)
    (folder / RECORD_FILE).write_text(json.dumps({"corpus": record}), encoding="utf-8")
    return folder


def test_a_reordered_dataset_folder_loses_and_repeats_nothing(source, tmp_path, run, monkeypatch):
    folder = tmp_path / "dataset"
    folder.mkdir()
    rows = (source / "docs.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "train.jsonl").write_bytes(b"".join(rows))
    arguments = flags(source, tmp_path / "out", corpus=("--dataset-name", str(folder)))

    def stop(*_: object) -> None:
        raise OSError("stopped before the manifest")

    with monkeypatch.context() as patch:
        patch.setattr(split, "write_manifest", stop)
        assert run(main, *arguments, "--streaming").status == 1
    assert list((tmp_path / "out" / "train").glob("partition-*"))

    (folder / "train.jsonl").write_bytes(b"".join(reversed(rows)))
    for output in ("out", "fresh"):
        assert run(main, *arguments, "--streaming", "--output-dir", tmp_path / output).status == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")

    (folder / "train.jsonl").write_bytes(b"".join(rows))
    refused = run(main, *arguments, "--streaming").refusal
    assert f"other settings: corpus.data_files[0] is {folder}/train.jsonl (" in refused


@pytest.mark.parametrize("is_finished", [True, False])
def test_a_split_of_another_preparation_must_not_share_text(source, tmp_path, run, is_finished):
    arguments = flags(source, tmp_path)
    assert main([*arguments, "--validation-percent", "20"]) == 0
    shutil.rmtree(tmp_path / "train")
    if not is_finished:
        (tmp_path / "validation" / "manifest.json").rename(tmp_path / "validation" / "plan.json")
    before = contents(tmp_path)
    line = run(main, *arguments).refusal
    assert (
        f"{tmp_path}/validation comes from a different preparation, and both were made from {source}/docs.jsonl ("
        in line
    )
    assert contents(tmp_path) == before


def test_the_corpus_of_the_tokenizer_must_not_have_changed(source, tmp_path, run, monkeypatch):
    for name in ("trained", "elsewhere"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(f"text of {name}\n" * 50, encoding="utf-8")
    monkeypatch.chdir(tmp_path / "trained")
    record = open_corpus(CorpusConfig(data_files=["*.txt"], limit=5)).record
    tokenizer = with_record(source, tmp_path / "tokenizer", record)
    monkeypatch.chdir(tmp_path / "elsewhere")
    arguments = flags(source, tmp_path / "out", tokenizer=tokenizer, corpus=())
    assert run(main, *arguments).status == 0
    (file,) = read_manifest(str(tmp_path / "out" / "train")).corpus["data_files"]
    assert file["path"] == f"{tmp_path}/trained/a.txt"

    (tmp_path / "trained" / "a.txt").write_text("TEXT of trained\n" * 50, encoding="utf-8")
    refused = run(main, *arguments, "--overwrite")
    assert refused.status == 2
    changed = f"since the tokenizer in {tokenizer} was trained on it: corpus.data_files[0] is {tmp_path}"
    assert changed in refused.error
    assert "name the corpus to prepare with --data-files" in refused.error
    assert main([*arguments, "--overwrite", "--data-files", str(tmp_path / "trained" / "a.txt")]) == 0


def test_a_data_set_is_read_at_the_commit_of_the_tokenizer(source, tmp_path, run, monkeypatch):
    settings = dataclasses.asdict(CorpusConfig(dataset_name="alice/text", dataset_revision="c" * 40))
    tokenizer = with_record(source, tmp_path / "tokenizer", {"settings": settings})

    def open_corpus(config: CorpusConfig) -> None:
        raise InputError(f"opened {config.dataset_name} at {config.dataset_revision}")

    monkeypatch.setattr(prepare_tfrecord_shards, "open_corpus", open_corpus)
    refused = run(main, *flags(source, tmp_path / "out", tokenizer=tokenizer, corpus=()))
    assert refused.error == f"error: opened alice/text at {'c' * 40}"
