"""The tokenizer as an artefact: its special tokens, loading, saving, and a hash that names its behaviour."""

import hashlib
import json
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mlm_common.errors import InputError
from mlm_common.storage import local_or_hub, open_folder
from tokenizer_training.word_starts import WORD_STARTS_FILE, word_starts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

# In the order of their ids. The RoBERTa family reads padding from id 1, and id 0 and 2 as begin and end of text.
SPECIAL_TOKENS = {"cls": "[CLS]", "pad": "<pad>", "sep": "[SEP]", "unk": "<unk>", "mask": "[MASK]"}
# The pieces that spell a character without a piece of its own, by their names in SentencePiece and `tokenizers`.
BYTE_PIECES = tuple(f"<0x{byte:02X}>" for byte in range(256))
# The pieces that fill a vocabulary up.
UNUSED_PIECE = re.compile(r"<unused\d+>")
# What `save_tokenizer` names in `tokenizer_config.json`.
FAST_TOKENIZER_CLASS = "PreTrainedTokenizerFast"
NO_TRUNCATION_OR_PADDING = {"truncation": None, "padding": None}


def load_tokenizer(name_or_path: str) -> "PreTrainedTokenizerFast":
    """Return the tokenizer in a local folder, in a `gs://` folder, or of a model on the Hub.

    Raises:
        InputError: there is none, it is not a fast one, or it lacks one of the five special tokens.
    """
    with local_or_hub(name_or_path) as name:
        tokenizer = _load(name, name_or_path)
    if not tokenizer.is_fast:
        raise InputError(f"--tokenizer must be a fast one (with a tokenizer.json); {name_or_path} is not.")
    missing = [name for name, token_id in special_ids(tokenizer).items() if token_id is None]
    if missing:
        raise InputError(
            f"The tokenizer must have cls, pad, sep, unk and mask tokens; {name_or_path} lacks {', '.join(missing)}. "
            "train-unigram makes one that has them."
        )
    return tokenizer


def _load(name: str, shown_name: str) -> "PreTrainedTokenizerFast":
    try:
        return _tokenizer_class(name).from_pretrained(name)
    except Exception as error:  # a file that is missing or malformed shows as nearly any exception
        raise InputError(
            f"A tokenizer is a folder written by train-unigram or a model on the Hub; {shown_name} cannot be loaded: "
            f"{' '.join(str(error).split())}"
        ) from error


def _tokenizer_class(name: str) -> Any:
    """Return the class to load a tokenizer with: where a folder names it, without the import of all models' classes."""
    config = Path(name, "tokenizer_config.json")
    if config.is_file() and json.loads(config.read_text("utf-8")).get("tokenizer_class") == FAST_TOKENIZER_CLASS:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


def special_ids(tokenizer: "PreTrainedTokenizerFast") -> dict[str, int]:
    """Return the ids of the special tokens, with the keys cls, pad, sep, unk and mask."""
    return {name: getattr(tokenizer, f"{name}_token_id") for name in SPECIAL_TOKENS}


def vocabulary_size(tokenizer: "PreTrainedTokenizerFast") -> int:
    """Return the largest id + 1, which is the rows an embedding needs (a vocabulary may have holes)."""
    return max(tokenizer.get_vocab().values()) + 1


def tokenizer_sha256(tokenizer: "PreTrainedTokenizerFast") -> str:
    """Return a SHA-256, in hex, over all that decides which ids a text gets, and over the special ids.

    It stays the same through saving and loading, and whatever truncation or padding was last used.
    """
    # `tokenizers` may change the last bit of a score when it reads its own file, so scores count to six decimals.
    backend = json.loads(tokenizer.backend_tokenizer.to_str(), parse_float=lambda digits: f"{float(digits):.6f}")
    record = {"backend": backend | NO_TRUNCATION_OR_PADDING, "special_ids": special_ids(tokenizer)}
    return hashlib.sha256(json.dumps(record, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def save_tokenizer(tokenizer: "PreTrainedTokenizerFast", folder: str) -> None:
    """Save the tokenizer's files in a local or `gs://` folder, each replaced in one step.

    Among them is the table of `word_starts`, for a tokenizer that has one.
    """
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    starts = word_starts(tokenizer)
    destination = open_folder(folder)
    if starts is None:
        destination.delete_files([WORD_STARTS_FILE])  # of an earlier tokenizer
    with tempfile.TemporaryDirectory() as temporary_folder:
        tokenizer.save_pretrained(temporary_folder)
        if starts is not None:
            np.save(Path(temporary_folder, WORD_STARTS_FILE), starts, allow_pickle=False)
        for path in sorted(Path(temporary_folder).iterdir()):
            destination.write_bytes(path.name, path.read_bytes())
