"""Divide texts into units such that no token of any model crosses a boundary between units.

So each token of each model belongs to exactly one unit, and all models are asked about the same characters. If a token
crosses the end of a word, such as a token of several Chinese characters, the words that it crosses form one unit.
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

# Scripts without spaces between words, whose characters count as words: East Asian scripts, and scripts in which only a
# dictionary shows where words end (class SA of Unicode's line breaking, such as Thai).
_WITHOUT_SPACES = r"\p{Han}\p{Hiragana}\p{Katakana}\u3040-\u30ff\p{Line_Break=SA}"
# Either one character of these scripts with its combining marks, or a sequence of other letters, marks and digits.
WORD = regex.compile(
    rf"(?V1)[[{_WITHOUT_SPACES}]&&[\p{{L}}\p{{N}}]]\p{{M}}*"
    rf"|[[\p{{L}}\p{{N}}_]--[{_WITHOUT_SPACES}]][[\w\p{{N}}]--[{_WITHOUT_SPACES}]]*"
)
# Unicode's classes of characters that a reader sees: letters, numbers, punctuation, symbols.
_VISIBLE = "LNPS"


class EncodedText(NamedTuple):
    """A text as a tokenizer reads it.

    Attributes:
        ids: int32 (tokens,).
        starts: int64 (tokens,), the first character of each token; the numbers never decrease.
        stops: int64 (tokens,), the character after the last character of each token.
        unread: bool (characters,), whether the character belongs to `<unk>`, or is a letter, digit or sign that
            belongs to no token.
    """

    ids: NDArray[np.int32]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    unread: NDArray[np.bool_]


class TextEncoder:
    """Encodes texts as stage 2 does: text never becomes a special token.

    Attributes:
        unk_id: the id of `<unk>`.
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
        for position in np.flatnonzero(~_covered(len(text), starts, stops)):
            unread[position] |= self._is_lost(text[position])
        return EncodedText(ids, starts, stops, unread)

    def _find_whether_lost(self, character: str) -> bool:
        """Return whether a character that no token covers was dropped. If not, it belongs to a token, as accents do."""
        is_visible = unicodedata.category(character)[0] in _VISIBLE
        return is_visible and self._ids_of_space.issuperset(
            self._tokenizer.encode(character, add_special_tokens=False).ids
        )


def byte_lengths(text: str) -> NDArray[np.int64]:
    """Return the number of bytes of each character in UTF-8: int64 (characters,)."""
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    return 1 + np.sum([codes > limit for limit in (0x7F, 0x7FF, 0xFFFF)], axis=0, dtype=np.int64)


def _spread_bytes(
    text: str, starts: NDArray[np.int64], stops: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Assign each token of a single byte to its character.

    For several unknown characters in a row, `tokenizers` gives all their byte tokens the span of the whole sequence. If
    the number of tokens is the number of bytes, the bytes show which tokens belong to which character. Otherwise, as
    after a normalization, the spans are not changed.
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
    """Return which positions are in a span from a start to before its stop: bool (length,)."""
    changes = np.zeros(length + 1, np.int64)
    np.add.at(changes, np.minimum(starts, length), 1)
    np.add.at(changes, np.minimum(np.maximum(starts, stops), length), -1)
    return np.cumsum(changes)[:-1] > 0


class Unit(NamedTuple):
    """Characters of a text that are asked about together: a word with adjacent spaces and signs, or several words.

    Attributes:
        document: number of the document.
        start: position of the first character; the units of a document cover it without gaps.
        stop: position after the last character.
        word_start: position of the first character of the first word.
        word_stop: position after the last character of the last word; equals `word_start` if there is no word.
    """

    document: int
    start: int
    stop: int
    word_start: int
    word_stop: int


def find_words(documents: Sequence[str]) -> list[NDArray[np.int64]]:
    """Return the (start, stop) of the words of each document, int64 (words, 2).

    Raises:
        InputError: no document contains any words.
    """
    words = [
        np.array([match.span() for match in WORD.finditer(document)], np.int64).reshape(-1, 2) for document in documents
    ]
    if not any(map(len, words)):
        raise InputError("--text must contain words; none was found.")
    return words


def draw_units(
    documents: Sequence[str], readings: Sequence[Sequence[EncodedText]], num_units: int, seed: int
) -> list[Unit]:
    """Draw units of the documents, without replacement and all with the same probability.

    Args:
        documents: the texts; a document without words is one unit.
        readings: for each tokenizer, the documents as this tokenizer reads them.
        num_units: number of units to draw; if there are fewer units, all are returned.
        seed: seed of the random draw.
    """
    units = []
    for number, (document, words) in enumerate(zip(documents, find_words(documents), strict=True)):
        if not document:
            continue
        ends = _ends_of_words(document, words)
        for reading in readings:
            tokens = reading[number]
            is_within_token = _covered(len(document), tokens.starts + 1, tokens.stops)
            ends = ends[~is_within_token[ends]]
        starts = np.append(0, ends)
        first_words = np.searchsorted(words[:, 0], starts)
        last_words = np.append(first_words[1:], len(words)) - 1
        bounds = (words[first_words, 0], words[last_words, 1]) if len(words) else (starts, starts)
        columns = (np.full(len(starts), number), starts, np.append(ends, len(document)), *bounds)
        units.append(np.stack(columns, axis=1))
    all_units = np.concatenate(units)
    drawn = np.random.default_rng(seed).choice(len(all_units), size=min(num_units, len(all_units)), replace=False)
    return [Unit(*row) for row in all_units[np.sort(drawn)].tolist()]


def _ends_of_words(document: str, words: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the end of each word except the last: int64 (words - 1,).

    The end includes any punctuation or symbols between the word and the next space.
    """
    spaces = np.array([match.start() for match in re.finditer(r"\s", document)] + [len(document)])
    next_space = spaces[np.searchsorted(spaces, words[:-1, 1])]
    return np.where(next_space < words[1:, 0], next_space, words[:-1, 1])


def tokens_of(encoded: EncodedText, unit: Unit) -> tuple[int, int]:
    """Return (first, stop) of the tokens that start in a unit."""
    first = np.searchsorted(encoded.starts, unit.start) if unit.start else 0
    stop = np.searchsorted(encoded.starts, unit.stop) if unit.stop < len(encoded.unread) else len(encoded.ids)
    return int(first), int(stop)
