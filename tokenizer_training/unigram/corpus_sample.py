"""Read a corpus once: a seeded sample of bounded size over all of it, counted, and some passages held out of it."""

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from mlm_common.cli.console import no_progress
from mlm_common.corpus.passages import cut_passages, grouped_by_size, num_utf8_bytes
from mlm_common.worker_pool import map_in_order
from tokenizer_training.unigram.normalization import NormalizationConfig
from tokenizer_training.unigram.word_counts import WordCounts, count_words

# What is drawn, skipped or counted at a time: less than a second of a worker's time, and little memory on its way.
BLOCK_BYTES = 4 << 20
# A small sample is of as many places in the text.
MIN_BLOCKS = 64
# Dropping the rarest segments takes as long as counting a block, so it is not done after each.
EXCESS_BEFORE_DROPPING = 1.5
HELD_OUT_BYTES = 2_000_000
HELD_OUT_SHARE = 0.05


class DocumentTally:
    """Documents, once, with their number and size counted on the way."""

    def __init__(self, documents: Iterable[str], on_bytes: Callable[[int], object] = no_progress) -> None:
        self._documents = documents
        self._on_bytes = on_bytes
        self.num_documents = 0
        self.num_bytes = 0

    def __iter__(self) -> Iterator[str]:
        for text in self._documents:
            self.num_documents += 1
            num_bytes = num_utf8_bytes(text, self.num_documents)
            self.num_bytes += num_bytes
            self._on_bytes(num_bytes)
            yield text


class HeldOut:
    """A seeded sample of passages, from all over the text, of `max_bytes` at most. The others pass through."""

    def __init__(self, generator: random.Random, max_bytes: int = HELD_OUT_BYTES, share: float = HELD_OUT_SHARE):
        self._generator = generator
        self._max_bytes = max_bytes
        self._share = share
        self._kept: list[tuple[float, str]] = []
        self._num_bytes = 0

    @property
    def passages(self) -> list[str]:
        """The passages held out so far, in the order of the text."""
        return [passage for _, passage in self._kept]

    def rest(self, passages: Iterable[str]) -> Iterator[str]:
        """Yield the passages that are not held out. What is held out too early is released when there is too much."""
        for passage in passages:
            draw = self._generator.random()
            if draw >= self._share or not passage.strip():
                yield passage
                continue
            self._kept.append((draw, passage))
            self._num_bytes += len(passage.encode())
            while self._num_bytes > self._max_bytes:
                self._share /= 2
                yield from (passage for draw, passage in self._kept if draw >= self._share)
                self._kept = [kept for kept in self._kept if kept[0] < self._share]
                self._num_bytes = sum(len(passage.encode()) for _, passage in self._kept)


@dataclass(frozen=True)
class SampleLimits:
    """What bounds the sample, and the seed of its draws.

    `max_distinct_characters`: of all different segments together, the rarest being dropped.
    """

    max_bytes: int
    max_distinct_characters: int
    seed: int


@dataclass(frozen=True)
class Block:
    """Passages to count; `halve` says that with them the sample became too large."""

    passages: list[str]
    halve: bool


class BlockSample:
    """Draws blocks so that what is counted stays under `max_bytes`: each time it would not, the rate is halved."""

    def __init__(self, generator: random.Random, max_bytes: int) -> None:
        self._generator = generator
        self._max_bytes = max_bytes
        self.rate = 1.0
        self.num_bytes = 0

    def draw(self, groups: Iterable[list[str]]) -> Iterator[Block]:
        """Yield the blocks to count, in order."""
        for passages in groups:
            if self._generator.random() >= self.rate:
                continue
            self.num_bytes += sum(len(passage.encode()) for passage in passages)
            halve = self.num_bytes > self._max_bytes
            if halve:
                self.rate /= 2
                self.num_bytes //= 2
            yield Block(passages, halve)


@dataclass(frozen=True)
class CorpusSample:
    """The counted sample, the passages held out, and `record`: what was read and used, fit for JSON."""

    counts: WordCounts
    held_out: list[str]
    record: dict[str, int | float]


def sample_corpus(
    documents: Iterable[str],
    config: NormalizationConfig,
    limits: SampleLimits,
    num_processes: int,
    hold_out: bool,
    on_bytes: Callable[[int], object] = no_progress,
) -> CorpusSample:
    """Count a sample of the documents, in memory that their length and number do not change.

    It is the same for any number of processes. A sample of half of the text is made by halving the counts of all words:
    one reading is enough, whatever the length of the corpus.

    Args:
        documents: read once, in one process; the workers count.
        config: the normalization under which words are counted.
        limits: of the sample.
        num_processes: workers that count.
        hold_out: whether to keep passages out of the counts, for measuring.
        on_bytes: called with the size of each document read.

    Raises:
        InputError: a document is not valid Unicode, or a worker was killed.
    """
    generator = random.Random(limits.seed)
    tally = DocumentTally(documents, on_bytes)
    held_out = HeldOut(random.Random(generator.getrandbits(64)), share=HELD_OUT_SHARE if hold_out else 0.0)
    sample = BlockSample(random.Random(generator.getrandbits(64)), limits.max_bytes)
    block_bytes = min(BLOCK_BYTES, limits.max_bytes // MIN_BLOCKS)
    blocks = sample.draw(grouped_by_size(held_out.rest(cut_passages(tally)), block_bytes))
    counts = WordCounts()
    num_dropped = 0
    count = partial(_count_block, config)
    for block_counts, halve in map_in_order(count, blocks, num_processes, "Give fewer --num-workers."):
        counts.add(block_counts)
        if halve:
            counts.halve(generator)
        if counts.num_distinct_characters > EXCESS_BEFORE_DROPPING * limits.max_distinct_characters:
            num_dropped += counts.keep_most_frequent(limits.max_distinct_characters)
    num_dropped += counts.keep_most_frequent(limits.max_distinct_characters)
    record = {
        "num_documents": tally.num_documents,
        "num_bytes": tally.num_bytes,
        "num_sampled_bytes": sample.num_bytes,
        "sampling_rate": sample.rate,
        "num_words": counts.num_words,
        "num_distinct_segments": len(counts.segments),
        "num_dropped_segments": num_dropped,
    }
    return CorpusSample(counts, held_out.passages, record)


def draw_passages(documents: Iterable[str], seed: int, max_bytes: int = HELD_OUT_BYTES) -> list[str]:
    """Draw a seeded sample of passages over all documents, `max_bytes` at most: all of them where there is room."""
    held_out = HeldOut(random.Random(seed), max_bytes, share=1.0)
    for _ in held_out.rest(cut_passages(documents)):
        pass
    return held_out.passages


def _count_block(config: NormalizationConfig, block: Block) -> tuple[WordCounts, bool]:
    return count_words(block.passages, config), block.halve
