"""The trainers that benchmarks/tokenizer_training.py compares: how to run them and how to read what they write."""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mlm_common.tokenizer import load_tokenizer
from tokenizer_training.unigram.normalization import NormalizationConfig, make_normalizer, make_pre_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PROJECT = Path(__file__).resolve().parents[2]
OURS, TEXT_PIECES_ONLY = "ours", "ours, no byte fallback"
BARE_TRAINER, SENTENCEPIECE = "UnigramTrainer", "SentencePiece"
OUR_COMMAND = str(PROJECT / "tokenizer_training" / "train_unigram.py")
PEER_COMMAND = str(PROJECT / "benchmarks" / "peers" / "tokenizer_peers.py")


@dataclass
class Contender:
    """A trainer: its command, given the size of the vocabulary and a path to write; and what reads its output."""

    name: str
    num_repeats: int
    command: Callable[[int, str], list[str]]
    load: Callable[[str], "PreTrainedTokenizerFast"]


def our_command(files: Iterable[str], valid_files: Iterable[str], vocab_size: int, output: str) -> list[str]:
    """Make the command of stage 1."""
    flags = ["--data-files", *files, "--vocab-size", str(vocab_size), "--output-dir", output]
    return [sys.executable, OUR_COMMAND, *flags, *(f"--validation-files={file}" for file in valid_files)]


def contenders(
    train_file: str, valid_file: str, text_file: str, num_repeats: int, num_trainer_repeats: int
) -> list[Contender]:
    """List ours, which reads the corpus, and its peers, which read its paragraphs in a text file."""
    ours = partial(our_command, [train_file], [valid_file])

    def peer(name: str) -> Callable[[int, str], list[str]]:
        return lambda size, output: [sys.executable, PEER_COMMAND, name, text_file, str(size), output]

    return [
        Contender(OURS, num_repeats, ours, load_tokenizer),
        Contender(
            TEXT_PIECES_ONLY, 1, lambda size, output: [*ours(size, output), "--no-byte-fallback"], load_tokenizer
        ),
        Contender(BARE_TRAINER, num_trainer_repeats, peer("unigram-trainer"), load_backend),
        Contender(SENTENCEPIECE, num_repeats, peer("sentencepiece"), load_sentencepiece),
    ]


def load_backend(path: str) -> "PreTrainedTokenizerFast":
    """Load the tokenizer in a `tokenizer.json`."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_file=path, unk_token="<unk>")


def load_sentencepiece(path: str) -> "PreTrainedTokenizerFast":
    """Load the pieces of a SentencePiece model in a tokenizer that cuts text into words as ours does."""
    from sentencepiece import SentencePieceProcessor
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    model = SentencePieceProcessor(model_file=path)
    scores = [(model.id_to_piece(index), model.get_score(index)) for index in range(len(model))]
    backend = Tokenizer(models.Unigram(scores, unk_id=model.unk_id()))
    backend.normalizer = make_normalizer(NormalizationConfig())
    backend.pre_tokenizer = make_pre_tokenizer(NormalizationConfig())
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token=model.id_to_piece(model.unk_id()))
