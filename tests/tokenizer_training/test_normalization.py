"""What happens to text before it is cut: exact examples, and that words can be normalized one by one."""

import itertools
import re
import unicodedata
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenizer_training.config import NormalizationConfig, make_normalizer, make_pre_tokenizer

# What the steps act on, so many that they meet: separators, quotes, marks, and letters that marks join or leave.
TRICKY = (
    " \t\n\x00\x1f\x7f\x85\ufeff\u3000\xa0\u2028▁\u200b\u200d"
    "`'\"\uff07\xb4¨\u0301\u0307\u0323\u0331\u030c\u0338<"
    "HhJİKΣßﬁ½①ﷺ각\u1100\u1161ｶﾞ😀"
)
TEXTS = st.text(st.one_of(st.sampled_from(TRICKY), st.characters(exclude_categories=["Cs"])))
FULL_WIDTH = "\uff26\uff55\uff4c\uff4c\u3000ﬁne ①½"
ALL_CONFIGS = [NormalizationConfig(*values) for values in itertools.product(("nfkc", "none"), *[(False, True)] * 3)]


def normalized(text: str, **settings: Any) -> str:
    return make_normalizer(NormalizationConfig(**settings)).normalize_str(text)


def cut(text: str, **settings: Any) -> list[str]:
    return [word for word, _ in make_pre_tokenizer(NormalizationConfig(**settings)).pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("text", "settings", "expected"),
    [
        (FULL_WIDTH, {}, "Full fine 11\u20442"),
        (FULL_WIDTH, {"normalization": "none"}, FULL_WIDTH.replace("\u3000", " ")),
        ("e\u0301 é", {}, "é é"),
        ("e\u0301 é", {"normalization": "none"}, "e\u0301 é"),
        ("ﷺ", {}, "صلى الله عليه وسلم"),
        ("İstanbul ÄÖẞ ΟΔΟΣ", {"lowercase": True}, "i\u0307stanbul äöß οδοσ"),
        ("H\u0331", {"lowercase": True}, "ẖ"),
        ("H\u0331", {"lowercase": True, "normalization": "none"}, "h\u0331"),
        ("naïve Ångström é각 ή", {"strip_accents": True}, "naive Angstrom e각 η"),
        ("ﬁnﬁ é", {"strip_accents": True, "normalization": "none"}, "ﬁnﬁ e"),
        ("Ünder Éa", {"strip_accents": True, "lowercase": True}, "under ea"),
        ("``so'' it's", {}, '"so" it\'s'),
        ("``so'' it's", {"replace_quotes": False}, "``so'' it's"),
        ("'\u0301'", {"strip_accents": True}, '"'),
        ("7 10", {"split_digits": True}, "7 10"),
    ],
)
def test_examples(text, settings, expected):
    assert normalized(text, **settings) == expected


@pytest.mark.parametrize("form", ["nfkc", "none"])
def test_one_space_between_words_and_none_at_the_end(form):
    separators = "\t\n\v\f\r \x00\x07\x1c\x1f\x7f\x85\x9f\xa0\u2003\u2028\u2029\u3000\ufeff▁"
    for separator in separators:
        assert normalized(f"a{separator}b", normalization=form) == "a b", ascii(separator)
    assert normalized(f"a{separators}b{separators}", normalization=form) == "a b"
    assert normalized(f"{separators}a", normalization=form) == " a"
    assert normalized(separators, normalization=form) == ""
    assert normalized("a\u200bb\u200d\u00adc", normalization=form) == "a\u200bb\u200d\u00adc"


@pytest.mark.parametrize("config", ALL_CONFIGS, ids=str)
def test_idempotent_and_word_by_word(config):
    """That words are normalized by themselves as in their text is what counting relies on."""
    normalize = make_normalizer(config).normalize_str

    @given(TEXTS)
    @settings(max_examples=80)
    def check(text: str) -> None:
        once = normalize(text)
        assert normalize(once) == once
        assert "  " not in once
        assert not once.endswith(" ")
        words = [word for part in text.split() for word in normalize(part).split(" ") if word]
        assert words == [word for word in once.split(" ") if word]

    check()


@given(TEXTS)
def test_nfkc_is_unicode_s(text):
    separated = re.sub(r"[\s\x00-\x1f\x7f-\x9f\ufeff▁]+", " ", unicodedata.normalize("NFKC", text)).rstrip(" ")
    # The library knows an older or newer Unicode than this Python: letters that one of them lacks may differ.
    is_assigned = all(unicodedata.category(character) != "Cn" for character in text)
    assert not is_assigned or normalized(text, replace_quotes=False) == separated


def test_words_are_marked_at_their_begin():
    assert cut("the cat, 2010") == ["▁the", "▁cat,", "▁2010"]
    assert cut(" the cat") == ["▁the", "▁cat"]
    assert cut("") == []
    assert cut("in 2010, ½٣x", split_digits=True) == ["▁in", "▁", "2", "0", "1", "0", ",", "▁", "½", "٣", "x"]
