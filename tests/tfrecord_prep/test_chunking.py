"""Cutting: the rows are those of slow definitions, in which no token is lost or invented."""

from collections.abc import Iterator
from itertools import accumulate, chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfrecord_prep.chunking import CHUNKINGS, Framing, Rows
from tfrecord_prep.config import MIN_LENGTH
from tfrecord_prep.encoding import TokenBatch
from tfrecord_prep.manifest import PAIRS

# Those that keep all text; of the other there is test_segment_pairs.py.
CHUNKINGS = {name: cut for name, cut in CHUNKINGS.items() if name != PAIRS}
CLS, PAD, SEP = 0, 1, 2
FRAMING = Framing(cls_id=CLS, sep_id=SEP, pad_id=PAD)

documents_strategy = st.lists(st.lists(st.integers(5, 70_000), min_size=1, max_size=40), max_size=12)
lengths_strategy = st.integers(MIN_LENGTH, 50)
WINDOW_TOKENS = 60


@pytest.fixture(autouse=True, scope="module")
def small_windows() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tfrecord_prep.chunking.WINDOW_TOKENS", WINDOW_TOKENS)
        yield


@st.composite
def batches_strategy(draw: Any, documents: list[list[int]]) -> list[TokenBatch]:
    """Cut the stream of ids anywhere; a document that ends at a cut ends before or after it."""
    stream = list(chain.from_iterable(documents))
    ends = list(accumulate(map(len, documents)))
    cuts = sorted(draw(st.lists(st.integers(0, len(stream)), max_size=5)))
    batches = []
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        num_ends = sum(end < stop for end in ends)
        if ends and ends[min(num_ends, len(ends) - 1)] == stop and draw(st.booleans()):
            num_ends += 1
        own_ends = np.array(ends[:num_ends], np.int64) - start
        batches.append(TokenBatch(np.array(stream[start:stop], np.int32), own_ends, num_ends))
        ends = ends[num_ends:]
    if ends:
        batches.append(TokenBatch(np.empty(0, np.int32), np.zeros(1, np.int64), 1))
    return batches


def cut(chunking: str, batches: list[TokenBatch], max_length: int) -> list[Rows]:
    return list(CHUNKINGS[chunking](batches, FRAMING, max_length))


def tokens_of(batches: list[Rows], max_length: int) -> list[list[int]]:
    """Read the rows without their padding, and check their form."""
    tokens = []
    for rows in batches:
        assert rows.input_ids.dtype == np.int32
        assert rows.input_ids.shape == (len(rows.num_tokens_per_row), max_length)
        is_padding = np.arange(max_length) >= rows.num_tokens_per_row[:, None]
        assert ((rows.input_ids == PAD) == is_padding).all()
        tokens += [row[:num].tolist() for row, num in zip(rows.input_ids, rows.num_tokens_per_row, strict=True)]
    assert all(tokens)
    return tokens


def expected_rows(chunking: str, documents: list[list[int]], max_length: int) -> list[list[int]]:
    """Do the same slowly, a token at a time."""
    inner = max_length - 2
    if chunking == "concat":
        stream = list(chain.from_iterable([CLS, *document, SEP] for document in documents))
        return [stream[start : start + max_length] for start in range(0, len(stream), max_length)]
    if chunking == "full_sentences":
        stream = list(chain.from_iterable([SEP, *document] for document in documents))[1:]
        return [[CLS, *stream[start : start + inner], SEP] for start in range(0, len(stream), inner)]
    passages = framed_passages(documents, max_length)
    if chunking == "packed":
        return packed_rows(passages, max_length)
    rows: list[list[int]] = []
    for passage in passages:
        if rows and len(rows[-1]) + len(passage) <= max_length:
            rows[-1] += passage
        else:
            rows.append(passage)
    return rows


def framed_passages(documents: list[list[int]], max_length: int) -> list[list[int]]:
    inner = max_length - 2
    starts = [(document, start) for document in documents for start in range(0, len(document), inner)]
    return [[CLS, *document[start : start + inner], SEP] for document, start in starts]


def packed_rows(passages: list[list[int]], max_length: int) -> list[list[int]]:
    rows: list[list[int]] = []
    while passages:
        window: list[list[int]] = []
        while passages and sum(map(len, window)) < WINDOW_TOKENS:
            window.append(passages.pop(0))

        def space(row: list[int]) -> int:
            return max_length - sum(len(window[number]) for number in row)  # noqa: B023

        opened: list[list[int]] = []  # the numbers of the passages in each row
        for number in sorted(range(len(window)), key=lambda number: -len(window[number])):
            fitting = [row for row in opened if space(row) >= len(window[number])]
            if fitting:
                min(fitting, key=space).append(number)
            else:
                opened.append([number])
        rows += [list(chain.from_iterable(window[number] for number in row)) for row in sorted(map(sorted, opened))]
    return rows


@pytest.mark.parametrize("chunking", CHUNKINGS)
@given(data=st.data(), documents=documents_strategy, max_length=lengths_strategy)
def test_rows_are_those_of_the_definition(chunking, data, documents, max_length):
    batches = data.draw(batches_strategy(documents))
    assert tokens_of(cut(chunking, batches, max_length), max_length) == expected_rows(chunking, documents, max_length)


def test_a_long_document_is_cut_as_it_comes():
    ids = np.arange(5, 1005, dtype=np.int32)
    batches = [TokenBatch(part, np.empty(0, np.int64), 0) for part in np.split(ids, 10)]
    end = TokenBatch(np.empty(0, np.int32), np.zeros(1, np.int64), 1)
    for chunking in CHUNKINGS:
        rows = CHUNKINGS[chunking](iter([*batches, end]), FRAMING, 12)
        assert len(next(rows).input_ids) in range(8, 11)  # of the first hundred ids
        assert sum(len(batch.input_ids) for batch in rows) > 70
