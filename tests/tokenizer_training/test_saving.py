"""A trained tokenizer is never lost because its folder cannot be written to."""

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from google.cloud.storage.retry import DEFAULT_RETRY

from mlm_common.errors import EXIT_FAILED, EXIT_PERMANENT
from mlm_common.storage.local import LocalFolder
from tests.servers.fixtures import CloudStorageHandle
from tokenizer_training import train_unigram
from tokenizer_training.train_unigram import main

FILES = {"report.json", "report.png", "tokenizer.json", "tokenizer_config.json", "training.json", "word_starts.npy"}
UPLOAD = "/upload/"


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[], object]], int]:
    """Run the command to save in a folder, with something that happens once the tokenizer is trained."""
    (tmp_path / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 50, encoding="utf-8")
    monkeypatch.setattr(train_unigram, "SAVE_RETRY_SECONDS", (0.01, 0.01))
    monkeypatch.setattr(DEFAULT_RETRY, "_timeout", 0.3)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def run(folder: str, then: Callable[[], object]) -> int:
        report_on = train_unigram.report_on

        def fail_from_now_on(*arguments: object) -> object:
            then()
            return report_on(*arguments)

        monkeypatch.setattr(train_unigram, "report_on", fail_from_now_on)
        corpus = ["--data-files", str(tmp_path / "corpus.txt"), "--sample-by", "line"]
        return main([*corpus, "--num-workers", "1", "--output-dir", folder])

    return run


def kept_files(error: str) -> set[str]:
    """List the files in the folder that the error names."""
    (folder,) = re.findall(r"It is kept in ([^;]+); copy it by hand: ", error)
    return {path.name for path in Path(folder).iterdir()}


def test_an_outage_while_saving_is_outlived(
    train: Callable[..., int], cloud: CloudStorageHandle, tmp_path: Path
) -> None:
    def fail_for_a_while() -> None:
        for status in (410, 409):
            cloud.fault(UPLOAD, method="POST", status=status)

    assert train(f"{cloud.bucket_url}/tokenizer", fail_for_a_while) == 0
    assert {name.removeprefix("tokenizer/") for name in cloud.objects()} >= FILES
    assert not list(tmp_path.glob("tokenizer-*"))


@pytest.mark.parametrize(("answer", "status"), [(503, EXIT_FAILED), (403, EXIT_PERMANENT)])
def test_a_tokenizer_that_cloud_storage_does_not_take_is_kept_and_named(
    train: Callable[..., int],
    cloud: CloudStorageHandle,
    answer: int,
    status: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fail = lambda: cloud.fault(UPLOAD, method="POST", status=answer, times=1000)  # noqa: E731
    assert train(f"{cloud.bucket_url}/tokenizer", fail) == status
    error = capsys.readouterr().err.splitlines()[-1]
    assert kept_files(error) >= FILES
    assert "gcloud storage cp " in error


def test_a_tokenizer_for_which_the_disk_has_no_room_is_kept_and_named(
    train: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "file")

    assert train(str(tmp_path / "out"), lambda: monkeypatch.setattr(LocalFolder, "_publish", fill)) == EXIT_FAILED
    error = capsys.readouterr().err.splitlines()[-1]
    assert "No space left on device" in error
    assert kept_files(error) >= FILES
