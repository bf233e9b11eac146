"""Work in processes and threads: same bytes as in one, few in memory, killed workers and parents, newest items."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from functools import partial
from operator import methodcaller
from pathlib import Path

import pytest

from mlm_common.errors import InputError
from mlm_common.workers import ITEMS_PER_WORKER, LatestItemWorker, Workers, map_in_order, num_cores
from tests.fixtures.partitions import split_work
from tests.fixtures.tiny_corpus import contents
from tfrecord_prep.partition import NumberedPartition, SplitWork, work_on_partition

PROJECT = Path(__file__).parents[2]
DOCUMENT = "11 12 13 12 11 12"


def work_locally(work: SplitWork, partitions: Iterable[NumberedPartition], num_processes: int) -> Iterator[int]:
    return map_in_order(partial(work_on_partition, work), partitions, num_processes, "Use fewer --num-workers.")


def test_two_processes_write_the_same_files_in_the_same_order(tmp_path):
    partitions = [NumberedPartition(number, "", [DOCUMENT[3 * (number % 5) :]] * 4) for number in range(8)]
    for num_processes in (1, 2):
        work = split_work(tmp_path / str(num_processes))
        assert list(work_locally(work, partitions, num_processes)) == list(range(8))
    assert contents(tmp_path / "1") == contents(tmp_path / "2")
    assert "TOKENIZERS_PARALLELISM" not in os.environ


# A call of the item: processes import nothing for it.
PROCESS_OF = methodcaller("__call__")


def test_processes_are_started_once_and_for_two_items_at_least():
    with Workers(2, "") as workers:
        assert list(workers.map_in_order(PROCESS_OF, [os.getpid])) == [os.getpid()]
        assert not multiprocessing.active_children()
        passes = [set(workers.map_in_order(PROCESS_OF, [os.getpid] * num_items)) for num_items in (20, 1, 20)]
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
    with pytest.raises(InputError, match=r"One of 2 workers was killed.*fewer --num-workers"):
        list(results)


# Without `if __name__ == "__main__"`, with work of a module.
UNGUARDED = """
from operator import methodcaller
from mlm_common.workers import map_in_order

print(list(map_in_order(methodcaller("upper"), ["a", "b", "c"], 2, "")))
"""


@pytest.mark.parametrize("is_file", [True, False])
def test_workers_do_not_run_the_script_again(is_file, tmp_path):
    """Nor do they look for the file of one that is read from standard input."""
    script = tmp_path / "program.py"
    script.write_text(UNGUARDED, encoding="utf-8")
    arguments = [str(script)] if is_file else ["-"]
    environment = os.environ | {"PYTHONPATH": str(PROJECT)}
    with script.open("rb") as file:
        done = subprocess.run(
            [sys.executable, *arguments], stdin=file, env=environment, capture_output=True, check=True
        )
    assert (done.stdout, done.stderr) == (b"['A', 'B', 'C']\n", b"")


V1_GROUPS = "4:memory:/box\n3:cpu,cpuacct:/box/inner\n1:name=systemd:/\n0::/\n"
V1_MOUNTS = """\
20 1 0:5 / / rw - ext4 /dev/sda rw
32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory
"""
V2_MOUNT = "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"


@pytest.mark.parametrize(
    ("groups", "mounts", "files", "num"),
    [
        ("", "", {}, 8),
        ("0::/\n", V2_MOUNT.format(root="/"), {"cpu.max": "200000 100000\n"}, 2),
        ("0::/\n", V2_MOUNT.format(root="/"), {"cpu.max": "50000 100000\n"}, 1),
        ("0::/a/b\n", V2_MOUNT.format(root="/"), {"a/cpu.max": "250000 100000", "a/b/cpu.max": "max 100000"}, 3),
        # Docker without a namespace for control groups.
        ("0::/docker/1f\n", V2_MOUNT.format(root="/docker/1f"), {"cpu.max": "400000 100000"}, 4),
        (
            V1_GROUPS,
            V1_MOUNTS,
            {"cpu,cpuacct/box/cpu.cfs_quota_us": "150000\n", "cpu,cpuacct/box/cpu.cfs_period_us": "50000\n"},
            3,
        ),
        ("0::/\n", V2_MOUNT.format(root="/"), {"cpu.max": "of another kernel"}, 8),
    ],
)
def test_the_quota_of_a_container_counts_as_its_cores(groups, mounts, files, num, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    described = {"proc/self/cgroup": groups, "proc/self/mountinfo": mounts}
    for name, content in (described | {f"sys/fs/cgroup/{name}": content for name, content in files.items()}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content, encoding="utf-8")
    assert num_cores(tmp_path) == num
    assert num_cores(tmp_path / "nothing") == 8


NOTES_PROCESS = """
import os, time
from pathlib import Path
from mlm_common.workers import map_in_order

def note_process_and_wait(_):
    Path("{folder}", str(os.getpid())).touch()
    time.sleep(60)

if __name__ == "__main__":
    list(map_in_order(note_process_and_wait, range(2), 2, ""))
"""


def test_workers_end_when_their_parent_is_killed(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(NOTES_PROCESS.format(folder=str(tmp_path)), encoding="utf-8")
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


class Handler:
    """Handles an item when the test lets it."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.ended: list[int] = []
        self.started, self.may_end = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, item: int) -> None:
        self.begun.append(item)
        self.started.release()
        assert self.may_end.acquire(timeout=20)
        if item < 0:
            raise ValueError(item)
        self.ended.append(item)


def test_of_those_that_wait_the_newest_is_handled():
    handler = Handler()
    pushes = LatestItemWorker(handler)
    pushes.submit(1)
    handler.started.acquire()
    assert not pushes.newer_waits.is_set()
    for item in (2, 3, 4):
        pushes.submit(item)
    assert pushes.newer_waits.is_set()
    assert not pushes.wait(0.01)
    handler.may_end.release(2)
    assert pushes.wait(20)
    assert handler.ended == [1, 4]


def test_what_waits_can_be_dropped_and_what_fails_ends_nothing():
    handler = Handler()
    pushes = LatestItemWorker(handler)
    pushes.submit(-1)
    handler.started.acquire()
    pushes.submit(2)
    pushes.drop_waiting()
    assert pushes.newer_waits.is_set()
    handler.may_end.release()
    assert pushes.wait(20)
    pushes.submit(3)
    handler.may_end.release()
    assert pushes.wait(20)
    assert (handler.begun, handler.ended) == ([-1, 3], [3])
