"""Records of a corpus: what tells its text from any other, and what does not."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mlm_common.corpus.config import CorpusConfig
from mlm_common.corpus.corpus import open_corpus
from mlm_common.corpus.record import (
    describe_changed_sources,
    describe_changes,
    describe_unknown,
    record_of_split,
)
from tests.servers.fixtures import CloudStorageHandle

COMMIT, OTHER_COMMIT = "a1" * 20, "b2" * 20


def record_of(*files: Path | str, split: str = "train", **settings: Any) -> dict[str, Any]:
    """Record a corpus of files, for one of its splits, as JSON gives it back."""
    record = open_corpus(CorpusConfig(data_files=list(map(str, files)), **settings)).record
    return json.loads(json.dumps(record_of_split(record, split)))


def on_hub(split: str = "train", **settings: Any) -> dict[str, Any]:
    config = CorpusConfig(dataset_name="a/b", **{"dataset_revision": COMMIT} | settings)
    return record_of_split({"settings": vars(config)}, split)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"{name}.txt" for name in "abc"]
    for path in paths:
        path.write_text(f"text of {path.stem}\n" * 10, encoding="utf-8")
    return paths


def test_the_same_text_elsewhere_is_the_same_corpus_and_another_text_of_that_size_is_not(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = record_of(*files[:2])
    (tmp_path / "moved").mkdir()
    for path in files[:2]:
        shutil.copy(path, tmp_path / "moved")
    monkeypatch.chdir(tmp_path / "moved")
    moved = record_of("?.txt")
    assert [file["path"] for file in moved["data_files"]] == [f"{tmp_path}/moved/{name}.txt" for name in "ab"]
    assert moved["settings"]["data_files"] == [f"{tmp_path}/moved/?.txt"]
    assert describe_changes(before, moved) == ""
    Path("b.txt").write_text("TEXT of b\n" * 10, encoding="utf-8")
    changes = describe_changes(before, record_of("?.txt"))
    assert f"corpus.data_files[1] is {files[1]} (100 bytes, sha256 " in changes
    assert f" there, {tmp_path}/moved/b.txt (100 bytes, sha256 " in changes


def test_an_object_uploaded_again_is_the_same_corpus(cloud: CloudStorageHandle) -> None:
    def record() -> dict[str, Any]:
        return record_of(f"{cloud.bucket_url}/a.txt")

    cloud.put("a.txt", b"text\n")
    before = record()
    cloud.put("a.txt", b"text\n")
    assert record()["data_files"][0]["generation"] != before["data_files"][0]["generation"]
    assert describe_changes(before, record()) == ""
    cloud.put("a.txt", b"TEXT\n")
    assert "(5 bytes, crc32c " in describe_changes(before, record())


def test_files_added_or_in_another_order_make_another_corpus(files: list[Path]) -> None:
    before = record_of(*files[:2])
    assert "data_files[2] is missing there" in describe_changes(before, record_of(*files))
    assert "data_files[0] is " in describe_changes(before, record_of(files[1], files[0]))
    assert describe_changes(before, record_of(*reversed(files[:2]))).endswith(", and 1 more")


@pytest.mark.parametrize("settings", [{"streaming": True}, {"trust_remote_code": True}, {"seed": 5}])
def test_settings_without_influence_are_not_recorded_of_a_split(files: list[Path], settings: dict[str, Any]) -> None:
    assert record_of(files[0], **settings) == record_of(files[0])


def test_held_out_files_are_of_their_own_split_alone(files: list[Path]) -> None:
    more = {"validation_files": [str(files[1])], "test_files": [str(files[2])]}
    assert record_of(files[0], **more) == record_of(files[0])
    assert record_of(files[0], split="validation", limit=3, **more) == record_of(
        files[2], split="validation", validation_files=[str(files[1])]
    )
    assert record_of(files[0], test_percent=10) != record_of(files[0])
    drawn = record_of(files[0], test_percent=10, validation_files=[str(files[1])])
    assert drawn == record_of(files[0], test_percent=10, split="test")


def test_a_data_set_of_another_commit_is_another_corpus_and_the_cure_is_named() -> None:
    changes = describe_changes(on_hub(), on_hub(dataset_revision=OTHER_COMMIT))
    assert f"dataset_revision is '{COMMIT}' there, '{OTHER_COMMIT}' is asked for" in changes
    assert f"--dataset-revision {COMMIT}" in changes
    assert describe_changes(on_hub(), on_hub(streaming=True, test_split="test")) == ""


def test_records_of_0_2_0_are_compared_as_far_as_they_tell(files: list[Path]) -> None:
    new = record_of(*files[:2])
    old = new | {"settings": {"data_files": ["*.txt"]}}
    old["data_files"] = [{"name": "a.txt", "num_bytes": 100, "fingerprint": "blake2b 00"} for _ in range(2)]
    assert describe_changes(old, new) == ""
    assert describe_unknown(old) == "the content of its files"
    assert describe_unknown(new) == ""
    old["data_files"][1]["num_bytes"] = 99
    assert "data_files[1] is a.txt (99 bytes, blake2b 00) there" in describe_changes(old, new)
    old_hub = {"settings": {"dataset_name": "a/b", "dataset_revision": None}}
    assert describe_changes(record_of_split(old_hub, "train"), on_hub()) == ""
    assert describe_unknown(old_hub) == "the commit of the data set"


def test_settings_of_a_later_version_are_differences() -> None:
    later = {"settings": {"dataset_name": "a/b", "dataset_revision": COMMIT, "novelty": 1}}
    assert "corpus.settings.novelty is 1 there, None is asked for" in describe_changes(
        record_of_split(later, "train"), on_hub()
    )


def test_sources_that_were_asked_for_otherwise_are_not_compared(files: list[Path]) -> None:
    def whole(validation_file: Path) -> dict[str, Any]:
        return open_corpus(
            CorpusConfig(data_files=[str(files[0])], validation_files=[str(validation_file)], limit=3)
        ).record

    trained_on = whole(files[1])
    assert describe_changed_sources(trained_on, whole(files[2])) == ""
    files[1].write_text("changed\n", encoding="utf-8")
    assert "validation_files[0] is " in describe_changed_sources(trained_on, whole(files[1]))
