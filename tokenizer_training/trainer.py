"""Train a unigram tokenizer (Kudo 2018, "Subword Regularization") on counted words.

SentencePiece selects the tokens, which it calls pieces. SentencePiece is many times faster than the trainer of
`tokenizers`. Unlike that trainer, SentencePiece gives the same pieces and scores for the same counts, and returns
exactly the requested number of pieces. SentencePiece runs in a separate process, so that Ctrl-C ends it at once, and
running out of memory gives an error message.
"""

import contextlib
import json
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mlm_common.cli.console import no_progress
from mlm_common.errors import InputError, RunFailedError
from mlm_common.tokenizer import SPECIAL_TOKENS
from tokenizer_training.config import (
    DEFAULT_VOCABULARY_SIZE,
    WORD_MARK,
    NormalizationConfig,
    UnigramConfig,
    make_normalizer,
    make_pre_tokenizer,
)
from tokenizer_training.corpus_sample import WordCounts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# If a score has no more decimals than this, `tokenizers` reads exactly the score that was written.
SCORE_DECIMALS = 6
# The score of reserved and unused tokens, which is so low that text that looks like such a token is cut into other
# tokens.
NOT_IN_TEXT_SCORE = -1000.0
# SentencePiece uses this sign for unknown characters, so it cannot become a piece.
NEVER_A_PIECE = "▅"
# A character among the 512 most frequent gets a token if it occurs at least five times in a million characters.
SMALL_ALPHABET = 512
MIN_LETTER_FREQUENCY = 5e-6
# The vocabulary is a multiple of 128, the width of a TPU's matrix unit.
VOCABULARY_STEP = 128
# The default number of trained tokens, divided by the square root of the bytes of text: 8,192 for 25 MB.
PIECES_PER_SQRT_BYTE = 1.6384

# SentencePiece sums its statistics per thread, so the last digits depend on the number of threads.
NUM_THREADS = 16
# Parameters of SentencePiece: rounds of EM before each pruning, fraction of pieces that a pruning keeps, and the final
# number of pieces relative to the requested one.
EM_ROUNDS_PER_PRUNING = 2
SHRINKING_FACTOR = 0.75
FINAL_EXCESS = 1.1
# Time and memory are proportional to the number of seeds. More than 6 seeds per piece did not improve the
# pieces on the texts that were tried; 8 leaves a margin for other texts.
SEEDS_PER_PIECE = 8
# Limit of SentencePiece's input. A segment is at most a passage of text.
MAX_SEGMENT_BYTES = 1 << 16
# The default of SentencePiece's --max_sentencepiece_length.
MAX_PIECE_CHARACTERS = 16
# SentencePiece's suffix array, too, finds only substrings that occur at least twice.
MIN_COUNT = 2
# Odd constants of SplitMix64 (Steele, Lea and Flood 2014), which spread the bits of a product.
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_SHIFT = np.uint64(29)

SEGMENTS, SEEDS, MODEL = "segments.tsv", "seeds.tsv", "model"


def train_unigram(
    counts: WordCounts,
    num_bytes: int,
    config: UnigramConfig,
    normalization: NormalizationConfig,
    on_round: Callable[[int, int], object] = no_progress,
) -> "PreTrainedTokenizerFast":
    """Train a tokenizer on counted words. The same counts and settings give the same tokenizer, bit for bit.

    Args:
        counts: counts of text that was normalized with `normalization`. The segments are consumed.
        num_bytes: size of that text, which determines the default size of the vocabulary.
        config: settings of the vocabulary, which gets exactly `vocab_size` tokens.
        normalization: how to normalize text.
        on_round: called with the number of finished rounds of training, and the expected total.

    Raises:
        InputError: there are no words, or the vocabulary is too large for the words or too small for the characters.
        RunFailedError: the trainer was killed.
    """
    if not counts.segments:
        raise InputError("A corpus must have text; every document of the corpus is blank. Check --text-column.")
    alphabet = choose_alphabet(counts.characters, config)
    size = config.vocab_size or _default_vocabulary_size(num_bytes, len(alphabet), config)
    if size <= config.num_reserved + len(alphabet):
        raise InputError(
            f"--vocab-size must be more than {config.num_reserved + len(alphabet):,}, because this corpus has "
            f"{len(alphabet):,} characters, and there are {config.num_reserved} special tokens and bytes; received "
            f"{size:,}. Raise it, or lower --character-coverage to leave out the rarest characters."
        )
    with tempfile.TemporaryDirectory(prefix="pieces-") as folder:
        write_table(f"{folder}/{SEGMENTS}", _within_alphabet(counts, alphabet))
        pieces = _train_vocabulary(folder, size, len(alphabet), config, on_round)
    return _as_tokenizer(pieces, config, normalization)


def choose_alphabet(characters: Counter[str], config: UnigramConfig) -> set[str]:
    """Choose the characters that become tokens.

    These are the most frequent characters, up to the requested coverage; all ASCII characters of the corpus; the rare
    letters of small alphabets, because otherwise German would lose Ö, and English J; and the characters of the reserved
    tokens, so that text that looks like such a token can be spelled.
    """
    by_rank = sorted(characters.keys() - {WORD_MARK}, key=lambda character: (-characters[character], character))
    num_characters = characters.total() - characters[WORD_MARK]
    alphabet = {WORD_MARK}.union(*config.reserved_tokens)
    num_covered = 0
    for rank, character in enumerate(by_rank):
        is_letter = rank < SMALL_ALPHABET and characters[character] >= MIN_LETTER_FREQUENCY * num_characters
        if num_covered < config.character_coverage * num_characters or is_letter or character.isascii():
            alphabet.add(character)
        num_covered += characters[character]
    return alphabet - {NEVER_A_PIECE}


def _default_vocabulary_size(num_bytes: int, num_characters: int, config: UnigramConfig) -> int:
    num_pieces = max(round(PIECES_PER_SQRT_BYTE * num_bytes**0.5), 2 * num_characters)
    size = -(-(num_pieces + config.num_reserved) // VOCABULARY_STEP) * VOCABULARY_STEP
    return min(size, DEFAULT_VOCABULARY_SIZE)


def _within_alphabet(counts: WordCounts, alphabet: set[str]) -> Iterator[tuple[str, int]]:
    """Yield the segments, cut at characters that are not in the alphabet, and then each character of the alphabet."""
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
    scores = [(token, NOT_IN_TEXT_SCORE) for token in config.reserved_tokens]
    scores += [(piece, round(score, SCORE_DECIMALS)) for piece, score in pieces]
    num_unused = -len(scores) % (config.pad_vocab_to_multiple_of or 1)
    scores += [(f"<unused{number}>", NOT_IN_TEXT_SCORE) for number in range(num_unused)]
    ids = {token: index for index, (token, _) in enumerate(scores)}
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
        # lstrip: the space before [MASK] belongs to the token, as it would belong to the word that [MASK] stands for.
        mask_token=AddedToken(tokens["mask"], lstrip=True, special=True),
        additional_special_tokens=config.extra_special_tokens,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


class TooManyPiecesError(ValueError):
    """The segments give fewer pieces than requested.

    Attributes:
        largest: number of pieces that the segments give.
    """

    def __init__(self, largest: int) -> None:
        super().__init__(f"at most {largest} pieces")
        self.largest = largest


def _train_vocabulary(
    folder: str, size: int, num_characters: int, config: UnigramConfig, on_round: Callable[[int, int], object]
) -> list[tuple[str, float]]:
    """Train the pieces of a vocabulary of this size. If `vocab_size` is not set, the vocabulary may become smaller."""
    while True:
        try:
            return train_pieces(folder, size - config.num_reserved, config.extra_special_tokens, on_round)
        except TooManyPiecesError as error:
            largest = error.largest + config.num_reserved
            if config.vocab_size is not None:
                raise InputError(
                    f"--vocab-size must be at most {largest:,} with this corpus; received {config.vocab_size:,}."
                ) from error
            rounded = largest // VOCABULARY_STEP * VOCABULARY_STEP
            size = rounded if rounded > config.num_reserved + num_characters else largest


def train_pieces(
    folder: str, num_pieces: int, reserved: Collection[str] = (), on_round: Callable[[int, int], object] = no_progress
) -> list[tuple[str, float]]:
    """Train exactly `num_pieces` pieces: every character, and the substrings that EM rates best.

    Args:
        folder: folder with the table of counted segments, `SEGMENTS`. Temporary files are written to it.
        num_pieces: number of pieces, which must be more than the number of characters.
        reserved: strings of two or more characters that must not become pieces.
        on_round: called with the number of finished rounds of training, and the expected total.

    Returns:
        The pieces with their log probabilities.

    Raises:
        TooManyPiecesError: the segments give fewer pieces.
        RunFailedError: the trainer was killed or failed otherwise.
    """
    from sentencepiece import SentencePieceProcessor

    arguments = {"folder": folder, "num_pieces": num_pieces, "reserved": list(reserved)}
    _run_trainer(arguments, int((num_pieces + 1) * FINAL_EXCESS), on_round)  # with <unk>
    model = SentencePieceProcessor(model_file=f"{folder}/{MODEL}.model")
    return [(model.id_to_piece(index), model.get_score(index)) for index in range(1, len(model))]


def write_table(path: str, rows: Iterable[tuple[str, int]]) -> None:
    """Write rows of (text, count) in the format of SentencePiece."""
    with Path(path).open("w", encoding="utf-8", newline="\n") as table:
        table.writelines(f"{text}\t{count}\n" for text, count in rows)


def train_model(folder: str, num_pieces: int, reserved: Sequence[str]) -> None:
    """Train SentencePiece on the table in the folder. The function runs in a separate process."""
    from sentencepiece import SentencePieceTrainer

    with Path(folder, SEGMENTS).open(encoding="utf-8", newline="\n") as table:
        rows = (line.rstrip("\n").split("\t") for line in table)
        segments, counts = zip(*((segment, int(count)) for segment, count in rows), strict=True)
    seeds = seed_pieces(segments, counts, SEEDS_PER_PIECE * num_pieces)
    del segments, counts
    write_table(f"{folder}/{SEEDS}", (seed for seed in seeds if seed[0] not in reserved))
    SentencePieceTrainer.train(
        input=f"{folder}/{SEGMENTS}",
        input_format="tsv",
        seed_sentencepieces_file=f"{folder}/{SEEDS}",
        model_prefix=f"{folder}/{MODEL}",
        model_type="unigram",
        vocab_size=num_pieces + 1,  # 1 for <unk>
        character_coverage=1.0,  # rare characters have already been removed
        normalization_rule_name="identity",  # the segments are already normalized, and have marks where words start
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        max_sentence_length=MAX_SEGMENT_BYTES,
        num_sub_iterations=EM_ROUNDS_PER_PRUNING,
        shrinking_factor=SHRINKING_FACTOR,
        num_threads=NUM_THREADS,
        unk_id=0,
        bos_id=-1,
        eos_id=-1,
    )


def _run_trainer(arguments: dict[str, object], last_num_pieces: int, on_round: Callable[[int, int], object]) -> None:
    program = f"import json, sys; from {__name__} import train_model; train_model(**json.load(sys.stdin))"
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    assert process.stdin is not None
    assert process.stderr is not None
    num_rounds = 0
    lines: list[str] = []
    try:
        # If the trainer has stopped reading, the exit status shows why.
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(json.dumps(arguments).encode())
        for line in process.stderr:
            lines = [*lines[-9:], line.decode(errors="replace").strip()]
            if match := re.search(r"EM sub_iter=\d+ size=(\d+)", lines[-1]):
                num_rounds += 1
                on_round(num_rounds, num_rounds + _num_rounds_left(int(match[1]), num_rounds, last_num_pieces))
    except BaseException:
        process.kill()
        raise
    finally:
        status = process.wait()
        process.stderr.close()
    if status and (match := re.search(r"too high \(\d+\).*<= (\d+)", "\n".join(lines))):
        raise TooManyPiecesError(int(match[1]) - 1)
    if status < 0:
        raise RunFailedError(
            f"The trainer was ended by {signal.Signals(-status).name}, most likely because memory ran out. Nothing was "
            "written. Use a smaller --max-bytes or --vocab-size."
        )
    if status:
        raise RunFailedError(f"SentencePiece could not train on this corpus: {lines[-1:]}")


def _num_rounds_left(num_pieces: int, num_rounds: int, last_num_pieces: int) -> int:
    """Estimate the number of remaining rounds of EM, from the number of pieces after `num_rounds` rounds."""
    num_left = -num_rounds % EM_ROUNDS_PER_PRUNING
    # Training ends with the pruning that would leave at most `last_num_pieces`.
    while (num_pieces := int(SHRINKING_FACTOR * num_pieces)) > last_num_pieces:
        num_left += EM_ROUNDS_PER_PRUNING
    return num_left


def seed_pieces(segments: Sequence[str], counts: Sequence[int], max_pieces: int) -> list[tuple[str, int]]:
    """Find substrings of 2 to 16 characters, as initial pieces for SentencePiece.

    A substring that is always followed by the same character is left out, because the longer substring represents it.
    SentencePiece could find seeds itself, with a suffix array. But given counted words, it uses the number of distinct
    words as the number of occurrences, and leaves out every word that is not part of a longer word.

    Args:
        segments: distinct segments.
        counts: number of occurrences of each segment.
        max_pieces: maximum number of substrings.

    Returns:
        (substring, number of occurrences), sorted by the number of characters of the text that the substring covers.
    """
    text = "".join(segments)
    num_characters = np.fromiter(map(len, segments), np.int32, len(segments))
    ends = np.repeat(np.cumsum(num_characters, dtype=np.int32), num_characters)
    weights = np.repeat(np.asarray(counts, np.float64), num_characters)
    levels = list(_right_maximal_substrings(text, ends, weights))
    starts, lengths, occurrences = (np.concatenate([level[field] for level in levels]) for field in range(3))
    by_coverage = np.lexsort((starts, lengths, -occurrences * lengths))[:max_pieces]
    table = zip(*(column[by_coverage].tolist() for column in (starts, lengths, occurrences)), strict=True)
    return [(text[start : start + length], count) for start, length, count in table]


@dataclass
class _Substrings:
    """All substrings of one length, grouped by their text.

    Attributes:
        starts: position of each occurrence in the concatenated segments; (num_occurrences,).
        groups: group of each occurrence; the occurrences of a group have the same text; (num_occurrences,).
        first: index of an occurrence of each group; (num_groups,).
        counts: number of occurrences of each group in the corpus; (num_groups,).
    """

    starts: NDArray[np.int32]
    groups: NDArray[np.int32]
    first: NDArray[np.int64]
    counts: NDArray[np.int64]


# Starts, lengths and counts of substrings, each (num_substrings,).
Level = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int64]]


def _right_maximal_substrings(text: str, ends: NDArray[np.int32], weights: NDArray[np.float64]) -> Iterator[Level]:
    """Yield the frequent substrings of each length, except substrings that are always followed by the same character.

    Args:
        text: concatenated segments.
        ends: for each character, the end of its segment; (num_characters,).
        weights: for each character, the number of occurrences of its segment; (num_characters,).
    """
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    starts, hashes = np.arange(len(codes), dtype=np.int32), codes.astype(np.uint64) * _SPREAD
    shorter = None
    for length in range(2, MAX_PIECE_CHARACTERS + 1):
        fits = starts + np.int32(length) <= ends[starts]
        starts = starts[fits]
        hashes = (hashes[fits] ^ (hashes[fits] >> _SHIFT)) * _MIX + codes[starts + np.int32(length - 1)] * _SPREAD
        substrings = _group(starts, hashes, weights)
        if shorter is not None:
            shorter_group = shorter.groups[fits][substrings.first]
            longest_counts = np.zeros_like(shorter.counts)
            np.maximum.at(longest_counts, shorter_group, substrings.counts)
            yield _select(shorter, longest_counts < shorter.counts, length - 1)
        frequent = substrings.counts[substrings.groups] >= MIN_COUNT
        starts, hashes = starts[frequent], hashes[frequent]
        shorter = substrings
        shorter.groups = substrings.groups[frequent]
    if shorter is not None:
        yield _select(shorter, np.ones(len(shorter.counts), bool), MAX_PIECE_CHARACTERS)


def _group(starts: NDArray[np.int32], hashes: NDArray[np.uint64], weights: NDArray[np.float64]) -> _Substrings:
    _, first, groups = np.unique(hashes, return_index=True, return_inverse=True)
    counts = np.bincount(groups, weights=weights[starts], minlength=len(first)).astype(np.int64)
    return _Substrings(starts, groups.astype(np.int32), first, counts)


def _select(substrings: _Substrings, selected: NDArray[np.bool_], length: int) -> Level:
    selected = selected & (substrings.counts >= MIN_COUNT)
    starts = substrings.starts[substrings.first[selected]]
    return starts, np.full(len(starts), length, np.int32), substrings.counts[selected]
