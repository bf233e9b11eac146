"""Tokenize documents in bounded memory, however long they are, and each frequent word only once."""

import functools
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from mlm_common.corpus.passages import grouped
from tfrecord_prep.word_boundaries import last_word_boundary, tokenizes_by_word, word_boundary

# What `tokenizers` returns of a text is hundreds of times its size, so little is held in that form.
CHARACTERS_AT_ONCE = 1 << 18
MAX_CHARACTERS_WITHOUT_BOUNDARY = 1 << 20
# Bounds what a process remembers of words: about 150,000 short ones, in 30 MB. Fewer would be tokenized more often, and
# more would be filled by large corpora only, whose workers would then take more memory than those of small ones.
MAX_REMEMBERED_CHARACTERS = 6 << 20
CHARACTERS_PER_ENTRY = 32  # what an entry takes besides its characters
# Marks a document's first word, which has no space before it. Half of a surrogate pair: no valid text holds it.
_FIRST = "\ud800"


@dataclass(frozen=True)
class TokenBatch:
    """Some of the stream of documents' ids, without framing.

    `document_ends` are the places in `ids` where documents end that have any, those begun in an earlier batch too;
    `num_documents` counts all that end here, those without ids too. `sentence_ends` are those of sentences, where
    documents are cut into them: of each document its end is one.
    """

    ids: NDArray[np.int32]  # (num_ids,)
    document_ends: NDArray[np.int64]  # (num_ends,)
    num_documents: int
    sentence_ends: NDArray[np.int64] | None = None  # (num_sentence_ends,)


def encode_documents(
    tokenizer_json: str, documents: Iterable[str], sentences_of: Callable[[str], list[str]] | None = None
) -> Iterator[TokenBatch]:
    """Yield the ids of documents, some hundred thousand characters at a time.

    A longer document is cut at the space between two words, which does not change its ids where a tokenizer treats
    each word by itself; only where a million characters have no such space, it is cut within a word.

    Args:
        tokenizer_json: what `plain_text_tokenizer_json` returned.
        documents: texts; those of nothing but white space have no ids.
        sentences_of: cuts a document into sentences, at least one; each is encoded by itself.
    """
    encoder = _encoder(tokenizer_json)
    num_open_ids = 0  # of the document that no batch has ended yet
    num_open_sentence_ids = 0
    passages_of_all = _passages(documents, sentences_of or (lambda document: [document]))
    sized = ((passage, len(passage.text) + 1) for passage in passages_of_all)  # blank documents have a size, too
    for passages in grouped(sized, CHARACTERS_AT_ONCE):
        ids_of_passages = encoder.encode([passage.text for passage in passages])
        ids = np.frombuffer(b"".join(ids_of_passages), np.int32)
        ends_of_passages = np.cumsum([len(ids) for ids in ids_of_passages]) // ids.itemsize
        ends = ends_of_passages[[passage.ends_document for passage in passages]]
        sentence_ends = ends_of_passages[[passage.ends_sentence for passage in passages]]
        with_ids = _with_ids(sentence_ends, num_open_sentence_ids) if sentences_of else None
        yield TokenBatch(ids, _with_ids(ends, num_open_ids), len(ends), with_ids)
        num_open_ids = len(ids) - ends[-1] if len(ends) else len(ids) + num_open_ids
        num_open_sentence_ids = len(ids) - sentence_ends[-1] if len(sentence_ends) else len(ids) + num_open_sentence_ids


def _with_ids(ends: NDArray[np.int64], num_open_ids: int) -> NDArray[np.int64]:
    """Keep the ends of what has ids, `num_open_ids` of which an earlier batch has of the first."""
    return ends[ends > np.concatenate([[-num_open_ids], ends])[:-1]]


@dataclass(frozen=True)
class _Passage:
    """A sentence, or what was cut of a long one; where documents are not cut into sentences each is one."""

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
            rest = "" if sentence.isspace() else sentence[start:]
            yield _Passage(rest, ends_sentence=True, ends_document=number == len(sentences))


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
