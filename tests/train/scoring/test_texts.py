"""Units of texts in many scripts, and by many tokenizers: each token is in one unit, each byte in one."""

import unicodedata

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlm_common.errors import InputError
from tests.fixtures.tiny_tokenizers import KINDS, SPECIAL_TOKENS
from train.scoring.texts import WORD, TextEncoder, byte_lengths, draw_units, tokens_of

NAMES = ("cls_token", "pad_token", "sep_token", "unk_token", "mask_token")
ROLES = dict(zip(NAMES, SPECIAL_TOKENS, strict=True))
CHARACTERS = st.one_of(
    st.sampled_from(
        [*" \t\n.,-'", "the", " model", "[MASK]", "<unk>", "語", "学", "\uff41", "ﬁ", "㍿", "e\u0301", "é"]
    ),
    st.sampled_from(
        ["हिन्दी", "ภาษาไทย", "שָׁלוֹם", "한국", unicodedata.normalize("NFD", "한국"), "😀", "👩\u200d🚀", "1️⃣"]
    ),
    st.characters(exclude_categories=["Cs"]),
)
UGLY = st.lists(CHARACTERS, min_size=1, max_size=25).map("".join)


def byte_fallback(normalizer=None):
    """Make the kind that train-unigram makes by default, which knows no Chinese."""
    pieces = [
        *((token, 0.0) for token in SPECIAL_TOKENS),
        ("▁", -2.0),
        ("▁the", -3.0),
        ("e", -4.0),
        ("の", -5.0),
        ("年月", -5.0),
    ]
    pieces += [(f"<0x{byte:02X}>", -10.0) for byte in range(256)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=3, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return tokenizer


def all_bytes():
    """Make GPT-2's kind with all bytes in its vocabulary."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *sorted(alphabet)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


MAKERS = {
    **KINDS,
    "byte fallback": byte_fallback,
    "byte fallback behind NFKC": lambda: byte_fallback(normalizers.NFKC()),
    "all bytes": all_bytes,
}
TOKENIZERS = {name: PreTrainedTokenizerFast(tokenizer_object=make(), **ROLES) for name, make in MAKERS.items()}
ENCODERS = {name: TextEncoder(tokenizer) for name, tokenizer in TOKENIZERS.items()}


@given(documents=st.lists(UGLY, min_size=1, max_size=3), names=st.lists(st.sampled_from(list(ENCODERS)), max_size=3))
def test_units_have_each_character_and_each_token_once_and_none_is_cut(documents, names):
    readings = [[ENCODERS[name].encode(document) for document in documents] for name in names]
    try:
        units = draw_units(documents, readings, 10**6, seed=1)
    except InputError:
        assert not any(WORD.search(document) for document in documents)
        return
    for number, document in enumerate(documents):
        of_document = [unit for unit in units if unit.document == number]
        assert "".join(document[unit.start : unit.stop] for unit in of_document) == document
        for name, texts in zip(names, readings, strict=True):
            text, spans = texts[number], [tokens_of(texts[number], unit) for unit in of_document]
            assert [token for span in spans for token in range(*span)] == list(range(len(text.ids)))
            for unit, (first, stop) in zip(of_document, spans, strict=True):
                assert all(unit.start <= start for start in text.starts[first:stop])
                assert all(end <= unit.stop for end in text.stops[first:stop]), name


@settings(max_examples=30)
@given(document=UGLY)
@pytest.mark.parametrize("name", list(ENCODERS))
def test_ids_are_those_of_stage_2(name, document):
    tokenizer = TOKENIZERS[name]
    ids = ENCODERS[name].encode(document).ids.tolist()
    special = [token_id for token_id in tokenizer.all_special_ids if token_id != tokenizer.unk_token_id]
    assert not set(ids).intersection(special)
    if not any(token in document for token in SPECIAL_TOKENS):
        assert ids == tokenizer(document, add_special_tokens=False)["input_ids"]


def units_of(text, *names):
    units = draw_units([text], [[ENCODERS[name].encode(text)] for name in names], 10**6, seed=1)
    return [text[unit.start : unit.stop] for unit in units]


def test_a_unit_is_a_word_with_the_signs_beside_it():
    assert units_of("“The” cat, it's (ü).\n") == ["“The”", " cat,", " it", "'s", " (ü).\n"]
    assert units_of("हिन्दी भाषा") == ["हिन्दी", " भाषा"]
    assert units_of("ภาษาที่ a") == [*"ภาษา", "ที่", " a"]
    assert units_of("語学のcafe\u0301 o\u0302") == ["語", "学", "の", "cafe\u0301", " o\u0302"]


def test_byte_tokens_belong_to_their_characters():
    assert units_of("the 語学の漢é", "byte fallback") == ["the", " 語", "学", "の", "漢", "é"]
    # What NFKC changed, such as the ligature, cannot be told apart in a row of bytes: the row is one unit.
    assert units_of("語ﬁ語 語語", "byte fallback behind NFKC") == ["語ﬁ語", " 語", "語"]


def test_words_that_a_token_of_any_model_crosses_are_one_unit():
    assert units_of("年月月年月x", "byte fallback") == ["年月", "月", "年月", "x"]
    assert units_of("年月x, 年", "all bytes") == ["年", "月", "x,", " 年"]
    assert units_of("年月x, 年", "all bytes", "words") == ["年月x,", " 年"]
    assert units_of("it's, the", "byte fallback", "words") == ["it's,", " the"]


@given(UGLY)
def test_bytes_of_characters_are_those_of_utf_8(text):
    assert byte_lengths(text).tolist() == [len(character.encode()) for character in text]


@pytest.mark.parametrize(
    ("name", "text", "unread"),
    [
        ("wordpiece", "the zq, ☃ model", "zq☃"),
        ("unigram", "the 𓀀 model", "𓀀"),
        ("byte fallback", "the 語 zq", ""),
        ("all bytes", "the 語 zq", ""),
        ("byte_level", "the жq model", "жq"),  # dropped without a word
        ("wordpiece", "e\u0301 \u0007", ""),  # marks and what nobody sees
        ("byte fallback behind NFKC", unicodedata.normalize("NFD", "한국"), ""),
    ],
)
def test_what_a_tokenizer_cannot_read(name, text, unread):
    encoded = ENCODERS[name].encode(text)
    assert "".join(np.array(list(text))[encoded.unread]).strip() == unread


def test_units_are_drawn_evenly_and_the_same_again():
    documents = ["a b c d", "e f", "語学 g-h", "…"]
    everything = draw_units(documents, [], 100, seed=1)
    words = [documents[unit.document][unit.word_start : unit.word_stop] for unit in everything]
    assert words == [*"abcdef", "語", "学", *"gh", ""]
    assert draw_units(documents, [], 3, seed=5) == draw_units(documents, [], 3, seed=5)
    counts = np.zeros(11)
    for seed in range(2000):
        for unit in draw_units(documents, [], 3, seed):
            counts[everything.index(unit)] += 1
    assert np.all(np.abs(counts / 2000 - 3 / 11) < 5 * np.sqrt(3 / 11 * 8 / 11 / 2000))
