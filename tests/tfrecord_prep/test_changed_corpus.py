"""Corpora that are not the recorded one: of shards, unfinished or complete, of parts beside them, of a tokenizer."""

import dataclasses
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mlm_common.corpus.config import CorpusConfig
from mlm_common.corpus.corpus import open_corpus
from mlm_common.tokenizer import RECORD_FILE
from tests.fixtures.run_command import Outcome
from tests.fixtures.tiny_corpus import DOCUMENTS, contents, flags, read_rows, write_source
from tests.servers.fixtures import HubHandle
from tfrecord_prep import split
from tfrecord_prep.manifest import read_manifest
from tfrecord_prep.prepare_tfrecord_shards import main

ErrorOf = Callable[[list[str]], str]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("source"))


@pytest.fixture
def error_of(run: Callable[..., Outcome]) -> Callable[[list[str]], str]:
    """Run the command, which must be refused, and return the error."""

    def refused(arguments: list[str]) -> str:
        outcome = run(main, *arguments)
        assert (outcome.status, outcome.error[:7]) == (2, "error: ")
        return outcome.error

    return refused


def of_tokenizer(source: Path, output: Path, tokenizer: Path, *more: str) -> list[str]:
    """Make arguments that name no corpus."""
    arguments = flags(source, output, *more)
    del arguments[2:4]
    arguments[1] = str(tokenizer)
    return arguments


def with_record(source: Path, folder: Path, **settings) -> Path:
    """Copy the tokenizer, with the record of the corpus that it was trained on."""
    shutil.copytree(source / "tokenizer", folder)
    record = {"corpus": open_corpus(CorpusConfig(**settings)).record}
    (folder / RECORD_FILE).write_text(json.dumps(record), encoding="utf-8")
    return folder


def test_a_reordered_dataset_folder_loses_and_repeats_nothing(
    source: Path, tmp_path: Path, error_of: ErrorOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "dataset"
    folder.mkdir()
    rows = (source / "docs.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "train.jsonl").write_bytes(b"".join(rows))
    arguments = flags(source, tmp_path / "out", "--dataset-name", str(folder), "--streaming")
    del arguments[2:4]

    def stop(*_: object) -> None:
        raise OSError("stopped before the manifest")

    with monkeypatch.context() as patch:
        patch.setattr(split, "write_manifest", stop)
        assert main(arguments) == 1
    assert list((tmp_path / "out" / "train").glob("partition-*"))

    (folder / "train.jsonl").write_bytes(b"".join(reversed(rows)))
    assert main(arguments) == 0
    assert main([*arguments[:-1], "--output-dir", str(tmp_path / "fresh")]) == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "fresh")

    (folder / "train.jsonl").write_bytes(b"".join(rows))
    line = error_of(arguments)
    assert f"other settings: corpus.data_files[0] is {folder}/train.jsonl (" in line


def test_splits_of_another_preparation_need_overwrite(
    source: Path, tmp_path: Path, error_of: ErrorOf, run: Callable[..., Outcome]
) -> None:
    arguments = flags(source, tmp_path)
    assert main([*arguments, "--validation-percent", "20"]) == 0
    shutil.rmtree(tmp_path / "train")
    before = contents(tmp_path)
    line = error_of(arguments)
    assert f"{tmp_path}/validation is not of this preparation, and both were made of {source}/docs.jsonl (" in line
    assert "--overwrite to delete it" in line
    plan = run(main, *arguments, "--overwrite", "--dry-run").out
    assert f"deleted     {tmp_path}/validation: not of this preparation" in plan
    assert contents(tmp_path) == before
    assert main([*arguments, "--overwrite"]) == 0
    assert not [name for name in contents(tmp_path) if name.startswith("validation/")]
    assert len(read_rows(tmp_path / "train")) == read_manifest(str(tmp_path / "train")).totals.num_rows


def test_unfinished_splits_of_another_preparation_are_refused(source: Path, tmp_path: Path, error_of: ErrorOf) -> None:
    assert main(flags(source, tmp_path, "--validation-percent", "20")) == 0
    (tmp_path / "validation" / "manifest.json").rename(tmp_path / "validation" / "plan.json")
    shutil.rmtree(tmp_path / "train")
    assert "validation is not of this preparation" in error_of(flags(source, tmp_path))


def test_splits_of_other_files_stay(source: Path, tmp_path: Path) -> None:
    (tmp_path / "held_out.txt").write_text("another text\n" * 20, encoding="utf-8")
    arguments = flags(source, tmp_path / "out")
    assert main([*arguments, "--validation-files", str(tmp_path / "held_out.txt")]) == 0
    before = contents(tmp_path / "out")
    assert main(arguments) == 0
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize(
    "more", [["--trust-remote-code"], ["--seed", "3"], ["--streaming"], ["--test-files", "{}/held_out.txt"]]
)
@pytest.mark.parametrize("complete", [True, False])
def test_settings_without_influence_on_a_split_may_change(
    source: Path, tmp_path: Path, more: list[str], complete: bool
) -> None:
    (tmp_path / "held_out.txt").write_text("another text\n" * 20, encoding="utf-8")
    arguments = flags(source, tmp_path / "out")
    assert main(arguments) == 0
    train = tmp_path / "out" / "train"
    shard = min(train.glob("*.tfrecord"))
    before = shard.stat().st_mtime_ns
    if not complete:
        (train / "manifest.json").rename(train / "plan.json")
    assert main([*arguments, *(word.format(tmp_path) for word in more)]) == 0
    assert not complete or shard.stat().st_mtime_ns == before
    assert (tmp_path / "out" / "test").exists() == ("--test-files" in more)


def test_unfinished_work_needs_the_same_tokenizers_library(
    source: Path, tmp_path: Path, error_of: ErrorOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = flags(source, tmp_path)
    assert main(arguments) == 0
    train, version = tmp_path / "train", split.version
    (train / "manifest.json").rename(train / "plan.json")
    for library, is_refused in (("tokenizers", True), ("numpy", False)):
        monkeypatch.setattr(split, "version", lambda name, other=library: "99" if name == other else version(name))
        if is_refused:
            assert "versions.tokenizers is " in error_of(arguments)
        else:
            assert main(arguments) == 0


def test_files_are_compared_by_content_not_by_name(
    source: Path, tmp_path: Path, error_of: ErrorOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("here", DOCUMENTS), ("moved", DOCUMENTS), ("other", DOCUMENTS[::-1])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("".join(f"{line}\n" for line in text), encoding="utf-8")
    arguments = flags(source, tmp_path / "out", "--data-files", "a.txt")
    monkeypatch.chdir(tmp_path / "here")
    assert main(arguments) == 0
    before = contents(tmp_path / "out")
    monkeypatch.chdir(tmp_path / "moved")
    assert main(arguments) == 0
    assert contents(tmp_path / "out") == before
    monkeypatch.chdir(tmp_path / "other")
    line = error_of(arguments)
    assert f"corpus.data_files[0] is {tmp_path}/here/a.txt (" in line
    assert f"there, {tmp_path}/other/a.txt (" in line


def test_unfinished_shards_of_other_files_are_refused(source: Path, tmp_path: Path, error_of: ErrorOf) -> None:
    (tmp_path / "other.txt").write_text("another text\n" * 20, encoding="utf-8")
    assert main(flags(source, tmp_path / "out")) == 0
    (tmp_path / "out" / "train" / "manifest.json").rename(tmp_path / "out" / "train" / "plan.json")
    line = error_of(flags(source, tmp_path / "out", "--data-files", str(tmp_path / "other.txt")))
    assert f"there, {tmp_path}/other.txt (260 bytes, " in line


def test_the_corpus_of_the_tokenizer_must_not_have_changed(
    source: Path, tmp_path: Path, error_of: ErrorOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("trained", "elsewhere"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(f"text of {name}\n" * 50, encoding="utf-8")
    monkeypatch.chdir(tmp_path / "trained")
    tokenizer = with_record(source, tmp_path / "tokenizer", data_files=["*.txt"], limit=5)
    monkeypatch.chdir(tmp_path / "elsewhere")
    arguments = of_tokenizer(source, tmp_path / "out", tokenizer)
    assert main(arguments) == 0
    (file,) = read_manifest(str(tmp_path / "out" / "train")).corpus["data_files"]
    assert file["path"] == f"{tmp_path}/trained/a.txt"

    (tmp_path / "trained" / "a.txt").write_text("TEXT of trained\n" * 50, encoding="utf-8")
    line = error_of([*arguments, "--overwrite"])
    assert (
        f"corpus of {tokenizer} has changed since its tokenizer was trained: corpus.data_files[0] is {tmp_path}" in line
    )
    assert "name the corpus to prepare with --data-files" in line
    assert main([*arguments, "--overwrite", "--data-files", str(tmp_path / "trained" / "a.txt")]) == 0


@pytest.fixture
def without_log():
    """pytest-xdist cannot send a log that is not UTF-8."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("without_log")
def test_a_name_that_is_not_utf_8_is_recorded_and_found_again(
    source: Path, tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt")
    Path(path).write_text("".join(f"{line}\n" for line in DOCUMENTS), encoding="utf-8")
    tokenizer = with_record(source, tmp_path / "tokenizer", data_files=[str(tmp_path / "*.txt")])
    arguments = of_tokenizer(source, tmp_path / "out", tokenizer)
    assert main(arguments) == 0
    (file,) = read_manifest(str(tmp_path / "out" / "train")).corpus["data_files"]
    assert file["path"] == path
    assert main(arguments) == 0
    assert "complete with these settings" in capfd.readouterr().out


def prepare_with_hub(hub_server: HubHandle, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tfrecord_prep.prepare_tfrecord_shards", *arguments],
        env=os.environ | hub_server.environment,
        capture_output=True,
        encoding="utf-8",
        timeout=120,
    )


def test_a_data_set_is_read_at_the_commit_of_the_tokenizer(source: Path, tmp_path: Path, hub_server: HubHandle) -> None:
    rows = (source / "docs.jsonl").read_bytes()
    hub_server.put("alice/text", "train.jsonl", rows, "datasets")
    first = hub_server.commit("alice/text", "datasets")
    hub_server.put("alice/text", "train.jsonl", rows * 2, "datasets")
    second = hub_server.commit("alice/text", "datasets")
    tokenizer = tmp_path / "tokenizer"
    shutil.copytree(source / "tokenizer", tokenizer)
    settings = dataclasses.asdict(CorpusConfig(dataset_name="alice/text", dataset_revision=first))
    record = {"corpus": {"settings": settings}}
    (tokenizer / RECORD_FILE).write_text(json.dumps(record), encoding="utf-8")

    done = prepare_with_hub(hub_server, of_tokenizer(source, tmp_path / "out", tokenizer))
    assert done.returncode == 0, done.stderr
    manifest = read_manifest(str(tmp_path / "out" / "train"))
    assert manifest.corpus["settings"]["dataset_revision"] == first
    assert manifest.totals.num_documents == len(DOCUMENTS)

    now = prepare_with_hub(
        hub_server, of_tokenizer(source, tmp_path / "out", tokenizer, "--dataset-name", "alice/text")
    )
    assert now.returncode == 2
    assert f"dataset_revision is '{first}' there, '{second}' is asked for" in now.stderr
    assert f"--dataset-revision {first}" in now.stderr
