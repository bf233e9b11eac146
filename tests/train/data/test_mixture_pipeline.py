"""Batches of a mixture: each source as if it were alone, in the order of the interleaving, however it is read."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfrecord_prep.records import encode_rows
from train.data.inputs import Feature
from train.data.pipeline import ONE_PIPELINE, MixtureOrder, SampleOrder, reading_groups, training_batches
from train.data.sources import Interleaving

LENGTH = 4
# Rows of each shard, by source. The first shard is read in parts, the second source is rarely read, the third
# often.
SHARDS = ((20, 7, 4, 6), (3, 3), (2, 1))
WINDOW_ROWS = (2, 5, 6)
WEIGHTS = (6, 1, 5)
FIRST_ROWS = (0, 4, 1)
FEATURES = {"input_ids": Feature((LENGTH,))}
BATCH_ROWS = 4
SHARD_ROWS = st.lists(st.integers(1, 40), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Orders over shards whose rows are numbered: row n of source s is all `1000 s + n`."""
    orders = []
    for source, shards in enumerate(SHARDS):
        folder = tmp_path_factory.mktemp("shards")
        first, paths = 1000 * source, []
        for index, num_rows in enumerate(shards):
            rows = np.repeat(np.arange(first, first + num_rows)[:, None], LENGTH, axis=1)
            path = folder / f"dataset-00000-{index:05d}-{num_rows}.tfrecord"
            path.write_bytes(encode_rows(rows, np.full(num_rows, LENGTH)))
            paths.append(str(path))
            first += num_rows
        orders.append(SampleOrder(paths, shards, 7, WINDOW_ROWS[source]))
    return orders


def rows_of(order, start_step, num_steps, context=ONE_PIPELINE, num_left_out_rows=0):
    steps = {"start_step": start_step, "num_steps": num_steps, "num_left_out_rows": num_left_out_rows}
    batches = training_batches(order, FEATURES, context, global_batch_rows=BATCH_ROWS, **steps)
    return [batch["input_ids"][:, 0].numpy().tolist() for batch in batches]


def flat(batches):
    return [row for batch in batches for row in batch]


@pytest.fixture(scope="module")
def mixture(sources):
    return MixtureOrder(sources, Interleaving(WEIGHTS), FIRST_ROWS)


@pytest.fixture(scope="module")
def rows(mixture):
    """The rows of 31 steps."""
    return flat(rows_of(mixture, 0, 31))


def test_each_source_is_read_as_if_alone_in_the_interleavings_order(sources, mixture, rows):
    assert any(len(part.rows) < part.window.num_rows for part in mixture.from_row(0, len(rows)))
    for source, order in enumerate(sources):
        of_source = [row for row in rows if row // 1000 == source]
        alone = rows_of(order, 0, -(-len(of_source) // BATCH_ROWS), num_left_out_rows=FIRST_ROWS[source])
        assert of_source == flat(alone)[: len(of_source)]
        positions = [position for position, row in enumerate(rows) if row // 1000 == source]
        assert positions == [mixture.interleaving.position(source, row) for row in range(len(positions))]
        num_rows, first = sum(SHARDS[source]), -FIRST_ROWS[source] % sum(SHARDS[source])
        for start in range(first, len(of_source) - num_rows + 1, num_rows):
            assert sorted(of_source[start : start + num_rows]) == list(range(1000 * source, 1000 * source + num_rows))


def test_a_later_start_reads_the_same_batches(mixture, rows):
    start_step, num_left_out_rows = 20, 3
    first = start_step * BATCH_ROWS + num_left_out_rows
    later = flat(rows_of(mixture, start_step, 30 - start_step, num_left_out_rows=num_left_out_rows))
    assert later == rows[first : first + len(later)]
    assert len(later) == (30 - start_step) * BATCH_ROWS


def test_pipelines_cut_the_same_global_batches(mixture, rows):
    """Two, of two replicas each."""
    parts = [rows_of(mixture, 3, 9, tf.distribute.InputContext(2, index, 4)) for index in range(2)]
    steps = [flat(flat(part[step * 2 : (step + 1) * 2] for part in parts)) for step in range(9)]
    assert flat(steps) == rows[3 * BATCH_ROWS : 12 * BATCH_ROWS]


@settings(max_examples=50)
@given(
    sources=st.lists(st.tuples(SHARD_ROWS, st.integers(1, 50), st.integers(1, 30)), min_size=2, max_size=6),
    start_row=st.integers(0, 300),
    num_rows=st.integers(1, 200),
    chunk_rows=st.integers(1, 60),
)
def test_chunks_are_complete_in_order_once_all_rows_are_read(sources, start_row, num_rows, chunk_rows):
    orders = [SampleOrder(list("abcd"[: len(shards)]), shards, 0, window_rows) for shards, _, window_rows in sources]
    order = Interleaving(tuple(weight for _, weight, _ in sources))
    windows = MixtureOrder(orders, order, [0] * len(orders)).from_row(start_row, num_rows)
    *groups, num_pieces = reading_groups(windows, start_row, num_rows, chunk_rows)
    num_found, complete, num_read = np.zeros_like(num_pieces), [], 0
    for start, end, first, last in zip(*groups, strict=True):
        assert start == num_read
        num_read = end
        for window in windows[start:end]:
            positions = [
                order.position(window.source, window.first_row + row) - start_row for row in range(len(window.rows))
            ]
            assert all(first <= position // chunk_rows <= last for position in positions if position < num_rows)
        num_found[first : last + 1] += 1
        complete += [chunk for chunk in range(first, last + 1) if num_found[chunk] == num_pieces[chunk]]
        num_complete_rows = (max(complete, default=-1) + 1) * chunk_rows
        assert all(window.first_position >= start_row + num_complete_rows for window in windows[end:])
    assert (num_read, complete) == (len(windows), list(range(-(-num_rows // chunk_rows))))


def test_many_sources_of_large_shards_hold_a_bounded_number_of_rows():
    buffer_rows, num_sources, num_rows = 2**15, 100, 10**6
    window_rows = buffer_rows // num_sources
    sources = [SampleOrder([f"{n}/0", f"{n}/1"], [2**14] * 2, 0, window_rows) for n in range(num_sources)]
    windows = MixtureOrder(sources, Interleaving((1,) * num_sources), [0] * num_sources).from_row(0, num_rows)
    chunk_rows = buffer_rows // 4
    *groups, num_pieces = reading_groups(windows, 0, num_rows, chunk_rows)
    num_held, num_found, num_complete = [0], np.zeros_like(num_pieces), 0
    for _, end, first, last in zip(*groups, strict=True):
        num_held.append(sum(len(window.rows) for window in windows[:end]) - num_complete * chunk_rows)
        num_found[first : last + 1] += 1
        num_complete = int(np.argmax(num_found < num_pieces))
    assert max(num_held) < 9 * buffer_rows
    # In whole shards it would be five times as many; for that each shard is read seven times.
    assert sum(part.window.num_rows for part in windows) < 8 * num_rows
