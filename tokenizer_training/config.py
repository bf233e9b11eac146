"""The settings of a tokenizer: its vocabulary, and how text is normalized before it is cut into tokens.

All steps of the normalization are stored in `tokenizer.json`.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from mlm_common.cli.settings import Bounded, Public, flag
from mlm_common.corpus.config import SourcesConfig
from mlm_common.errors import InputError
from mlm_common.tokenizer import BYTE_TOKENS, SPECIAL_TOKENS, UNUSED_TOKEN

if TYPE_CHECKING:
    from tokenizers import normalizers, pre_tokenizers


WORD_MARK = "▁"
# A run of these characters becomes one space: white space, control characters, byte-order marks, and `WORD_MARK`.
SEPARATORS = rf"[\s\p{{Cc}}\ufeff{WORD_MARK}]+"


@dataclass(frozen=True)
class NormalizationConfig:
    """How to normalize text."""

    FLAG_GROUP = "Normalization"

    normalization: Literal["nfkc", "none"] = flag(
        "nfkc",
        "How to normalize characters. nfkc: replace full-width letters, ligatures, superscript digits (10² becomes "
        "102) and the like with their usual form, as in SentencePiece, ALBERT and XLM-RoBERTa. none: do not change "
        "characters. In both cases a run of white space becomes one space.",
    )
    lowercase: bool = flag(
        False,
        "Convert all letters to lower case. Without this flag they keep their case, as in RoBERTa and cased BERT.",
    )
    strip_accents: bool = flag(
        False, "Remove accents and other combining marks. Do not use this for the many languages that need them."
    )
    replace_quotes: bool = flag(
        True,
        "Replace `` and '' by \", as transformers' TPU tutorial does for WikiText. This is the default.",
        off_help="Do not replace `` and ''.",
    )
    split_digits: bool = flag(
        False, "Make each digit a token. Without this flag a frequent number such as 2010 is one token."
    )


def make_normalizer(config: NormalizationConfig) -> "normalizers.Normalizer":
    """Make a normalizer that leaves one space between words and none at the end, and treats each word independently.

    A space at the start is kept, because text after a special token is normalized separately, and the space shows that
    a word starts there.
    """
    from tokenizers import Regex, normalizers

    steps: list[normalizers.Normalizer] = [normalizers.NFKC()] if config.normalization == "nfkc" else []
    if config.lowercase:
        steps += [normalizers.Lowercase()]
    if config.strip_accents:
        steps += [normalizers.NFD(), normalizers.StripAccents()]
    if config.strip_accents or (config.lowercase and config.normalization == "nfkc"):
        # Compose again, because NFD also decomposes Hangul syllables, and some letters have a composed form in lower
        # case only.
        steps += [normalizers.NFC()]
    if config.replace_quotes:
        steps += [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    steps += [normalizers.Replace(Regex(SEPARATORS), " "), normalizers.Strip(left=False, right=True)]
    return normalizers.Sequence(steps)


def make_pre_tokenizer(config: NormalizationConfig) -> "pre_tokenizers.PreTokenizer":
    """Make the pre-tokenizer, which cuts text into words with a mark at their start and, if configured, into digits."""
    from tokenizers import pre_tokenizers

    # With "first", text that follows a special token without a space, such as the full stop in "[MASK].", gets no
    # mark.
    words = pre_tokenizers.Metaspace(replacement=WORD_MARK, prepend_scheme="first")
    if not config.split_digits:
        return words
    return pre_tokenizers.Sequence([words, pre_tokenizers.Digits(individual_digits=True)])


@dataclass(frozen=True)
class SampledSourcesConfig(SourcesConfig):
    """Several corpora, and how much of each to sample."""

    sampling_alpha: float | None = flag(
        None,
        "With --sources without weights: how much of each source to sample, in proportion to bytes^alpha. 1: in "
        "proportion to size. 0: the same amount of each. XLM-R used 0.3, so that small languages get tokens, too. "
        "Default: 1.",
        at_least=0,
        at_most=1,
    )


MIN_BYTES = 1_000_000
# The distinct segments of 30 MB of English have 1.3 million characters. With fewer than eight segments of eight
# characters per token, the tokens were worse.
MIN_DISTINCT_CHARACTERS = 2_000_000
DISTINCT_CHARACTERS_PER_TOKEN = 64
DEFAULT_VOCABULARY_SIZE = 32_000


@dataclass(frozen=True)
class UnigramConfig(Bounded):
    """The settings of the tokenizer, in addition to the corpus and the normalization.

    Raises:
        InputError: a setting is out of range.
    """

    FLAG_GROUP = "Vocabulary"

    vocab_size: int | None = flag(
        None,
        "Number of tokens in the vocabulary, including special tokens and bytes. Default: 32,000 for 400 MB of text or "
        "more; for less text, proportional to the square root of its size (8,576 for 25 MB), but at least twice the "
        "number of different characters, and a multiple of 128.",
        is_usual=True,
    )
    character_coverage: float = flag(
        0.9995,
        "Fraction of the characters of the text that get a token. The rarest characters become bytes or <unk>, unless "
        "they are ASCII or letters of a small alphabet. 0.9995 is SentencePiece's default and keeps rare scripts and "
        "emoji out of the vocabulary.",
        at_least=0.9,
        at_most=1,
    )
    byte_fallback: bool = flag(
        True,
        "Encode characters without a token as UTF-8 bytes, for which there are 256 tokens, so that no text becomes "
        "<unk>. This is the default.",
        off_help="Do not add 256 tokens for bytes. Rare characters become <unk>.",
    )
    extra_special_tokens: Public[list[str]] = flag(
        list,
        "Additional special tokens, such as [ENT]. Their ids start at 5, in the order given.",
        metavar="TOKEN",
    )
    pad_vocab_to_multiple_of: int | None = flag(
        None, "Pad the vocabulary to a multiple of N, such as 128, with <unused0>, <unused1>, ….", at_least=1
    )
    max_bytes: int = flag(
        1_000_000_000,
        "Maximum number of bytes of text to train on. From a larger corpus, a random half, quarter, … is used. More "
        "than 1 GB hardly changes the tokens.",
        at_least=MIN_BYTES,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.vocab_size is not None and self.vocab_size <= self.num_reserved:
            raise InputError(
                f"--vocab-size must be more than the {self.num_reserved} special tokens and bytes; received "
                f"{self.vocab_size}."
            )
        for token in self.extra_special_tokens:
            if len(token) < 2 or " " in token or not token.isprintable() or UNUSED_TOKEN.fullmatch(token):
                raise InputError(
                    "Each token in --extra-special-tokens must have at least two visible characters, contain no "
                    f"spaces, and not look like <unused0>; received {token!r}."
                )
        reserved = self.reserved_tokens
        if repeated := sorted({token for token in reserved if reserved.count(token) > 1}):
            raise InputError(f"--extra-special-tokens must be new tokens; {' '.join(repeated)} already exist.")

    @property
    def max_distinct_characters(self) -> int:
        """Maximum number of characters of all distinct segments; memory and time of training grow with this number."""
        return max(
            MIN_DISTINCT_CHARACTERS, DISTINCT_CHARACTERS_PER_TOKEN * (self.vocab_size or DEFAULT_VOCABULARY_SIZE)
        )

    @property
    def reserved_tokens(self) -> list[str]:
        """The tokens that are not trained, in the order of their ids, which are the first ids."""
        return [*SPECIAL_TOKENS.values(), *self.extra_special_tokens, *(BYTE_TOKENS if self.byte_fallback else ())]

    @property
    def num_reserved(self) -> int:
        return len(self.reserved_tokens)
