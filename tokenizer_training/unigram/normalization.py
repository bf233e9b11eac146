"""Normalize text before it is cut into tokens; all steps are part of `tokenizer.json`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from mlm_common.cli.settings import flag
from mlm_common.errors import InputError

if TYPE_CHECKING:
    from tokenizers import normalizers, pre_tokenizers

UnicodeForm = Literal["nfkc", "none"]

WORD_MARK = "▁"
# A run of these becomes one space: white space, control characters, byte-order marks, and the mark of a word's start.
SEPARATORS = rf"[\s\p{{Cc}}\ufeff{WORD_MARK}]+"


@dataclass(frozen=True)
class NormalizationConfig:
    """How text is normalized.

    Raises:
        InputError: an unknown form.
    """

    FLAG_GROUP = "Normalization"

    normalization: UnicodeForm = flag(
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

    def __post_init__(self) -> None:
        if self.normalization not in get_args(UnicodeForm):
            raise InputError(
                f"--normalization is one of {', '.join(get_args(UnicodeForm))}; got {self.normalization!r}."
            )


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
