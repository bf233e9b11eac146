"""Where a text can be cut with no change of its ids: at the space between two words, for most tokenizers."""

import functools
import json
import re
import unicodedata
from collections.abc import Iterable
from typing import Any

import regex

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
