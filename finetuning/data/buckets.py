"""Assign rows to batches by length. The order depends only on the seed and the number of the pass.

A bucket contains the rows that are padded to the same length. In each pass over the data, the rows are permuted, and
the rows of each bucket are cut into batches in that order. Rows left over from a bucket move to the bucket with the
next greater length; the last batch of the longest bucket is filled with rows of padding. Then the batches are permuted.
So each row is used once per pass, a pass has the same number of batches as without buckets, and the batch of any step
can be computed directly. The bucket lengths depend on the rows, not on the device, so that a run can move between
devices.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# The row number that stands for padding in a batch.
PADDING = -1
# Lengths are multiples of the unit. There are at most 8 lengths, because on a TPU it takes about a minute to compile a
# program for each length.
LENGTH_UNIT, MAX_LENGTHS = 4, 8
# Number of padding tokens that an additional length must save per pass. In the time that it takes to trace one more
# program, a small model on a CPU computes this number of tokens.
TOKENS_OF_PROGRAM = 16_384


@dataclass(frozen=True)
class Batches:
    """The row numbers and the padded length of each batch.

    Attributes:
        rows: int32 (batches, batch_rows), row numbers, or `PADDING`.
        lengths: int32 (batches,), tokens to which the rows of each batch are padded.
    """

    rows: NDArray[np.int32]
    lengths: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.lengths)


def fitted_lengths(row_lengths: NDArray[np.int64], max_length: int) -> list[int]:
    """Choose the lengths to which rows are padded, so that there is little padding.

    Dynamic programming minimizes the number of tokens of all rows, including padding, plus `TOKENS_OF_PROGRAM` for each
    length.

    Args:
        row_lengths: number of tokens of each row, (rows,); at least one row.
        max_length: maximum number of tokens of a row. This number is always the last length, because rows of an
            evaluation may need it.

    Returns:
        At most `MAX_LENGTHS` + 1 lengths, ascending.
    """
    ends, counts = np.unique(np.minimum(-(-row_lengths // LENGTH_UNIT) * LENGTH_UNIT, max_length), return_counts=True)
    num_rows = np.concatenate([[0], np.cumsum(counts)])  # number of rows up to each end
    # Cost of one length for the rows between two ends, (ends + 1, ends + 1).
    tokens = (num_rows - num_rows[:, np.newaxis]) * np.concatenate([[0], ends]) + TOKENS_OF_PROGRAM
    tokens = np.where(np.tri(len(num_rows), dtype=bool), np.inf, tokens)
    least = np.where(num_rows == 0, 0, np.inf)  # lowest cost of the rows up to each end, using the lengths so far
    totals, begins = [], []
    for _ in range(MAX_LENGTHS):
        added = least[:, np.newaxis] + tokens
        least = added.min(axis=0)
        totals.append(least[-1])
        begins.append(added.argmin(axis=0))
    end, lengths = len(ends), {max_length}
    for begin in reversed(begins[: np.argmin(totals) + 1]):
        lengths.add(int(ends[end - 1]))
        end = begin[end]
    return sorted(lengths)


def bucket_of_rows(row_lengths: NDArray[np.int64], lengths: Sequence[int]) -> NDArray[np.int64]:
    """Return the bucket of each row, (rows,): the index of the first of the ascending `lengths` into which it fits."""
    return np.searchsorted(np.asarray(lengths), row_lengths)


def training_batches(
    row_lengths: NDArray[np.int64],
    lengths: Sequence[int],
    *,
    batch_rows: int,
    seed: int,
    first: int,
    num_batches: int,
    groups: NDArray[np.int32] | None = None,
) -> Batches:
    """Make the training batches with the numbers `first` to `first + num_batches - 1`, counted over all passes.

    Args:
        row_lengths: number of tokens of each row, (rows,).
        lengths: lengths of the buckets, ascending; no row is longer than the last length.
        batch_rows: rows per batch.
        seed: seed of the permutations.
        first: number of the first batch.
        num_batches: number of batches.
        groups: group number of each row, (rows,). Rows of the same group share a batch only if unavoidable.
    """
    batches_of_pass = -(-len(row_lengths) // batch_rows)
    passes = range(first // batches_of_pass, -(-(first + num_batches) // batches_of_pass))
    keys = [hashlib.sha256(f"{seed}/{number}".encode()).digest()[:16] for number in passes]
    batches = [_pass(row_lengths, lengths, batch_rows, int.from_bytes(key, "little"), groups) for key in keys]
    begin = first - passes.start * batches_of_pass
    chosen = slice(begin, begin + num_batches)
    return Batches(
        np.concatenate([of_pass.rows for of_pass in batches])[chosen],
        np.concatenate([of_pass.lengths for of_pass in batches])[chosen],
    )


def evaluation_batches(row_lengths: NDArray[np.int64], lengths: Sequence[int], *, batch_rows: int) -> Batches:
    """Make the batches of an evaluation: every row once, bucket by bucket. Padding fills each bucket's last batch."""
    buckets = bucket_of_rows(row_lengths, lengths)
    rows: list[NDArray[np.int64]] = []
    batch_lengths: list[int] = []
    for bucket, length in enumerate(lengths):
        filled = _filled(np.flatnonzero(buckets == bucket), batch_rows)
        rows.append(filled)
        batch_lengths += [length] * (len(filled) // batch_rows)
    joined = np.concatenate(rows).reshape(-1, batch_rows)
    return Batches(joined.astype(np.int32), np.array(batch_lengths, np.int32))


def _pass(
    row_lengths: NDArray[np.int64],
    lengths: Sequence[int],
    batch_rows: int,
    key: int,
    groups: NDArray[np.int32] | None,
) -> Batches:
    """Make the batches of a pass over the rows, whose permutations are drawn with `key`."""
    random = np.random.Philox(key=key)
    buckets = bucket_of_rows(row_lengths, lengths)
    order = np.argsort(random.random_raw(len(row_lengths)), kind="stable")
    used_buckets = [bucket for bucket in range(len(lengths)) if (buckets == bucket).any()]
    left_over = np.array([], np.int64)
    rows: list[NDArray[np.int64]] = []
    batch_lengths: list[int] = []
    for bucket in used_buckets:
        chosen = np.concatenate([left_over, order[buckets[order] == bucket]])
        num_full = len(chosen) // batch_rows * batch_rows
        if bucket == used_buckets[-1]:
            chosen = _filled(chosen, batch_rows)
        else:
            chosen, left_over = chosen[:num_full], chosen[num_full:]
        rows.append(chosen if groups is None else _apart(chosen, groups, batch_rows))
        batch_lengths += [lengths[bucket]] * (len(chosen) // batch_rows)
    batch_order = np.argsort(random.random_raw(len(batch_lengths)), kind="stable")
    joined = np.concatenate(rows).reshape(-1, batch_rows)
    return Batches(joined[batch_order].astype(np.int32), np.array(batch_lengths, np.int32)[batch_order])


def _apart(rows: NDArray[np.int64], groups: NDArray[np.int32], batch_rows: int) -> NDArray[np.int64]:
    """Put each row into the first batch with room and without a row of its group, or else into any batch with room."""
    batches: list[list[int]] = [[] for _ in range(len(rows) // batch_rows)]
    first = 0  # the first batch with room
    after: dict[int, int] = {}  # {group: number of the batch after the last batch with the group}
    for row in rows[rows != PADDING].tolist():
        group = int(groups[row])
        place = max(first, after.get(group, 0))
        while place < len(batches) and len(batches[place]) == batch_rows:
            place += 1
        if place == len(batches):
            place = first
        batches[place].append(row)
        after[group] = max(place + 1, after.get(group, 0))
        while first < len(batches) and len(batches[first]) == batch_rows:
            first += 1
    filled = [batch + [PADDING] * (batch_rows - len(batch)) for batch in batches]
    return np.array(filled, np.int64).reshape(-1)


def _filled(rows: NDArray[np.int64], batch_rows: int) -> NDArray[np.int64]:
    """Fill the last batch with rows of padding."""
    return np.concatenate([rows, np.full(-len(rows) % batch_rows, PADDING)])
