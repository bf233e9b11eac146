"""The partitions of a split: how large they are, and which of them are still to be worked on."""

from collections.abc import Collection, Iterator, Mapping

from tfrecord_prep.split_progress import SplitProgress
from tokenizer_training.corpus import Corpus, Partition
from tokenizer_training.text_files import Stretch

# A hundred partitions and more keep all workers busy to the end. Smaller ones would be padded rows and files of a few
# rows; larger ones would be work lost when a worker dies, and memory where documents are sent to the workers.
NUM_PARTITIONS = 128
MIN_DEFAULT_BYTES = 1 << 20
MAX_DEFAULT_BYTES = 64 << 20
DEFAULT_BYTES = 4 << 20  # where nothing tells how large the corpus is


class WorkList:
    """The numbered partitions of a split without the complete ones, once; `num_partitions` counts all of them."""

    def __init__(
        self, corpus: Corpus, split_name: str, partition_bytes: int, complete: Collection[int], progress: SplitProgress
    ) -> None:
        self._partitions = corpus.partitions(split_name, partition_bytes)
        self._file_sizes = file_sizes(corpus, split_name)
        self._complete = complete
        self._progress = progress
        self._num_bytes: dict[int, int] = {}
        self.num_partitions = 0

    def __iter__(self) -> Iterator[tuple[int, Partition]]:
        for index, partition in enumerate(self._partitions):
            self.num_partitions += 1
            num_bytes = num_partition_bytes(partition, self._file_sizes)
            if index in self._complete:
                self._progress.skip(num_bytes)
            else:
                self._num_bytes[index] = num_bytes
                yield index, partition

    def finish(self, index: int, num_tokens: int) -> None:
        """Count partition number `index` as complete."""
        self._progress.add(self._num_bytes.pop(index), num_tokens)


def file_sizes(corpus: Corpus, split_name: str) -> dict[str, int]:
    """Return name -> size in bytes of the files that are read for a split; none where there are no files."""
    source = corpus.sources.get(split_name, corpus.sources[corpus.config.split])
    return {file.name: file.num_bytes for file in source.files or ()}


def total_bytes(corpus: Corpus, split_name: str, partition_bytes: int) -> int | None:
    """Return the sum of the partitions' sizes; None where only reading them would tell."""
    if not corpus.has_stretches(split_name, partition_bytes):
        return None
    return sum(file_sizes(corpus, split_name).values()) or None


def default_partition_bytes(corpus: Corpus) -> int:
    """Return a size of partitions that fits the size of the corpus."""
    num_bytes = sum(file_sizes(corpus, corpus.config.split).values())
    if not num_bytes or corpus.config.limit:
        return DEFAULT_BYTES
    return min(max(num_bytes // NUM_PARTITIONS, MIN_DEFAULT_BYTES), MAX_DEFAULT_BYTES)


def num_partition_bytes(partition: Partition, file_sizes: Mapping[str, int]) -> int:
    """Return the size of a partition: of its documents in UTF-8, or of its stretches as stored."""
    num_bytes = 0
    for item in partition:
        if isinstance(item, Stretch):
            num_bytes += file_sizes[item.name] if item.stop is None else item.stop - item.start
        else:
            num_bytes += len(item.encode())
    return num_bytes
