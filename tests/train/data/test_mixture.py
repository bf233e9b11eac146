"""The order of a mixture: exact counts, every row once, and any position found directly."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.data.sources import MAX_SUM, Interleaving

# Of Huffman's tree: (1 + 1/1 + 1/2 + 1/3 + 1/5 + 1/8 + …) / 2.
LARGEST_ERROR = 1.68
WEIGHTS = st.lists(st.integers(1, 10**7), min_size=1, max_size=12).map(lambda weights: Interleaving(tuple(weights)))


@given(order=WEIGHTS, start=st.integers(0, 10**12), num_rows=st.integers(0, 10**6))
def test_counts_over_any_range_follow_the_weights(order, start, num_rows):
    total, stop = sum(order.weights), start + num_rows
    counts = [order.num_rows(source, stop) - order.num_rows(source, start) for source in range(len(order.weights))]
    assert sum(counts) == num_rows
    for source, (weight, count) in enumerate(zip(order.weights, counts, strict=True)):
        # Each rounding is off by 1/2, and of the error of a node its part comes to the source.
        parts = [Fraction(weight, branch.parent_weight) for branch in order.branches[source][:-1]]
        largest_error = (1 + sum(parts)) / 2 if order.branches[source] else 0
        assert largest_error < LARGEST_ERROR
        assert abs(order.num_rows(source, start) - Fraction(start * weight, total)) <= largest_error
        assert count >= 0
        assert abs(count - Fraction(num_rows * weight, total)) <= 2 * largest_error
        if len(order.weights) == 2:
            assert abs(count - Fraction(num_rows * weight, total)) <= 1


@given(order=WEIGHTS, start=st.integers(0, 10**12))
def test_each_position_is_one_row_of_one_source(order, start):
    rows = range(start, start + 40)
    positions = [
        order.position(source, row)
        for source in range(len(order.weights))
        for row in range(order.num_rows(source, rows.start), order.num_rows(source, rows.stop))
    ]
    assert sorted(positions) == list(rows)


@given(order=WEIGHTS, num_passes=st.integers(1, 5))
def test_weights_by_size_end_the_passes_of_all_sources_together(order, num_passes):
    position = num_passes * sum(order.weights)
    counts = [order.num_rows(source, position) for source in range(len(order.weights))]
    assert counts == [num_passes * weight for weight in order.weights]


@given(st.lists(st.floats(1e-9, 1e15), min_size=1, max_size=200))
def test_any_weights_become_whole_numbers(weights):
    order = Interleaving.of(weights)
    assert sum(order.weights) <= MAX_SUM
    for weight, given_weight in zip(order.weights, weights, strict=True):
        assert weight / sum(order.weights) == pytest.approx(given_weight / sum(weights), abs=1e-6)
    assert Interleaving.of([3, 4]).weights == (3, 4)


def test_the_order_is_pinned():
    """Of runs that were begun with an earlier version."""
    order = Interleaving((5, 3, 2))
    positions = {order.position(source, row): source for source in range(3) for row in range(10)}
    assert "".join(str(positions[position]) for position in range(20)) == "10201020101020102010"
