"""Batches by arithmetic: each row once in a pass, rows of a bucket together, the same from wherever one begins."""

from collections.abc import Iterator
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetuning.data import buckets
from finetuning.data.buckets import (
    LENGTH_UNIT,
    MAX_LENGTHS,
    PADDING,
    Batches,
    bucket_of_rows,
    evaluation_batches,
    fitted_lengths,
    training_batches,
)

BUCKETS = (4, 8, 16)


def check(batches: Batches, lengths: np.ndarray, batch_rows: int) -> None:
    for rows, length in zip(batches.rows, batches.lengths, strict=True):
        assert rows.shape == (batch_rows,)
        assert (lengths[rows[rows != PADDING]] <= length).all()
        assert (rows != PADDING).any()


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 16), min_size=1, max_size=50).map(np.array), st.integers(1, 9), st.integers(0, 2**31 - 1)
)
def test_each_row_once_in_a_pass(lengths, batch_rows, seed):
    num = -(-len(lengths) // batch_rows)
    for number in range(2):
        batches = training_batches(
            lengths, BUCKETS, batch_rows=batch_rows, seed=seed, first=number * num, num_batches=num
        )
        check(batches, lengths, batch_rows)
        rows = batches.rows[batches.rows != PADDING]
        assert sorted(rows) == list(range(len(lengths)))
        assert len(batches) == num


@settings(max_examples=60)
@given(st.lists(st.integers(1, 16), min_size=1, max_size=50).map(np.array), st.integers(1, 9))
def test_each_row_once_in_an_evaluation(lengths, batch_rows):
    batches = evaluation_batches(lengths, BUCKETS, batch_rows=batch_rows)
    check(batches, lengths, batch_rows)
    assert sorted(batches.rows[batches.rows != PADDING]) == list(range(len(lengths)))
    shortest = np.array(BUCKETS)[np.searchsorted(BUCKETS, lengths)]
    for rows, length in zip(batches.rows, batches.lengths, strict=True):
        assert (shortest[rows[rows != PADDING]] == length).all()


@settings(max_examples=40)
@given(st.integers(0, 40), st.integers(1, 12))
def test_the_batch_of_a_step_is_the_same_from_any_start(first, num):
    lengths = np.arange(29) % 16 + 1
    whole = training_batches(lengths, BUCKETS, batch_rows=4, seed=3, first=0, num_batches=60)
    part = training_batches(lengths, BUCKETS, batch_rows=4, seed=3, first=first, num_batches=num)
    np.testing.assert_array_equal(part.rows, whole.rows[first : first + num])
    np.testing.assert_array_equal(part.lengths, whole.lengths[first : first + num])


def test_pinned():
    """Another order would make of a run that resumes another run."""
    batches = training_batches(np.array([3, 9, 4, 16, 2, 8]), BUCKETS, batch_rows=2, seed=0, first=0, num_batches=3)
    assert batches.rows.tolist() == [[4, 2], [0, 5], [1, 3]]
    assert batches.lengths.tolist() == [4, 8, 16]


def test_passes_differ_and_are_fair():
    """Over many passes each of four rows comes first about as often: chi-squared, three degrees of freedom."""
    counts = np.zeros(4)
    for number in range(400):
        batches = training_batches(np.ones(4, int), (1,), batch_rows=4, seed=7, first=number, num_batches=1)
        counts[batches.rows[0, 0]] += 1
    assert ((counts - 100) ** 2 / 100).sum() < 16.3  # exceeded once in a thousand seeds


def test_rows_of_a_group_are_in_different_batches():
    """Where that can be avoided; each row is still used once, and all that is left over is padding."""
    lengths, groups = np.full(41, 3), np.arange(41, dtype=np.int32) // 4
    made = training_batches(lengths, (4,), batch_rows=8, seed=1, first=0, num_batches=6, groups=groups)
    assert sorted(made.rows[made.rows >= 0]) == list(range(41))
    for batch in made.rows:
        batch_groups = groups[batch[batch >= 0]]
        assert len(set(batch_groups.tolist())) == len(batch_groups)
    same = training_batches(lengths, (4,), batch_rows=8, seed=1, first=0, num_batches=6, groups=groups * 0)
    assert sorted(same.rows[same.rows >= 0]) == list(range(41))


def num_tokens(row_lengths: np.ndarray, lengths: list[int]) -> int:
    return int(np.asarray(lengths)[bucket_of_rows(row_lengths, lengths)].sum())


def lengths_to_choose_from(row_lengths: np.ndarray, max_length: int) -> Iterator[list[int]]:
    """Yield up to `MAX_LENGTHS` multiples of the unit, to the longest row; then `max_length`."""
    *shorter, longest = sorted({min(-(-int(row) // LENGTH_UNIT) * LENGTH_UNIT, max_length) for row in row_lengths})
    for num in range(MAX_LENGTHS):
        for chosen in combinations(shorter, num):
            yield sorted({*chosen, longest, max_length})


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({13: 10**6}, [16, 128]),
        ({13: 1, 100: 10**4}, [100, 128]),  # one row is not worth a program
        ({13: 10**4, 100: 1}, [16, 100, 128]),
        ({5: 10**4, 30: 10**4, 127: 10**4}, [8, 32, 128]),
        (dict.fromkeys(range(4, 129, 4), 10**5), [16, 32, 48, 64, 80, 96, 112, 128]),
    ],
)
def test_fitted_lengths(counts, expected):
    assert fitted_lengths(np.repeat(list(counts), list(counts.values())), 128) == expected


@settings(max_examples=15)
@given(
    st.lists(st.tuples(st.integers(1, 47), st.integers(1, 10**5)), min_size=1, max_size=8),
    st.integers(0, 3),
    st.sampled_from([0, 100, buckets.TOKENS_OF_PROGRAM]),
    st.sampled_from([1, 2, 3, MAX_LENGTHS]),
)
def test_no_lengths_are_better(counts, margin, tokens_of_program, most):
    """They ascend, the last covers all rows, those in use are few enough, and each other choice costs as much."""
    row_lengths = np.repeat(*map(np.array, zip(*counts, strict=True)))
    max_length = int(row_lengths.max()) + margin
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "TOKENS_OF_PROGRAM", tokens_of_program)
        patch.setattr(buckets, "MAX_LENGTHS", most)
        lengths = fitted_lengths(row_lengths, max_length)
        choices = [choice for choice in lengths_to_choose_from(row_lengths, max_length) if len(choice) <= most + 1]

    def cost(chosen: list[int]) -> int:
        used = np.unique(bucket_of_rows(row_lengths, chosen))
        return num_tokens(row_lengths, chosen) + tokens_of_program * len(used)

    assert lengths == sorted(set(lengths))
    assert lengths[-1] == max_length
    assert len(np.unique(bucket_of_rows(row_lengths, lengths))) <= most
    assert cost(lengths) == min(
        cost(choice) for choice in choices if len(np.unique(bucket_of_rows(row_lengths, choice))) <= most
    )
