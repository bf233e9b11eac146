"""Build partitions in several processes, in order, with few of them in memory at a time."""

import contextlib
import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from tfrecord_prep.partition import PartitionResult, PartitionSettings, build_partition
from tfrecord_prep.plain_text import grouped_by_size
from tokenizer_training.command_line import InputError

# One partition being built and one waiting: a worker never waits for the reader, unless reading is the slower part.
PARTITIONS_PER_WORKER = 2


def build_partitions(
    documents: Iterable[str], settings: PartitionSettings, partition_bytes: int, num_processes: int
) -> Iterator[PartitionResult]:
    """Yield the result of each partition, in order; one process means this one.

    Raises:
        InputError: a document is not valid Unicode, or a worker was killed.
    """
    partitions = enumerate(grouped_by_size(documents, partition_bytes))
    with _single_threaded_tokenizers():
        if num_processes == 1:
            for index, partition in partitions:
                yield build_partition(index, partition, settings)
        else:
            yield from _build_in_pool(partitions, settings, num_processes)


def _build_in_pool(
    partitions: Iterable[tuple[int, list[str]]], settings: PartitionSettings, num_processes: int
) -> Iterator[PartitionResult]:
    # Spawned, since a fork copies the locks of the threads that this process has. Ctrl-C is this process's business.
    pool = ProcessPoolExecutor(
        num_processes,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=signal.signal,
        initargs=(signal.SIGINT, signal.SIG_IGN),
    )
    in_flight: deque[Future[PartitionResult]] = deque()
    try:
        for index, partition in partitions:
            if len(in_flight) == PARTITIONS_PER_WORKER * num_processes:
                yield in_flight.popleft().result()
            in_flight.append(pool.submit(build_partition, index, partition, settings))
        while in_flight:
            yield in_flight.popleft().result()
    except BrokenProcessPool as error:
        raise InputError(
            f"A worker was killed, most likely for want of memory, with {num_processes} at work. "
            "Give fewer --num-workers, or a smaller --partition-bytes."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


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
