"""A run whose bucket takes everything but the log: it trains on, saves, stops in time, and its log is completed."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mlm_common.errors import EXIT_STOPPED
from tests.campaign.processes import Processes
from tests.fixtures.same_run import timeless_lines
from tests.fixtures.tiny_run import run_flags
from tests.servers.fixtures import CloudStorageHandle

MODULE = "train.run_mlm"
FILES = r"metrics\.jsonl|loss\.png|tensorboard"


def wait_until(is_so: Callable[[], bool]) -> None:
    end_seconds = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < end_seconds
        time.sleep(0.05)


def newest_step(cloud_storage: CloudStorageHandle) -> int:
    names = [name.rpartition("/")[2] for name in cloud_storage.objects()]
    return max((int(name[5:13]) for name in names if name.startswith("step-") and name.endswith(".json")), default=0)


@pytest.mark.slow
def test_a_run_trains_on_and_stops_in_time_while_its_log_stalls(
    shards: Path, cloud_storage: CloudStorageHandle, tmp_path: Path
) -> None:
    url = f"{cloud_storage.bucket_url}/run"
    more = ("--max-steps", "3000", "--log-steps", "1", "--eval-steps", "100", "--save-steps", "5")
    flags = run_flags(shards, url, *more)
    with Processes(tmp_path, cloud_storage.environment) as processes:
        process = processes.start(MODULE, flags)
        wait_until(lambda: newest_step(cloud_storage) > 0)
        cloud_storage.fault(FILES, mode="hold", times=10**6)
        step = newest_step(cloud_storage)
        wait_until(lambda: newest_step(cloud_storage) >= step + 20)
        process.send(signal.SIGTERM)
        asked_seconds = time.monotonic()
        assert process.wait(60) == EXIT_STOPPED, process.output[-3000:]
        assert time.monotonic() - asked_seconds < 15
        assert "the log is not complete" in process.errors
        cloud_storage.release()
        step = newest_step(cloud_storage)
        process = processes.start(MODULE, [*flags, "--max-steps", str(step + 1)])
        assert process.wait() == 0, process.output[-3000:]
    (tmp_path / "metrics.jsonl").write_bytes(cloud_storage.objects()["run/metrics.jsonl"])
    lines = timeless_lines(tmp_path)
    assert [line["step"] for line in lines if line["split"] == "train"] == list(range(1, step + 2))
