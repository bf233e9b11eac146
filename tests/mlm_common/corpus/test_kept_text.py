"""The text of the built-in corpus is extracted once: the next command finds it in the user's cache."""

import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from mlm_common.corpus import builtin, kept_text
from mlm_common.corpus.kept_text import cache_folder, keep, read_kept

DOCUMENTS = ("a document\n\nof two paragraphs", "another with ü and \u2028")
PROSE = "Return the words of the sentence in the order in which they were read, and nothing else besides them, {}."


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "mlm-pretraining" / kept_text.FILE_NAME


def test_what_is_kept_is_read_with_its_key_alone(cache: Path) -> None:
    assert read_kept("a") is None
    keep("a", DOCUMENTS)
    assert read_kept("a") == DOCUMENTS
    assert read_kept("b") is None
    keep("b", DOCUMENTS[:1])
    assert (read_kept("a"), read_kept("b")) == (None, DOCUMENTS[:1])
    assert list(cache.parent.iterdir()) == [cache]


@pytest.mark.parametrize("damage", [lambda data: data[:-9], lambda _: b"", lambda data: data[:40] + b"x" + data[41:]])
def test_a_damaged_file_is_as_none(damage: Callable[[bytes], bytes], cache: Path) -> None:
    keep("a", DOCUMENTS)
    cache.write_bytes(damage(cache.read_bytes()))
    assert read_kept("a") is None


def test_a_home_that_cannot_be_written_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be", encoding="utf-8")
    keep("a", DOCUMENTS)
    assert read_kept("a") is None


def test_the_cache_is_in_the_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "mlm-pretraining"


def test_the_corpus_is_extracted_once_and_again_after_a_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "packages" / "module.py"
    module.parent.mkdir()
    module.write_text(f'"""{PROSE.format("first")}"""\n', encoding="utf-8")
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(module.parent))
    monkeypatch.setattr(builtin, "num_cores", lambda: 1)
    extracted = []
    extract = builtin.extract_documents
    monkeypatch.setattr(builtin, "extract_documents", lambda path: extracted.append(path) or extract(path))

    def read() -> tuple[str, ...]:
        builtin.read_builtin_corpus.cache_clear()
        return builtin.read_builtin_corpus()

    try:
        first = read()
        num_files = len(extracted)
        assert first == (PROSE.format("first"),)
        assert read() == first
        assert len(extracted) == num_files
        module.write_text(f'"""{PROSE.format("second, of another length")}"""\n', encoding="utf-8")
        assert read() == (PROSE.format("second, of another length"),)
        assert len(extracted) == 2 * num_files
    finally:
        builtin.read_builtin_corpus.cache_clear()
