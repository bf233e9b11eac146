"""Train a unigram tokenizer (Kudo 2018, "Subword Regularization") on counted words, as a `tokenizers` tokenizer.

SentencePiece's EM rather than the trainer of `tokenizers`: the same counts in give the same pieces and scores out, it
is many times faster, and it returns exactly the number of pieces asked for.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from mlm_common.cli.console import no_progress
from mlm_common.errors import InputError
from mlm_common.tokenizer import SPECIAL_TOKENS
from tokenizer_training.unigram.config import DEFAULT_VOCABULARY_SIZE, UnigramConfig
from tokenizer_training.unigram.normalization import WORD_MARK, NormalizationConfig, make_normalizer, make_pre_tokenizer
from tokenizer_training.unigram.sentencepiece_trainer import SegmentTable, TooManyPiecesError
from tokenizer_training.unigram.word_counts import WordCounts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

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
# Pieces for the square root of the bytes of text, when no number is asked for: 8,192 for 25 MB, beside the reserved.
PIECES_PER_SQRT_BYTE = 1.6384


def train_unigram(
    counts: WordCounts,
    num_bytes: int,
    config: UnigramConfig,
    normalization: NormalizationConfig,
    on_round: Callable[[int, int], object] = no_progress,
) -> "PreTrainedTokenizerFast":
    """Train a tokenizer on counted words; the same counts and settings give the same one, bit for bit.

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
    """Choose the characters that become pieces.

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
    """Train the pieces of a vocabulary of `size`; of the largest one there is if the configuration leaves it open."""
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
        for run in segment.translate(to_space).split(" "):
            if run:
                yield run, count
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
