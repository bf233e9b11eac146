"""A trained tokenizer is never lost because its folder cannot be written to."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from google.cloud.storage.retry import DEFAULT_RETRY

from mlm_common.errors import EXIT_FAILED, EXIT_PERMANENT
from tests.fixtures.run_command import Outcome, Run
from tests.fixtures.tiny_models import tiny_tokenizer
from tokenizer_training import train_unigram
from tokenizer_training.train_unigram import main

FILES = {"report.json", "report.png", "tokenizer.json", "tokenizer_config.json", "training.json", "word_starts.npy"}
UPLOAD = "/upload/"


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> Run:
    """Run the command to save in a folder, and call a function once the tokenizer, the same each time, is trained."""
    (tmp_path / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 50, encoding="utf-8")
    monkeypatch.setattr(train_unigram, "SAVE_RETRY_SECONDS", (0.01, 0.01))
    monkeypatch.setattr(DEFAULT_RETRY, "_timeout", 0.3)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def train_then(folder: str, then: Callable[[], object]) -> Outcome:
        def report_and_fail_from_now_on(*_: object) -> tuple[dict, bytes]:
            then()
            return {}, b"a picture"

        monkeypatch.setattr(train_unigram, "train", lambda *_: tiny_tokenizer())
        monkeypatch.setattr(train_unigram, "report_on", report_and_fail_from_now_on)
        corpus = ["--data-files", tmp_path / "corpus.txt", "--sample-by", "line"]
        return run(main, *corpus, "--num-workers", 1, "--output-dir", folder)

    return train_then


def kept_files(error: str) -> set[str]:
    """List the files in the folder that the error names."""
    (folder,) = re.findall(r"It is kept in (\S+)\. Copy it by hand: ", error)
    return {path.name for path in Path(folder).iterdir()}


def test_an_outage_while_saving_is_survived(train, cloud, tmp_path):
    def fail_for_a_while() -> None:
        for status in (410, 409):
            cloud.fault(UPLOAD, method="POST", status=status)

    assert train(f"{cloud.bucket_url}/tokenizer", fail_for_a_while).status == 0
    assert {name.removeprefix("tokenizer/") for name in cloud.objects()} >= FILES
    assert not list(tmp_path.glob("tokenizer-*"))


@pytest.mark.parametrize(("answer", "status"), [(503, EXIT_FAILED), (403, EXIT_PERMANENT)])
def test_a_tokenizer_that_cloud_storage_refuses_is_kept_and_named(train, cloud, answer, status):
    fail = lambda: cloud.fault(UPLOAD, method="POST", status=answer, times=1000)  # noqa: E731
    failed = train(f"{cloud.bucket_url}/tokenizer", fail)
    assert failed.status == status
    assert kept_files(failed.error) >= FILES
    assert "gcloud storage cp " in failed.error
