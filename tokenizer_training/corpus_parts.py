"""The parts of a corpus that are drawn from its documents: which part a document belongs to."""

import hashlib
from collections.abc import Iterable, Iterator
from itertools import islice

from tokenizer_training.corpus_config import HELD_OUT_PARTS, CorpusConfig


def documents_of_part(
    config: CorpusConfig, part: str, documents: Iterable[str], limit: int | None = None
) -> Iterator[str]:
    """Return those of the documents that belong to a part: all, for a part that is not drawn.

    Args:
        config: the settings of the draw.
        part: `config.split`, or one of `validation` and `test`.
        documents: of the main part before the draw or, for a part that has documents of its own, these.
        limit: read no further than to this many documents of `config.split`.
    """
    is_drawn = part == config.split or config.percent_of(part) > 0
    if not is_drawn:
        return iter(documents)
    if not any(map(config.percent_of, HELD_OUT_PARTS)):
        return islice(documents, limit)
    return _drawn(config, part, documents, limit)


def part_share(config: CorpusConfig, part: str) -> float:
    """Return which share of the documents that are read for a part belong to it, about."""
    if part == config.split:
        return 1 - sum(map(config.percent_of, HELD_OUT_PARTS)) / 100
    return config.percent_of(part) / 100 or 1.0


def drawn_part(config: CorpusConfig, text: str) -> str:
    """Return the part of a document of the main files: a function of its text, the seed and the percentages."""
    digest = hashlib.blake2b(text.encode(), digest_size=8, key=str(config.seed).encode()).digest()
    draw = int.from_bytes(digest, "little")
    percent = 0.0
    for part in HELD_OUT_PARTS:
        percent += config.percent_of(part)
        if draw < percent / 100 * 2**64:
            return part
    return config.split


def _drawn(config: CorpusConfig, part: str, documents: Iterable[str], limit: int | None) -> Iterator[str]:
    num_main_documents = 0
    for text in documents:
        drawn = drawn_part(config, text)
        if drawn == part:
            yield text
        if drawn == config.split:
            num_main_documents += 1
            if num_main_documents == limit:
                return
