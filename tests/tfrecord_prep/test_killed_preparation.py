"""A preparation that is killed at any moment and run again ends with the bytes of one that never was."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fixtures.tiny_corpus import WORDS, contents, flags, write_source
from tests.servers.fixtures import CloudStorageHandle
from tfrecord_prep.prepare_tfrecord_shards import main

SCRIPT = Path(__file__).parents[2] / "tfrecord_prep" / "prepare_tfrecord_shards.py"
SIZES = ["--partition-bytes", "1024", "--shard-size", "20", "--num-workers", "2", "--validation-percent", "20"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_source(tmp_path_factory.mktemp("source"))
    generator = random.Random(0)
    lines = (" ".join(generator.choices(WORDS, k=generator.randrange(40))) + "\n" for _ in range(1200))
    (folder / "docs.txt").write_text("".join(lines))  # 120 kB
    return folder


def arguments_for(source: Path, output: Path | str) -> list[str]:
    return flags(source, output, "--data-files", str(source / "docs.txt"), *SIZES)


def start(arguments: list[str], environment: dict[str, str] | None = None) -> subprocess.Popen:
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.Popen(
        command, env=os.environ | (environment or {}), start_new_session=True, stdout=subprocess.PIPE, text=True,
        stderr=subprocess.STDOUT,
    )  # fmt: skip


def finish(process: subprocess.Popen) -> None:
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output


def kill_after(process: subprocess.Popen, seconds: float, with_workers: bool) -> bool:
    """Kill the command after so many seconds; return whether it was still at work."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        (os.killpg if with_workers else os.kill)(process.pid, signal.SIGKILL)
    process.communicate()
    return process.returncode != 0


@pytest.fixture(scope="module")
def never_killed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bytes], float]:
    """Return the files of a run that was never killed, and its seconds."""
    folder = tmp_path_factory.mktemp("never-killed")
    started_seconds = time.monotonic()
    finish(start(arguments_for(source, folder)))
    seconds = time.monotonic() - started_seconds
    files = contents(folder)
    assert len(files) > 200
    return files, seconds


@pytest.mark.parametrize("num_kills", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_and_resumed(
    source: Path, tmp_path: Path, never_killed: tuple[dict[str, bytes], float], num_kills: int
) -> None:
    expected, seconds = never_killed
    generator = random.Random(num_kills)
    arguments = arguments_for(source, tmp_path / "out")
    for number in range(num_kills):
        was_killed = kill_after(start(arguments), generator.uniform(0.2, 1) * seconds, with_workers=number % 4 != 3)
        if not was_killed:
            assert contents(tmp_path / "out") == expected
            shutil.rmtree(tmp_path / "out")
    finish(start(arguments))
    assert contents(tmp_path / "out") == expected


@pytest.mark.slow
def test_killed_and_resumed_on_faulty_cloud_storage(
    source: Path, tmp_path: Path, cloud_storage: CloudStorageHandle
) -> None:
    sizes = ["--partition-bytes", "1024", "--num-workers", "2"]
    assert main(flags(source, tmp_path, *sizes)) == 0
    expected = {f"run/{name}": data for name, data in contents(tmp_path).items()}
    environment = {"STORAGE_EMULATOR_HOST": cloud_storage.url, "NO_PROXY": "127.0.0.1"}
    arguments = flags(source, f"{cloud_storage.bucket_url}/run", *sizes)
    modes = {"lost_answer": 0, "reset": 0, "status": 503}
    for number, (mode, status) in enumerate(modes.items()):
        process = start(arguments, environment)
        cloud_storage.fault("^/upload/", mode=mode, status=status)
        cloud_storage.fault("run/train", mode=mode, status=status)  # another request for an object
        wait_for(lambda: process.poll() is not None or len(cloud_storage.objects()) >= 6 * number + 4)  # noqa: B023
        kill_after(process, 0.0, with_workers=True)
        assert "run/train/manifest.json" not in cloud_storage.objects()
    cloud_storage.fault("^/upload/", status=429)
    finish(start(arguments, environment))
    assert cloud_storage.objects() == expected
    taken = [(entry["fault"], entry["status"]) for entry in cloud_storage.requests() if entry["fault"] != "none"]
    assert {mode for mode, _ in taken} == set(modes)
    assert {503, 429} <= {status for _, status in taken}


def wait_for(condition: Callable[[], bool]) -> None:
    end_seconds = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end_seconds
        time.sleep(0.05)
