"""The files of a corpus as pieces of work, and a sample of its bytes that takes no longer however large they are."""

import random
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice, pairwise

from mlm_common.storage.stored_files import StoredFile
from tokenizer_training.corpus.passages import grouped
from tokenizer_training.corpus.text_files import Stretch, can_be_cut, cut_file

# Read one after the other from a disk or in one request each, where seeking takes a small part of the time.
SAMPLE_BLOCK_BYTES = 8 << 20
# Fewer groups than these, when one of them is a large file that cannot be cut, would leave workers without work.
MIN_GROUPS = 16
# So that a small sample, too, is from all over the corpus.
MIN_SAMPLE_BLOCKS = 64


def grouped_stretches(files: Sequence[StoredFile], sample_by: str, max_bytes: int) -> Iterator[list[Stretch]]:
    """Yield the files in order, in groups of at most `max_bytes`; a file that is larger and cannot be cut is a group.

    A large file's stretches are groups by themselves, small files come together.
    """
    stretches = (
        (stretch, file.num_bytes if stretch.stop is None else stretch.stop - stretch.start)
        for file in files
        for stretch in cut_file(file.name, file.num_bytes, sample_by, max_bytes, file.generation)
    )
    return grouped(stretches, max_bytes)


def is_for_few_workers(files: Sequence[StoredFile], sample_by: str, max_bytes: int) -> bool:
    """Return whether the groups are few, and one is larger than `max_bytes` because its file cannot be cut."""
    if all(file.num_bytes <= max_bytes or can_be_cut(file.name, sample_by) for file in files):
        return False
    groups = islice(grouped_stretches(files, sample_by, max_bytes), MIN_GROUPS)
    return sum(1 for _ in groups) < MIN_GROUPS


def draw_stretches(files: Sequence[StoredFile], sample_by: str, num_bytes: int, seed: int) -> list[Stretch] | None:
    """Return about `num_bytes` of the files in stretches from all over them, in order, drawn by the seed.

    Of the files one after the other, as if they were one, a block is drawn from each of equally long sections. None
    where they have no more bytes than that, or one of them cannot be cut.
    """
    total_bytes = sum(file.num_bytes for file in files)
    if total_bytes <= num_bytes or not all(can_be_cut(file.name, sample_by) for file in files):
        return None
    block_bytes = max(1, min(SAMPLE_BLOCK_BYTES, num_bytes // MIN_SAMPLE_BLOCKS))
    num_blocks = -(-total_bytes // block_bytes)
    num_drawn = min(num_blocks, -(-num_bytes // block_bytes))
    generator = random.Random(seed)
    sections = [num_blocks * number // num_drawn for number in range(num_drawn + 1)]
    blocks = [generator.randrange(first, after) for first, after in pairwise(sections)]
    return list(_stretches_of_blocks(files, blocks, block_bytes))


def num_stretch_bytes(stretches: Sequence[Stretch]) -> int:
    """Return the number of bytes of stretches that have an end."""
    return sum((stretch.stop or 0) - stretch.start for stretch in stretches)


def _stretches_of_blocks(files: Sequence[StoredFile], blocks: Sequence[int], block_bytes: int) -> Iterator[Stretch]:
    """Yield the stretches that make up the blocks, whose numbers are in order."""
    ends = list(accumulate(file.num_bytes for file in files))
    index = 0
    for block in blocks:
        position, block_end = block * block_bytes, (block + 1) * block_bytes
        while position < block_end and index < len(files):
            file, file_start = files[index], ends[index] - files[index].num_bytes
            stop = min(block_end, ends[index])
            if position < stop:
                start = max(position, file_start)
                yield Stretch(file.name, start - file_start, stop - file_start, file.generation)
                position = stop
            if position >= ends[index]:
                index += 1
