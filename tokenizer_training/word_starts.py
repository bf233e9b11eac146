"""Which tokens begin a word: what masking whole words needs to know of a tokenizer."""

import io
import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mlm_common.errors import InputError
from mlm_common.storage import open_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

WORD_STARTS_FILE = "word_starts.npy"
WHITE_SPACE = " \t\n\v\f\r"


def word_starts(tokenizer: "PreTrainedTokenizerFast") -> NDArray[np.bool_] | None:
    """Return for each id whether a word begins with this token, (vocabulary_size,), or None if no mark tells.

    The marks are the tokenizer's own, in its `tokenizer.json`: with Metaspace a piece that begins with the mark of a
    space (`▁`) begins a word, with ByteLevel one that begins with white space (`Ġ`, `Ċ`), with WordPiece one without
    the prefix of continued words (`##`). There are none in word-level models, in BPE that marks the ends of words
    (`</w>`), and in tokenizers that keep no trace of spaces.

    Special tokens begin a word, since they are units of their own; but `<unk>` does not where marks are pieces by
    themselves, as a mark then goes before it like before any other piece. Bytes and ids without a token do not. A
    tokenizer may leave out the mark of a text's first word: what follows a special token begins a word in any case.
    """
    settings = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = tokenizer.get_vocab()
    marks = _marks(settings)
    begins_word = _begins_with(marks) if marks else _lacks_prefix(settings["model"])
    if begins_word is None:
        return None
    starts = np.zeros(max(vocabulary.values()) + 1, np.bool_)
    for piece, token_id in vocabulary.items():
        starts[token_id] = begins_word(piece)
    starts[sorted(special_token_ids(tokenizer))] = True
    if tokenizer.unk_token_id is not None and any(mark in vocabulary for mark in marks):
        starts[tokenizer.unk_token_id] = False
    return starts


def load_word_starts(folder: str) -> NDArray[np.bool_] | None:
    """Return the table saved with the tokenizer in a local or `gs://` folder, (vocabulary_size,), None without one.

    Raises:
        InputError: the file is damaged.
    """
    files = open_folder(folder)
    if not files.exists(WORD_STARTS_FILE):
        return None
    rule = f"{files.path_of(WORD_STARTS_FILE)} must hold one truth value per id, as saved with the tokenizer; "
    try:
        starts = np.lib.format.read_array(io.BytesIO(files.read_bytes(WORD_STARTS_FILE)), allow_pickle=False)
    except ValueError as error:
        raise InputError(f"{rule}it cannot be read: {error}") from error
    if starts.dtype != np.bool_ or starts.ndim != 1:
        raise InputError(f"{rule}it holds {starts.dtype} of shape {starts.shape}.")
    return starts


def special_token_ids(tokenizer: "PreTrainedTokenizerFast") -> set[int]:
    """Return the ids of all special tokens, those without a role included."""
    added = tokenizer.added_tokens_decoder
    return {token_id for token_id in added if added[token_id].special} | set(tokenizer.all_special_ids)


def _marks(settings: dict[str, Any]) -> str:
    """Return the characters that stand for a space in the pieces; there are none in WordPiece."""
    for component in (*_components(settings["pre_tokenizer"]), *_components(settings["decoder"])):
        if component["type"] == "Metaspace":
            return component["replacement"]
        if component["type"] == "ByteLevel":
            return _byte_level_white_space()
    return ""


def _components(component: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yield a pre-tokenizer or decoder, and what it consists of."""
    if component is not None:
        yield component
        for part in component.get("pretokenizers") or component.get("decoders") or ():
            yield from _components(part)


def _byte_level_white_space() -> str:
    from tokenizers import pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(piece for piece, _ in byte_level.pre_tokenize_str(WHITE_SPACE))


def _begins_with(marks: str) -> Callable[[str], bool]:
    return lambda piece: piece.startswith(tuple(marks))


def _lacks_prefix(model: dict[str, Any]) -> Callable[[str], bool] | None:
    prefix = model.get("continuing_subword_prefix")
    # The pieces of single bytes bear no prefix, wherever in a word they are.
    if not prefix or model.get("byte_fallback"):
        return None
    return lambda piece: not piece.startswith(prefix)
