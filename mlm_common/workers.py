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

# One item being worked on and one waiting: a worker never waits for the reader, unless reading is the slower part.
ITEMS_PER_WORKER = 2
# The longest that Ctrl-C waits for a result.
POLL_SECONDS = 0.5


def num_cores(system: Path = Path("/")) -> int:
    """Count the cores that this process may use: those it is bound to, and no more than the quotas of its containers.

    `system` is the root of the file system.
    """
    num_bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = []
    with contextlib.suppress(OSError, ValueError):  # not on Linux, or in a form that we do not know
        for folder in _control_groups(system):
            quotas += _cpu_quota(folder)
    return max(1, min([num_bound, *map(math.ceil, quotas)]))


def _control_groups(system: Path) -> Iterator[Path]:
    """Yield the folder of each control group of this process that may have a CPU quota, and those above it.

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
            yield from [folder, *(one for one in folder.parents if one.is_relative_to(top))]


def _cpu_quota(group: Path) -> list[float]:
    """Read how many cores a control group may use, of version 2 or 1; empty if as many as there are."""
    for names in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            quota, period = " ".join((group / name).read_text(encoding="ascii") for name in names).split()
            return [] if quota in ("max", "-1") else [int(quota) / int(period)]
    return []


def map_in_order(
    function: Callable[[Item], Result], items: Iterable[Item], num_processes: int, hint: str
) -> Iterator[Result]:
    """Yield `function(item)` for each item, in order, as `Workers` that are needed once."""
    with Workers(num_processes, hint) as workers:
        yield from workers.map_in_order(function, items)


class Workers:
    """Worker processes, started when there is work for two; they end with the context.

    Args:
        num_processes: how many; one means this process.
        hint: what to change if a worker was killed for lack of memory.
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
        """Yield `function(item)` for each item, in order; a single one is worked on here, if no worker waits for it.

        Args:
            function: a function of a module, or a `functools.partial` of one.
            items: taken as results leave, so that at most two a worker are held.

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
        # Spawned, since a fork copies the locks of the threads that this process has.
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
                f"A worker was killed, most likely for lack of memory, with {self._num_processes} at work. {self._hint}"
            ) from error


@contextlib.contextmanager
def _without_main_module(function: Callable[..., Any]) -> Iterator[None]:
    """Let workers that are started meanwhile not run the script of this process again, unless the function is from it.

    It may do its work without `if __name__ == "__main__"`, or be no file.
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
    """Wait for a result; Ctrl-C takes effect between two waits: within a call of a future it may leave a lock taken."""
    while True:
        with interrupts_put_off():
            if wait([future], timeout=POLL_SECONDS).done:
                return future.result()


def _begin_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Kill this worker when its parent is killed: a restarted run must have the folder to itself."""
    parent = multiprocessing.parent_process()
    if parent:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block Ctrl-C: a worker that is started meanwhile inherits that, until it ignores Ctrl-C."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _single_threaded_tokenizers() -> Iterator[None]:
    """Keep `tokenizers`, here and in processes started meanwhile, from starting a thread per core."""
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
    """Delay Ctrl-C and SIGTERM until the end; outside the main thread they take effect elsewhere anyway."""
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


# How long a command waits for its threads at its end: longer than one try of Cloud Storage's client.
END_SECONDS = 150.0
# After a stop or an error: whoever stopped the command may be about to kill it.
STOP_SECONDS = 5.0


def seconds_to_end(error_type: type[BaseException] | None) -> float:
    """Return how long a context may wait for its thread, by the exception that ends the context."""
    return END_SECONDS if error_type is None else STOP_SECONDS


class LatestItemWorker(Generic[Item]):
    """Calls `handle` in a daemon thread, one item at a time; while it is busy, a newer item replaces the waiting one.

    `newer_waits` is set while an item waits, so that `handle` can end early what the next item makes useless.

    Args:
        handle: its exceptions are logged, and the next item follows.
    """

    def __init__(self, handle: Callable[[Item], None]):
        self.newer_waits = threading.Event()
        self._handle = handle
        self._changed = threading.Condition()
        self._waiting: Item | None = None
        self._is_busy = False
        self._thread: threading.Thread | None = None

    def submit(self, item: Item) -> None:
        """Handle the item next, instead of the one that waits."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="latest-item", daemon=True)
            self._thread.start()
        with self._changed:
            self._waiting = item
            self.newer_waits.set()
            self._changed.notify_all()

    def drop_waiting(self) -> None:
        """Drop the item that waits, and let the current one end early."""
        with self._changed:
            self._waiting = None
            self.newer_waits.set()
            self._changed.notify_all()

    def wait(self, timeout_seconds: float | None = None) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self._waiting is None and not self._is_busy, timeout_seconds)

    def _work(self) -> None:
        while True:
            item = self._take()
            try:
                self._handle(item)
            except Exception:  # the thread must survive for the next item
                logger.exception("work in the background failed")
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
