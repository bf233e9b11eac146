"""A disk that takes no more; `tests/campaign/` has the one that is full."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from mlm_common.errors import InputError
from tests.fixtures.tiny_corpus import flags, write_source
from tfrecord_prep.manifest import open_shards

SCRIPT = Path(__file__).parents[2] / "tfrecord_prep" / "prepare_tfrecord_shards.py"


def test_a_file_that_becomes_too_large_leaves_nothing_complete(tmp_path: Path) -> None:
    arguments = flags(write_source(tmp_path), tmp_path, "--shard-size", "100", "--partition-bytes", "8000")
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({7_000}, {7_000})); "
    limited += f"import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    command = [sys.executable, "-c", limited, str(SCRIPT), *arguments]
    done = subprocess.run(command, capture_output=True, encoding="utf-8")
    assert done.returncode == 1, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    said = "/train was not completed: .*File too large.*run the same command again: it resumes from there"
    assert re.search(said, line)
    with pytest.raises(InputError, match="did not end"):
        open_shards(str(tmp_path / "train"))
