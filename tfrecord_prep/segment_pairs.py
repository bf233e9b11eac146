"""Draw the pairs of segments that BERT is trained on: a text, and its continuation or a passage of another document.

The rule is the same as in google-research/bert (create_pretraining_data.py). The random numbers are seeded with a hash
of the document.
"""

import hashlib
import random
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import regex
from numpy.typing import NDArray

from tfrecord_prep.manifest import IS_NEXT, RANDOM_NEXT

SentencesBy = Literal["punctuation", "line"]
# The end of a sentence: one of Unicode's sentence terminators or an ellipsis, then closing quotes and brackets. White
# space must follow, and then a character that is not a lower-case letter, except after Chinese and Japanese full stops.
# The quotes include the quotes that Unicode calls initial (Pi), because German closes quotations with them.
SENTENCE_END = regex.compile(
    r"""[\p{STerm}…]+[\p{Pe}\p{Pf}\p{Pi}"']*(?=\s+\P{Ll})|[\u3002\uff01\uff1f\uff61]+[\p{Pe}\p{Pf}"']*"""
)


@dataclass(frozen=True)
class PairRule:
    """Probabilities for drawing pairs; the defaults are BERT's.

    Attributes:
        short_share: probability that the pairs of a document are shorter than a row, so that a model also learns from
            short pairs.
        random_share: probability that the second segment of a pair comes from another document, if the chunk has a
            continuation.
    """

    short_share: float = 0.1
    random_share: float = 0.5


class Pairs(NamedTuple):
    """Pairs of segments, each of which is a range of ids.

    Attributes:
        begins: positions of the first ids; (num_pairs, 2).
        ends: positions after the last ids; (num_pairs, 2).
        labels: `RANDOM_NEXT` or `IS_NEXT`; (num_pairs,).
    """

    begins: NDArray[np.int64]
    ends: NDArray[np.int64]
    labels: NDArray[np.int64]


Range = tuple[int, int]


def draw_pairs(
    ids: NDArray[np.int32],
    sentence_ends: NDArray[np.int64],
    document_ends: NDArray[np.int64],
    max_tokens: int,
    rule: PairRule,
    first_document: int = 0,
) -> Pairs:
    """Draw the pairs of all documents, in order. The pairs depend only on the documents and their numbers.

    Each document is cut into chunks of sentences that fill a row. The first segment of a pair is the first sentences of
    a chunk, at least one. The second segment is the remaining sentences, or a passage of about the same length from
    another document. After such a passage, the remaining sentences start the next chunk. A chunk of a single sentence
    always gets a passage of another document. Segments that are too long lose tokens at both ends. If there is only one
    document, no segment is random, and chunks of a single sentence give no pair.

    Args:
        ids: concatenated ids of the documents; (num_ids,).
        sentence_ends: ends of all sentences, including the last one of each document; (num_sentences,).
        document_ends: ends of the documents; (num_documents,).
        max_tokens: maximum number of ids of both segments together.
        rule: probabilities.
        first_document: number of the first document. Equal documents with different numbers get different pairs.
    """
    ends = sentence_ends.tolist()
    bounds = [0, *(np.searchsorted(sentence_ends, document_ends) + 1).tolist()]  # first sentence of each document
    begins_of_documents = [0, *document_ends.tolist()]
    pairs: list[tuple[Range, Range, int]] = []
    for document in range(len(document_ends)):
        document_ids = ids[begins_of_documents[document] : begins_of_documents[document + 1]]
        draw = random.Random(_key(document_ids, first_document + document))
        pairs += _pairs_of_document(document, ends, bounds, max_tokens, rule, draw)
    ranges = np.array([pair[:2] for pair in pairs], np.int64).reshape(-1, 2, 2)
    return Pairs(ranges[..., 0], ranges[..., 1], np.array([pair[2] for pair in pairs], np.int64))


def _key(ids: NDArray[np.int32], number: int) -> int:
    digest = hashlib.blake2b(ids.astype("<i4").tobytes(), digest_size=16, salt=number.to_bytes(16, "little"))
    return int.from_bytes(digest.digest(), "little")


def _pairs_of_document(
    document: int, ends: Sequence[int], bounds: Sequence[int], max_tokens: int, rule: PairRule, draw: random.Random
) -> Iterator[tuple[Range, Range, int]]:
    """Yield (first segment, second segment, label) for each pair. Sentences are numbered across all documents."""

    def begin_of(sentence: int) -> int:
        return ends[sentence - 1] if sentence else 0

    num_tokens = max_tokens
    if draw.random() < rule.short_share:
        num_tokens = 2 + _integer(draw, max_tokens - 1)
    sentence, stop = bounds[document], bounds[document + 1]
    while sentence < stop:
        end = min(bisect_left(ends, begin_of(sentence) + num_tokens, sentence, stop) + 1, stop)
        num_sentences = end - sentence
        middle = sentence + 1 + (_integer(draw, num_sentences - 1) if num_sentences > 1 else 0)
        first = (begin_of(sentence), begin_of(middle))
        is_random = (num_sentences == 1 or draw.random() < rule.random_share) and len(bounds) > 2
        if is_random:
            second = _passage_of_another(document, ends, bounds, num_tokens - (first[1] - first[0]), draw)
            sentence = middle
        else:
            second = (begin_of(middle), begin_of(end))
            sentence = end
        if second[0] < second[1]:
            yield *_shortened(first, second, max_tokens, draw), RANDOM_NEXT if is_random else IS_NEXT


def _passage_of_another(
    document: int, ends: Sequence[int], bounds: Sequence[int], num_tokens: int, draw: random.Random
) -> Range:
    """Draw a sentence of another document; extend it until it has `num_tokens` ids or the document ends."""
    other = _integer(draw, len(bounds) - 2)
    other += other >= document
    first, stop = bounds[other], bounds[other + 1]
    sentence = first + _integer(draw, stop - first)
    begin = ends[sentence - 1] if sentence else 0
    last = min(bisect_left(ends, begin + max(1, num_tokens), sentence, stop), stop - 1)
    return begin, ends[last]


def _shortened(first: Range, second: Range, max_tokens: int, draw: random.Random) -> tuple[Range, Range]:
    """Remove tokens from random ends: first from the longer segment, then alternately from the second and the first."""
    lengths = first[1] - first[0], second[1] - second[0]
    excess = max(0, sum(lengths) - max_tokens)
    from_longer = min(excess, abs(lengths[0] - lengths[1]))
    from_first = (from_longer if lengths[0] > lengths[1] else 0) + (excess - from_longer) // 2
    return _cut_at_both_ends(first, from_first, draw), _cut_at_both_ends(second, excess - from_first, draw)


def _cut_at_both_ends(segment: Range, num_tokens: int, draw: random.Random) -> Range:
    num_in_front = draw.getrandbits(num_tokens).bit_count() if num_tokens else 0
    return segment[0] + num_in_front, segment[1] - (num_tokens - num_in_front)


def _integer(draw: random.Random, num_values: int) -> int:
    """Draw an integer from 0 to `num_values` - 1.

    Uses `random()`, because Python guarantees that its results are the same in all versions.
    """
    return int(draw.random() * num_values)


def sentences_of(text: str, by: SentencesBy) -> list[str]:
    """Cut a text into sentences, without the white space between them. A blank text is one empty sentence.

    With `by="line"` each line is one sentence. With `by="punctuation"` a line may have several sentences.
    """
    sentences = [sentence.strip() for line in text.split("\n") for sentence in _sentences_of_line(line, by)]
    return [sentence for sentence in sentences if sentence] or [""]


def _sentences_of_line(line: str, by: SentencesBy) -> list[str]:
    if by == "line":
        return [line]
    ends = [match.end() for match in SENTENCE_END.finditer(line)]
    return [line[start:end] for start, end in zip([0, *ends], [*ends, len(line)], strict=True)]
