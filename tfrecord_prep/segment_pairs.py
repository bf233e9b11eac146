"""Pairs of segments as BERT is trained on: a text and what follows it, or a passage of another document.

The rule of google-research/bert (create_pretraining_data.py), whose draws come here from a hash of the document.
"""

import hashlib
import random
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# The value of `next_sentence_label` where the second segment is of another document, as in Google's code and in
# transformers; 0 where it follows the first.
RANDOM_NEXT, IS_NEXT = 1, 0
# Documents are told apart, and drawn from, as soon as they have so many tokens together.
WINDOW_TOKENS = 1 << 20


@dataclass(frozen=True)
class PairRule:
    """Google's probabilities.

    short_share: of the documents whose pairs are shorter than a row, so that a model also learns from short ones.
    random_share: of the pairs whose second segment is random, of those that could have either.
    """

    short_share: float = 0.1
    random_share: float = 0.5


class Pairs(NamedTuple):
    """Pairs of segments, each a range of ids."""

    begins: NDArray[np.int64]  # (num_pairs, 2)
    ends: NDArray[np.int64]  # (num_pairs, 2)
    labels: NDArray[np.int64]  # (num_pairs,)


Range = tuple[int, int]


def draw_pairs(
    ids: NDArray[np.int32],
    sentence_ends: NDArray[np.int64],
    document_ends: NDArray[np.int64],
    max_tokens: int,
    rule: PairRule,
    first_document: int = 0,
) -> Pairs:
    """Draw the pairs of documents, in order; they depend on the documents alone.

    A document is cut into chunks of sentences that fill a row. Its first sentences, at least one, are the first
    segment. The second is the others, or a passage of another document that is as long; then the others begin the next
    chunk. Where a chunk is one sentence, it is always such a passage. What is too long loses tokens at both ends.
    Without another document there are no random segments, and no pairs of single sentences.

    Args:
        ids: of the documents, one after the other; (num_ids,).
        sentence_ends: where sentences end, every document's last one too; (num_sentences,).
        document_ends: (num_documents,).
        max_tokens: of both segments.
        rule: probabilities.
        first_document: number of the first document; equal documents of other numbers are drawn differently.
    """
    ends = sentence_ends.tolist()
    bounds = [0, *(np.searchsorted(sentence_ends, document_ends) + 1).tolist()]  # the documents' first sentences
    begins_of_documents = [0, *document_ends.tolist()]
    pairs: list[tuple[Range, Range, int]] = []
    for document in range(len(document_ends)):
        own_ids = ids[begins_of_documents[document] : begins_of_documents[document + 1]]
        draw = random.Random(_key(own_ids, first_document + document))
        pairs += _pairs_of_document(document, ends, bounds, max_tokens, rule, draw)
    ranges = np.array([pair[:2] for pair in pairs], np.int64).reshape(-1, 2, 2)
    return Pairs(ranges[..., 0], ranges[..., 1], np.array([pair[2] for pair in pairs], np.int64))


def _key(ids: NDArray[np.int32], number: int) -> int:
    digest = hashlib.blake2b(ids.astype("<i4").tobytes(), digest_size=16, salt=number.to_bytes(16, "little"))
    return int.from_bytes(digest.digest(), "little")


def _pairs_of_document(
    document: int, ends: Sequence[int], bounds: Sequence[int], max_tokens: int, rule: PairRule, draw: random.Random
) -> Iterator[tuple[Range, Range, int]]:
    """Yield first segment, second segment and label; sentences are counted over all documents."""

    def place(sentence: int) -> int:
        return ends[sentence - 1] if sentence else 0

    num_tokens = max_tokens
    if draw.random() < rule.short_share:
        num_tokens = 2 + _integer(draw, max_tokens - 1)
    sentence, stop = bounds[document], bounds[document + 1]
    while sentence < stop:
        end = min(bisect_left(ends, place(sentence) + num_tokens, sentence, stop) + 1, stop)
        num_sentences = end - sentence
        middle = sentence + 1 + (_integer(draw, num_sentences - 1) if num_sentences > 1 else 0)
        first = (place(sentence), place(middle))
        is_random = (num_sentences == 1 or draw.random() < rule.random_share) and len(bounds) > 2
        if is_random:
            second = _passage_of_another(document, ends, bounds, num_tokens - (first[1] - first[0]), draw)
            sentence = middle
        else:
            second = (place(middle), place(end))
            sentence = end
        if second[0] < second[1]:
            yield *_shortened(first, second, max_tokens, draw), RANDOM_NEXT if is_random else IS_NEXT


def _passage_of_another(
    document: int, ends: Sequence[int], bounds: Sequence[int], num_tokens: int, draw: random.Random
) -> Range:
    """Draw another document, and of it a sentence, which with those after it has so many tokens, if there are."""
    other = _integer(draw, len(bounds) - 2)
    other += other >= document
    first, stop = bounds[other], bounds[other + 1]
    sentence = first + _integer(draw, stop - first)
    begin = ends[sentence - 1] if sentence else 0
    last = min(bisect_left(ends, begin + max(1, num_tokens), sentence, stop), stop - 1)
    return begin, ends[last]


def _shortened(first: Range, second: Range, max_tokens: int, draw: random.Random) -> tuple[Range, Range]:
    """Take tokens from the longer segment, where both are as long from the second, each from a random end."""
    lengths = first[1] - first[0], second[1] - second[0]
    excess = max(0, sum(lengths) - max_tokens)
    from_longer = min(excess, abs(lengths[0] - lengths[1]))
    from_first = (from_longer if lengths[0] > lengths[1] else 0) + (excess - from_longer) // 2
    return _cut_at_both_ends(first, from_first, draw), _cut_at_both_ends(second, excess - from_first, draw)


def _cut_at_both_ends(segment: Range, num_tokens: int, draw: random.Random) -> Range:
    num_in_front = draw.getrandbits(num_tokens).bit_count() if num_tokens else 0
    return segment[0] + num_in_front, segment[1] - (num_tokens - num_in_front)


def _integer(draw: random.Random, num_values: int) -> int:
    """Draw from 0 to `num_values`, which is excluded; by Python's promise the same in all its versions."""
    return int(draw.random() * num_values)
