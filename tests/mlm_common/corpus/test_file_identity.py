"""A file's identity is that of all its bytes, and is computed once for each of its states."""

import errno
import gzip
import hashlib
import json
import os
import time
from pathlib import Path

import pytest

from mlm_common.corpus import file_identity
from mlm_common.corpus.byte_ranges import ByteRange
from mlm_common.corpus.file_identity import with_checksums
from mlm_common.corpus.shared_text import NO_CONTENT
from mlm_common.corpus.text_files import read_byte_range
from mlm_common.errors import InputError
from mlm_common.storage.reading import StoredFile

CONTENT = b"a line\n" * 50_000


def checksum_of(path: Path) -> str | None:
    (found,) = with_checksums([StoredFile(str(path), path.stat().st_size)])
    return found.checksum


@pytest.fixture
def num_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """List the paths that are hashed, of a user whose cache is empty; any file of an age is remembered."""
    hashed: list[str] = []
    hash_file = file_identity._checksums
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(file_identity, "MIN_REMEMBERED_BYTES", 1)
    monkeypatch.setattr(file_identity, "MIN_AGE_SECONDS", 0.05)
    monkeypatch.setattr(file_identity, "_checksums", lambda path: hashed.append(path) or hash_file(path))
    return hashed


def test_one_byte_changed_in_the_middle_makes_another_file_and_a_copy_does_not(tmp_path: Path) -> None:
    path, middle = tmp_path / "a.txt", len(CONTENT) // 2
    path.write_bytes(CONTENT)
    (tmp_path / "copy.txt").write_bytes(CONTENT)
    before = checksum_of(path)
    assert checksum_of(tmp_path / "copy.txt") == before
    path.write_bytes(CONTENT[:middle] + b"X" + CONTENT[middle + 1 :])
    assert checksum_of(path) != before


def test_a_file_that_stays_is_hashed_once_and_one_with_its_old_time_set_back_again(
    tmp_path: Path, num_hashed: list[str]
) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(CONTENT)
    time.sleep(0.1)
    before, modified = checksum_of(path), path.stat().st_mtime_ns
    assert checksum_of(path) == before
    assert len(num_hashed) == 1
    path.write_bytes(CONTENT.upper())
    os.utime(path, ns=(modified, modified))
    assert checksum_of(path) != before
    assert len(num_hashed) == 2


def test_a_file_that_was_just_written_is_not_remembered(tmp_path: Path, num_hashed: list[str]) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(CONTENT)
    assert checksum_of(path) == checksum_of(path)
    assert len(num_hashed) == 2


def test_without_a_cache_that_can_be_written_files_are_hashed_each_time(tmp_path: Path, num_hashed: list[str]) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(CONTENT)
    (tmp_path / "cache").write_bytes(b"a file in the way")
    time.sleep(0.1)
    assert checksum_of(path) == checksum_of(path)
    assert len(num_hashed) == 2


def test_a_local_file_that_changes_after_it_was_hashed_ends_the_reading(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(CONTENT)
    (file,) = with_checksums([StoredFile(str(path), len(CONTENT))])
    texts = read_byte_range(ByteRange(file), "text", "line")
    assert next(texts) == "a line"
    path.write_bytes(CONTENT.upper())
    with pytest.raises(InputError, match=r"a\.txt changed while it was being read"):
        list(texts)
    with pytest.raises(InputError, match="changed while it was being read"):
        list(read_byte_range(ByteRange(file), "text", "line"))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"must be readable; .*gone\.txt: No such file"):
        with_checksums([StoredFile(str(tmp_path / "gone.txt"), 5)])


@pytest.mark.parametrize("damage", [b"", b"not gzip", gzip.compress(CONTENT)[:-9], gzip.compress(CONTENT) + b"garbage"])
def test_a_damaged_gzip_file_has_no_content_checksum(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(damage)
    (found,) = with_checksums([StoredFile(str(path), len(damage))])
    assert found.checksum == f"sha256 {hashlib.sha256(damage).hexdigest()}"
    assert found.content_checksum in {None, NO_CONTENT}


def test_both_checksums_of_a_gzip_file_are_remembered(
    tmp_path: Path, num_hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(CONTENT))
    monkeypatch.setattr(file_identity, "MIN_AGE_SECONDS", -60.0)
    first, second = (with_checksums([StoredFile(str(path), 0)]) for _ in range(2))
    assert first == second
    assert first[0].content_checksum == f"sha256 {hashlib.sha256(CONTENT).hexdigest()}"
    assert len(num_hashed) == 1
    (remembered,) = (tmp_path / "cache" / "mlm-pretraining" / "checksums").iterdir()
    record = json.loads(remembered.read_text(encoding="utf-8"))
    del record["content_checksum"]  # as an older version left it
    remembered.write_text(json.dumps(record), encoding="utf-8")
    assert with_checksums([StoredFile(str(path), 0)]) == first
    assert len(num_hashed) == 2


@pytest.mark.parametrize("obstacle", ["no home", "a read-only home"])
def test_without_a_home_files_are_hashed_each_time(
    tmp_path: Path, num_hashed: list[str], monkeypatch: pytest.MonkeyPatch, obstacle: str
) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(CONTENT)
    monkeypatch.setattr(file_identity, "MIN_AGE_SECONDS", -60.0)

    def refuse(*_: object, **__: object) -> Path:
        if obstacle == "no home":
            raise RuntimeError("Could not determine home directory.")
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home" if obstacle == "no home" else "mkdir", refuse)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert checksum_of(path) == checksum_of(path)
    assert len(num_hashed) == 2
