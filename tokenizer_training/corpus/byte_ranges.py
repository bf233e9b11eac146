"""Byte ranges of a corpus's files: units of work for many readers, and a sample whose cost its size does not change."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise

from mlm_common.storage.reading import StoredFile
from tokenizer_training.corpus.passages import grouped

# Read one after the other from a disk or in one request each, where seeking takes a small part of the time.
SAMPLE_BLOCK_BYTES = 8 << 20
# Fewer groups than these, when one of them is a large file that cannot be cut, would leave workers without work.
MIN_GROUPS = 16
# So that a small sample, too, is from all over the corpus.
MIN_SAMPLE_BLOCKS = 64


@dataclass(frozen=True)
class ByteRange:
    """The rows of a file that begin in bytes [start, stop), each to its end; the whole file where `stop` is None."""

    file: StoredFile
    start: int = 0
    stop: int | None = None

    @property
    def num_bytes(self) -> int:
        """Its size as stored."""
        return (self.file.num_bytes if self.stop is None else self.stop) - self.start


def can_be_cut(file: StoredFile, sample_by: str) -> bool:
    """Tell whether rows of the file can be read without those before: each ends with a line."""
    return file.name.endswith(".jsonl") or (file.name.endswith(".txt") and sample_by == "line")


def cut_file(file: StoredFile, sample_by: str, max_bytes: int) -> list[ByteRange]:
    """Cut the file into ranges of about equal size, at most `max_bytes` each; one that cannot be cut stays whole."""
    if file.num_bytes <= max_bytes or not can_be_cut(file, sample_by):
        return [ByteRange(file)]
    num_ranges = -(-file.num_bytes // max_bytes)
    borders = [file.num_bytes * number // num_ranges for number in range(num_ranges + 1)]
    return [ByteRange(file, start, stop) for start, stop in pairwise(borders)]


def group_byte_ranges(files: Sequence[StoredFile], sample_by: str, max_bytes: int) -> Iterator[list[ByteRange]]:
    """Yield the files in order, in groups of at most `max_bytes`; a file that is larger and cannot be cut is a group.

    A large file's ranges are groups by themselves, small files come together.
    """
    ranges = (byte_range for file in files for byte_range in cut_file(file, sample_by, max_bytes))
    return grouped(((byte_range, byte_range.num_bytes) for byte_range in ranges), max_bytes)


def is_for_few_workers(files: Sequence[StoredFile], sample_by: str, max_bytes: int) -> bool:
    """Tell whether the groups are few, and one is larger than `max_bytes` because its file cannot be cut."""
    if all(file.num_bytes <= max_bytes or can_be_cut(file, sample_by) for file in files):
        return False
    groups = islice(group_byte_ranges(files, sample_by, max_bytes), MIN_GROUPS)
    return sum(1 for _ in groups) < MIN_GROUPS


def draw_byte_ranges(files: Sequence[StoredFile], sample_by: str, num_bytes: int, seed: int) -> list[ByteRange] | None:
    """Draw about `num_bytes` of the files, in ranges from all over them, in order; the same for the same seed.

    Of the files one after the other, as if they were one, a block is drawn from each of equally long sections. None
    where they have no more bytes than that, or one of them cannot be cut.
    """
    total_bytes = sum(file.num_bytes for file in files)
    if total_bytes <= num_bytes or not all(can_be_cut(file, sample_by) for file in files):
        return None
    block_bytes = max(1, min(SAMPLE_BLOCK_BYTES, num_bytes // MIN_SAMPLE_BLOCKS))
    num_blocks = -(-total_bytes // block_bytes)
    num_drawn = min(num_blocks, -(-num_bytes // block_bytes))
    generator = random.Random(seed)
    sections = [num_blocks * number // num_drawn for number in range(num_drawn + 1)]
    blocks = [generator.randrange(first, after) for first, after in pairwise(sections)]
    return list(_ranges_of_blocks(files, blocks, block_bytes))


def _ranges_of_blocks(files: Sequence[StoredFile], blocks: Sequence[int], block_bytes: int) -> Iterator[ByteRange]:
    """Yield the ranges that make up the blocks, whose numbers are in order."""
    ends = list(accumulate(file.num_bytes for file in files))
    index = 0
    for block in blocks:
        position, block_end = block * block_bytes, (block + 1) * block_bytes
        while position < block_end and index < len(files):
            file, file_start = files[index], ends[index] - files[index].num_bytes
            stop = min(block_end, ends[index])
            if position < stop:
                start = max(position, file_start)
                yield ByteRange(file, start - file_start, stop - file_start)
                position = stop
            if position >= ends[index]:
                index += 1
