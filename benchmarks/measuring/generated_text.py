"""Generate any amount of text of made-up words, in which new words keep appearing as in real text.

    python benchmarks/measuring/generated_text.py --megabytes 1000 --output text.txt

The rank of a word follows the Zipf-Mandelbrot law without an upper limit, and its spelling is a hash of its rank. With
the two constants, the frequencies of words and the growth of the vocabulary are similar to English Wikipedia's, or
slightly higher. A text of 30 MB has 150,000 different words, and a text of 300 MB has five times that number.
"""

import argparse
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

# P(rank > k) = (1 + k / RANK_SHIFT) ** -TAIL_EXPONENT
TAIL_EXPONENT = 0.4
RANK_SHIFT = 6.0
MAX_RANK = 1 << 62
# From each of these ranks on, words have one more syllable.
LONGER_FROM_RANKS = (1, 100, 5_000, 1_000_000)
WORDS_PER_PARAGRAPH = 100
PARAGRAPHS_AT_ONCE = 5_000

ONSETS = [
    *"bcdfghjklmnprstvwz",
    *("br", "ch", "cl", "cr", "dr", "fl", "gr", "pl", "pr", "qu", "sh", "sl", "st", "str", "th", "tr"),
]
VOWELS = [*"aeiou", "ai", "ea", "ee", "io", "oo", "ou"]
CODAS = ["", *"nrstldm", "ng", "st", "nt", "ck"]
SEPARATORS = [" "] * 10 + [", ", ". "]
PARTS = np.array(["", "\n", *SEPARATORS, *map("".join, product(ONSETS, VOWELS, CODAS))], np.bytes_)
NOTHING, PARAGRAPH_END, FIRST_SEPARATOR = 0, 1, 2
FIRST_SYLLABLE = FIRST_SEPARATOR + len(SEPARATORS)

# Odd constants of SplitMix64 (Steele, Lea and Flood 2014), which spread the bits of a product.
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_SHIFT = np.uint64(31)


def write_generated_text(path: Path, num_bytes: int, seed: int = 0) -> None:
    """Write `num_bytes` of text, one paragraph per line.

    With the same seed, a short text is the beginning of a longer one.
    """
    with path.open("wb") as file:
        for text in _texts(seed):
            file.write(text[: num_bytes - file.tell()])
            if file.tell() == num_bytes:
                return


def _texts(seed: int) -> Iterator[bytes]:
    """Yield an endless text, 3 MB at a time."""
    generator = np.random.default_rng(seed)
    num_words = PARAGRAPHS_AT_ONCE * WORDS_PER_PARAGRAPH
    while True:
        uniform = 1 - generator.random(num_words)
        ranks = np.minimum(RANK_SHIFT * (uniform ** (-1 / TAIL_EXPONENT) - 1) + 1, MAX_RANK).astype(np.uint64)
        separators = generator.integers(FIRST_SEPARATOR, FIRST_SYLLABLE, num_words)
        separators[WORDS_PER_PARAGRAPH - 1 :: WORDS_PER_PARAGRAPH] = PARAGRAPH_END
        parts = np.column_stack([*_spell(ranks), separators])  # (words, syllables + 1)
        yield PARTS[parts].tobytes().translate(None, b"\0")  # numpy pads with zero bytes


def _spell(ranks: NDArray[np.uint64]) -> Iterator[NDArray[np.int64]]:
    """Yield the indices of the words' first syllables, then of their second syllables, and so on, (words,) each."""
    num_syllables = np.uint64(len(PARTS) - FIRST_SYLLABLE)
    hashes = ranks * _SPREAD
    for first_rank in LONGER_FROM_RANKS:
        hashes = (hashes ^ (hashes >> _SHIFT)) * _MIX
        syllables = (hashes >> _SHIFT) % num_syllables + np.uint64(FIRST_SYLLABLE)
        yield np.where(ranks >= first_rank, syllables, NOTHING).astype(np.int64)


def main() -> None:
    """Write a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, required=True, help="Size of the text, in millions of bytes.")
    parser.add_argument("--output", type=Path, required=True, help="File to write.")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write_generated_text(arguments.output, int(arguments.megabytes * 1e6), arguments.seed)


if __name__ == "__main__":
    main()
