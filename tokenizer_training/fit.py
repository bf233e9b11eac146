"""Measure how well tokens fit a text: tokens per word or, if spaces do not separate words, characters per token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from mlm_common.tokenizer import plain_text_tokenizer_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# Encodings are many times the size of their text, so only a few are in memory at a time.
TEXTS_AT_ONCE = 64
# Text with more characters per space, such as DNA sequences, has no words to count.
MAX_CHARACTERS_PER_WORD = 15.0
# The texts of a source with spaces, or its texts without spaces, are not reported if they are a smaller fraction of the
# source than this.
MIN_FRACTION = 0.05
SCRIPTS_WITHOUT_SPACES = ("Han", "Hiragana", "Katakana", "Bopomofo", "Thai", "Lao", "Khmer", "Myanmar", "Tibetan", "Yi")


@dataclass(frozen=True)
class Fit:
    """Counts for the texts of a source that separate words with spaces, or for the source's other texts.

    Attributes:
        source: name of the source; empty for a single corpus.
        has_spaces: whether the texts separate words with spaces.
        num_words: number of words, separated by white space.
        num_characters: number of characters, including white space.
        num_tokens: number of tokens.
    """

    source: str
    has_spaces: bool
    num_words: int
    num_characters: int
    num_tokens: int

    @property
    def tokens_per_word(self) -> float:
        return self.num_tokens / max(1, self.num_words)

    @property
    def characters_per_token(self) -> float:
        return self.num_characters / max(1, self.num_tokens)

    @property
    def record(self) -> dict[str, Any]:
        """The entry of `report.json`: the counts, and tokens per word (without spaces: characters per token)."""
        ratio = "tokens_per_word" if self.has_spaces else "characters_per_token"
        return vars(self) | {ratio: getattr(self, ratio)}


def fit_of(record: Mapping[str, Any]) -> Fit:
    """Convert an entry of `report.json` back to a `Fit`."""
    return Fit(**{name: record[name] for name in Fit.__dataclass_fields__})


def describe_fits(fits: Sequence[Fit]) -> str:
    """Describe the ratio of each fit of a source. If there are several, also give their fractions of the text."""
    total = sum(fit.num_characters for fit in fits)
    parts = [f" ({fit.num_characters / total:.0%} of the text)" if len(fits) > 1 else "" for fit in fits]
    return ", ".join(_describe_ratio(fit) + part for fit, part in zip(fits, parts, strict=True))


def _describe_ratio(fit: Fit) -> str:
    if fit.has_spaces:
        return f"{fit.tokens_per_word:.2f} tokens per word"
    return f"{fit.characters_per_token:.2f} characters per token"


def measure_fits(tokenizer: "PreTrainedTokenizerFast", texts_by_source: Mapping[str, Sequence[str]]) -> list[Fit]:
    """Measure each source: once on the texts that separate words with spaces, and once on its other texts."""
    return [fit for source, texts in texts_by_source.items() for fit in _fits_of_source(tokenizer, source, texts)]


def _fits_of_source(tokenizer: "PreTrainedTokenizerFast", source: str, texts: Sequence[str]) -> list[Fit]:
    groups: dict[bool, list[str]] = {True: [], False: []}
    for text in texts:
        groups[separates_words(text)].append(text)
    fits = [_measure(tokenizer, source, has_spaces, group) for has_spaces, group in groups.items() if any(group)]
    total = sum(fit.num_characters for fit in fits)
    large = [fit for fit in fits if fit.num_characters >= MIN_FRACTION * total]
    return sorted(large, key=lambda fit: -fit.num_characters)


def _measure(tokenizer: "PreTrainedTokenizerFast", source: str, has_spaces: bool, texts: Sequence[str]) -> Fit:
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(plain_text_tokenizer_json(tokenizer.backend_tokenizer.to_str()))
    num_tokens = 0
    for start in range(0, len(texts), TEXTS_AT_ONCE):
        encodings = backend.encode_batch_fast(texts[start : start + TEXTS_AT_ONCE], add_special_tokens=False)
        num_tokens += sum(map(len, encodings))
    num_words, num_characters = sum(len(text.split()) for text in texts), sum(map(len, texts))
    has_words = has_spaces and num_characters <= MAX_CHARACTERS_PER_WORD * num_words
    return Fit(source, has_words, num_words, num_characters, num_tokens)


def separates_words(text: str) -> bool:
    """Return whether at least half of the letters belong to scripts that separate words with spaces."""
    letter, without_spaces = _patterns()
    return 2 * len(without_spaces.findall(text)) <= len(letter.findall(text))


@lru_cache(maxsize=1)
def _patterns() -> tuple[Any, Any]:
    import regex

    scripts = "".join(rf"\p{{Script={name}}}" for name in SCRIPTS_WITHOUT_SPACES)
    return regex.compile(r"\p{L}"), regex.compile(rf"[\p{{L}}&&[{scripts}]]", regex.V1)
