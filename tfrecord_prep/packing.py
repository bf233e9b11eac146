"""Put passages together into rows so that little of a row stays empty: best fit, the longest first."""

from bisect import bisect_left, insort

import numpy as np
from numpy.typing import NDArray

# Passages are packed as soon as they have so many tokens: 2,048 rows of 512, or 128 of 8,192. In a smaller window fewer
# passages fit each other; a larger one would take more memory, which is 25 MB.
WINDOW_TOKENS = 1 << 20


def pack(lengths: NDArray[np.int64], max_length: int, *, is_all: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Arrange passages in rows, window by window; what becomes of a window depends on its passages' lengths alone.

    The passages of a row stay in order, and so do the rows by their first passages.

    Args:
        lengths: tokens of each passage, 1 to `max_length`; (num_passages,).
        max_length: tokens a row.
        is_all: none follow; else the passages of the last window, which is not complete, are not arranged.

    Returns:
        The numbers of the passages, in order of the rows, (num_arranged,), and how many of them the rows up to each one
        hold, (num_rows,).
    """
    ends = np.append(0, np.cumsum(lengths))
    orders, row_ends = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    begin = 0
    while begin < len(lengths):
        end = int(np.searchsorted(ends, ends[begin] + WINDOW_TOKENS))  # with the passage that fills it
        if end > len(lengths) and not is_all:
            break
        rows = best_fit(lengths[begin:end].tolist(), max_length)
        orders.append(begin + np.argsort(rows, kind="stable"))
        row_ends.append(begin + np.cumsum(np.unique(rows, return_counts=True)[1]))
        begin = end
    return np.concatenate(orders), np.concatenate(row_ends)


def best_fit(lengths: list[int], max_length: int) -> NDArray[np.int64]:
    """Choose a row for each passage, named by the number of its first passage; (num_passages,).

    Best fit decreasing (Johnson 1973): the longest passage left goes into the row with the least space that takes it.
    """
    rows = np.empty(len(lengths), np.int64)
    open_rows: list[tuple[int, int]] = []  # (space, row), sorted
    num_rows = 0
    for passage in sorted(range(len(lengths)), key=lambda passage: -lengths[passage]):
        found = bisect_left(open_rows, (lengths[passage], 0))
        if found < len(open_rows):
            space, row = open_rows.pop(found)
        else:
            space, row = max_length, num_rows
            num_rows += 1
        rows[passage] = row
        if space > lengths[passage]:
            insort(open_rows, (space - lengths[passage], row))
    _, first_passages, row_numbers = np.unique(rows, return_index=True, return_inverse=True)
    return first_passages[row_numbers]
