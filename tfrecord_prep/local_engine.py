"""Work on the partitions of a split in processes of this machine."""

from collections.abc import Iterable, Iterator
from functools import partial

from tfrecord_prep.partition import SplitWork, work_on_partition
from tfrecord_prep.sidecar import PartitionResult
from tokenizer_training.corpus import Partition
from tokenizer_training.worker_pool import map_in_order


def work_locally(
    work: SplitWork, partitions: Iterable[tuple[int, Partition]], num_processes: int
) -> Iterator[PartitionResult]:
    """Yield the result of each numbered partition, in order; one process means this one.

    Raises:
        InputError: what `work_on_partition` raises, or a worker was killed.
    """
    cure = "Give fewer --num-workers, or a smaller --partition-bytes."
    yield from map_in_order(partial(work_on_partition, work), partitions, num_processes, cure)
