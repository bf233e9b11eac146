"""Read a corpus once: count its words, draw a random sample of limited size, and hold out some passages.

A word is counted in segments, because it is cut wherever a letter is next to a sign. SentencePiece allows no token
across such a boundary, so nothing is lost. There are half as many distinct segments as distinct words, because "word",
"word," and "(word)" share a segment. A segment that starts a word carries the mark `▁`.

If there are several sources, the counts are scaled so that each source has a fixed share of the sum: its weight, or
bytes^alpha (Conneau et al. 2020, section 3.1). The words of a source with too little text count several times, as if
the text were read again.
"""

import functools
import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mlm_common.cli.console import no_progress
from mlm_common.corpus.text_files import cut_passages, grouped_by_size
from mlm_common.mixture import normalized, sampling_weights
from mlm_common.workers import map_in_order
from tokenizer_training.config import WORD_MARK, NormalizationConfig, make_normalizer

if TYPE_CHECKING:
    from mlm_common.corpus.sources import Mixture  # slow to import for workers

# Blocks of this size are drawn, skipped or counted as a whole. A worker counts a block in less than a second.
BLOCK_BYTES = 4 << 20
# Even a small sample is drawn from at least this many places in the text.
MIN_BLOCKS = 64
# Dropping the rarest segments takes as long as counting a block, so it is not done after every block.
EXCESS_BEFORE_DROPPING = 1.5
HELD_OUT_BYTES = 2_000_000
HELD_OUT_FRACTION = 0.05
# Characters that belong to no script. The sign ー is excluded: it is part of words in kana, and SentencePiece treats it
# as a letter, too.
SIGN = r"[\p{Script=Common}--\u30fc]"


@dataclass
class WordCounts:
    """Counts of the words of a text.

    Attributes:
        segments: number of occurrences of each segment.
        characters: number of occurrences of each character in the segments.
        num_words: number of words.
    """

    segments: Counter[str] = field(default_factory=Counter)
    characters: Counter[str] = field(default_factory=Counter)
    num_words: int = 0

    def add(self, other: "WordCounts") -> None:
        self.segments.update(other.segments)
        self.characters.update(other.characters)
        self.num_words += other.num_words

    def halve(self, generator: random.Random) -> None:
        """Halve all counts, as if only half of the text had been read. Odd counts are randomly rounded up or down."""
        self.segments = _halved(self.segments, generator)
        self.characters = _halved(self.characters, generator)
        self.num_words //= 2

    def scaled(self, times: float) -> "WordCounts":
        """Return the counts multiplied by `times` and rounded. `times` need not be a whole number."""

        def scale(counts: Counter[str]) -> Counter[str]:
            return Counter({key: round(count * times) for key, count in counts.items()})

        return WordCounts(scale(self.segments), scale(self.characters), round(self.num_words * times))

    def keep_most_frequent(self, max_characters: int) -> int:
        """Drop the rarest segments until the remaining segments have at most `max_characters` characters in total.

        Returns:
            The number of segments that were dropped.
        """
        if self.num_distinct_characters <= max_characters:
            return 0
        # Equally frequent segments are sorted by a checksum. Alphabetical order would drop the end of the alphabet.
        by_rank = sorted(
            self.segments, key=lambda segment: (-self.segments[segment], zlib.crc32(segment.encode()), segment)
        )
        cumulative = np.cumsum(np.fromiter(map(len, by_rank), np.int64, len(by_rank)))
        num_kept = int(np.searchsorted(cumulative, max_characters, side="right"))
        self.segments = Counter({segment: self.segments[segment] for segment in by_rank[:num_kept]})
        return len(by_rank) - num_kept

    def pop_segments(self) -> Iterator[tuple[str, int]]:
        """Yield the segments with their counts, and remove them to free memory for the training."""
        while self.segments:
            yield self.segments.popitem()

    @property
    def num_distinct_characters(self) -> int:
        """Number of characters of all distinct segments; memory and time of the training are proportional to this."""
        return sum(map(len, self.segments))


def count_words(texts: Sequence[str], config: NormalizationConfig) -> WordCounts:
    """Count the words in a block of texts. No word may continue from one text to the next."""
    normalize, cut = _normalizer(config), segment_cutter(config.split_digits)
    words: Counter[str] = Counter()
    for text in texts:
        words.update(text.split())
    counts = WordCounts()
    # Each distinct word is normalized only once. Normalizing words separately gives the same result as normalizing the
    # text.
    for word, count in words.items():
        for part in filter(None, normalize(word).split(" ")):
            counts.num_words += count
            for segment in cut(WORD_MARK + part):
                counts.segments[segment] += count
    counts.characters = count_characters(counts.segments)
    return counts


def count_characters(segments: Counter[str]) -> Counter[str]:
    """Count the characters in segments, given each segment's frequency, including the word-start marker."""
    lengths = np.fromiter(map(len, segments), np.int64, len(segments))
    counts = np.fromiter(segments.values(), np.int64, len(segments))
    characters = np.frombuffer("".join(segments).encode("utf-32-le"), np.uint32)
    codes, index = np.unique(characters, return_inverse=True)
    totals = np.bincount(index, weights=np.repeat(counts, lengths), minlength=len(codes))
    return Counter({chr(code): int(total) for code, total in zip(codes.tolist(), totals.tolist(), strict=True)})


@functools.lru_cache(maxsize=2)
def segment_cutter(split_digits: bool) -> Callable[[str], list[str]]:
    """Return a function that cuts a marked word into segments; with `split_digits` each digit is a segment.

    The mark `▁` belongs to the segment after it. Combining marks belong to the segment before them.
    """
    import regex

    letters = rf"[^{SIGN}]+"
    signs = rf"{SIGN}[{SIGN}\p{{Script=Inherited}}]*"
    by_script = regex.compile(rf"{WORD_MARK}{letters}|{signs}|{letters}", regex.V1).findall
    if not split_digits:
        return by_script
    by_digit = regex.compile(r"\p{N}|\P{N}+").findall
    return lambda word: [run for segment in by_script(word) for run in by_digit(segment)]


@functools.lru_cache(maxsize=2)
def _normalizer(config: NormalizationConfig) -> Callable[[str], str]:
    return make_normalizer(config).normalize_str


def _halved(counts: Counter[str], generator: random.Random) -> Counter[str]:
    halves = {key: (count + generator.getrandbits(1)) >> 1 for key, count in counts.items()}
    return Counter({key: count for key, count in halves.items() if count})


class HeldOut:
    """A random sample of passages from all parts of the text.

    Args:
        generator: source of the random numbers.
        max_bytes: maximum size of the sample.
        fraction: fraction of the passages to hold out. The fraction is halved whenever the sample would become too
            large.

    Attributes:
        passages: the sample.
    """

    def __init__(self, generator: random.Random, max_bytes: int = HELD_OUT_BYTES, fraction: float = HELD_OUT_FRACTION):
        self._generator = generator
        self._max_bytes = max_bytes
        self._fraction = fraction
        self._kept: list[tuple[float, str]] = []
        self._num_bytes = 0

    @property
    def passages(self) -> list[str]:
        return [passage for _, passage in self._kept]

    def others(self, passages: Iterable[str]) -> Iterator[str]:
        """Hold out some passages, and yield the rest. Passages that were held out in excess are yielded later."""
        for passage in passages:
            draw = self._generator.random()
            if draw >= self._fraction or not passage.strip():
                yield passage
                continue
            self._kept.append((draw, passage))
            self._num_bytes += len(passage.encode())
            while self._num_bytes > self._max_bytes:
                self._fraction /= 2
                yield from (passage for draw, passage in self._kept if draw >= self._fraction)
                self._kept = [kept for kept in self._kept if kept[0] < self._fraction]
                self._num_bytes = sum(len(passage.encode()) for _, passage in self._kept)


class BlockSample:
    """Draws blocks of text such that the counted sample stays below `max_bytes`.

    Args:
        generator: source of the random numbers.
        max_bytes: maximum size of the sample.

    Attributes:
        rate: probability of drawing a block. The rate is halved whenever the sample becomes too large.
        num_bytes: size of the sample.
    """

    def __init__(self, generator: random.Random, max_bytes: int) -> None:
        self._generator = generator
        self._max_bytes = max_bytes
        self.rate = 1.0
        self.num_bytes = 0

    def draw(self, groups: Iterable[list[str]]) -> Iterator[tuple[list[str], bool]]:
        """Yield passages to count, and whether to halve all counts afterwards because the sample became too large."""
        for passages in groups:
            if self._generator.random() >= self.rate:
                continue
            self.num_bytes += sum(len(passage.encode()) for passage in passages)
            halve = self.num_bytes > self._max_bytes
            if halve:
                self.rate /= 2
                self.num_bytes //= 2
            yield passages, halve


@dataclass(frozen=True)
class CorpusSample:
    """The counted sample of a corpus.

    Attributes:
        counts: counts of the sample.
        held_out: passages that were not counted.
        record: amounts of text that were read and used, as JSON values.
    """

    counts: WordCounts
    held_out: list[str]
    record: dict[str, int | float]


def sample_corpus(
    documents: Iterable[str],
    config: NormalizationConfig,
    *,
    max_bytes: int,
    max_distinct_characters: int,
    seed: int,
    hold_out: bool,
    num_processes: int,
    on_bytes: Callable[[int], object] = no_progress,
) -> CorpusSample:
    """Count a sample of the documents. Memory does not grow with the length or the number of the documents.

    The result does not depend on the number of processes. When the sample becomes too large, the counts of all words
    are halved, as if only half of the text had been sampled. So a single pass is enough for a corpus of any size.

    Args:
        documents: texts. The texts are read once, in this process; workers count the words.
        config: how to normalize words.
        max_bytes: maximum size of the counted text.
        max_distinct_characters: maximum number of characters of all distinct segments. The rarest segments are dropped.
        seed: seed of the sample.
        hold_out: whether to leave some passages out of the counts, so that the tokenizer can be measured on them.
        num_processes: number of workers.
        on_bytes: called with the size of each document that was read.

    Raises:
        InputError: a document cannot be read, or a worker was killed.
    """
    generator = random.Random(seed)
    held_out = HeldOut(random.Random(generator.getrandbits(64)), fraction=HELD_OUT_FRACTION if hold_out else 0.0)
    sample = BlockSample(random.Random(generator.getrandbits(64)), max_bytes)
    record: dict[str, int | float] = {"num_documents": 0, "num_bytes": 0}

    def counted_documents() -> Iterator[str]:
        for number, text in enumerate(documents, start=1):
            num_bytes = len(text.encode())
            record["num_documents"] = number
            record["num_bytes"] += num_bytes
            on_bytes(num_bytes)
            yield text

    block_bytes = min(BLOCK_BYTES, max_bytes // MIN_BLOCKS)
    blocks = sample.draw(grouped_by_size(held_out.others(cut_passages(counted_documents())), block_bytes))
    counts = WordCounts()
    num_dropped = 0
    count = partial(_count_block, config)
    for block_counts, halve in map_in_order(count, blocks, num_processes, "Use fewer --num-workers."):
        counts.add(block_counts)
        if halve:
            counts.halve(generator)
        if counts.num_distinct_characters > EXCESS_BEFORE_DROPPING * max_distinct_characters:
            num_dropped += counts.keep_most_frequent(max_distinct_characters)
    num_dropped += counts.keep_most_frequent(max_distinct_characters)
    record |= {
        "num_sampled_bytes": sample.num_bytes,
        "sampling_rate": sample.rate,
        "num_words": counts.num_words,
        "num_distinct_segments": len(counts.segments),
        "num_dropped_segments": num_dropped,
    }
    return CorpusSample(counts, held_out.passages, record)


def draw_passages(documents: Iterable[str], seed: int, max_bytes: int = HELD_OUT_BYTES) -> list[str]:
    """Draw a random sample of passages from all documents, or all passages if they have at most `max_bytes`."""
    held_out = HeldOut(random.Random(seed), max_bytes, fraction=1.0)
    for _ in held_out.others(cut_passages(documents)):
        pass
    return held_out.passages


def _count_block(config: NormalizationConfig, block: tuple[list[str], bool]) -> tuple[WordCounts, bool]:
    passages, halve = block
    return count_words(passages, config), halve


def max_bytes_of(mixture: "Mixture", max_bytes: int, alpha: float | None) -> dict[str, int]:
    """Return how many bytes to sample from each source: `max_bytes`, divided in proportion to the weights or sizes.

    If sizes are not known before the sources are read, each source gets `max_bytes`.
    """
    files = {name: corpus.files(corpus.config.split) for name, corpus in mixture.corpora.items()}
    if not mixture.weights and not all(files.values()):
        return dict.fromkeys(files, max_bytes)
    sizes = {name: sum(file.num_bytes for file in source_files) for name, source_files in files.items()}
    return {name: max(1, round(share * max_bytes)) for name, share in _shares(mixture, sizes, alpha).items()}


def shares_of(
    mixture: "Mixture", samples: Mapping[str, CorpusSample], max_bytes: Mapping[str, int], alpha: float | None
) -> dict[str, float]:
    """Compute the share of each source in the sum of all counts, from its weight or the size of its text.

    Args:
        mixture: the sources.
        samples: sample of each source.
        max_bytes: result of `max_bytes_of`, with which the sources were sampled.
        alpha: exponent of the size; None for 1.
    """
    sizes = {}
    for name, corpus in mixture.corpora.items() if not mixture.weights else ():
        fraction = corpus.sampled_fraction(corpus.config.split, max_bytes[name])
        sizes[name] = samples[name].record["num_bytes"] / fraction
    return _shares(mixture, sizes, alpha)


def _shares(mixture: "Mixture", sizes: Mapping[str, float], alpha: float | None) -> dict[str, float]:
    if mixture.weights:
        return normalized(mixture.weights)
    return sampling_weights({name: max(size, 1) for name, size in sizes.items()}, 1.0 if alpha is None else alpha)


def combine_samples(
    samples: Mapping[str, CorpusSample], shares: Mapping[str, float], max_distinct_characters: int
) -> tuple[CorpusSample, dict[str, dict[str, Any]]]:
    """Add up the counts of the sources, scaled so that each source has its share and counts at least once.

    Args:
        samples: sample of each source.
        shares: shares of the sources, which sum to 1.
        max_distinct_characters: maximum number of characters of all distinct segments. The rarest segments are dropped.

    Returns:
        The combined sample, and the report's entry for each source.
    """
    num_bytes = {name: int(sample.record["num_sampled_bytes"]) for name, sample in samples.items()}
    total = max(num_bytes[name] / shares[name] for name in samples)  # the source with the maximum counts once
    counts, record, inputs = WordCounts(), Counter[str](), {}
    for name, sample in samples.items():
        times = shares[name] * total / num_bytes[name] if num_bytes[name] else 1.0
        counts.add(sample.counts.scaled(times))
        record.update({key: value for key, value in sample.record.items() if key != "sampling_rate"})
        inputs[name] = {"share": shares[name], "times_counted": times, "input": sample.record}
    num_dropped = counts.keep_most_frequent(max_distinct_characters)
    combined: dict[str, Any] = dict(record) | {
        "sampling_rate": sum(num_bytes.values()) / max(1, record["num_bytes"]),
        "num_distinct_segments": len(counts.segments),
        "num_dropped_segments": record["num_dropped_segments"] + num_dropped,
        "num_words": counts.num_words,
    }
    return CorpusSample(counts, [], combined), inputs
