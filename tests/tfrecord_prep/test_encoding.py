"""Tokenizing documents: the ids of the tokenizer as it is, however they are batched, cut and remembered."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from mlm_common.tokenizer import plain_text_tokenizer_json
from tests.fixtures.tiny_tokenizers import KINDS, SPECIAL_TOKENS
from tfrecord_prep import encoding
from tfrecord_prep.encoding import encode_documents, tokenizes_by_word, word_boundary

PLAIN_JSON = {name: plain_text_tokenizer_json(make().to_str()) for name, make in KINDS.items()}
BY_WORD = [name for name in KINDS if tokenizes_by_word(PLAIN_JSON[name])]
# Words, and what normalizers make spaces of, remove, join or take apart.
WORDS = "a model language ordinary 12 . é e\u0301 \u0301 क\u094d ☃ 🙂 ǆ ﬁ ㎏ ﾞ 한 \u200b \u200d \ufeff"
WORDS += " \ufffd ▁ \u00b4 \u00a8 \u037a \u2017 ﷺ `` '' \" [MASK] [ ] <unk>"
SPACES = [" ", " ", " ", "  ", "\n", "\t", "\r\n", "\x00", "\x1c", "\x7f", "\x85", "\xa0", "\u2028", "\u3000"]
PARTS = [*WORDS.split(), *SPACES]
texts_strategy = st.lists(st.sampled_from(PARTS), max_size=30).map("".join)


def documents_of(name: str, documents: Sequence[str]) -> list[list[int]]:
    """Encode the documents, and put the ids of each that has any together from all batches."""
    ids_of_documents: list[list[int]] = [[]]
    num_documents = 0
    for batch in encode_documents(PLAIN_JSON[name], documents):
        assert (batch.ids.dtype, batch.document_ends.dtype) == (np.int32, np.int64)
        num_documents += batch.num_documents
        first, *others = np.split(batch.ids, batch.document_ends)
        ids_of_documents[-1] += first.tolist()
        ids_of_documents += [ids.tolist() for ids in others]
    assert num_documents == len(documents)
    assert ids_of_documents.pop() == []
    return ids_of_documents


def expected_of(name: str, documents: Sequence[str]) -> list[list[int]]:
    tokenizer = Tokenizer.from_str(PLAIN_JSON[name])
    texts = [text for text in documents if text and not text.isspace()]
    ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    return [some for some in ids if some]


def test_all_kinds_but_one_are_tokenized_by_word():
    assert [*BY_WORD, "whole_text"] == list(KINDS)


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=30)
@given(documents=st.lists(texts_strategy, max_size=4))
def test_ids_are_those_of_the_tokenizer(name, documents):
    assert documents_of(name, documents) == expected_of(name, documents)


@pytest.mark.parametrize("name", BY_WORD)
@pytest.mark.parametrize("characters_at_once", [8, 60])
@settings(max_examples=25)
@given(texts=st.lists(texts_strategy, max_size=4))
def test_long_documents_are_cut_without_a_change(name, characters_at_once, texts):
    # Each with a boundary in reach, since without one a document is cut within a word.
    documents = [" a b".join(["", *text, ""]) if text else "" for text in texts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoding, "CHARACTERS_AT_ONCE", characters_at_once)
        assert documents_of(name, documents) == expected_of(name, documents)


def test_text_without_spaces_is_cut_hard(monkeypatch):
    monkeypatch.setattr(encoding, "CHARACTERS_AT_ONCE", 30)
    monkeypatch.setattr(encoding, "MAX_CHARACTERS_WITHOUT_BOUNDARY", 100)
    (ids,) = documents_of("byte_level", ["a" * 1020])
    assert ids == expected_of("byte_level", ["a" * 100])[0] * 10 + expected_of("byte_level", ["a" * 20])[0]
    batches = list(encode_documents(PLAIN_JSON["byte_level"], ["e", "a" * 1020, "e"]))
    assert [len(batch.document_ends) for batch in batches] == [1] + [0] * 10 + [2]


def test_text_with_few_spaces_is_cut_at_them(monkeypatch):
    monkeypatch.setattr(encoding, "CHARACTERS_AT_ONCE", 30)
    monkeypatch.setattr(encoding, "MAX_CHARACTERS_WITHOUT_BOUNDARY", 100)
    text = f"{'a' * 80} {'e' * 90} {'a' * 20}"
    assert documents_of("byte_level", [text]) == expected_of("byte_level", [text])
    assert len(list(encode_documents(PLAIN_JSON["byte_level"], [text]))) == 3


@pytest.mark.parametrize("name", ["unigram", pytest.param("lowercased", marks=pytest.mark.slow)])
def test_every_visible_character_may_stand_beside_a_boundary(name):
    characters = [chr(code) for code in range(0x10000) if not 0xD800 <= code < 0xE000]
    words = [word for character in characters for word in (character, f"a{character}")]
    documents = [" ".join(words[start : start + 300]) for start in range(0, len(words), 300)]
    assert sum(len(word_boundary().findall(document)) for document in documents) > 100_000
    assert documents_of(name, documents) == expected_of(name, documents)


def test_words_are_remembered_and_forgotten(monkeypatch):
    documents = [f"model {'language ' * (number % 50)}a{number % 7}" for number in range(3000)]
    encoder = encoding._encoder(PLAIN_JSON["words"])
    assert documents_of("words", documents) == expected_of("words", documents)
    assert "language" in encoder._ids_of_word
    monkeypatch.setattr(encoding, "MAX_REMEMBERED_CHARACTERS", 200)
    monkeypatch.setattr(encoding, "CHARACTERS_AT_ONCE", 1000)
    assert documents_of("words", documents) == expected_of("words", documents)
    assert len(encoder._ids_of_word) + len(encoder._ids_of_older_word) < 18


def test_blank_documents_are_counted_alone():
    (batch,) = encode_documents(PLAIN_JSON["byte_level"], ["", " \n ", "a", "\u3000"])
    assert (batch.num_documents, batch.document_ends.tolist()) == (4, [1])
    assert list(encode_documents(PLAIN_JSON["words"], [])) == []


def test_boundaries():
    text = "one two  three\nfour, five: é ☃ \u0301six \xa0seven \u00b4eight nin\u0301 ten "
    cut = word_boundary().split(text)
    assert cut == ["one", "two  three\nfour,", "five:", "é", "☃ \u0301six \xa0seven \u00b4eight", "nin\u0301", "ten "]


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_text_that_reads_like_a_special_token_is_text(make):
    tokenizer = make()
    text = "language [MASK] model <pad>[SEP] <unk> [CLS]language"
    special_ids = {tokenizer.token_to_id(token) for token in SPECIAL_TOKENS if token != "<unk>"}
    assert special_ids & set(tokenizer.encode(text, add_special_tokens=False).ids)
    plain = Tokenizer.from_str(plain_text_tokenizer_json(tokenizer.to_str()))
    assert plain.encode(text, add_special_tokens=False).ids
    for noncharacter in ("", "\U0010ffff", "\U0010fffe", "\ufdd0", "\x00"):
        ids = plain.encode(f"{text} {noncharacter}[MASK] {noncharacter}<pad>", add_special_tokens=False).ids
        assert not special_ids & set(ids)


def test_nothing_is_truncated_padded_or_framed():
    tokenizer = KINDS["unigram"]()
    expected = tokenizer.encode("language model " * 30).ids
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=500)
    plain = Tokenizer.from_str(plain_text_tokenizer_json(tokenizer.to_str()))
    assert plain.encode("language model " * 30).ids == expected
