"""A disk that becomes full: what is there does not look complete, and the run resumes once there is room."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from mlm_common.errors import InputError
from tests.fixtures.tiny_corpus import contents, flags, write_source
from tfrecord_prep.manifest import open_shards
from tfrecord_prep.prepare_tfrecord_shards import main

SCRIPT = Path(__file__).parents[2] / "tfrecord_prep" / "prepare_tfrecord_shards.py"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("source"))


def check_not_completed(status: int, errors: str, reason: str, folder: Path) -> None:
    assert status == 1, errors
    (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert re.search(rf"/train was not completed: .*{reason}.*run the same command again: it resumes from there", line)
    with pytest.raises(InputError, match="did not end"):
        open_shards(str(folder / "train"))


def test_full_disk(source: Path, tmp_path: Path) -> None:
    """A disk with room for the plan, the tokenizer, and two partitions of four (files take whole pages of 4 kB)."""
    disk, copy = tmp_path / "disk", tmp_path / "copy"
    disk.mkdir()
    arguments = flags(source, disk, "--num-workers", "2")
    mount = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    shell = f'mount -t tmpfs -o size=112k none {disk} && "$@"; status=$?; cp -r {disk} {copy}; exit $status'
    if subprocess.run([*mount, f"mount -t tmpfs none {disk}"], capture_output=True).returncode:
        pytest.skip("needs the right to mount; test_file_that_becomes_too_large shows the same without it")
    done = subprocess.run([*mount, shell, "-", sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True)
    check_not_completed(done.returncode, done.stderr, "No space left on device", copy)
    assert list((copy / "train").glob("partition-*.json"))
    assert main(flags(source, copy)) == 0
    assert main(flags(source, tmp_path / "fresh")) == 0
    assert contents(copy) == contents(tmp_path / "fresh")


def test_file_that_becomes_too_large(source: Path, tmp_path: Path) -> None:
    arguments = flags(source, tmp_path, "--shard-size", "100", "--partition-bytes", "8000")
    limited = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({7_000}, {7_000})); "
    limited += f"import runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    command = [sys.executable, "-c", limited, str(SCRIPT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    check_not_completed(done.returncode, done.stderr, "File too large", tmp_path)
