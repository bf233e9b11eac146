"""Records of a corpus: what tells its text from any other, what does not, and text that two splits share."""

import gzip
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from mlm_common.corpus import identity
from mlm_common.corpus.config import CorpusConfig
from mlm_common.corpus.corpus import open_corpus
from mlm_common.corpus.identity import (
    NO_CONTENT,
    Part,
    describe_changes,
    describe_shared_text,
    keep,
    published_corpus,
    recall,
    record_of_split,
    with_checksums,
)
from mlm_common.corpus.text_files import ByteRange, read_byte_range
from mlm_common.errors import InputError
from mlm_common.storage.reading import StoredFile

COMMIT, OTHER_COMMIT = "a1" * 20, "b2" * 20
CONTENT = b"a line\n" * 50_000
TEXTS = ["a document\n\nof two paragraphs", "another with ü and \u2028"]


def record_of(*files: Path | str, split: str = "train", **settings: Any) -> dict[str, Any]:
    """Record a corpus of files, for one of its splits, as JSON gives it back."""
    record = open_corpus(CorpusConfig(data_files=list(map(str, files)), **settings)).record
    return json.loads(json.dumps(record_of_split(record, split)))


def on_hub(split: str = "train", name: str = "a/b", **settings: Any) -> dict[str, Any]:
    config = CorpusConfig(dataset_name=name, **{"dataset_revision": COMMIT} | settings)
    return record_of_split({"settings": vars(config)}, split)


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Return the paths of a.txt, b.txt and c.txt, each with other text."""
    paths = [tmp_path / f"{name}.txt" for name in "abc"]
    for path in paths:
        path.write_text(f"text of {path.stem}\n" * 10, encoding="utf-8")
    return paths


def test_a_corpus_is_known_by_content_not_by_place(files, tmp_path, monkeypatch):
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
    assert f" there, but {tmp_path}/moved/b.txt (100 bytes, sha256 " in changes


def test_an_object_uploaded_again_is_the_same_corpus(cloud):
    def record() -> dict[str, Any]:
        return record_of(f"{cloud.bucket_url}/a.txt")

    cloud.put("a.txt", b"text\n")
    before = record()
    cloud.put("a.txt", b"text\n")
    assert record()["data_files"][0]["generation"] != before["data_files"][0]["generation"]
    assert describe_changes(before, record()) == ""
    cloud.put("a.txt", b"TEXT\n")
    assert "(5 bytes, crc32c " in describe_changes(before, record())


def test_files_added_or_in_another_order_make_another_corpus(files):
    before = record_of(*files[:2])
    assert "data_files[2] is missing there" in describe_changes(before, record_of(*files))
    assert "data_files[0] is " in describe_changes(before, record_of(files[1], files[0]))
    assert describe_changes(before, record_of(*reversed(files[:2]))).endswith(", and 1 more")


def test_held_out_files_are_of_their_own_split_alone(files):
    held_out = {"validation_files": [str(files[1])], "test_files": [str(files[2])]}
    assert record_of(files[0], **held_out) == record_of(files[0])
    assert record_of(files[0], split="validation", limit=3, **held_out) == record_of(
        files[2], split="validation", validation_files=[str(files[1])]
    )
    assert record_of(files[0], test_percent=10) != record_of(files[0])
    drawn = record_of(files[0], test_percent=10, validation_files=[str(files[1])])
    assert drawn == record_of(files[0], test_percent=10, split="test")


def test_another_commit_is_another_corpus_with_a_hint():
    changes = describe_changes(on_hub(), on_hub(dataset_revision=OTHER_COMMIT))
    assert f"dataset_revision is '{COMMIT}' there, but '{OTHER_COMMIT}' is requested" in changes
    assert f"--dataset-revision {COMMIT}" in changes
    assert describe_changes(on_hub(), on_hub(streaming=True, test_split="test")) == ""


def checksum_of(path: Path) -> str | None:
    (file,) = with_checksums([StoredFile(str(path), path.stat().st_size)])
    return file.checksum


@pytest.fixture
def num_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """List the paths that are hashed, of a user whose cache is empty; files of any size and age are remembered."""
    hashed: list[str] = []
    hash_file = identity._checksums
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(identity, "MIN_REMEMBERED_BYTES", 1)
    monkeypatch.setattr(identity, "MIN_AGE_SECONDS", -60.0)
    monkeypatch.setattr(identity, "_checksums", lambda path: hashed.append(path) or hash_file(path))
    return hashed


def test_a_file_is_hashed_once_for_each_of_its_states(tmp_path, num_hashed):
    path = tmp_path / "a.txt"
    path.write_bytes(CONTENT)
    before, modified = checksum_of(path), path.stat().st_mtime_ns
    assert checksum_of(path) == before
    assert len(num_hashed) == 1
    path.write_bytes(CONTENT.upper())
    os.utime(path, ns=(modified, modified))
    assert checksum_of(path) != before
    assert len(num_hashed) == 2


def test_a_file_that_changes_after_hashing_is_refused(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(CONTENT)
    (file,) = with_checksums([StoredFile(str(path), len(CONTENT))])
    texts = read_byte_range(ByteRange(file), CorpusConfig())
    assert next(texts) == "a line"
    path.write_bytes(CONTENT.upper())
    with pytest.raises(InputError, match=r"a\.txt changed while it was being read"):
        list(texts)
    with pytest.raises(InputError, match="changed while it was being read"):
        list(read_byte_range(ByteRange(file), CorpusConfig()))


@pytest.mark.parametrize("damage", [b"", b"not gzip", gzip.compress(CONTENT)[:-9], gzip.compress(CONTENT) + b"garbage"])
def test_a_damaged_gzip_file_has_no_content_checksum(tmp_path, damage):
    path = tmp_path / "a.txt.gz"
    path.write_bytes(damage)
    (file,) = with_checksums([StoredFile(str(path), len(damage))])
    assert file.checksum == f"sha256 {hashlib.sha256(damage).hexdigest()}"
    assert file.content_checksum in {None, NO_CONTENT}


@pytest.mark.parametrize("name", ["a.gz", "folder/a.gz"])
def test_what_is_kept_is_read_with_its_key_alone(name, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    left = tmp_path / "mlm-pretraining" / Path(name).with_name(".a.gz.killed.partial")
    left.parent.mkdir(parents=True)
    left.touch()
    assert recall(name, 1) is None
    keep(name, 1, TEXTS)
    assert (recall(name, 1), recall(name, 2)) == (TEXTS, None)
    keep(name, 2, TEXTS[:1])
    assert (recall(name, 1), recall(name, 2)) == (None, TEXTS[:1])
    (path,) = (path for path in tmp_path.rglob("*") if path.is_file())
    content = path.read_bytes()
    for damaged in (content[:-9], b"", content[:40] + b"x" + content[41:]):
        path.write_bytes(damaged)
        assert recall(name, 2) is None


# Text that two splits share: found by content, commit and draw, whatever the names of files and folders.


def part_of(*files: Path | str, split: str = "train", **settings: Any) -> Part:
    return Part(record_of(*files, split=split, **settings), split)


def part_on_hub(split: str = "train", **settings: Any) -> Part:
    return Part(on_hub(split, **settings), split)


def builtin(part: str = "train", python: str = "3.11", **settings: Any) -> Part:
    config = CorpusConfig(dataset_name="builtin", **settings)
    return Part({"settings": vars(config), "builtin": {"python": python}}, part)


def published(part: Part) -> Part:
    return Part(published_corpus(part.corpus), part.split)


def names_a_file(shared: str) -> bool:
    return shared.startswith("both were made from /") and "bytes, sha256 " in shared


@pytest.fixture
def gz_copy(files: list[Path]) -> Path:
    """A copy of `a.txt` under another name, in two gzip members."""
    path, content = files[0].with_name("copy.txt.gz"), files[0].read_bytes()
    path.write_bytes(gzip.compress(content[:7]) + gzip.compress(content[7:], 1))
    return path


def test_splits_of_one_draw_or_of_other_sources_share_nothing(files, gz_copy):
    drawn = {"validation_percent": 10.0}
    train = part_of(files[0], **drawn)
    assert describe_shared_text(train, part_of(files[0], split="validation", **drawn)) == ""
    assert describe_shared_text(train, part_of(gz_copy, split="validation", **drawn)) == ""
    assert describe_shared_text(train, part_of(files[0], split="validation", validation_percent=5.0)) == ""
    assert describe_shared_text(train, part_of(files[1], split="test", test_percent=5.0)) == ""
    assert describe_shared_text(part_on_hub(), part_on_hub("test", test_split="test")) == ""
    assert describe_shared_text(part_on_hub(), train) == ""
    assert describe_shared_text(builtin(**drawn), builtin("validation", **drawn)) == ""


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_split_shares_all_its_text_with_itself(files, split):
    first, second = (part_of(files[0], split=split, validation_percent=10.0) for _ in range(2))
    assert describe_shared_text(first, second).startswith(f"both are the split `{split}` of {files[0]} (100 bytes, ")
    assert describe_shared_text(published(first), published(second)).startswith(f"both are the split `{split}` of")
    assert "of a/b" in describe_shared_text(*(part_on_hub(split, validation_percent=5.0) for _ in range(2)))
    assert "of builtin" in describe_shared_text(*(builtin(split, validation_percent=5.0) for _ in range(2)))


def test_files_that_both_were_made_of_are_found(files):
    train = part_of(*files[:2])
    copy = files[0].with_name("copy.txt")
    shutil.copy(files[1], copy)
    for other in (
        part_of(*files[:2], split="validation", validation_percent=10.0),
        part_of(*files[:2], limit=5),
        part_of(files[2], split="validation", validation_files=[str(copy)]),
    ):
        assert names_a_file(describe_shared_text(train, other))
    files[0].write_text("another state of that file", encoding="utf-8")
    assert names_a_file(describe_shared_text(train, part_of(files[0], split="test", test_percent=5.0)))


def test_draws_that_overlap_share_text(files):
    validation = part_of(files[0], split="validation", validation_percent=10.0)
    for settings in ({"test_percent": 5.0}, {"validation_percent": 5.0}, {"seed": 1, "validation_percent": 10.0}):
        assert describe_shared_text(part_of(files[0], **settings), validation)
    paragraphs = part_of(files[0], validation_percent=10.0, sample_by="paragraph")
    assert describe_shared_text(paragraphs, validation), "documents are cut otherwise, so drawn otherwise"


def test_a_compressed_copy_is_found_by_its_content(files, gz_copy):
    for pair in ((files[0], gz_copy), (gz_copy, files[0])):
        first, second = map(part_of, pair)
        assert f"or a copy of it, {pair[1]}" in describe_shared_text(first, second)
        assert names_a_file(describe_shared_text(first, second))
        assert describe_shared_text(published(first), published(second))
    again = gz_copy.with_name("again.txt.gz")
    again.write_bytes(gzip.compress(files[0].read_bytes(), 9))
    assert describe_shared_text(part_of(gz_copy), part_of(again))
    assert describe_shared_text(part_of(gz_copy), part_of(files[1])) == ""


def test_data_sets_of_the_hub_are_known_by_commit_and_split():
    assert (
        describe_shared_text(part_on_hub(), part_on_hub("validation", validation_percent=5.0))
        == "both were made from a/b"
    )
    assert describe_shared_text(part_on_hub(), part_on_hub("test", test_split="test", dataset_revision=OTHER_COMMIT))
    assert describe_shared_text(part_on_hub(), part_on_hub("validation", name="moved/b", validation_percent=5.0))
    assert describe_shared_text(part_on_hub(), part_on_hub(name="a/c", dataset_revision=OTHER_COMMIT)) == ""


def test_splits_with_redacted_paths_are_compared_by_content(files):
    train, other = (published(part_of(file)) for file in files[:2])
    assert describe_shared_text(train, other) == ""
    assert describe_shared_text(train, published(part_of(files[0], test_percent=5.0))).startswith(
        "both were made from ("
    )
    folders = [{"settings": vars(CorpusConfig(dataset_name=f"/{name}")), "data_files": []} for name in "ab"]
    assert describe_shared_text(*(published(Part(folder, "train")) for folder in folders)) == ""


@pytest.mark.parametrize("copy", ["b.txt", "a.txt.gz", "link.txt"])
def test_a_held_out_file_is_no_copy_of_one_that_is_trained_on(tmp_path, monkeypatch, copy):
    monkeypatch.chdir(tmp_path)
    content = b"some text\n"
    Path("a.txt").write_bytes(content)
    if copy.startswith("link"):
        Path(copy).symlink_to("a.txt")
    else:
        Path(copy).write_bytes(gzip.compress(content) if copy.endswith(".gz") else content)
    for split in ("validation", "test"):
        config = CorpusConfig(data_files=["a.txt"], **{f"{split}_files": [copy]})
        with pytest.raises(InputError, match=rf"`train` and `{split}` must not share text; .*, {tmp_path}/{copy}\."):
            open_corpus(config)
