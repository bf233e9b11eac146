"""Text that two splits share: found by content, commit and draw, whatever the names of files and folders."""

import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mlm_common.corpus.config import CorpusConfig
from mlm_common.corpus.corpus import open_corpus
from mlm_common.corpus.identity import (
    Part,
    describe_possibly_shared_text,
    describe_shared_text,
    published_corpus,
    record_of_split,
)
from mlm_common.errors import InputError

COMMIT, OTHER_COMMIT = "a1" * 20, "b2" * 20


def part_of(*files: Path | str, split: str = "train", **settings: Any) -> Part:
    """Record a corpus of files, for one of its splits, as a manifest does."""
    record = open_corpus(CorpusConfig(data_files=list(map(str, files)), **settings)).record
    return Part(json.loads(json.dumps(record_of_split(record, split))), split)


def on_hub(split: str = "train", name: str = "a/b", **settings: Any) -> Part:
    config = CorpusConfig(dataset_name=name, **{"dataset_revision": COMMIT} | settings)
    return Part(record_of_split({"settings": vars(config)}, split), split)


def builtin(part: str = "train", python: str = "3.11", **settings: Any) -> Part:
    config = CorpusConfig(dataset_name="builtin", **settings)
    return Part({"settings": vars(config), "builtin": {"python": python}}, part)


def published(part: Part) -> Part:
    return Part(published_corpus(part.corpus), part.split)


def names_a_file(shared: str) -> bool:
    return shared.startswith("both were made of /") and "bytes, sha256 " in shared


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
    assert describe_shared_text(on_hub(), on_hub("test", test_split="test")) == ""
    assert describe_shared_text(on_hub(), train) == ""
    assert describe_shared_text(builtin(**drawn), builtin("validation", **drawn)) == ""


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_split_shares_all_its_text_with_itself(files, split):
    one, other = (part_of(files[0], split=split, validation_percent=10.0) for _ in range(2))
    assert describe_shared_text(one, other).startswith(f"both are the split `{split}` of {files[0]} (100 bytes, ")
    assert describe_shared_text(published(one), published(other)).startswith(f"both are the split `{split}` of")
    assert "of a/b" in describe_shared_text(*(on_hub(split, validation_percent=5.0) for _ in range(2)))
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
        one, other = map(part_of, pair)
        assert f"or a copy of it, {pair[1]}" in describe_shared_text(one, other)
        assert names_a_file(describe_shared_text(one, other))
        assert describe_shared_text(published(one), published(other))
    again = gz_copy.with_name("again.txt.gz")
    again.write_bytes(gzip.compress(files[0].read_bytes(), 9))
    assert describe_shared_text(part_of(gz_copy), part_of(again))
    assert describe_shared_text(part_of(gz_copy), part_of(files[1])) == ""


def test_data_sets_of_the_hub_are_known_by_commit_and_split():
    assert describe_shared_text(on_hub(), on_hub("validation", validation_percent=5.0)) == "both were made of a/b"
    assert describe_shared_text(on_hub(), on_hub("test", test_split="test", dataset_revision=OTHER_COMMIT))
    assert describe_shared_text(on_hub(), on_hub("validation", name="moved/b", validation_percent=5.0))
    assert describe_shared_text(on_hub(), on_hub(name="a/c", dataset_revision=OTHER_COMMIT)) == ""


def test_the_builtin_text_is_one_under_any_split_name():
    assert describe_shared_text(builtin(), builtin("validation", split="validation"))
    drawn = {"validation_percent": 5.0}
    assert describe_shared_text(builtin(**drawn), builtin("validation", python="3.12", **drawn))


def test_splits_with_redacted_paths_are_compared_by_content(files):
    train, other = (published(part_of(file)) for file in files[:2])
    assert describe_shared_text(train, other) == ""
    assert describe_possibly_shared_text(train, other) == ""
    assert describe_shared_text(train, published(part_of(files[0], test_percent=5.0))).startswith("both were made of (")
    folders = [{"settings": vars(CorpusConfig(dataset_name=f"/{name}")), "data_files": []} for name in "ab"]
    assert describe_shared_text(*(published(Part(folder, "train")) for folder in folders)) == ""


def test_what_checksums_cannot_tell_is_named(files, cloud):
    local = part_of(files[0])
    cloud.put("a.txt", files[0].read_bytes())
    cloud.put("a.txt.gz", gzip.compress(files[0].read_bytes()))
    cloud.put("b.txt", files[0].read_bytes())
    cloud.put("other/a.txt", b"another size\n")
    for name in ("a.txt", "a.txt.gz"):
        reason = describe_possibly_shared_text(local, part_of(f"{cloud.bucket_url}/{name}"))
        assert reason == f"the checksums of {files[0]} and {cloud.bucket_url}/{name} cannot be compared"
    for name in ("b.txt", "other/a.txt"):
        assert describe_possibly_shared_text(local, part_of(f"{cloud.bucket_url}/{name}")) == ""
    drawn = {"validation_percent": 10.0}
    held_out = part_of(f"{cloud.bucket_url}/a.txt", split="validation", **drawn)
    assert describe_possibly_shared_text(part_of(files[0], **drawn), held_out) == ""
    assert describe_possibly_shared_text(local, part_of(files[1])) == ""


def test_configurations_of_a_data_set_may_share_text():
    reason = "they are of the configurations en and None of a/b"
    assert describe_possibly_shared_text(on_hub(dataset_config="en"), on_hub()) == reason
    assert describe_possibly_shared_text(on_hub(dataset_config="en"), on_hub("test", test_split="test")) == ""


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


def test_empty_files_are_no_copies(files):
    empty = [files[0].with_name(name) for name in ("1.txt.gz", "2.txt.gz", "3.txt")]
    for path in empty:
        path.write_bytes(gzip.compress(b"") if path.suffix == ".gz" else b"")
    for one, other in ((empty[0], empty[1]), (empty[0], empty[2]), (empty[2], empty[2])):
        held_out = part_of(files[1], split="validation", validation_files=[str(other), str(files[2])])
        assert describe_shared_text(part_of(files[0], one), held_out) == ""
