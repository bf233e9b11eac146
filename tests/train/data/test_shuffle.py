from hypothesis import given
from hypothesis import strategies as st

from train.data.pipeline import SampleOrder

SHARDS = st.lists(st.integers(1, 9), min_size=1, max_size=8)


def make_order(num_rows_per_shard, seed=0, window_rows=7):
    paths = [f"gs://bucket/train/dataset-{index:05d}-{rows}.tfrecord" for index, rows in enumerate(num_rows_per_shard)]
    return SampleOrder(paths, num_rows_per_shard, seed, window_rows)


def stream(order, start_row, num_rows):
    """Name every row that the windows hold by (epoch seed, place in the window), as the reader would read it."""
    rows = []
    for window in order.from_row(start_row, num_rows):
        rows += [(window.seed, place) for place in range(window.num_skipped_rows, window.num_rows)]
    return rows[:num_rows]


@given(num_rows_per_shard=SHARDS, seed=st.integers(0, 100), window_rows=st.integers(1, 30), epoch=st.integers(0, 3))
def test_every_epoch_reads_every_shard_once(num_rows_per_shard, seed, window_rows, epoch):
    order = make_order(num_rows_per_shard, seed, window_rows)
    windows = order.windows(epoch)
    read = [index for window in windows for index in window.shard_indices]
    assert sorted(read) == list(range(len(num_rows_per_shard)))
    assert sum(window.num_rows for window in windows) == order.num_rows
    assert all(window.num_rows < window_rows + max(num_rows_per_shard) for window in windows)


@given(num_rows_per_shard=SHARDS, start_row=st.integers(0, 150), num_rows=st.integers(1, 60))
def test_a_late_start_reads_the_rows_of_an_uninterrupted_run(num_rows_per_shard, start_row, num_rows):
    order = make_order(num_rows_per_shard)
    assert stream(order, start_row, num_rows) == stream(order, 0, start_row + num_rows)[start_row:]


def test_order_differs_between_epochs_and_seeds():
    orders = [
        [window.shard_indices for window in make_order([4] * 8, seed).windows(epoch)]
        for seed, epoch in ((0, 0), (0, 1), (1, 0))
    ]
    assert len({str(order) for order in orders}) == 3


def test_order_does_not_depend_on_where_the_shards_lie():
    order = make_order([4] * 8)
    moved = SampleOrder([path.replace("gs://bucket", "/mnt") for path in order.shard_paths], [4] * 8, 0, 7)
    assert order.windows(3) == moved.windows(3)


def test_windows_are_pinned():
    windows = make_order([3, 4, 5, 6], seed=5).windows(1)
    assert [window.shard_indices for window in windows] == [(3, 2), (0, 1)]
    assert windows[0].seed == (-172486520, -441837002)
