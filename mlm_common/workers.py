"""Worker processes that map a function over items, and a worker thread that processes only the most recent item."""

import contextlib
import logging
import math
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from itertools import chain, islice
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from mlm_common.errors import InputError

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Result = TypeVar("Result")

# One item in progress and one in the queue, so that a worker waits only if reading items is the bottleneck.
ITEMS_PER_WORKER = 2
# The longest time until Ctrl-C takes effect while the process waits for a result.
POLL_SECONDS = 0.5


def num_cores(system: Path = Path("/")) -> int:
    """Count the cores that this process may use, limited by its CPU affinity and by the quotas of its containers.

    Args:
        system: root of the file system.
    """
    num_bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = []
    with contextlib.suppress(OSError, ValueError):  # not on Linux, or in an unknown format
        for folder in _control_groups(system):
            quotas += _cpu_quota(folder)
    return max(1, min([num_bound, *map(math.ceil, quotas)]))


def _control_groups(system: Path) -> Iterator[Path]:
    """Yield the folders of the control groups of this process that may have a CPU quota, and of their ancestors.

    See cgroups(7), and proc(5) for mountinfo.
    """
    groups = [line.split(":", 2) for line in (system / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()]
    for line in (system / "proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        before, _, after = line.partition(" - ")
        root, mount_point = before.split()[3:5]
        kind, _, options = after.split()
        for _, controllers, path in groups:
            is_first = kind == "cgroup" and "cpu" in controllers.split(",") and "cpu" in options.split(",")
            if not is_first and (kind != "cgroup2" or controllers):
                continue
            top = system / mount_point.lstrip("/")
            folder = top / path.removeprefix(root.rstrip("/")).lstrip("/")
            yield from [folder, *(parent for parent in folder.parents if parent.is_relative_to(top))]


def _cpu_quota(group: Path) -> list[float]:
    """Return the number of cores that a control group (version 2 or 1) may use; empty if there is no limit."""
    for names in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            quota, period = " ".join((group / name).read_text(encoding="ascii") for name in names).split()
            return [] if quota in ("max", "-1") else [int(quota) / int(period)]
    return []


def map_in_order(
    function: Callable[[Item], Result], items: Iterable[Item], num_processes: int, hint: str
) -> Iterator[Result]:
    """Yield `function(item)` for each item, in order, with `Workers` that exist only for this call."""
    with Workers(num_processes, hint) as workers:
        yield from workers.map_in_order(function, items)


class Workers:
    """Worker processes, which are started when there are items for two of them, and end with the context.

    Args:
        num_processes: number of workers. With 1 the work is done in this process.
        hint: sentence that says what to change if a worker was killed for lack of memory.
    """

    def __init__(self, num_processes: int, hint: str) -> None:
        self._num_processes = num_processes
        self._hint = hint
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)

    def map_in_order(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """Yield `function(item)` for each item, in order.

        A single item is processed in this process unless workers are already running.

        Args:
            function: top-level function of a module, or a `functools.partial` of one.
            items: read as results are consumed, so that at most two items per worker are in memory.

        Raises:
            InputError: a worker was killed.
        """
        items = iter(items)
        with _single_threaded_tokenizers():
            first = list(islice(items, min(self._num_processes, 2)))
            if self._pool is None and len(first) < 2:
                yield from map(function, chain(first, items))
            else:
                yield from self._map_in_pool(function, chain(first, items))

    def _map_in_pool(self, function: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        # Workers are spawned, because a fork would copy the locks of this process's threads.
        self._pool = self._pool or ProcessPoolExecutor(
            self._num_processes, mp_context=multiprocessing.get_context("spawn"), initializer=_begin_worker
        )
        in_flight: deque[Future[Result]] = deque()
        try:
            for item in items:
                if len(in_flight) == ITEMS_PER_WORKER * self._num_processes:
                    yield _result(in_flight.popleft())
                with interrupts_put_off(), _interrupts_blocked(), _without_main_module(function):
                    in_flight.append(self._pool.submit(function, item))
            while in_flight:
                yield _result(in_flight.popleft())
        except BrokenProcessPool as error:
            raise InputError(
                f"One of {self._num_processes} workers was killed, most likely for lack of memory. {self._hint}"
            ) from error


@contextlib.contextmanager
def _without_main_module(function: Callable[..., Any]) -> Iterator[None]:
    """Keep workers started in this context from running the main script again, unless the function is defined in it.

    The script may lack `if __name__ == "__main__"`, or may not be a file at all.
    """
    while isinstance(function, partial):
        function = function.func
    main = sys.modules["__main__"]
    if getattr(function, "__module__", None) != main.__name__:
        sys.modules["__main__"] = ModuleType(main.__name__)
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _result(future: Future[Result]) -> Result:
    """Wait for a result. Ctrl-C takes effect between two waits, because during a wait it could leave a lock held."""
    while True:
        with interrupts_put_off():
            if wait([future], timeout=POLL_SECONDS).done:
                return future.result()


def _begin_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Kill this worker when its parent has ended, so that a restarted run has the folder to itself."""
    parent = multiprocessing.parent_process()
    if parent:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block Ctrl-C. Workers that are started in this context inherit the block until they ignore Ctrl-C."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _single_threaded_tokenizers() -> Iterator[None]:
    """Keep `tokenizers`, here and in processes started in this context, from starting a thread per core."""
    variable = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(variable)
    os.environ[variable] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


@contextlib.contextmanager
def interrupts_put_off() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until the end of the context. Does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []

    def put_off(number: int, _frame: object) -> None:
        received.append(number)

    numbers = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) is not None]
    before = [signal.signal(number, put_off) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
        for received_number in received:
            signal.raise_signal(received_number)


# The time that a command waits for its threads when it ends. This time is longer than a single attempt of Cloud
# Storage's client.
END_SECONDS = 150.0
# The same limit after a shutdown request or an error. The limit is short, because the command may be about to be
# killed.
STOP_SECONDS = 5.0


def seconds_to_end(error_type: type[BaseException] | None) -> float:
    """Return how long a context may wait for its thread when it ends; `error_type` is the exception that ended it."""
    return END_SECONDS if error_type is None else STOP_SECONDS


class LatestItemWorker(Generic[Item]):
    """Calls `handle` in a daemon thread, one item at a time. While it is busy, a new item replaces the waiting one.

    Args:
        handle: processes an item. Exceptions of `handle` are logged, and the thread continues with the next item.

    Attributes:
        newer_waits: set while an item waits, so that `handle` can stop work that the waiting item makes useless.
    """

    def __init__(self, handle: Callable[[Item], None]):
        self.newer_waits = threading.Event()
        self._handle = handle
        self._changed = threading.Condition()
        self._waiting: Item | None = None
        self._is_busy = False
        self._thread: threading.Thread | None = None

    def submit(self, item: Item) -> None:
        """Let the item wait for processing. It replaces an item that is already waiting."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="latest-item", daemon=True)
            self._thread.start()
        with self._changed:
            self._waiting = item
            self.newer_waits.set()
            self._changed.notify_all()

    def drop_waiting(self) -> None:
        """Drop the waiting item, and set `newer_waits` so that the current one ends early."""
        with self._changed:
            self._waiting = None
            self.newer_waits.set()
            self._changed.notify_all()

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until all items are processed; return False after the time-out."""
        with self._changed:
            return self._changed.wait_for(lambda: self._waiting is None and not self._is_busy, timeout_seconds)

    def _work(self) -> None:
        while True:
            item = self._take()
            try:
                self._handle(item)
            except Exception:  # the thread must survive for the next item
                logger.exception("background work failed")
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
            del item  # its memory may be large

    def _take(self) -> Item:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is not None)
            item, self._waiting = self._waiting, None
            self._is_busy = True
            self.newer_waits.clear()
            assert item is not None
            return item
