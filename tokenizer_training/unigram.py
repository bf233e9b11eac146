"""Train a unigram tokenizer (Kudo 2018, "Subword Regularization") with SentencePiece, as a `tokenizers` tokenizer.

SentencePiece rather than the trainer of `tokenizers`: the same words in give the same pieces and scores out, it is
many times faster, and it returns exactly the number of pieces asked for.
"""

import io
import logging
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizer_training.command_line import InputError
from tokenizer_training.tokenizer import SPECIAL_TOKENS

if TYPE_CHECKING:
    from tokenizers import normalizers
    from transformers import PreTrainedTokenizerFast

logger = logging.getLogger(__name__)

# SentencePiece adds up its statistics per thread, so another number of threads gives other last digits.
NUM_THREADS = 16
# A longer run without a space is cut, where SentencePiece would leave it out.
MAX_WORD_CHARACTERS = 4096
MAX_WORD_BYTES = 4 * MAX_WORD_CHARACTERS + 1
# Few enough digits that `tokenizers` reads the very number that was written.
SCORE_DECIMALS = 6
# So low that text which reads like a special token is cut into ordinary pieces when it is encoded as plain text.
SPECIAL_TOKEN_SCORE = -1000.0
# Kept however rare they are: the mark of a word's begin (rare in text without spaces), and the characters of the
# special tokens, so that text which reads like one can be spelled.
REQUIRED_CHARACTERS = frozenset("▁").union(*SPECIAL_TOKENS.values())


@dataclass(frozen=True)
class UnigramConfig:
    """What decides the tokenizer, beside the corpus.

    Raises:
        InputError: a setting is out of its range.
    """

    vocab_size: int = field(
        default=32000,
        metadata={
            "help": "Pieces in the vocabulary, the five special tokens included. 32,000 suits a corpus of 100 MB and "
            "more, and is a multiple of 128, the width of a TPU's matrix unit; 8,000 to 16,000 suit smaller ones."
        },
    )
    character_coverage: float = field(
        default=0.9995,
        metadata={
            "help": "Share of the corpus' characters that get a piece of their own; the rarest others become <unk>. "
            "0.9995 is SentencePiece's default and keeps rare scripts and emoji out of the vocabulary."
        },
    )

    def __post_init__(self) -> None:
        if self.vocab_size <= len(SPECIAL_TOKENS):
            raise InputError(
                f"--vocab-size must leave room beside the {len(SPECIAL_TOKENS)} special tokens; got {self.vocab_size}."
            )
        if not 0.9 <= self.character_coverage <= 1:
            raise InputError(f"--character-coverage must be from 0.9 to 1; got {self.character_coverage}.")


def make_normalizer() -> "normalizers.Normalizer":
    """Return the normalization: NFKC, `` and '' to ", runs of white space to one space, none at the end.

    The quotes are those of Penn Treebank text such as WikiText. Line ends count as spaces, as in BERT and ALBERT.
    """
    from tokenizers import Regex, normalizers

    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.Replace("``", '"'),
            normalizers.Replace("''", '"'),
            normalizers.Replace(Regex(r"\s+"), " "),
            normalizers.Strip(left=False, right=True),
        ]
    )


def count_words(batches: Iterable[list[str]]) -> Counter[str]:
    """Return how often each word occurs in the batches of documents, after normalization, cut at spaces."""
    normalizer = make_normalizer()
    counts: Counter[str] = Counter()
    for batch in batches:
        counts.update(chain.from_iterable(_words(normalizer.normalize_str(text)) for text in batch))
    del counts[""]
    return counts


def train_unigram(word_counts: Mapping[str, int], config: UnigramConfig) -> "PreTrainedTokenizerFast":
    """Return a tokenizer with exactly `config.vocab_size` pieces, trained on counted words.

    The same counts and settings give the same tokenizer, bit for bit.

    Raises:
        InputError: no words; or the words give fewer pieces, or have more characters, than the vocabulary holds.
    """
    if not word_counts:
        raise InputError("A corpus must hold text; every document of the corpus is blank (see --text-column).")
    return _as_tokenizer(_train_pieces(word_counts, config))


def _train_pieces(word_counts: Mapping[str, int], config: UnigramConfig) -> list[tuple[str, float]]:
    from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

    tokens = SPECIAL_TOKENS
    ids = {name: index for index, name in enumerate(tokens)}
    model = io.BytesIO()
    with tempfile.TemporaryDirectory() as folder:
        word_file = Path(folder) / "words.tsv"
        with word_file.open("w", encoding="utf-8", newline="\n") as lines:
            lines.writelines(f"{word}\t{count}\n" for word, count in sorted(word_counts.items()))
        try:
            SentencePieceTrainer.train(
                input=str(word_file),
                input_format="tsv",
                model_writer=model,
                model_type="unigram",
                vocab_size=config.vocab_size,
                character_coverage=config.character_coverage,
                required_chars=_required_characters(word_counts),
                normalization_rule_name="identity",  # the words are normalized already
                max_sentence_length=MAX_WORD_BYTES,
                bos_id=ids["cls"],
                bos_piece=tokens["cls"],
                pad_id=ids["pad"],
                pad_piece=tokens["pad"],
                eos_id=ids["sep"],
                eos_piece=tokens["sep"],
                unk_id=ids["unk"],
                unk_piece=tokens["unk"],
                control_symbols=[tokens["mask"]],  # gets the next free id
                num_threads=NUM_THREADS,
                minloglevel=2,
            )
        except RuntimeError as error:
            raise InputError(_explain(str(error), config)) from error
    pieces = SentencePieceProcessor(model_proto=model.getvalue())
    return [(pieces.id_to_piece(index), pieces.get_score(index)) for index in range(len(pieces))]


def _required_characters(word_counts: Mapping[str, int]) -> str:
    """Return the characters to keep at any coverage: the ASCII ones too, or an English corpus may lose its J."""
    counts: Counter[str] = Counter()
    for word, count in word_counts.items():
        counts["▁"] += count
        for character in word:
            counts[character] += count
    required = REQUIRED_CHARACTERS | {character for character in counts if character.isascii()}
    # SentencePiece ignores the list when it holds all that are frequent, and the most frequent one needs no listing.
    return "".join(sorted(required - {max(counts, key=lambda character: (counts[character], character))}))


def _explain(message: str, config: UnigramConfig) -> str:
    """Return SentencePiece's own message as a rule, what was received, and the cure."""
    if found := re.search(r"too high \(\d+\).*<= (\d+)", message):
        return f"--vocab-size can be {found[1]} at most with this corpus; got {config.vocab_size}."
    if found := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return (
            f"--vocab-size must be more than {found[1]}, the characters of this corpus and the special tokens; got "
            f"{config.vocab_size} (a lower --character-coverage leaves the rarest out)."
        )
    return f"SentencePiece cannot train on this corpus: {message}"


def _as_tokenizer(pieces: list[tuple[str, float]]) -> "PreTrainedTokenizerFast":
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokens = SPECIAL_TOKENS
    ids = {token: index for index, token in enumerate(tokens.values())}
    scores = [(piece, SPECIAL_TOKEN_SCORE if piece in ids else round(score, SCORE_DECIMALS)) for piece, score in pieces]
    backend = Tokenizer(models.Unigram(scores, unk_id=ids[tokens["unk"]]))
    backend.normalizer = make_normalizer()
    # "first": what follows a special token without a space, as the full stop in "[MASK].", does not begin a word.
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
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
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def _words(text: str) -> Iterator[str]:
    for word in text.split(" "):
        if len(word) <= MAX_WORD_CHARACTERS:
            yield word
        else:
            yield from (word[start : start + MAX_WORD_CHARACTERS] for start in range(0, len(word), MAX_WORD_CHARACTERS))
