"""Tokenize documents of any length in limited memory, and tokenize each frequent word only once.

With most tokenizers, cutting a text at the space between two words does not change its ids.
"""

import functools
import json
import re
import unicodedata
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import regex
from numpy.typing import NDArray
from tokenizers import Tokenizer

from mlm_common.corpus.text_files import grouped
from mlm_common.tokenizer import steps_of

# The encodings that `tokenizers` returns are hundreds of times the size of their text, so texts are encoded in groups
# of this size.
CHARACTERS_AT_ONCE = 1 << 18
MAX_CHARACTERS_WITHOUT_BOUNDARY = 1 << 20
# Limits how many words a process remembers: about 150,000 short words in 30 MB. With a lower limit, words would be
# tokenized again more often. With a higher limit, the memory of a worker would grow with the corpus.
MAX_REMEMBERED_CHARACTERS = 6 << 20
CHARACTERS_PER_ENTRY = 32  # memory of an entry in addition to its characters
# Marks a document's first word, which has no space before it. The mark is half of a surrogate pair, so no valid text
# has it.
_FIRST = "\ud800"

# Characters that Unicode calls letters or symbols, but that normalizers remove or replace with a space: SentencePiece's
# mark of a word's start, the replacement character, and two letters that were combining marks before Unicode 12.
_NOT_VISIBLE = "▁\ufffd\u1cf2\u1cf3"
# Only these characters are considered. A space next to any other character, such as an emoji, is never a boundary.
_BASIC_PLANE = range(0x10000)
# These normalizers change each word independently of its neighbors.
_WORD_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "StripAccents", "BertNormalizer", "Precompiled"}
# Patterns that match a run of characters of one class, such as white space.
_RUN = re.compile(r"\[[^\[\]]+\]\+|\\s\+| \{2,\}| \+")
_WORD_PRE_TOKENIZERS = {"WhitespaceSplit", "Whitespace", "BertPreTokenizer"}


@dataclass(frozen=True)
class TokenBatch:
    """A part of the stream of all documents' ids, without [CLS] and [SEP].

    Attributes:
        ids: the ids; (num_ids,).
        document_ends: positions in `ids` where documents end, except documents without ids; (num_ends,). The first
            of these documents may have started in an earlier batch.
        num_documents: number of documents that end in this batch, including those without ids.
        sentence_ends: positions in `ids` where sentences end, including the ends of documents; (num_sentence_ends,).
            None if documents are not cut into sentences.
    """

    ids: NDArray[np.int32]  # (num_ids,)
    document_ends: NDArray[np.int64]  # (num_ends,)
    num_documents: int
    sentence_ends: NDArray[np.int64] | None = None  # (num_sentence_ends,)


def encode_documents(
    tokenizer_json: str, documents: Iterable[str], sentences_of: Callable[[str], list[str]] | None = None
) -> Iterator[TokenBatch]:
    """Yield the ids of documents in batches of a few hundred thousand characters.

    A longer document is cut at a space between two words. The cut does not change the ids if the tokenizer treats each
    word independently. If a million characters contain no such space, the document is cut within a word.

    Args:
        tokenizer_json: result of `plain_text_tokenizer_json`.
        documents: texts; a text that is only white space gets no ids.
        sentences_of: cuts a document into one or more sentences, which are encoded separately. None to encode
            documents whole.
    """
    encoder = _encoder(tokenizer_json)
    num_open_ids = 0  # number of ids so far in the document that has not ended yet
    num_open_sentence_ids = 0
    all_passages = _passages(documents, sentences_of or (lambda document: [document]))
    sized = ((passage, len(passage.text) + 1) for passage in all_passages)  # + 1, so that blank documents have a size
    for passages in grouped(sized, CHARACTERS_AT_ONCE):
        ids_of_passages = encoder.encode([passage.text for passage in passages])
        ids = np.frombuffer(b"".join(ids_of_passages), np.int32)
        ends_of_passages = np.cumsum([len(ids) for ids in ids_of_passages]) // ids.itemsize
        ends = ends_of_passages[[passage.ends_document for passage in passages]]
        sentence_ends = ends_of_passages[[passage.ends_sentence for passage in passages]]
        nonempty_sentence_ends = _without_empty(sentence_ends, num_open_sentence_ids) if sentences_of else None
        yield TokenBatch(ids, _without_empty(ends, num_open_ids), len(ends), nonempty_sentence_ends)
        num_open_ids = len(ids) - ends[-1] if len(ends) else len(ids) + num_open_ids
        num_open_sentence_ids = len(ids) - sentence_ends[-1] if len(sentence_ends) else len(ids) + num_open_sentence_ids


def _without_empty(ends: NDArray[np.int64], num_open_ids: int) -> NDArray[np.int64]:
    """Drop the ends of texts without ids. The first text has `num_open_ids` ids in earlier batches."""
    return ends[ends > np.concatenate([[-num_open_ids], ends])[:-1]]


@dataclass(frozen=True)
class _Passage:
    """A sentence, or a part of a long sentence. A document that is not cut into sentences counts as one sentence."""

    text: str
    ends_sentence: bool
    ends_document: bool


def _passages(documents: Iterable[str], sentences_of: Callable[[str], list[str]]) -> Iterator[_Passage]:
    for document in documents:
        sentences = sentences_of(document)
        for number, sentence in enumerate(sentences, start=1):
            start = 0
            while len(sentence) - start > CHARACTERS_AT_ONCE:
                end = _end_of_passage(sentence, start)
                yield _Passage(sentence[start:end], ends_sentence=False, ends_document=False)
                start = end
            last = "" if sentence.isspace() else sentence[start:]
            yield _Passage(last, ends_sentence=True, ends_document=number == len(sentences))


def _end_of_passage(document: str, start: int) -> int:
    soft_end, hard_end = start + CHARACTERS_AT_ONCE, start + MAX_CHARACTERS_WITHOUT_BOUNDARY
    before = last_word_boundary(document, start, soft_end)
    if before is not None:
        return before
    after = word_boundary().search(document, soft_end, hard_end)
    return after.start() if after else min(hard_end, len(document))


@functools.lru_cache(maxsize=1)
def _encoder(tokenizer_json: str) -> "Encoder":
    return Encoder(tokenizer_json)


class Encoder:
    """A tokenizer with a cache of words. Use one per process.

    The cache has two generations. When the recent words reach their limit, they become the older words, and the
    previous older words are forgotten. So frequent words stay in the cache, no matter how many rare words occur.
    """

    def __init__(self, tokenizer_json: str) -> None:
        self._tokenizer = Tokenizer.from_str(tokenizer_json)
        self._by_word = tokenizes_by_word(tokenizer_json)
        self._ids_of_word: dict[str, bytes] = {}
        self._ids_of_older_word: dict[str, bytes] = {}
        self._num_characters = 0  # of `_ids_of_word`

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        """Encode each text, word by word if the tokenizer allows it; return the int32 ids of each text as bytes."""
        if not self._by_word:
            return self._encode_whole(texts)
        words_of_texts = [word_boundary().split(text) for text in texts]
        for words in words_of_texts:
            words[0] = _FIRST + words[0]
        self._remember(set().union(*words_of_texts))
        return [b"".join(map(self._ids_of_word.__getitem__, words)) for words in words_of_texts]

    def _remember(self, words: set[str]) -> None:
        if self._num_characters > MAX_REMEMBERED_CHARACTERS // 2:
            self._ids_of_older_word, self._ids_of_word, self._num_characters = self._ids_of_word, {}, 0
        missing = words.difference(self._ids_of_word)
        unknown = missing.difference(self._ids_of_older_word)
        self._ids_of_word.update((word, self._ids_of_older_word[word]) for word in missing - unknown)
        in_text = [word[1:] if word.startswith(_FIRST) else " " + word for word in unknown]
        self._ids_of_word.update(zip(unknown, self._encode_whole(in_text), strict=True))
        self._num_characters += sum(map(len, missing)) + CHARACTERS_PER_ENTRY * len(missing)

    def _encode_whole(self, texts: Sequence[str]) -> list[bytes]:
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [array("i", encoding.ids).tobytes() for encoding in encodings]


@functools.cache
def word_boundary() -> re.Pattern[str]:
    """Compile the pattern of a single space between two words.

    Normalization must not remove the characters on both sides of the space, nor turn them into white space. So the
    space must follow a letter, digit, punctuation mark or symbol, with up to two combining marks after it, and the
    next character must be a letter, digit, punctuation mark or symbol.
    """
    visible = _character_class(_visible_characters())
    marks = filter(lambda character: unicodedata.category(character)[0] == "M", map(chr, _BASIC_PLANE))
    mark = _character_class(marks)
    before = "|".join(f"(?<=[{visible}]{f'[{mark}]' * num_marks} )" for num_marks in range(3))
    return re.compile(f" (?:{before})(?=[{visible}])")


def last_word_boundary(text: str, start: int, end: int) -> int | None:
    """Return the position of the last word boundary in `text[start + 1 : end]`, or None."""
    pattern = word_boundary()
    space = text.rfind(" ", start + 1, end)
    while space >= 0:
        if pattern.match(text, space):
            return space
        space = text.rfind(" ", start + 1, space)
    return None


@functools.cache
def _visible_characters() -> str:
    return "".join(filter(_is_visible, map(chr, _BASIC_PLANE)))


def _is_visible(character: str) -> bool:
    forms = character + unicodedata.normalize("NFKC", character)
    return character not in _NOT_VISIBLE and all(unicodedata.category(form)[0] in "LNPS" for form in forms)


def _character_class(characters: Iterable[str]) -> str:
    """Write sorted characters as the ranges of a character class, without its brackets."""
    ranges: list[list[int]] = []
    for code in map(ord, characters):
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return "".join(rf"\u{first:04x}-\u{last:04x}" for first, last in ranges)


def tokenizes_by_word(tokenizer_json: str) -> bool:
    """Return whether encoding a text gives the same ids as encoding its words separately.

    Each word includes the space before it. The result is True only for kinds of normalizers and pre-tokenizers that are
    known to work this way, including the kinds that SentencePiece, BERT and GPT-2 use.

    Args:
        tokenizer_json: result of `plain_text_tokenizer_json`.
    """
    settings = json.loads(tokenizer_json)
    return (
        all(map(_is_within_word, steps_of(settings["normalizer"])))
        and _splits_before_space(settings["pre_tokenizer"])
        and all(_stands_alone(token) for token in settings["added_tokens"] if not token["special"])
    )


def _is_within_word(normalizer: dict[str, Any]) -> bool:
    if normalizer["type"] == "Strip":
        return not normalizer["strip_left"]
    if normalizer["type"] == "Replace":
        pattern = normalizer["pattern"]
        if "Regex" in pattern:
            return bool(_RUN.fullmatch(pattern["Regex"])) and not regex.search(pattern["Regex"], _visible_characters())
        return not any(character.isspace() for character in pattern["String"] + normalizer["content"])
    return normalizer["type"] in _WORD_NORMALIZERS


def _splits_before_space(pre_tokenizer: dict[str, Any] | None) -> bool:
    first: dict[str, Any] = next(iter(steps_of(pre_tokenizer)), {"type": None})
    if first["type"] == "Metaspace":
        return first.get("split", True)
    if first["type"] == "ByteLevel":
        return first.get("use_regex", True)
    return first["type"] in _WORD_PRE_TOKENIZERS


def _stands_alone(token: dict[str, Any]) -> bool:
    """Return whether an added token neither contains nor strips spaces."""
    has_space = any(character.isspace() for character in token["content"])
    return not (has_space or token["lstrip"] or token["rstrip"])
