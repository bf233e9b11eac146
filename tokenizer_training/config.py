"""The settings of a tokenizer: how text is normalized before it is cut into tokens, and its vocabulary.

All steps of the normalization are part of `tokenizer.json`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mlm_common.cli.settings import PUBLIC, Bounded, flag
from mlm_common.corpus.config import SourcesConfig
from mlm_common.errors import InputError
from mlm_common.tokenizer import BYTE_TOKENS, SPECIAL_TOKENS, UNUSED_TOKEN

if TYPE_CHECKING:
    from tokenizers import normalizers, pre_tokenizers


WORD_MARK = "▁"
# A run of these becomes one space: white space, control characters, byte-order marks, and the mark of a word's start.
SEPARATORS = rf"[\s\p{{Cc}}\ufeff{WORD_MARK}]+"


@dataclass(frozen=True)
class NormalizationConfig:
    """How text is normalized."""

    FLAG_GROUP = "Normalization"

    normalization: Literal["nfkc", "none"] = flag(
        "nfkc",
        "nfkc (as SentencePiece, ALBERT and XLM-RoBERTa): one form for full-width letters, ligatures, raised "
        "digits (10² becomes 102) and the like. none: characters as they are. With both, runs of white space "
        "become one space.",
    )
    lowercase: bool = flag(
        False, "Convert all letters to lower case. Without it they stay, as in RoBERTa and cased BERT."
    )
    strip_accents: bool = flag(False, "Remove accents and other combining marks. Many languages need them.")
    replace_quotes: bool = flag(
        True,
        "Replace `` and '' by \", as transformers' TPU tutorial does for WikiText. This is the default.",
        off_help="Keep `` and '' as they are.",
    )
    split_digits: bool = flag(False, "Make each digit a token. Without it frequent numbers such as 2010 are one token.")


def make_normalizer(config: NormalizationConfig) -> "normalizers.Normalizer":
    """Make the normalizer, which leaves one space between words, none at the end, and treats each word by itself.

    A space at the start stays: text after a special token is normalized by itself, and the space marks a word.
    """
    from tokenizers import Regex, normalizers

    steps = [normalizers.NFKC()] if config.normalization == "nfkc" else []
    if config.lowercase:
        steps += [normalizers.Lowercase()]
    if config.strip_accents:
        steps += [normalizers.NFD(), normalizers.StripAccents()]
    if config.strip_accents or (config.lowercase and config.normalization == "nfkc"):
        # Composed again: Hangul syllables are decomposed, too, and some letters are composed in lower case only.
        steps += [normalizers.NFC()]
    if config.replace_quotes:
        steps += [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    steps += [normalizers.Replace(Regex(SEPARATORS), " "), normalizers.Strip(left=False, right=True)]
    return normalizers.Sequence(steps)


def make_pre_tokenizer(config: NormalizationConfig) -> "pre_tokenizers.PreTokenizer":
    """Make the pre-tokenizer, which cuts text into words, each marked at its start, and into digits if configured."""
    from tokenizers import pre_tokenizers

    # "first": what follows a special token without a space, as the full stop in "[MASK].", does not begin a word.
    words = pre_tokenizers.Metaspace(replacement=WORD_MARK, prepend_scheme="first")
    if not config.split_digits:
        return words
    return pre_tokenizers.Sequence([words, pre_tokenizers.Digits(individual_digits=True)])


@dataclass(frozen=True)
class SampledSourcesConfig(SourcesConfig):
    """Several corpora, and how much of each is in the sample."""

    sampling_alpha: float | None = flag(
        None,
        "With --sources that have no weights: the part of each in the sample is bytes^alpha. 1: by size. 0: all "
        "alike. XLM-R used 0.3, so that small languages get tokens, too. Default: 1.",
        at_least=0,
        at_most=1,
    )


MIN_BYTES = 1_000_000
# 30 MB of English have 1.3 million characters of different segments. Fewer than eight segments per token, of eight
# characters each, made worse tokens.
MIN_DISTINCT_CHARACTERS = 2_000_000
DISTINCT_CHARACTERS_PER_TOKEN = 64
DEFAULT_VOCABULARY_SIZE = 32_000


@dataclass(frozen=True)
class UnigramConfig(Bounded):
    """The settings of the tokenizer, in addition to the corpus and the normalization.

    Raises:
        InputError: a setting is out of its range.
    """

    FLAG_GROUP = "Vocabulary"

    vocab_size: int | None = flag(
        None,
        "Tokens in the vocabulary, special tokens and bytes included. Default: 32,000 for 400 MB of text or more, "
        "fewer for less, in proportion to the square root of its size (8,576 for 25 MB), at least twice its "
        "characters; a multiple of 128.",
        is_usual=True,
    )
    character_coverage: float = flag(
        0.9995,
        "Fraction of the text's characters that get a token; the rarest others become bytes or <unk>, unless they "
        "are ASCII or letters of a small alphabet. 0.9995 is SentencePiece's default and keeps rare scripts and "
        "emoji out of the vocabulary.",
        at_least=0.9,
        at_most=1,
    )
    byte_fallback: bool = flag(
        True,
        "Encode characters without a token as UTF-8 bytes, with 256 tokens for them, so that no text becomes "
        "<unk>. This is the default.",
        off_help="Use these 256 tokens for text; rare characters become <unk>.",
    )
    extra_special_tokens: list[str] = flag(
        list, "More special tokens, such as [ENT]; their ids start at 5, in the order given.", PUBLIC, metavar="TOKEN"
    )
    pad_vocab_to_multiple_of: int | None = flag(
        None, "Pad the vocabulary with <unused0>, <unused1>, … to a multiple of N, such as 128.", at_least=1
    )
    max_bytes: int = flag(
        1_000_000_000,
        "Bytes of text to train on, at most: a seeded sample of half, a quarter, … of the text. More than 1 GB "
        "hardly changes the tokens.",
        at_least=MIN_BYTES,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vocab_size is not None and self.vocab_size <= self.num_reserved:
            rule = f"must leave room beside {self.num_reserved} special tokens and bytes"
            raise InputError(f"--vocab-size {rule}; got {self.vocab_size}.")
        for token in self.extra_special_tokens:
            if len(token) < 2 or " " in token or not token.isprintable() or UNUSED_TOKEN.fullmatch(token):
                raise InputError(
                    "--extra-special-tokens must be of two or more visible characters, without spaces, and not "
                    f"<unused0> and so on; got {token!r}."
                )
        reserved = self.reserved_tokens
        if repeated := sorted({token for token in reserved if reserved.count(token) > 1}):
            raise InputError(f"--extra-special-tokens must be new ones; got {' '.join(repeated)}, which exist.")

    @property
    def max_distinct_characters(self) -> int:
        """Characters of different segments to train on; memory and time are proportional to it."""
        return max(
            MIN_DISTINCT_CHARACTERS, DISTINCT_CHARACTERS_PER_TOKEN * (self.vocab_size or DEFAULT_VOCABULARY_SIZE)
        )

    @property
    def reserved_tokens(self) -> list[str]:
        """The tokens that are not trained, in the order of their ids, which are the first."""
        return [*SPECIAL_TOKENS.values(), *self.extra_special_tokens, *(BYTE_TOKENS if self.byte_fallback else ())]

    @property
    def num_reserved(self) -> int:
        return len(self.reserved_tokens)
