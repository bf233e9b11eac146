"""Tokenizing documents: the ids of the tokenizer as it is, but for what reads like a special token."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, trainers

from tfrecord_prep.plain_text import encode_documents, plain_text_tokenizer_json

SPECIAL_TOKENS = ["[CLS]", "<pad>", "[SEP]", "<unk>", "[MASK]"]
TEXTS = ["a model of language, masked", "the MASK [of] <the> language model CLS SEP unk pad ] [ < >"] * 20


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=80, special_tokens=SPECIAL_TOKENS, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def wordpiece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=120, special_tokens=SPECIAL_TOKENS, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_special_tokens(["[LATE]"])
    tokenizer.add_tokens([AddedToken("ordinary", normalized=True)])
    return tokenizer


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=SPECIAL_TOKENS, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def words() -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, "language", "model"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    return tokenizer


TOKENIZERS = {make.__name__: make() for make in (unigram, wordpiece, byte_level, words)}


def ids_of(tokenizer: Tokenizer, *documents: str) -> tuple[list[int], list[int]]:
    ids, lengths = encode_documents(plain_text_tokenizer_json(tokenizer.to_str()), documents)
    assert (ids.dtype, lengths.dtype) == (np.int32, np.int64)
    return ids.tolist(), lengths.tolist()


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
@settings(deadline=None, max_examples=50)
@given(documents=st.lists(st.text(st.sampled_from("model lang☃[],.é\n\t ordinary"), min_size=1), max_size=5))
def test_ids_are_those_of_the_tokenizer(tokenizer: Tokenizer, documents: list[str]) -> None:
    expected = [tokenizer.encode(document, add_special_tokens=False).ids for document in documents]
    assert ids_of(tokenizer, *documents) == (list(chain.from_iterable(expected)), [len(ids) for ids in expected])


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
def test_text_that_reads_like_a_special_token_is_text(tokenizer: Tokenizer) -> None:
    text = "language [MASK] model <pad>[SEP] <unk> [CLS]language"
    special_ids = {tokenizer.token_to_id(token) for token in SPECIAL_TOKENS if token != "<unk>"}
    assert special_ids & set(tokenizer.encode(text, add_special_tokens=False).ids)
    ids, _ = ids_of(tokenizer, text)
    assert ids
    assert not special_ids & set(ids)


def test_nothing_is_truncated_or_padded() -> None:
    tokenizer = unigram()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=50)
    ids, lengths = ids_of(tokenizer, "language model " * 30, "model")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    expected = [tokenizer.encode(text).ids for text in ("language model " * 30, "model")]
    assert (ids, lengths) == (expected[0] + expected[1], [len(expected[0]), len(expected[1])])


def test_many_documents_are_encoded_in_order() -> None:
    documents = [f"model {'language ' * (number % 50)}" for number in range(10_000)]
    _, lengths = ids_of(TOKENIZERS["words"], *documents)
    assert lengths == [1 + number % 50 for number in range(10_000)]


def test_no_documents() -> None:
    assert ids_of(TOKENIZERS["words"]) == ([], [])
