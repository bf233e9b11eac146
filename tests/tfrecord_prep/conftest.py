"""A tiny corpus, and the command on it."""

from pathlib import Path

import pytest

from tests.fixtures.run_command import Run
from tests.fixtures.tiny_corpus import flags, write_source
from tfrecord_prep.prepare_tfrecord_shards import main


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of corpus and tokenizer, which no test changes."""
    return write_source(tmp_path_factory.mktemp("source"))


@pytest.fixture
def prepare(source: Path, run: Run) -> Run:
    """Run the command with an output folder and more flags."""
    return lambda output, *extra_flags: run(main, *flags(source, output), *extra_flags)
