"""Texts cut into units that every tokenizer cuts, too: each token of each model is in one unit.

So the bits of all units of a text are those of all its tokens, each once, and every model is asked for the same
characters. Where the tokens of a model cross the end of a word, as those of several Chinese characters do, the words
that they cross are one unit.
"""

import functools
import itertools
import re
import unicodedata
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import regex
from numpy.typing import NDArray
from tokenizers import Tokenizer

from mlm_common.errors import InputError
from mlm_common.tokenizer import plain_text_tokenizer_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Scripts without spaces between words, where each character counts as one: East Asian ones, and those whose words only
# a dictionary finds (class SA of Unicode's line breaking, such as Thai).
_WITHOUT_SPACES = r"\p{Han}\p{Hiragana}\p{Katakana}\u3040-\u30ff\p{Line_Break=SA}"
# A character of these with its combining marks, or else letters, marks and digits up to what is none.
WORD = regex.compile(
    rf"(?V1)[[{_WITHOUT_SPACES}]&&[\p{{L}}\p{{N}}]]\p{{M}}*"
    rf"|[[\p{{L}}\p{{N}}_]--[{_WITHOUT_SPACES}]][[\w\p{{N}}]--[{_WITHOUT_SPACES}]]*"
)
# Unicode's classes of characters that a reader sees: letters, numbers, punctuation, symbols.
_VISIBLE = "LNPS"


class EncodedText(NamedTuple):
    """How a tokenizer reads a text.

    ids: int32 (tokens,).
    starts, stops: int64 (tokens,), the first character of each token, and the one after its last. Starts never fall.
    unread: bool (characters,), what `<unk>` stands for, and letters, digits and signs that no token stands for.
    """

    ids: NDArray[np.int32]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    unread: NDArray[np.bool_]


class TextEncoder:
    """Reads texts as stage 2 does: no text makes special tokens.

    unk_id: of `<unk>`.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerFast") -> None:
        self._tokenizer = Tokenizer.from_str(plain_text_tokenizer_json(tokenizer.backend_tokenizer.to_str()))
        self.unk_id = int(tokenizer.unk_token_id)
        self._ids_of_space = set(self._tokenizer.encode(" ", add_special_tokens=False).ids)
        self._is_lost = functools.cache(self._find_whether_lost)

    def encode(self, text: str) -> EncodedText:
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        ids = np.array(encoding.ids, np.int32)
        spans = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        starts, stops = _spread_bytes(text, np.maximum.accumulate(spans[:, 0]), spans[:, 1])
        stops = np.maximum(starts, stops)
        unread = _covered(len(text), starts[ids == self.unk_id], stops[ids == self.unk_id])
        for place in np.flatnonzero(~_covered(len(text), starts, stops)):
            unread[place] |= self._is_lost(text[place])
        return EncodedText(ids, starts, stops, unread)

    def _find_whether_lost(self, character: str) -> bool:
        """Return whether a character outside all tokens was dropped; else it became part of one, as a mark does."""
        is_visible = unicodedata.category(character)[0] in _VISIBLE
        return is_visible and self._ids_of_space.issuperset(
            self._tokenizer.encode(character, add_special_tokens=False).ids
        )


def byte_lengths(text: str) -> NDArray[np.int64]:
    """Count the bytes of each character in UTF-8: int64 (characters,)."""
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    return 1 + np.sum([codes > limit for limit in (0x7F, 0x7FF, 0xFFFF)], axis=0, dtype=np.int64)


def _spread_bytes(
    text: str, starts: NDArray[np.int64], stops: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Give each token of a single byte the character it belongs to.

    `tokenizers` gives all byte tokens of several unknown characters in a row the place of the whole row. If they are as
    many as its bytes, the characters follow from these; otherwise, as after a normalization, the places stay.
    """
    is_new = np.append(True, (np.diff(starts) != 0) | (np.diff(stops) != 0))
    firsts = np.append(np.flatnonzero(is_new), len(starts))
    starts, stops = starts.copy(), stops.copy()
    for first, stop in itertools.pairwise(firsts.tolist() if len(starts) else []):
        begin, end = int(starts[first]), int(stops[first])
        if stop - first > 1 and end - begin > 1:
            lengths = byte_lengths(text[begin:end])
            if lengths.sum() == stop - first:
                starts[first:stop] = np.repeat(np.arange(begin, end), lengths)
                stops[first:stop] = starts[first:stop] + 1
    return starts, stops


def _covered(length: int, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Mark the places from a start to its stop, without the latter: bool (length,)."""
    changes = np.zeros(length + 1, np.int64)
    np.add.at(changes, np.minimum(starts, length), 1)
    np.add.at(changes, np.minimum(np.maximum(starts, stops), length), -1)
    return np.cumsum(changes)[:-1] > 0


class Unit(NamedTuple):
    """Characters of a text that are asked for together: a word, with the spaces and signs beside it.

    start, stop: places in the document; its units follow one another, from its first character to its last.
    word_start, word_stop: from the first character of its first word to the last of its last one; equal without a word.
    """

    document: int
    start: int
    stop: int
    word_start: int
    word_stop: int


def find_words(documents: Sequence[str]) -> list[NDArray[np.int64]]:
    """Find the words of each document, int64 (words, 2); InputError if there are none."""
    words = [
        np.array([match.span() for match in WORD.finditer(document)], np.int64).reshape(-1, 2) for document in documents
    ]
    if not any(map(len, words)):
        raise InputError("--text must have words; none was found.")
    return words


def draw_units(
    documents: Sequence[str], readings: Sequence[Sequence[EncodedText]], num_units: int, seed: int
) -> list[Unit]:
    """Draw different units of the documents, all with the same probability; all units where there are fewer.

    Args:
        documents: texts; a document without words is one unit.
        readings: how each tokenizer reads each of the documents.
        num_units: how many to draw.
        seed: of the draw.
    """
    units = []
    for number, (document, words) in enumerate(zip(documents, find_words(documents), strict=True)):
        if not document:
            continue
        ends = _ends_of_words(document, words)
        for reading in readings:
            ends = ends[~_is_crossed(reading[number], len(document))[ends]]
        starts = np.append(0, ends)
        first_words = np.searchsorted(words[:, 0], starts)
        last_words = np.append(first_words[1:], len(words)) - 1
        bounds = (words[first_words, 0], words[last_words, 1]) if len(words) else (starts, starts)
        columns = (np.full(len(starts), number), starts, np.append(ends, len(document)), *bounds)
        units.append(np.stack(columns, axis=1))
    everything = np.concatenate(units)
    chosen = np.random.default_rng(seed).choice(len(everything), size=min(num_units, len(everything)), replace=False)
    return [Unit(*row) for row in everything[np.sort(chosen)].tolist()]


def _ends_of_words(document: str, words: NDArray[np.int64]) -> NDArray[np.int64]:
    """Find where each word but the last ends, with the signs behind it up to a space: int64 (words - 1,)."""
    spaces = np.array([match.start() for match in re.finditer(r"\s", document)] + [len(document)])
    next_space = spaces[np.searchsorted(spaces, words[:-1, 1])]
    return np.where(next_space < words[1:, 0], next_space, words[:-1, 1])


def _is_crossed(encoded: EncodedText, length: int) -> NDArray[np.bool_]:
    """Return for each place in a text whether a token begins before and ends after it: bool (length,)."""
    return _covered(length, encoded.starts + 1, encoded.stops)


def tokens_of(encoded: EncodedText, unit: Unit) -> tuple[int, int]:
    """Find the tokens that begin in a unit, as (first, stop)."""
    first = np.searchsorted(encoded.starts, unit.start) if unit.start else 0
    stop = np.searchsorted(encoded.starts, unit.stop) if unit.stop < len(encoded.unread) else len(encoded.ids)
    return int(first), int(stop)
