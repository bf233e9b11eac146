"""Train a unigram tokenizer (Kudo 2018, "Subword Regularization") on counted words, as a `tokenizers` tokenizer.

SentencePiece's EM rather than the trainer of `tokenizers`: the same counts in give the same pieces and scores out, it
is many times faster, and it returns exactly the number of pieces asked for.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tokenizer_training.command_line import InputError
from tokenizer_training.normalization import WORD_MARK, NormalizationConfig, make_normalizer, make_pre_tokenizer
from tokenizer_training.piece_training import SegmentTable, TooManyPiecesError
from tokenizer_training.progress import no_progress
from tokenizer_training.tokenizer import BYTE_PIECES, SPECIAL_TOKENS, UNUSED_PIECE
from tokenizer_training.word_counts import WordCounts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MIN_BYTES = 1_000_000
# 30 MB of English have 1.3 million characters of different segments. Fewer than eight segments a piece, of eight
# characters each, made worse pieces.
MIN_DISTINCT_CHARACTERS = 2_000_000
DISTINCT_CHARACTERS_PER_PIECE = 64
# Few enough digits that `tokenizers` reads the very number that was written.
SCORE_DECIMALS = 6
# So low that text which reads like a special token or a byte piece is cut into ordinary pieces.
NOT_IN_TEXT_SCORE = -1000.0
# SentencePiece's own sign for an unknown character cannot become a piece.
NEVER_A_PIECE = "▅"
# A character among the most frequent 512 gets a piece when it occurs five times in a million or more.
SMALL_ALPHABET = 512
MIN_SHARE_OF_LETTER = 5e-6
# A TPU's matrix unit is 128 wide.
VOCABULARY_STEP = 128
DEFAULT_VOCABULARY_SIZE = 32_000
# Pieces for the square root of the bytes of text, when no number is asked for: 8,192 for 25 MB, beside the reserved.
PIECES_PER_SQRT_BYTE = 1.6384


@dataclass(frozen=True)
class UnigramConfig:
    """What decides the tokenizer, beside the corpus and the normalization.

    Raises:
        InputError: a setting is out of its range.
    """

    vocab_size: int | None = field(
        default=None,
        metadata={
            "help": "Pieces in the vocabulary, special tokens and bytes included. Default: 32,000 for 400 MB of text "
            "or more, fewer for less, in proportion to the square root of its size (8,576 for 25 MB), and at least "
            "twice its characters; a multiple of 128, the width of a TPU's matrix unit."
        },
    )
    character_coverage: float = field(
        default=0.9995,
        metadata={
            "help": "Share of the text's characters that get a piece of their own; the rarest others become bytes, or "
            "<unk>, unless they are ASCII or letters of a small alphabet. 0.9995 is SentencePiece's default and keeps "
            "rare scripts and emoji out of the vocabulary."
        },
    )
    byte_fallback: bool = field(
        default=True,
        metadata={
            "help": "Spell characters without a piece as their UTF-8 bytes, with 256 pieces for these, so that no text "
            "becomes <unk>. Off: the 256 pieces go to text, and such characters are lost."
        },
    )
    extra_special_tokens: list[str] = field(
        default_factory=list,
        metadata={"help": "More special tokens, such as [ENT]; they get the ids from 5 on, in the order given."},
    )
    pad_vocab_to_multiple_of: int | None = field(
        default=None,
        metadata={"help": "Fill the vocabulary up with <unused0>, <unused1>, … to a multiple of this, such as 128."},
    )
    max_bytes: int = field(
        default=1_000_000_000,
        metadata={
            "help": "Bytes of text to train on, at most: a seeded sample of half, a quarter, … of all of it. More "
            "text than the default, 1 GB, hardly changes which pieces are best."
        },
    )

    def __post_init__(self) -> None:
        if self.vocab_size is not None and self.vocab_size <= self.num_reserved:
            raise InputError(
                f"--vocab-size must leave room beside {self.num_reserved} special tokens and bytes; got "
                f"{self.vocab_size}."
            )
        if not 0.9 <= self.character_coverage <= 1:
            raise InputError(f"--character-coverage must be from 0.9 to 1; got {self.character_coverage}.")
        for token in self.extra_special_tokens:
            if len(token) < 2 or " " in token or not token.isprintable() or UNUSED_PIECE.fullmatch(token):
                raise InputError(
                    "--extra-special-tokens must be of two or more visible characters, without spaces, and not "
                    f"<unused0> and so on; got {token!r}."
                )
        reserved = self.reserved_tokens
        if repeated := sorted({token for token in reserved if reserved.count(token) > 1}):
            raise InputError(f"--extra-special-tokens must be new ones; got {' '.join(repeated)}, which exist.")
        if self.pad_vocab_to_multiple_of is not None and self.pad_vocab_to_multiple_of < 1:
            raise InputError(f"--pad-vocab-to-multiple-of must be 1 or more; got {self.pad_vocab_to_multiple_of}.")
        if self.max_bytes < MIN_BYTES:
            raise InputError(f"--max-bytes must be at least {MIN_BYTES:,}; got {self.max_bytes:,}.")

    @property
    def max_distinct_characters(self) -> int:
        """How much of different words training is given: memory and time go with it."""
        return max(
            MIN_DISTINCT_CHARACTERS, DISTINCT_CHARACTERS_PER_PIECE * (self.vocab_size or DEFAULT_VOCABULARY_SIZE)
        )

    @property
    def reserved_tokens(self) -> list[str]:
        """The pieces that are not trained, in the order of their ids, which are the first."""
        return [*SPECIAL_TOKENS.values(), *self.extra_special_tokens, *(BYTE_PIECES if self.byte_fallback else ())]

    @property
    def num_reserved(self) -> int:
        """How many pieces are not trained."""
        return len(self.reserved_tokens)


def train_unigram(
    counts: WordCounts,
    num_bytes: int,
    config: UnigramConfig,
    normalization: NormalizationConfig,
    on_round: Callable[[int, int], object] = no_progress,
) -> "PreTrainedTokenizerFast":
    """Return a tokenizer trained on counted words; the same counts and settings give the same one, bit for bit.

    Args:
        counts: of text normalized with `normalization`; its segments are used up.
        num_bytes: size of that text, for the default size of the vocabulary.
        config: its `vocab_size` is met exactly.
        normalization: becomes part of the tokenizer.
        on_round: called with the number of rounds of training done and expected in all.

    Raises:
        InputError: no words; or the words give fewer pieces, or have more characters, than the vocabulary holds.
        RunFailedError: the trainer was killed.
    """
    if not counts.segments:
        raise InputError("A corpus must hold text; every document of the corpus is blank (see --text-column).")
    alphabet = choose_alphabet(counts.characters, config)
    size = config.vocab_size or _default_vocabulary_size(num_bytes, len(alphabet), config)
    if size <= config.num_reserved + len(alphabet):
        raise InputError(
            f"--vocab-size must be more than {config.num_reserved + len(alphabet):,}: {len(alphabet):,} characters of "
            f"this corpus, {config.num_reserved} special tokens and bytes; got {size:,} (a lower --character-coverage "
            "leaves the rarest characters out)."
        )
    with SegmentTable(_within_alphabet(counts, alphabet)) as table:
        pieces = _train_pieces(table, size, len(alphabet), config, on_round)
    return _as_tokenizer(pieces, config, normalization)


def choose_alphabet(characters: Counter[str], config: UnigramConfig) -> set[str]:
    """Return the characters that become pieces.

    They are the most frequent ones that make up the coverage asked for; a small alphabet's rare letters, or German
    would lose its Ö and English its J; and those of the reserved tokens, so that text which reads like one can be
    spelled.
    """
    by_rank = sorted(characters.keys() - {WORD_MARK}, key=lambda character: (-characters[character], character))
    num_characters = characters.total() - characters[WORD_MARK]
    alphabet = {WORD_MARK}.union(*config.reserved_tokens)
    num_covered = 0
    for rank, character in enumerate(by_rank):
        is_letter = rank < SMALL_ALPHABET and characters[character] >= MIN_SHARE_OF_LETTER * num_characters
        if num_covered < config.character_coverage * num_characters or is_letter or character.isascii():
            alphabet.add(character)
        num_covered += characters[character]
    return alphabet - {NEVER_A_PIECE}


def _default_vocabulary_size(num_bytes: int, num_characters: int, config: UnigramConfig) -> int:
    num_pieces = max(round(PIECES_PER_SQRT_BYTE * num_bytes**0.5), 2 * num_characters)
    size = -(-(num_pieces + config.num_reserved) // VOCABULARY_STEP) * VOCABULARY_STEP
    return min(size, DEFAULT_VOCABULARY_SIZE)


def _train_pieces(
    table: SegmentTable,
    size: int,
    num_characters: int,
    config: UnigramConfig,
    on_round: Callable[[int, int], object],
) -> list[tuple[str, float]]:
    """Return the pieces of a vocabulary of `size`; of the largest one there is if the configuration leaves it open."""
    while True:
        try:
            return table.train(size - config.num_reserved, config.extra_special_tokens, on_round)
        except TooManyPiecesError as error:
            largest = error.largest + config.num_reserved
            if config.vocab_size is not None:
                raise InputError(
                    f"--vocab-size can be {largest:,} at most with this corpus; got {config.vocab_size:,}."
                ) from error
            rounded = largest // VOCABULARY_STEP * VOCABULARY_STEP
            size = rounded if rounded > config.num_reserved + num_characters else largest


def _within_alphabet(counts: WordCounts, alphabet: set[str]) -> Iterator[tuple[str, int]]:
    """Yield the segments, cut at characters outside the alphabet, and each character of the alphabet once."""
    to_space = dict.fromkeys(map(ord, counts.characters.keys() - alphabet), " ")
    for segment, count in counts.pop_segments():
        for part in segment.translate(to_space).split(" "):
            if part:
                yield part, count
    for character in sorted(alphabet):
        yield character, 1


def _as_tokenizer(
    pieces: list[tuple[str, float]], config: UnigramConfig, normalization: NormalizationConfig
) -> "PreTrainedTokenizerFast":
    from tokenizers import AddedToken, Tokenizer, decoders, models, processors
    from transformers import PreTrainedTokenizerFast

    tokens = SPECIAL_TOKENS
    scores = [(piece, NOT_IN_TEXT_SCORE) for piece in config.reserved_tokens]
    scores += [(piece, round(score, SCORE_DECIMALS)) for piece, score in pieces]
    num_unused = -len(scores) % (config.pad_vocab_to_multiple_of or 1)
    scores += [(f"<unused{number}>", NOT_IN_TEXT_SCORE) for number in range(num_unused)]
    ids = {piece: index for index, (piece, _) in enumerate(scores)}
    backend = Tokenizer(models.Unigram(scores, unk_id=ids[tokens["unk"]], byte_fallback=config.byte_fallback))
    backend.normalizer = make_normalizer(normalization)
    backend.pre_tokenizer = make_pre_tokenizer(normalization)
    backend.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(replacement=WORD_MARK, prepend_scheme="first")]
    )
    backend.post_processor = processors.TemplateProcessing(
        single=f"{tokens['cls']} $A {tokens['sep']}",
        pair=f"{tokens['cls']} $A {tokens['sep']} $B:1 {tokens['sep']}:1",
        special_tokens=[(token, ids[token]) for token in (tokens["cls"], tokens["sep"])],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=tokens["cls"],
        eos_token=tokens["sep"],
        cls_token=tokens["cls"],
        pad_token=tokens["pad"],
        sep_token=tokens["sep"],
        unk_token=tokens["unk"],
        # lstrip: the space before [MASK] belongs to it, as it belongs to the word that it stands for.
        mask_token=AddedToken(tokens["mask"], lstrip=True, special=True),
        additional_special_tokens=config.extra_special_tokens,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )
