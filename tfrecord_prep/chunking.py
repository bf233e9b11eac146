"""Cut tokenized documents into rows of one length: every token goes into exactly one row, in order."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokenizer_training.command_line import InputError

# Two of a row's ids are framing; fewer than six others would leave rows that are mostly that.
MIN_LENGTH = 8


@dataclass(frozen=True, kw_only=True)
class Framing:
    """The ids put around and after the text."""

    cls_id: int
    sep_id: int
    pad_id: int


@dataclass(frozen=True)
class Rows:
    """Rows of one length, of which only the last may end in padding."""

    input_ids: NDArray[np.int32]  # (num_rows, max_length)
    num_tokens_per_row: NDArray[np.int64]  # (num_rows,): ids before the padding


def cut_concat(ids: NDArray[np.int32], lengths: NDArray[np.int64], framing: Framing, max_length: int) -> Rows:
    """Return `[CLS] document [SEP] [CLS] document [SEP] …` cut every `max_length` ids.

    What the run_mlm examples of transformers do, but for the remainder, which they drop.

    Args:
        ids: the documents' ids, one after the other, without framing; (num_ids,).
        lengths: ids per document, none of them 0; (num_documents,).
        framing: the special ids.
        max_length: ids per row.
    """
    ends = np.cumsum(lengths + 2)
    stream = _with_gaps(ids, {framing.cls_id: ends - lengths - 2, framing.sep_id: ends - 1})
    return _cut(stream, max_length, framing.pad_id)


def cut_full_sentences(ids: NDArray[np.int32], lengths: NDArray[np.int64], framing: Framing, max_length: int) -> Rows:
    """Return rows `[CLS] … [SEP]`, filled across the borders of documents, at which a `[SEP]` stands.

    The FULL-SENTENCES format of RoBERTa (https://arxiv.org/abs/1907.11692, section 4.2), filled by tokens rather than
    by sentences, so that no row is short. Arguments as in `cut_concat`.
    """
    stream = _with_gaps(ids, {framing.sep_id: np.cumsum(lengths + 1)[:-1] - 1})
    inner = _cut(stream, max_length - 2, framing.pad_id)
    num_tokens = inner.num_tokens_per_row + 2
    rows = np.full((len(num_tokens), max_length), framing.pad_id, np.int32)
    rows[:, 0] = framing.cls_id
    rows[:, 1:-1] = inner.input_ids
    rows[np.arange(len(rows)), num_tokens - 1] = framing.sep_id
    return Rows(rows, num_tokens)


CHUNKINGS: dict[str, Callable[[NDArray[np.int32], NDArray[np.int64], Framing, int], Rows]] = {
    "concat": cut_concat,
    "full_sentences": cut_full_sentences,
}


def check_chunking(chunking: str, max_length: int) -> None:
    """Check the settings of a cut.

    Raises:
        InputError: no such way of cutting, or rows too short to hold text.
    """
    if chunking not in CHUNKINGS:
        raise InputError(f"--chunking must be one of {', '.join(CHUNKINGS)}; received {chunking!r}.")
    if max_length < MIN_LENGTH:
        raise InputError(f"--max-length must be at least {MIN_LENGTH} tokens a row; received {max_length}.")


def _with_gaps(ids: NDArray[np.int32], positions_of_id: dict[int, NDArray[np.int64]]) -> NDArray[np.int32]:
    """Return `ids` spread out so that each given id stands at its positions in the result."""
    stream = np.empty(len(ids) + sum(len(positions) for positions in positions_of_id.values()), np.int32)
    is_text = np.ones(len(stream), bool)
    for inserted_id, positions in positions_of_id.items():
        stream[positions] = inserted_id
        is_text[positions] = False
    stream[is_text] = ids
    return stream


def _cut(stream: NDArray[np.int32], length: int, pad_id: int) -> Rows:
    num_rows = -(-len(stream) // length)
    rows = np.full(num_rows * length, pad_id, np.int32)
    rows[: len(stream)] = stream
    num_tokens = np.full(num_rows, length, np.int64)
    num_tokens[-1:] -= num_rows * length - len(stream)
    return Rows(rows.reshape(num_rows, length), num_tokens)
