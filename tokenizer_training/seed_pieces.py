"""The pieces that training starts from: the substrings of the counted segments that cover most text."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# SentencePiece's default, --max_sentencepiece_length, and what its suffix array requires.
MAX_PIECE_CHARACTERS = 16
MIN_COUNT = 2

# Odd constants of SplitMix64 (Steele, Lea and Flood 2014), which spread the bits of a product.
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_SHIFT = np.uint64(29)


def seed_pieces(segments: Sequence[str], counts: Sequence[int], max_pieces: int) -> list[tuple[str, int]]:
    """Return (piece, occurrences) of substrings of 2 to 16 characters, those that cover most characters first.

    A substring that is always followed by the same character is left out: the longer one stands for it. SentencePiece
    does so, too, with a suffix array; but from counted words it takes the number of different words for the
    occurrences, and leaves out every word that has no longer one.
    """
    text = "".join(segments)
    num_characters = np.fromiter(map(len, segments), np.int32, len(segments))
    ends = np.repeat(np.cumsum(num_characters, dtype=np.int32), num_characters)
    weights = np.repeat(np.asarray(counts, np.float64), num_characters)
    found = list(_right_maximal_substrings(text, ends, weights))
    starts, lengths, occurrences = (np.concatenate([level[field] for level in found]) for field in range(3))
    by_coverage = np.lexsort((starts, lengths, -occurrences * lengths))[:max_pieces]
    table = zip(*(column[by_coverage].tolist() for column in (starts, lengths, occurrences)), strict=True)
    return [(text[start : start + length], count) for start, length, count in table]


@dataclass
class _Substrings:
    """All substrings of one length: where each occurrence starts, and the group of equal ones that it is in."""

    starts: NDArray[np.int32]  # (occurrences,)
    groups: NDArray[np.int32]  # (occurrences,)
    first: NDArray[np.int64]  # (groups,), index of an occurrence
    counts: NDArray[np.int64]  # (groups,), occurrences in the text


Found = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]


def _right_maximal_substrings(text: str, ends: NDArray[np.int32], weights: NDArray[np.float64]) -> Iterator[Found]:
    """Yield (starts, lengths, counts), each (substrings,), of the frequent substrings of each length.

    Args:
        text: all segments, one after the other.
        ends: (characters,), where the segment of each character ends.
        weights: (characters,), how often the segment of each character occurs.
    """
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    starts, hashes = np.arange(len(codes), dtype=np.int32), codes.astype(np.uint64) * _SPREAD
    shorter = None
    for length in range(2, MAX_PIECE_CHARACTERS + 1):
        fits = starts + np.int32(length) <= ends[starts]
        starts = starts[fits]
        hashes = (hashes[fits] ^ (hashes[fits] >> _SHIFT)) * _MIX + codes[starts + np.int32(length - 1)] * _SPREAD
        substrings = _group(starts, hashes, weights)
        if shorter is not None:
            shorter_group = shorter.groups[fits][substrings.first]
            longest_counts = np.zeros_like(shorter.counts)
            np.maximum.at(longest_counts, shorter_group, substrings.counts)
            yield _select(shorter, longest_counts < shorter.counts, length - 1)
        frequent = substrings.counts[substrings.groups] >= MIN_COUNT
        starts, hashes = starts[frequent], hashes[frequent]
        shorter = substrings
        shorter.groups = substrings.groups[frequent]
    if shorter is not None:
        yield _select(shorter, np.ones(len(shorter.counts), bool), MAX_PIECE_CHARACTERS)


def _group(starts: NDArray[np.int32], hashes: NDArray[np.uint64], weights: NDArray[np.float64]) -> _Substrings:
    _, first, groups = np.unique(hashes, return_index=True, return_inverse=True)
    counts = np.bincount(groups, weights=weights[starts], minlength=len(first)).astype(np.int64)
    return _Substrings(starts, groups.astype(np.int32), first, counts)


def _select(substrings: _Substrings, selected: NDArray[np.bool_], length: int) -> Found:
    selected = selected & (substrings.counts >= MIN_COUNT)
    starts = substrings.starts[substrings.first[selected]]
    return starts, np.full(len(starts), length, np.int32), substrings.counts[selected]
