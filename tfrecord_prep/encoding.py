"""Tokenize documents in bounded memory, however long they are, and each frequent word only once."""

import functools
import json
import re
import unicodedata
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import regex
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tokenizer_training.corpus.passages import grouped

# What `tokenizers` returns of a text is hundreds of times its size, so little is held in that form.
CHARACTERS_AT_ONCE = 1 << 18
MAX_CHARACTERS_WITHOUT_BOUNDARY = 1 << 20
# Bounds what a process remembers of words: about 150,000 short ones, in 30 MB. Fewer would be tokenized more often, and
# more would be filled by large corpora only, whose workers would then take more memory than those of small ones.
MAX_REMEMBERED_CHARACTERS = 6 << 20
CHARACTERS_PER_ENTRY = 32  # what an entry takes besides its characters
# Marks a document's first word, which has no space before it; no text holds this noncharacter of Unicode.
_FIRST = "\U0010fffe"
# What normalizers make a space of, or remove, though Unicode counts it among letters and symbols: the mark of a word's
# begin, the sign for what cannot be shown, and two letters that were combining marks before Unicode 12.
_NOT_VISIBLE = "▁\ufffd\u1cf2\u1cf3"
# Characters beyond these, such as emoji, just end no word.
_BASIC_PLANE = range(0x10000)
# These change a word by itself, whatever stands before and after the spaces around it.
_WORD_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "StripAccents", "BertNormalizer", "Precompiled"}
# A run of characters of one class, such as white space.
_RUN = re.compile(r"\[[^\[\]]+\]\+|\\s\+| \{2,\}| \+")
_WORD_PRE_TOKENIZERS = {"WhitespaceSplit", "Whitespace", "BertPreTokenizer"}
# A noncharacter of Unicode, which stands for nothing in text.
_NOT_IN_TEXT = "\U0010ffff"


@dataclass(frozen=True)
class TokenBatch:
    """Some of the stream of documents' ids, without framing.

    `document_ends` are the places in `ids` where documents end that have any, those begun in an earlier batch too;
    `num_documents` counts all that end here, those without ids too.
    """

    ids: NDArray[np.int32]  # (num_ids,)
    document_ends: NDArray[np.int64]  # (num_ends,)
    num_documents: int


def encode_documents(tokenizer_json: str, documents: Iterable[str]) -> Iterator[TokenBatch]:
    """Yield the ids of documents, some hundred thousand characters at a time.

    A longer document is cut at the space between two words, which does not change its ids where a tokenizer treats
    each word by itself; only where a million characters have no such space, it is cut within a word.

    Args:
        tokenizer_json: what `plain_text_tokenizer_json` returned.
        documents: texts; those of nothing but white space have no ids.
    """
    encoder = _encoder(tokenizer_json)
    num_open_ids = 0  # of the document that no batch has ended yet
    sized = ((passage, len(passage.text) + 1) for passage in _passages(documents))  # blank documents have a size, too
    for passages in grouped(sized, CHARACTERS_AT_ONCE):
        ids_of_passages = encoder.encode([passage.text for passage in passages])
        ids = np.frombuffer(b"".join(ids_of_passages), np.int32)
        ends_of_passages = np.cumsum([len(ids) for ids in ids_of_passages]) // ids.itemsize
        ends = ends_of_passages[[passage.is_last for passage in passages]]
        starts = np.concatenate([[-num_open_ids], ends])[:-1]
        yield TokenBatch(ids, ends[ends > starts], len(ends))
        num_open_ids = len(ids) - ends[-1] if len(ends) else len(ids) + num_open_ids


@dataclass(frozen=True)
class _Passage:
    """A document, or what was cut of a long one."""

    text: str
    is_last: bool


def _passages(documents: Iterable[str]) -> Iterator[_Passage]:
    for document in documents:
        start = 0
        while len(document) - start > CHARACTERS_AT_ONCE:
            end = _end_of_passage(document, start)
            yield _Passage(document[start:end], is_last=False)
            start = end
        yield _Passage("" if document.isspace() else document[start:], is_last=True)


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
    """A tokenizer that remembers words; a process needs one.

    When the words that were last used are as many as may be, they take the place of older ones, which are forgotten: so
    frequent words stay, however many rare ones come.
    """

    def __init__(self, tokenizer_json: str) -> None:
        self._tokenizer = Tokenizer.from_str(tokenizer_json)
        self._by_word = tokenizes_by_word(tokenizer_json)
        self._ids_of_word: dict[str, bytes] = {}
        self._ids_of_older_word: dict[str, bytes] = {}
        self._num_characters = 0  # of the former

    def encode(self, texts: Sequence[str]) -> list[bytes]:
        """Encode each text: its ids, as the bytes of int32 numbers, those of its words if it is tokenized by word."""
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


def plain_text_tokenizer_json(tokenizer_json: str) -> str:
    """Make a `tokenizer.json` with the same ids, whose special tokens no text can produce.

    `encode_special_tokens` of the library does less: a unigram model holds its special tokens among its pieces, and
    goes on finding them in text. Here they get names that text does not contain.
    """
    settings = json.loads(tokenizer_json)
    special_tokens = {token["content"] for token in settings["added_tokens"] if token["special"]}

    def renamed(token: str) -> str:
        return _NOT_IN_TEXT + token if token in special_tokens else token

    for token in settings["added_tokens"]:
        token["content"] = renamed(token["content"])
    model = settings["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {renamed(token): index for token, index in vocabulary.items()}
    else:
        model["vocab"] = [[renamed(token), score] for token, score in vocabulary]
    if model.get("unk_token"):
        model["unk_token"] = renamed(model["unk_token"])
    settings["truncation"] = settings["padding"] = settings["post_processor"] = None
    return json.dumps(settings, ensure_ascii=False)


def last_word_boundary(text: str, start: int, end: int) -> int | None:
    """Find the last boundary in `text[start + 1 : end]`, None where there is none."""
    pattern = word_boundary()
    space = text.rfind(" ", start + 1, end)
    while space >= 0:
        if pattern.match(text, space):
            return space
        space = text.rfind(" ", start + 1, space)
    return None


@functools.cache
def word_boundary() -> re.Pattern[str]:
    """Compile the pattern of the single space between two words.

    Neither the last character of the one nor the first of the other is, or can become by normalization, white space or
    nothing; so no normalizer has to look across. Letters, digits, punctuation and symbols are such characters, and the
    combining marks that follow them.
    """
    visible = _character_class(_visible_characters())
    marks = filter(lambda character: unicodedata.category(character)[0] == "M", map(chr, _BASIC_PLANE))
    mark = _character_class(marks)
    before = "|".join(f"(?<=[{visible}]{f'[{mark}]' * num_marks} )" for num_marks in range(3))
    return re.compile(f" (?:{before})(?=[{visible}])")


@functools.cache
def _visible_characters() -> str:
    return "".join(filter(_is_visible, map(chr, _BASIC_PLANE)))


def _is_visible(character: str) -> bool:
    forms = character + unicodedata.normalize("NFKC", character)
    return character not in _NOT_VISIBLE and all(unicodedata.category(form)[0] in "LNPS" for form in forms)


def _character_class(characters: Iterable[str]) -> str:
    """Write the characters, which must be sorted, as the ranges of a regular expression's set."""
    ranges: list[list[int]] = []
    for code in map(ord, characters):
        if ranges and ranges[-1][1] == code - 1:
            ranges[-1][1] = code
        else:
            ranges.append([code, code])
    return "".join(rf"\u{first:04x}-\u{last:04x}" for first, last in ranges)


def tokenizes_by_word(tokenizer_json: str) -> bool:
    """Tell whether a text's ids are those of its words, one after the other, each but the first with its space.

    True only for the kinds of normalizers and pre-tokenizers known to work so, those of SentencePiece, BERT and GPT-2
    among them.

    Args:
        tokenizer_json: of a tokenizer whose special tokens no text can produce.
    """
    settings = json.loads(tokenizer_json)
    return (
        all(map(_is_within_word, _steps(settings["normalizer"], "normalizers")))
        and _splits_before_space(settings["pre_tokenizer"])
        and all(_stands_alone(token) for token in settings["added_tokens"] if not token["special"])
    )


def _steps(component: dict[str, Any] | None, members: str) -> list[dict[str, Any]]:
    """List the steps of a component that may be none, one, or a sequence, of sequences too."""
    if component is None:
        return []
    if component["type"] != "Sequence":
        return [component]
    return [step for member in component[members] for step in _steps(member, members)]


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
    steps = _steps(pre_tokenizer, "pretokenizers")
    if not steps:
        return False
    first = steps[0]
    if first["type"] == "Metaspace":
        return first.get("split", True)
    if first["type"] == "ByteLevel":
        return first.get("use_regex", True)
    return first["type"] in _WORD_PRE_TOKENIZERS


def _stands_alone(token: dict[str, Any]) -> bool:
    """Tell whether a token that is looked for in the text takes no space with it, nor looks at what is behind one."""
    has_space = any(character.isspace() for character in token["content"])
    return not (has_space or token["lstrip"] or token["rstrip"])
