"""Cut tokenized documents into rows of equal length.

Every token goes into exactly one row, except in `cut_segment_pairs`.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from tfrecord_prep.encoding import TokenBatch
from tfrecord_prep.manifest import PAIRS
from tfrecord_prep.segment_pairs import PairRule, Pairs, draw_pairs

# The indices of the passages in the order in which rows contain them, (num_arranged,), and the number of passages up to
# the end of each row, (num_rows,).
Arrangement = tuple[NDArray[np.int64], NDArray[np.int64]]

# Passages are packed, and random segments are drawn, within windows of this many tokens: 2,048 rows of 512 tokens, or
# 128 rows of 8,192. A smaller window would leave more padding. A larger one would take more than 25 MB of memory.
WINDOW_TOKENS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Framing:
    """The ids of the tokens that start a row, end a segment, and pad a row."""

    cls_id: int
    sep_id: int
    pad_id: int


@dataclass(frozen=True)
class Rows:
    """Rows of equal length, some of which may end in padding.

    Attributes:
        input_ids: ids, including padding; (num_rows, max_length).
        num_tokens_per_row: number of ids before the padding; (num_rows,).
        next_sentence_labels: `RANDOM_NEXT` or `IS_NEXT` for rows of segment pairs, otherwise None; (num_rows,).
    """

    input_ids: NDArray[np.int32]
    num_tokens_per_row: NDArray[np.int64]
    next_sentence_labels: NDArray[np.int64] | None = None


def cut_concat(batches: Iterable[TokenBatch], framing: Framing, max_length: int) -> Iterator[Rows]:
    """Yield `[CLS] document [SEP] [CLS] document [SEP] …`, cut every `max_length` ids. Only the last row is padded.

    The run_mlm examples of transformers do the same, but drop the last row.

    Args:
        batches: ids of the documents. The last batch ends with the end of a document.
        framing: ids of [CLS], [SEP] and padding.
        max_length: ids per row.
    """
    return _cut(_framed(batches, [framing.cls_id], [framing.sep_id]), max_length, framing.pad_id)


def cut_full_sentences(batches: Iterable[TokenBatch], framing: Framing, max_length: int) -> Iterator[Rows]:
    """Yield rows `[CLS] … [SEP]` that continue across the ends of documents, with a `[SEP]` between two documents.

    The rows have the FULL-SENTENCES format of RoBERTa (https://arxiv.org/abs/1907.11692, section 4.2), except that rows
    are filled token by token rather than sentence by sentence, so that only the last row is padded. The arguments are
    the same as for `cut_concat`.
    """
    stream = _framed(batches, [framing.sep_id], [], is_open=True)
    for inner in _cut(stream, max_length - 2, framing.pad_id):
        num_tokens = inner.num_tokens_per_row + 2
        rows = np.full((len(num_tokens), max_length), framing.pad_id, np.int32)
        rows[:, 0] = framing.cls_id
        rows[:, 1:-1] = inner.input_ids
        rows[np.arange(len(rows)), num_tokens - 1] = framing.sep_id
        yield Rows(rows, num_tokens)


def cut_documents(batches: Iterable[TokenBatch], framing: Framing, max_length: int) -> Iterator[Rows]:
    """Fill each row with the next documents that fit, each framed by `[CLS]` and `[SEP]`. Any row may be padded.

    The rows have the DOC-SENTENCES format of RoBERTa (section 4.2), except that several short documents share a row. A
    document longer than a row is cut into framed passages that fill a row each. The document's last passage may share a
    row with the next documents. The arguments are the same as for `cut_concat`.
    """
    yield from _cut_passages(batches, framing, max_length, _arrange_in_order)


def cut_packed(batches: Iterable[TokenBatch], framing: Framing, max_length: int) -> Iterator[Rows]:
    """Yield rows of framed documents as `cut_documents` does, but combine documents that fill a row, to avoid padding.

    Documents are reordered within windows of a million tokens. The arguments are the same as for `cut_concat`.
    """
    yield from _cut_passages(batches, framing, max_length, pack)


def cut_segment_pairs(
    batches: Iterable[TokenBatch], framing: Framing, max_length: int, rule: PairRule | None = None
) -> Iterator[Rows]:
    """Yield a row `[CLS] A [SEP] B [SEP]` for each pair of `draw_pairs`. Any row may be padded.

    Random segments come from the same window of a million tokens. Text that does not fit in a row is left out. The
    text of a random segment also occurs in a pair of its document.

    Args:
        batches: as in `cut_concat`. In batches without sentences, each document counts as one sentence.
        framing: ids of [CLS], [SEP] and padding.
        max_length: ids per row.
        rule: probabilities; default: BERT's probabilities.
    """
    rule = rule or PairRule()
    ids = np.empty(0, np.int32)  # starts with the first document that is not in a row yet
    document_ends, sentence_ends = np.empty(0, np.int64), np.empty(0, np.int64)
    num_done = 0
    for batch in chain(batches, [None]):
        if batch is not None:
            ends = batch.document_ends if batch.sentence_ends is None else batch.sentence_ends
            sentence_ends = np.append(sentence_ends, ends + len(ids))
            document_ends = np.append(document_ends, batch.document_ends + len(ids))
            ids = np.append(ids, batch.ids)
        while num_documents := _window_documents(document_ends, is_all=batch is None):
            end = document_ends[num_documents - 1]
            in_window = sentence_ends <= end
            window_ends = document_ends[:num_documents]
            pairs = draw_pairs(ids[:end], sentence_ends[in_window], window_ends, max_length - 3, rule, num_done)
            if len(pairs.labels):
                yield _rows_of_pairs(ids, pairs, framing, max_length)
            num_done += num_documents
            ids, sentence_ends = ids[end:], sentence_ends[~in_window] - end
            document_ends = document_ends[num_documents:] - end


CHUNKINGS: dict[str, Callable[..., Iterator[Rows]]] = {
    "concat": cut_concat,
    "full_sentences": cut_full_sentences,
    "documents": cut_documents,
    "packed": cut_packed,
    PAIRS: cut_segment_pairs,
}


def _framed(
    batches: Iterable[TokenBatch], before: list[int], after: list[int], is_open: bool = False
) -> Iterator[NDArray[np.int32]]:
    """Yield the ids with `before` inserted at the start of each document and `after` at its end.

    If `is_open`, the first document counts as already started, and gets no `before`.
    """
    for batch in batches:
        ends = batch.document_ends
        begins = ends if is_open else np.append(0, ends)
        begins = begins[begins < len(batch.ids)]
        positions = np.concatenate([*[ends] * len(after), *[begins] * len(before)])
        values = np.repeat(after + before, [len(ends)] * len(after) + [len(begins)] * len(before))
        yield np.insert(batch.ids, positions, values)  # keeps the order of values at equal positions
        is_open = bool(ends[-1] < len(batch.ids)) if len(ends) else is_open or len(batch.ids) > 0


def _cut(stream: Iterable[NDArray[np.int32]], length: int, pad_id: int) -> Iterator[Rows]:
    """Yield the stream in rows of `length` ids. Only the last row is padded."""
    remaining = np.empty(0, np.int32)
    for ids in stream:
        ids = np.append(remaining, ids)
        num_rows = len(ids) // length
        yield Rows(ids[: num_rows * length].reshape(num_rows, length), np.full(num_rows, length))
        remaining = ids[num_rows * length :]
    if len(remaining):
        row = np.full((1, length), pad_id, np.int32)
        row[0, : len(remaining)] = remaining
        yield Rows(row, np.array([len(remaining)]))


def _passage_ends(document_ends: NDArray[np.int64], num_ids: int, length: int) -> NDArray[np.int64]:
    """Return the ends of passages of `length` ids, or of fewer ids at the end of a document; (num_passages,).

    A document that does not end within the first `num_ids` ids contributes only its full passages.
    """
    begin_of_open = document_ends[-1] if len(document_ends) else 0
    end_of_full = begin_of_open + (num_ids - begin_of_open) // length * length
    ends = np.append(document_ends, end_of_full)
    begins = np.append(0, document_ends)
    num_passages = -(-(ends - begins) // length)
    number_within = np.arange(num_passages.sum()) - np.repeat(np.cumsum(num_passages) - num_passages, num_passages)
    return np.minimum(np.repeat(begins, num_passages) + (number_within + 1) * length, np.repeat(ends, num_passages))


def _cut_passages(
    batches: Iterable[TokenBatch], framing: Framing, max_length: int, arrange: Callable[..., Arrangement]
) -> Iterator[Rows]:
    """Yield rows of framed passages, arranged by `arrange`, which has the signature of `pack`."""
    ids = np.empty(0, np.int32)  # the ids of the passages that no row contains yet
    document_ends = np.empty(0, np.int64)
    for batch in chain(batches, [None]):
        if batch is not None:
            document_ends = np.append(document_ends, batch.document_ends + len(ids))
            ids = np.append(ids, batch.ids)
        passage_ends = _passage_ends(document_ends, len(ids), max_length - 2)
        order, row_ends = arrange(np.diff(passage_ends, prepend=0) + 2, max_length, is_all=batch is None)
        if len(row_ends):
            yield _rows_of_passages(ids, passage_ends, order, row_ends, framing, max_length)
            num_done = passage_ends[len(order) - 1]
            ids, document_ends = ids[num_done:], document_ends[document_ends > num_done] - num_done


def _arrange_in_order(lengths: NDArray[np.int64], max_length: int, *, is_all: bool) -> Arrangement:
    """Fill each row with the next passages that fit.

    Unless `is_all`, more passages follow, so the last row is returned only if it is full.
    """
    ends = np.cumsum(lengths)
    row_ends: list[int] = []
    num_passages, limit = 0, max_length
    while num_passages < len(ends):
        num_passages = int(np.searchsorted(ends, limit, side="right"))
        if num_passages == len(ends) and ends[-1] < limit and not is_all:
            break
        row_ends.append(num_passages)
        limit = ends[num_passages - 1] + max_length
    return np.arange(row_ends[-1] if row_ends else 0), np.array(row_ends, np.int64)


def _window_documents(document_ends: NDArray[np.int64], *, is_all: bool) -> int:
    """Return the number of documents in the next window: the smallest number that fills the window, but at least two.

    Returns 0 if there are not enough documents yet. A last document that would be alone in its window joins the
    previous window.
    """
    num_documents = max(2, int(np.searchsorted(document_ends, WINDOW_TOKENS)) + 1)
    if len(document_ends) >= num_documents + 2:
        return num_documents
    return len(document_ends) if is_all else 0


def _rows_of_pairs(ids: NDArray[np.int32], pairs: Pairs, framing: Framing, max_length: int) -> Rows:
    begins, ends_in_ids = pairs.begins.ravel(), pairs.ends.ravel()
    lengths = ends_in_ids - begins  # (2 * num_pairs,)
    ends = np.cumsum(lengths)  # ends of the segments in `text`
    text = _gathered(ids, begins, lengths)
    positions = np.concatenate([ends, (ends - lengths)[::2]])
    values = np.repeat([framing.sep_id, framing.cls_id], [len(ends), len(ends) // 2])
    stream = np.insert(text, positions, values)  # at equal positions [SEP] comes first, then [CLS]
    return _filled(stream, lengths.reshape(-1, 2).sum(axis=1) + 3, framing, max_length, pairs.labels)


def _rows_of_passages(
    ids: NDArray[np.int32],
    passage_ends: NDArray[np.int64],
    order: NDArray[np.int64],
    row_ends: NDArray[np.int64],
    framing: Framing,
    max_length: int,
) -> Rows:
    begins = np.append(0, passage_ends[:-1])[order]
    lengths = passage_ends[order] - begins
    ends = np.cumsum(lengths)  # ends of the passages in `text`
    text = _gathered(ids, begins, lengths)
    positions = np.concatenate([ends, ends - lengths])
    values = np.repeat([framing.sep_id, framing.cls_id], len(ends))
    stream = np.insert(text, positions, values)  # at equal positions [SEP] comes first, then [CLS]
    return _filled(stream, np.diff(ends[row_ends - 1] + 2 * row_ends, prepend=0), framing, max_length)


def _gathered(ids: NDArray[np.int32], begins: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int32]:
    ends = np.cumsum(lengths)
    return ids[np.arange(ends[-1]) + np.repeat(begins - (ends - lengths), lengths)]


def _filled(
    stream: NDArray[np.int32],
    num_tokens_per_row: NDArray[np.int64],
    framing: Framing,
    max_length: int,
    labels: NDArray[np.int64] | None = None,
) -> Rows:
    """Cut a stream into rows with the given numbers of tokens, and pad them."""
    rows = np.full((len(num_tokens_per_row), max_length), framing.pad_id, np.int32)
    rows[np.arange(max_length) < num_tokens_per_row[:, None]] = stream
    return Rows(rows, num_tokens_per_row, labels)


def pack(lengths: NDArray[np.int64], max_length: int, *, is_all: bool) -> Arrangement:
    """Arrange passages in rows with little padding, window by window.

    The arrangement of a window depends only on the lengths of its passages. The passages of a row stay in order, and
    the rows are sorted by their first passages.

    Args:
        lengths: number of tokens of each passage, 1 to `max_length`; (num_passages,).
        max_length: tokens per row.
        is_all: whether no passages follow. Otherwise the passages of the last, incomplete window are not arranged.
    """
    ends = np.append(0, np.cumsum(lengths))
    orders, row_ends = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    begin = 0
    while begin < len(lengths):
        end = int(np.searchsorted(ends, ends[begin] + WINDOW_TOKENS))  # includes the passage that fills the window
        if end > len(lengths) and not is_all:
            break
        rows = best_fit(lengths[begin:end].tolist(), max_length)
        orders.append(begin + np.argsort(rows, kind="stable"))
        row_ends.append(begin + np.cumsum(np.unique(rows, return_counts=True)[1]))
        begin = end
    return np.concatenate(orders), np.concatenate(row_ends)


def best_fit(lengths: list[int], max_length: int) -> NDArray[np.int64]:
    """Choose a row for each passage by the best-fit-decreasing rule (Johnson 1973).

    The longest remaining passage goes into the fullest row that has room for it.

    Returns:
        For each passage, the index of the first passage in its row; (num_passages,).
    """
    rows = np.empty(len(lengths), np.int64)
    open_rows: list[tuple[int, int]] = []  # (space, row), sorted
    num_rows = 0
    for passage in sorted(range(len(lengths)), key=lambda passage: -lengths[passage]):
        fullest = bisect_left(open_rows, (lengths[passage], 0))
        if fullest < len(open_rows):
            space, row = open_rows.pop(fullest)
        else:
            space, row = max_length, num_rows
            num_rows += 1
        rows[passage] = row
        if space > lengths[passage]:
            insort(open_rows, (space - lengths[passage], row))
    _, first_passages, row_numbers = np.unique(rows, return_index=True, return_inverse=True)
    return first_passages[row_numbers]
