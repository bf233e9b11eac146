"""A tokenizer for plain text: what reads like a special token is text."""

import pytest
from tokenizers import Tokenizer

from tests.fixtures.tiny_tokenizers import KINDS, SPECIAL_TOKENS
from tfrecord_prep.encoding import plain_text_tokenizer_json


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_text_that_reads_like_a_special_token_is_text(make) -> None:
    tokenizer = make()
    text = "language [MASK] model <pad>[SEP] <unk> [CLS]language"
    special_ids = {tokenizer.token_to_id(token) for token in SPECIAL_TOKENS if token != "<unk>"}
    assert special_ids & set(tokenizer.encode(text, add_special_tokens=False).ids)
    plain = Tokenizer.from_str(plain_text_tokenizer_json(tokenizer.to_str()))
    ids = plain.encode(text, add_special_tokens=False).ids
    assert ids
    assert not special_ids & set(ids)


def test_nothing_is_truncated_padded_or_framed() -> None:
    tokenizer = KINDS["unigram"]()
    expected = tokenizer.encode("language model " * 30).ids
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=500)
    plain = Tokenizer.from_str(plain_text_tokenizer_json(tokenizer.to_str()))
    assert plain.encode("language model " * 30).ids == expected
