"""The corpus that a tokenizer was trained on: read from beside it, and what of other parts it has seen."""

import json
import logging
from pathlib import Path

import pytest

from tests.fixtures.tiny_corpus import flags, write_source
from tfrecord_prep.prepare_tfrecord_shards import main
from tfrecord_prep.tokenizer_corpus import seen_splits
from tokenizer_training.corpus.config import CorpusConfig
from tokenizer_training.corpus.corpus import open_corpus


def drawn(validation: float = 0, test: float = 0, **more: int) -> CorpusConfig:
    return CorpusConfig(data_files=["a.txt"], validation_percent=validation, test_percent=test, **more)


@pytest.mark.parametrize(
    ("corpus", "seen", "expected"),
    [
        (drawn(), drawn(), []),
        (drawn(20, 20), drawn(20, 20), []),
        (drawn(20, 20), drawn(20), ["test"]),
        (drawn(20, 20), drawn(), ["validation", "test"]),
        (drawn(0, 20), drawn(20), []),
        (drawn(20, 20), drawn(40), []),
        (drawn(20), drawn(10), ["validation"]),
        (drawn(20, 20, seed=1), drawn(20, 20), ["validation", "test"]),
    ],
)
def test_seen_splits(corpus: CorpusConfig, seen: CorpusConfig, expected: list[str], tmp_path: Path) -> None:
    """As they are known from the settings, and as the documents show."""
    assert seen_splits(corpus, seen) == expected
    path = tmp_path / "a.txt"
    path.write_text("".join(f"{number}\n" for number in range(300)))
    opened, opened_seen = (open_corpus(CorpusConfig(**vars(c) | {"data_files": [str(path)]})) for c in (corpus, seen))
    trained_on = set(opened_seen.documents("train"))
    held_out = opened.split_names[1:]
    assert [part for part in held_out if trained_on.intersection(opened.documents(part))] == expected


def test_of_another_corpus_nothing_is_known_to_be_seen() -> None:
    assert seen_splits(drawn(20), CorpusConfig(data_files=["b.txt"])) == []


def test_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = write_source(tmp_path)
    record = {"corpus": {"settings": {"data_files": [str(source / "docs.jsonl")], "validation_percent": 20}}}
    (source / "tokenizer" / "training.json").write_text(json.dumps(record))
    parts = ["--validation-percent", "20", "--test-percent", "20", "--dry-run"]
    with caplog.at_level(logging.WARNING):
        assert main(flags(source, tmp_path / "out", *parts[:2], "--dry-run")) == 0
        assert not caplog.messages
        assert main(flags(source, tmp_path / "out", *parts)) == 0
    (message,) = caplog.messages
    assert "trained on documents of the split `test`" in message
