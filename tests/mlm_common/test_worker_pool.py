"""Partitions in processes: same bytes as in one, few in memory, killed workers and killed parents."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

import pytest

from mlm_common.errors import InputError
from mlm_common.workers import ITEMS_PER_WORKER, Workers, map_in_order
from tests.fixtures.partitions import split_work
from tfrecord_prep.partition import NumberedPartition, SplitWork, work_on_partition

PROJECT = Path(__file__).parents[2]
DOCUMENT = "11 12 13 12 11 12"


def work_locally(work: SplitWork, partitions: Iterable[NumberedPartition], num_processes: int) -> Iterator[int]:
    return map_in_order(partial(work_on_partition, work), partitions, num_processes, "Use fewer --num-workers.")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_two_processes_write_the_same_files_in_the_same_order(tmp_path):
    partitions = [NumberedPartition(number, "", [DOCUMENT[3 * (number % 5) :]] * 4) for number in range(8)]
    for num_processes in (1, 2):
        work = split_work(tmp_path / str(num_processes))
        assert list(work_locally(work, partitions, num_processes)) == list(range(8))
    assert contents(tmp_path / "1") == contents(tmp_path / "2")
    assert "TOKENIZERS_PARALLELISM" not in os.environ


def process_of(_: object) -> int:
    return os.getpid()


def test_processes_are_started_once_and_for_two_items_at_least():
    with Workers(2, "") as workers:
        assert list(workers.map_in_order(process_of, range(1))) == [os.getpid()]
        assert not multiprocessing.active_children()
        passes = [set(workers.map_in_order(process_of, range(num_items))) for num_items in (20, 1, 20)]
        assert len(set().union(*passes)) <= 2
        assert os.getpid() not in set().union(*passes)
    assert not multiprocessing.active_children()


def test_reading_stays_a_few_partitions_ahead(tmp_path):
    num_read = 0

    def partitions() -> Iterator[NumberedPartition]:
        nonlocal num_read
        for number in range(100):
            num_read += 1
            yield NumberedPartition(number, "", [DOCUMENT])

    results = work_locally(split_work(tmp_path), partitions(), 2)
    next(results)
    assert num_read == 2 * ITEMS_PER_WORKER + 1  # those in flight, and the one that had to wait
    results.close()
    assert not multiprocessing.active_children()


def test_a_killed_worker_is_reported_with_a_hint(tmp_path):
    def partitions() -> Iterator[NumberedPartition]:
        for number in range(1000):
            if number == 20:
                for worker in multiprocessing.active_children():
                    worker.kill()
            yield NumberedPartition(number, "", [DOCUMENT])

    results = work_locally(split_work(tmp_path), partitions(), 2)
    with pytest.raises(InputError, match=r"A worker was killed.*fewer --num-workers"):
        list(results)


def note_process_and_wait(folder: str) -> None:
    Path(folder, f"{os.getpid()}").touch()
    time.sleep(60)


def test_workers_end_when_their_parent_is_killed(tmp_path):
    program = (
        "from tests.mlm_common.test_worker_pool import note_process_and_wait as work\n"
        "from mlm_common.workers import map_in_order\n"
        f"if __name__ == '__main__': list(map_in_order(work, [{str(tmp_path)!r}] * 2, 2, ''))"
    )
    script = tmp_path / "program.py"
    script.write_text(program, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(PROJECT)}
    parent = subprocess.Popen([sys.executable, str(script)], env=environment, stderr=subprocess.DEVNULL)
    wait_for(lambda: len(list(tmp_path.iterdir())) == 3)
    workers = [int(path.name) for path in tmp_path.iterdir() if path.name.isdigit()]
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_for(lambda: not any(is_running(worker) for worker in workers))


def is_running(process_id: int) -> bool:
    try:
        return Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition) -> None:
    end_seconds = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end_seconds
        time.sleep(0.05)
