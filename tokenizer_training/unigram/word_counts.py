"""Count words, and the characters in them, in blocks of text that are independent of each other.

A word is counted in segments, cut where the script changes from letters to signs and back. SentencePiece allows no
piece across such a change, so the segments lose nothing, and they are half as many: "word", "word," and "(word)" share
theirs. A segment that begins a word carries the mark `▁`.
"""

import functools
import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from tokenizer_training.unigram.normalization import WORD_MARK, NormalizationConfig, make_normalizer

# The sign ー is of no script, but part of words in kana; SentencePiece counts it among the letters, too.
SIGN = r"[\p{Script=Common}--\u30fc]"


@dataclass
class WordCounts:
    """Occurrences of segments and of the characters in them; `num_words` counts whole words."""

    segments: Counter[str] = field(default_factory=Counter)
    characters: Counter[str] = field(default_factory=Counter)
    num_words: int = 0

    def add(self, other: "WordCounts") -> None:
        """Add the counts of another block of text."""
        self.segments.update(other.segments)
        self.characters.update(other.characters)
        self.num_words += other.num_words

    def halve(self, generator: random.Random) -> None:
        """Halve all counts, the odd ones rounded up or down by chance: what half of the text would have given."""
        self.segments = _halved(self.segments, generator)
        self.characters = _halved(self.characters, generator)
        self.num_words //= 2

    def keep_most_frequent(self, max_characters: int) -> int:
        """Drop the rarest segments and count them; the others have `max_characters` at most, each counted once."""
        if self.num_distinct_characters <= max_characters:
            return 0
        # Among equally frequent ones a checksum decides; the alphabet would leave one end of itself out.
        by_rank = sorted(
            self.segments, key=lambda segment: (-self.segments[segment], zlib.crc32(segment.encode()), segment)
        )
        cumulative = np.cumsum(np.fromiter(map(len, by_rank), np.int64, len(by_rank)))
        num_kept = int(np.searchsorted(cumulative, max_characters, side="right"))
        self.segments = Counter({segment: self.segments[segment] for segment in by_rank[:num_kept]})
        return len(by_rank) - num_kept

    def pop_segments(self) -> Iterator[tuple[str, int]]:
        """Yield the segments with their counts, and remove them on the way: training needs the memory."""
        while self.segments:
            yield self.segments.popitem()

    @property
    def num_distinct_characters(self) -> int:
        """Characters of all segments, each segment counted once: what memory and training time go with."""
        return sum(map(len, self.segments))


def count_words(texts: Sequence[str], config: NormalizationConfig) -> WordCounts:
    """Count the words in a block of texts. A word may not be cut between two texts."""
    normalize, cut = _normalizer(config), segment_cutter(config.split_digits)
    words: Counter[str] = Counter()
    for text in texts:
        words.update(text.split())
    counts = WordCounts()
    # Each distinct word is normalized once, by itself, which is the same as normalizing the text.
    for word, count in words.items():
        for normalized in normalize(word).split(" "):
            if normalized:
                counts.num_words += count
                for segment in cut(WORD_MARK + normalized):
                    counts.segments[segment] += count
    counts.characters = count_characters(counts.segments)
    return counts


def count_characters(segments: Counter[str]) -> Counter[str]:
    """Count how often each character occurs in counted segments, the mark of a word's begin included."""
    lengths = np.fromiter(map(len, segments), np.int64, len(segments))
    counts = np.fromiter(segments.values(), np.int64, len(segments))
    characters = np.frombuffer("".join(segments).encode("utf-32-le"), np.uint32)
    found, index = np.unique(characters, return_inverse=True)
    totals = np.bincount(index, weights=np.repeat(counts, lengths), minlength=len(found))
    return Counter({chr(code): int(total) for code, total in zip(found.tolist(), totals.tolist(), strict=True)})


@functools.lru_cache(maxsize=2)
def segment_cutter(split_digits: bool) -> Callable[[str], list[str]]:
    """Make the function that cuts a word with its mark into segments, each digit by itself if `split_digits`.

    The mark `▁` belongs to the segment after it, combining marks to the one before.
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
