"""Encoded examples in memory: rows of differing length, laid end to end."""

import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from mlm_common.errors import InputError

# Texts that are encoded at once; those of a batch go over all cores.
TEXTS_AT_ONCE = 10_000
INPUT_IDS, TOKEN_TYPES, INDEX = "input_ids", "token_type_ids", "index"
# 1 at the tokens of a row, 0 at its padding: by its length, since the padding token may also occur in a text.
ATTENTION_MASK = "attention_mask"


@dataclass(frozen=True)
class EncodedRows:
    """Rows of token ids, and what belongs to their tokens and to them.

    starts: int64 (rows + 1,), where each row begins among the tokens, and where the last ends.
    of_tokens: {feature: int32 (tokens,)}.
    of_rows: {feature: (rows, …)}; among them the number of the row, `INDEX`.
    """

    starts: NDArray[np.int64]
    of_tokens: Mapping[str, NDArray[np.int32]]
    of_rows: Mapping[str, NDArray[np.generic]]

    @property
    def num_rows(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each row, (rows,)."""
        return np.diff(self.starts)

    @functools.cached_property
    def sha256(self) -> str:
        digest = hashlib.sha256(self.starts.tobytes())
        for columns in (self.of_tokens, self.of_rows):
            for name in sorted(columns):
                digest.update(f"{name} {columns[name].dtype} {columns[name].shape}".encode())
                digest.update(np.ascontiguousarray(columns[name]).tobytes())
        return digest.hexdigest()


def check_room(tokenizer: PreTrainedTokenizerFast, max_length: int, *, is_pair: bool = False) -> None:
    """Check that a row has room for more than special tokens, which are never cut.

    Raises:
        InputError: it has not.
    """
    num_special = tokenizer.num_special_tokens_to_add(pair=is_pair)
    if max_length <= num_special:
        raise InputError(
            f"--max-seq-length must be above {num_special}, the special tokens of a row; {max_length} is not."
        )


def encode_texts(
    tokenizer: PreTrainedTokenizerFast,
    texts: Sequence[Sequence[str]],
    *,
    max_length: int,
    token_types: bool,
    labels: NDArray[np.generic],
) -> EncodedRows:
    """Encode texts, or pairs of texts, with special tokens, cut to `max_length`, of a pair the longer text first.

    Args:
        tokenizer: of the model.
        texts: one or two columns.
        max_length: in tokens.
        token_types: keep which text of a pair a token is of.
        labels: (rows, …), the feature `label`.

    Raises:
        InputError: `max_length` leaves no room for text.
    """
    check_room(tokenizer, max_length, is_pair=len(texts) == 2)
    ids: list[NDArray[np.int32]] = []
    types: list[NDArray[np.int32]] = []
    num_rows = len(texts[0])
    for start in range(0, num_rows, TEXTS_AT_ONCE):
        encoded = tokenizer(
            *(list(column[start : start + TEXTS_AT_ONCE]) for column in texts),
            truncation="longest_first",
            max_length=max_length,
            return_token_type_ids=token_types,
            return_attention_mask=False,
        )
        ids += [np.array(row, np.int32) for row in encoded["input_ids"]]
        types += [np.array(row, np.int32) for row in encoded["token_type_ids"]] if token_types else []
    of_tokens = {INPUT_IDS: np.concatenate(ids)}
    if token_types:
        of_tokens[TOKEN_TYPES] = np.concatenate(types)
    starts = np.concatenate([[0], np.cumsum([len(row) for row in ids])]).astype(np.int64)
    return EncodedRows(starts, of_tokens, {"label": labels, INDEX: np.arange(num_rows, dtype=np.int32)})
