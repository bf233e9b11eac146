"""The partitions of a split that are still to be worked on, and how far the work is."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mlm_common.corpus.byte_ranges import ByteRange
from mlm_common.corpus.corpus import Corpus, Partition
from tfrecord_prep.partition import NumberedPartition
from tfrecord_prep.split_folder import CompletePartitions

if TYPE_CHECKING:
    from tqdm import tqdm

logger = logging.getLogger(__name__)

# A hundred partitions and more keep all workers busy to the end. Smaller ones would be padded rows and files of a few
# rows; larger ones would be work lost when a worker dies, and memory where documents are sent to the workers.
NUM_PARTITIONS = 128
MIN_DEFAULT_BYTES = 1 << 20
MAX_DEFAULT_BYTES = 64 << 20
DEFAULT_BYTES = 4 << 20  # where nothing tells how large the corpus is
SECONDS_BETWEEN_LINES = 30.0


def default_partition_bytes(corpus: Corpus) -> int:
    """Choose a size of partitions that fits the size of the corpus."""
    num_bytes = sum(file.num_bytes for file in corpus.files(corpus.config.split))
    if not num_bytes or corpus.config.limit:
        return DEFAULT_BYTES
    return min(max(num_bytes // NUM_PARTITIONS, MIN_DEFAULT_BYTES), MAX_DEFAULT_BYTES)


class WorkList:
    """The numbered partitions of a split without the complete ones, once; `sha256` has those of all of them."""

    def __init__(
        self,
        partitions: Iterable[Partition],
        hash_of: Callable[[Partition], str],
        complete: CompletePartitions,
        progress: "SplitProgress",
    ) -> None:
        self._partitions = partitions
        self._hash_of = hash_of
        self._complete = complete
        self._progress = progress
        self._num_bytes: dict[int, int] = {}
        self.sha256: dict[int, str] = {}

    def __iter__(self) -> Iterator[NumberedPartition]:
        for index, partition in enumerate(self._partitions):
            self.sha256[index] = sha256 = self._hash_of(partition)
            num_bytes = num_partition_bytes(partition)
            if self._complete.keep(index, sha256):
                self._progress.skip(num_bytes)
            else:
                self._num_bytes[index] = num_bytes
                yield NumberedPartition(index, sha256, partition)

    def finish(self, index: int, num_tokens: int) -> None:
        """Count partition number `index` as complete."""
        self._progress.add(self._num_bytes.pop(index), num_tokens)


def num_partition_bytes(partition: Partition) -> int:
    """Measure a partition: its documents in UTF-8, or its byte ranges as stored."""
    return sum(item.num_bytes if isinstance(item, ByteRange) else len(item.encode()) for item in partition)


def total_bytes(corpus: Corpus, split_name: str, partition_bytes: int) -> int | None:
    """Sum the sizes of the partitions; None where only reading them would tell."""
    if not corpus.has_byte_ranges(split_name, partition_bytes):
        return None
    return sum(file.num_bytes for file in corpus.files(split_name)) or None


@contextmanager
def split_progress(split_name: str, total_bytes: int | None) -> Iterator["SplitProgress"]:
    """Give the progress of a split, shown from now on until the end."""
    from tqdm import tqdm

    # Without smoothing the rate is a mean, so that what was skipped has no part in it.
    with tqdm(desc=split_name, total=total_bytes, unit="B", unit_scale=True, smoothing=0, disable=None) as bar:
        progress = SplitProgress(split_name, total_bytes, None if bar.disable else bar)
        yield progress
    if bar.disable:
        progress.log_line()


class SplitProgress:
    """Bytes of the corpus done, of `total_bytes` where that is known; rates and estimates are those of this run."""

    def __init__(self, split_name: str, total_bytes: int | None, bar: "tqdm | None") -> None:
        self._split_name = split_name
        self._total_bytes = total_bytes
        self._bar = bar
        self._started_seconds = self._line_seconds = time.monotonic()
        self._num_bytes_before = 0
        self._num_bytes = 0
        self._num_tokens = 0

    def skip(self, num_bytes: int) -> None:
        """Count what an earlier run has done."""
        self._num_bytes_before += num_bytes
        if self._bar is not None:
            self._bar.initial += num_bytes
            self._bar.update(num_bytes)

    def add(self, num_bytes: int, num_tokens: int) -> None:
        """Count what this run has done."""
        self._num_bytes += num_bytes
        self._num_tokens += num_tokens
        if self._bar is not None:
            self._bar.set_postfix_str(self._tokens_per_second(), refresh=False)
            self._bar.update(num_bytes)
        elif time.monotonic() - self._line_seconds >= SECONDS_BETWEEN_LINES:
            self._line_seconds = time.monotonic()
            self.log_line()

    def log_line(self) -> None:
        """Log how far the split is."""
        logger.info("%s: %s, %s%s", self._split_name, self._share(), self._tokens_per_second(), self._estimate())

    def _share(self) -> str:
        num_bytes = self._num_bytes_before + self._num_bytes
        if self._total_bytes:
            return f"{100 * num_bytes / self._total_bytes:.0f} % of {self._total_bytes / 1e6:,.1f} MB"
        return f"{num_bytes / 1e6:,.1f} MB"

    def _tokens_per_second(self) -> str:
        return f"{self._num_tokens / self._seconds():,.0f} tokens/s"

    def _estimate(self) -> str:
        num_bytes_left = (self._total_bytes or 0) - self._num_bytes_before - self._num_bytes
        if num_bytes_left <= 0 or not self._num_bytes:
            return ""
        return f", {num_bytes_left / self._num_bytes * self._seconds() / 60:,.1f} minutes left"

    def _seconds(self) -> float:
        return max(time.monotonic() - self._started_seconds, 1e-3)
