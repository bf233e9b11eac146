"""Which local files a pattern names: each once, whatever its names, and none without a word."""

from pathlib import Path

import pytest

from mlm_common.corpus.config import CorpusConfig
from mlm_common.corpus.corpus import open_corpus
from mlm_common.corpus.text_files import find_files
from mlm_common.errors import InputError


def names(*patterns: Path | str) -> list[str]:
    return [file.name for file in find_files(list(map(str, patterns)), "--data-files")]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("a.txt", "sub/b.txt", "sub/deep/c.txt", "sub/.hidden/d.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_file_is_read_once_whatever_its_names(folder):
    (folder / "link.txt").symlink_to("a.txt")
    corpus = open_corpus(CorpusConfig(data_files=["a.txt", "./a.txt", "sub/../a.txt", "*.txt", str(folder / "a.txt")]))
    assert list(corpus.documents("train")) == ["text of a.txt"]
    assert [file["path"] for file in corpus.record["data_files"]] == [f"{folder}/a.txt"]


def test_links_that_loop_lead_to_each_folder_once(folder):
    (folder / "sub" / "up").symlink_to("..")
    (folder / "sub" / "deep" / "top").symlink_to(folder)
    expected = ["a.txt", "sub/b.txt", "sub/deep/c.txt"]
    assert names(folder / "**" / "*.txt") == [f"{folder}/{name}" for name in expected]
    assert names(folder / "**") == [f"{folder}/{name}" for name in expected]
    assert names("sub/**/*.txt", "**/deep/**") == ["sub/b.txt", "sub/deep/c.txt", "sub/up/a.txt"]


def test_links_to_folders_are_followed(folder):
    (folder / "data").mkdir()
    (folder / "data" / "linked").symlink_to(folder / "sub")
    assert names("data/**/*.txt") == ["data/linked/b.txt", "data/linked/deep/c.txt"]
    assert names("data/*/*.txt") == ["data/linked/b.txt"]


@pytest.mark.parametrize("pattern", ["*.txt", "**/*.txt", "gone.txt"])
def test_a_link_to_nothing_is_refused(folder, pattern):
    (folder / "gone.txt").symlink_to("nowhere.txt")
    with pytest.raises(InputError, match=r"gone\.txt is a link to nowhere\.txt, which does not exist"):
        names(pattern)


def test_a_pattern_names_the_same_files_from_any_folder(folder, monkeypatch):
    special = folder / "[x] *"
    special.mkdir()
    (special / "e.txt").write_text("text\n", encoding="utf-8")
    monkeypatch.chdir(special)
    for pattern in ("e.txt", "*.txt", "../**/e.txt"):
        settings = open_corpus(CorpusConfig(data_files=[pattern])).config
        monkeypatch.chdir(folder)
        assert list(open_corpus(settings).documents("train")) == ["text"]
        monkeypatch.chdir(special)
