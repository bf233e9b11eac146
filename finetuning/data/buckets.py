"""Which rows make a batch: of one bucket of lengths each, in an order that is a pure function of seed and pass.

In each pass over the rows they are permuted, and the rows of a bucket cut into batches in that order. What is left over
of a bucket joins the next longer one; of the longest, it makes a batch that rows of padding fill up. Then the batches
are permuted. So each row is used once in a pass, a pass has as many batches as without buckets, and the batch of any
step is found by arithmetic. The lengths of the buckets follow from the rows, not from the device: a run keeps them.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# The number of a row of padding in a batch.
PADDING = -1
# Lengths are multiples of the unit, and at most 8: on a TPU each program takes about a minute to compile.
LENGTH_UNIT, MAX_LENGTHS = 4, 8
# Tokens of padding that a length must save in a pass: a small model on a CPU computes them while another is traced.
TOKENS_OF_PROGRAM = 16_384


@dataclass(frozen=True)
class Batches:
    """Batches by the numbers of their rows.

    rows: int32 (batches, batch_rows), `PADDING` where a batch is filled up.
    lengths: int32 (batches,), the tokens that the rows of each are filled up to.
    """

    rows: NDArray[np.int32]
    lengths: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.lengths)


def fitted_lengths(row_lengths: NDArray[np.int64], max_length: int) -> list[int]:
    """Choose the lengths that rows are filled up to, ascending, with the least padding; at most `MAX_LENGTHS` and one.

    The tokens of all rows, padding included, and `TOKENS_OF_PROGRAM` for each length are as few as possible, by dynamic
    programming.

    Args:
        row_lengths: the tokens of each row, (rows,), of one row at least.
        max_length: which no row exceeds; always the last length, since rows of an evaluation may need it.
    """
    ends, counts = np.unique(np.minimum(-(-row_lengths // LENGTH_UNIT) * LENGTH_UNIT, max_length), return_counts=True)
    num_rows = np.concatenate([[0], np.cumsum(counts)])  # with the first ends
    # Of a length for the rows from one end to another, (ends + 1, ends + 1).
    tokens = (num_rows - num_rows[:, np.newaxis]) * np.concatenate([[0], ends]) + TOKENS_OF_PROGRAM
    tokens = np.where(np.tri(len(num_rows), dtype=bool), np.inf, tokens)
    least = np.where(num_rows == 0, 0, np.inf)  # tokens of the rows up to each end, with a number of lengths
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
    """Find for each row the bucket, by its place in the ascending `lengths`, whose length it reaches at most."""
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
    """Make `num_batches` batches from number `first` on, counted over all passes, of rows with these tokens.

    `lengths` are those of the buckets, ascending; the last is that of the longest row at least.
    No batch has two rows of one of the `groups`, where that can be avoided.
    """
    batches_of_pass = -(-len(row_lengths) // batch_rows)
    passes = range(first // batches_of_pass, -(-(first + num_batches) // batches_of_pass))
    keys = [hashlib.sha256(f"{seed}/{number}".encode()).digest()[:16] for number in passes]
    made = [_pass(row_lengths, lengths, batch_rows, int.from_bytes(key, "little"), groups) for key in keys]
    begin = first - passes.start * batches_of_pass
    chosen = slice(begin, begin + num_batches)
    return Batches(
        np.concatenate([one.rows for one in made])[chosen], np.concatenate([one.lengths for one in made])[chosen]
    )


def evaluation_batches(row_lengths: NDArray[np.int64], lengths: Sequence[int], *, batch_rows: int) -> Batches:
    """Make the batches of an evaluation: every row once, bucket by bucket, the last batch of each filled up."""
    buckets = bucket_of_rows(row_lengths, lengths)
    rows: list[NDArray[np.int64]] = []
    of_batches: list[int] = []
    for bucket, length in enumerate(lengths):
        filled = _filled(np.flatnonzero(buckets == bucket), batch_rows)
        rows.append(filled)
        of_batches += [length] * (len(filled) // batch_rows)
    joined = np.concatenate(rows).reshape(-1, batch_rows)
    return Batches(joined.astype(np.int32), np.array(of_batches, np.int32))


def _pass(
    row_lengths: NDArray[np.int64],
    lengths: Sequence[int],
    batch_rows: int,
    key: int,
    groups: NDArray[np.int32] | None,
) -> Batches:
    random = np.random.Philox(key=key)
    buckets = bucket_of_rows(row_lengths, lengths)
    order = np.argsort(random.random_raw(len(row_lengths)), kind="stable")
    filled = [bucket for bucket in range(len(lengths)) if (buckets == bucket).any()]
    rest = np.array([], np.int64)
    rows: list[NDArray[np.int64]] = []
    of_batches: list[int] = []
    for bucket in filled:
        chosen = np.concatenate([rest, order[buckets[order] == bucket]])
        num_full = len(chosen) // batch_rows * batch_rows
        if bucket == filled[-1]:
            chosen = _filled(chosen, batch_rows)
        else:
            chosen, rest = chosen[:num_full], chosen[num_full:]
        rows.append(chosen if groups is None else _apart(chosen, groups, batch_rows))
        of_batches += [lengths[bucket]] * (len(chosen) // batch_rows)
    batch_order = np.argsort(random.random_raw(len(of_batches)), kind="stable")
    joined = np.concatenate(rows).reshape(-1, batch_rows)
    return Batches(joined[batch_order].astype(np.int32), np.array(of_batches, np.int32)[batch_order])


def _apart(rows: NDArray[np.int64], groups: NDArray[np.int32], batch_rows: int) -> NDArray[np.int64]:
    """Put each row into the first batch with room that has none of its group; into any, if there is none."""
    batches: list[list[int]] = [[] for _ in range(len(rows) // batch_rows)]
    first = 0  # the first batch with room
    after: dict[int, int] = {}  # {group: the batch after the last that has it}
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
    return np.array([one + [PADDING] * (batch_rows - len(one)) for one in batches], np.int64).reshape(-1)


def _filled(rows: NDArray[np.int64], batch_rows: int) -> NDArray[np.int64]:
    """Fill up the last batch with rows of padding."""
    return np.concatenate([rows, np.full(-len(rows) % batch_rows, PADDING)])
