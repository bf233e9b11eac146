"""Cutting: no token lost or invented, framing right, rows exact, padding in the last row only."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfrecord_prep.chunking import CHUNKINGS, MIN_LENGTH, Framing, Rows, check_chunking
from tokenizer_training.command_line import InputError

CLS, PAD, SEP = 0, 1, 2
FRAMING = Framing(cls_id=CLS, sep_id=SEP, pad_id=PAD)

documents_strategy = st.lists(st.lists(st.integers(5, 70_000), min_size=1, max_size=40), max_size=12)
lengths_strategy = st.integers(MIN_LENGTH, 50)


def cut(chunking: str, documents: list[list[int]], max_length: int) -> Rows:
    ids = np.array(list(chain.from_iterable(documents)), np.int32)
    lengths = np.array([len(document) for document in documents], np.int64)
    return CHUNKINGS[chunking](ids, lengths, FRAMING, max_length)


def without_padding(rows: Rows) -> list[list[int]]:
    return [row[:num_tokens].tolist() for row, num_tokens in zip(rows.input_ids, rows.num_tokens_per_row, strict=True)]


@pytest.mark.parametrize("chunking", CHUNKINGS)
@settings(deadline=None)
@given(documents=documents_strategy, max_length=lengths_strategy)
def test_tokens_in_are_tokens_out(chunking: str, documents: list[list[int]], max_length: int) -> None:
    rows = cut(chunking, documents, max_length)
    written = [token for token in chain.from_iterable(without_padding(rows)) if token not in (CLS, SEP)]
    assert written == list(chain.from_iterable(documents))


@pytest.mark.parametrize("chunking", CHUNKINGS)
@settings(deadline=None)
@given(documents=documents_strategy, max_length=lengths_strategy)
def test_rows_are_exact_and_only_the_last_is_padded(chunking: str, documents: list[list[int]], max_length: int) -> None:
    rows = cut(chunking, documents, max_length)
    assert rows.input_ids.shape == (len(rows.num_tokens_per_row), max_length)
    assert rows.input_ids.dtype == np.int32
    assert (rows.num_tokens_per_row[:-1] == max_length).all()
    is_padding = np.arange(max_length) >= rows.num_tokens_per_row[:, None]
    assert ((rows.input_ids == PAD) == is_padding).all()
    assert (len(rows.input_ids) == 0) == (not documents)


@settings(deadline=None)
@given(documents=documents_strategy, max_length=lengths_strategy)
def test_concat_frames_every_document(documents: list[list[int]], max_length: int) -> None:
    stream = list(chain.from_iterable([CLS, *document, SEP] for document in documents))
    expected = [stream[start : start + max_length] for start in range(0, len(stream), max_length)]
    assert without_padding(cut("concat", documents, max_length)) == expected


@settings(deadline=None)
@given(documents=documents_strategy, max_length=lengths_strategy)
def test_full_sentences_frames_every_row(documents: list[list[int]], max_length: int) -> None:
    stream = list(chain.from_iterable([SEP, *document] for document in documents))[1:]
    inner = max_length - 2
    expected = [[CLS, *stream[start : start + inner], SEP] for start in range(0, len(stream), inner)]
    assert without_padding(cut("full_sentences", documents, max_length)) == expected


def test_worked_rows() -> None:
    documents = [[10, 11, 12, 13, 14], [20, 21]]
    assert cut("concat", documents, 8).input_ids.tolist() == [
        [CLS, 10, 11, 12, 13, 14, SEP, CLS],
        [20, 21, SEP, PAD, PAD, PAD, PAD, PAD],
    ]
    assert cut("full_sentences", documents, 8).input_ids.tolist() == [
        [CLS, 10, 11, 12, 13, 14, SEP, SEP],
        [CLS, 20, 21, SEP, PAD, PAD, PAD, PAD],
    ]


def test_bad_settings_name_the_flag() -> None:
    with pytest.raises(InputError, match=r"--chunking must be one of concat, full_sentences; received 'sentences'"):
        check_chunking("sentences", 512)
    with pytest.raises(InputError, match=r"--max-length must be at least 8 tokens a row; received 7"):
        check_chunking("concat", 7)
