import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from tfrecord_prep.manifest import ShardSet
from tfrecord_prep.records import encode_rows
from train.data.inputs import Feature
from train.data.pipeline import (
    NUM_SHARDS_IN_TURN,
    ONE_PIPELINE,
    SampleOrder,
    evaluation_batches,
    first_turns,
    training_batches,
)
from train.tasks.masking import mask_row_by_content
from train.tasks.masking_rule import MaskingRule

LENGTH = 8
NUM_ROWS_PER_SHARD = (5, 7, 4)
RULE = MaskingRule(4, (0, 1, 2, 3, 4), 1000, mlm_probability=0.3)
FEATURES = {"input_ids": Feature((LENGTH,), padding=1)}


def masked(row):
    return mask_row_by_content(row["input_ids"], RULE)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Shards whose rows are numbered: row n is all `10 + n`."""
    folder = tmp_path_factory.mktemp("shards")
    paths, first = [], 0
    for index, num_rows in enumerate(NUM_ROWS_PER_SHARD):
        rows = np.repeat(np.arange(first, first + num_rows)[:, None] + 10, LENGTH, axis=1)
        path = folder / f"dataset-00000-{index:05d}-{num_rows}.tfrecord"
        path.write_bytes(encode_rows(rows, np.full(num_rows, LENGTH)))
        paths.append(str(path))
        first += num_rows
    return ShardSet(str(folder), tuple(paths), NUM_ROWS_PER_SHARD, sum(NUM_ROWS_PER_SHARD), None, None)


def training_rows(shards, start_step, num_steps, seed=0, batch_rows=3, context=ONE_PIPELINE):
    order = SampleOrder(shards.paths, shards.num_rows_per_shard, seed, window_rows=6)
    batches = training_batches(
        order, FEATURES, context, global_batch_rows=batch_rows, start_step=start_step, num_steps=num_steps
    )
    replica_rows = batch_rows // context.num_replicas_in_sync
    assert batches.element_spec == {"input_ids": tf.TensorSpec((replica_rows, LENGTH), tf.int32)}
    return [(batch["input_ids"][:, 0] - 10).numpy().tolist() for batch in batches]


def pipelines(num_pipelines, num_replicas):
    return [tf.distribute.InputContext(num_pipelines, index, num_replicas) for index in range(num_pipelines)]


def of_all_replicas(batches_of_pipelines, num_replicas):
    """Put the batches that the pipelines give their replicas together to global ones."""
    share = num_replicas // len(batches_of_pipelines)
    num_steps = len(batches_of_pipelines[0]) // share
    assert {len(batches) for batches in batches_of_pipelines} == {num_steps * share}
    shares = [slice(step * share, (step + 1) * share) for step in range(num_steps)]
    return [
        [row for batches in batches_of_pipelines for batch in batches[step_share] for row in batch]
        for step_share in shares
    ]


def test_every_row_is_read_once_an_epoch_in_an_order_of_the_seed(shards):
    batches = training_rows(shards, 0, 16)
    rows = [row for batch in batches for row in batch]
    for epoch in range(3):
        assert sorted(rows[16 * epoch : 16 * (epoch + 1)]) == list(range(16))
    assert rows[:16] not in (rows[16:32], list(range(16)))
    assert batches == training_rows(shards, 0, 16) != training_rows(shards, 0, 16, seed=1)


def test_a_later_start_reads_the_same_batches(shards):
    batches = training_rows(shards, 0, 14)
    assert training_rows(shards, 9, 5) == batches[9:]


def test_pipelines_cut_the_same_global_batches(shards):
    batches = [training_rows(shards, 3, 9, batch_rows=4, context=context) for context in pipelines(2, 4)]
    assert of_all_replicas(batches, 4) == training_rows(shards, 3, 9, batch_rows=4)


def test_windows_of_one_shard_are_permuted_by_their_seeds(shards):
    order = SampleOrder(shards.paths, shards.num_rows_per_shard, 0, window_rows=1)
    batches = training_batches(order, FEATURES, global_batch_rows=4, start_step=0, num_steps=4)
    rows = []
    for window in order.windows(0):
        first = sum(NUM_ROWS_PER_SHARD[: window.shard_indices[0]])
        draws = tf.random.stateless_uniform((window.num_rows,), window.seed, None, None, tf.int32, alg="philox")
        rows += [first + row for row in tf.argsort(draws, stable=True).numpy().tolist()]
    assert [row - 10 for batch in batches for row in batch["input_ids"][:, 0].numpy().tolist()] == rows


# By row, packed to bits. Validation losses of two versions compare only while these masks stay.
EVALUATION_MASKS = [96, 128, 17, 224, 156, 131, 138, 43, 70, 80, 120, 1, 0, 162, 41, 0]


@pytest.mark.parametrize("batch_rows", [3, 20])
def test_evaluation_reads_every_row_once_with_the_same_masks(shards, batch_rows):
    dataset = evaluation_batches(shards, FEATURES, masked, global_batch_rows=batch_rows)
    assert dataset.element_spec.original_ids.shape[0] == batch_rows  # XLA compiles for known shapes
    batches = list(dataset)
    original = np.concatenate([batch.original_ids.numpy() for batch in batches])
    is_masked = np.concatenate([batch.is_masked.numpy() for batch in batches])
    masks = {row[0] - 10: np.packbits(mask)[0] for row, mask in zip(original[:16], is_masked[:16], strict=True)}
    assert masks == dict(enumerate(EVALUATION_MASKS))
    assert len(original) == -(-16 // batch_rows) * batch_rows
    assert (original[16:] == 1).all()
    assert not is_masked[16:].any()


def test_pipelines_evaluate_every_row_once(shards):
    def ids(context):
        batches = evaluation_batches(shards, FEATURES, masked, context, global_batch_rows=12)
        return [batch.original_ids[:, 0].numpy().tolist() for batch in batches]

    batches = of_all_replicas([ids(context) for context in pipelines(2, 4)], 4)
    assert batches == ids(ONE_PIPELINE)
    assert len(batches) == 2
    rows = [row - 10 for batch in batches for row in batch]
    assert sorted(rows[:16]) == list(range(16))
    assert rows[16:] == [1 - 10] * (len(rows) - 16)


@pytest.mark.parametrize(
    ("num_rows_per_shard", "length", "message"),
    [(NUM_ROWS_PER_SHARD, LENGTH + 1, "input_ids"), ((5, 6, 4), LENGTH, "as many rows as their names say")],
)
def test_rows_of_another_length_or_number_are_an_error(shards, num_rows_per_shard, length, message):
    order = SampleOrder(shards.paths, num_rows_per_shard, 0, window_rows=16)
    features = {"input_ids": Feature((length,))}
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        list(training_batches(order, features, global_batch_rows=3, start_step=0, num_steps=1))


@pytest.mark.parametrize("num_shards", [1, 21])
def test_shards_of_a_window_take_turns_as_tensorflow_interleaves_files(num_shards, tmp_path):
    """So did earlier versions read them."""
    sizes = np.random.default_rng(num_shards).integers(0, 7, num_shards).tolist()
    paths = [str(tmp_path / str(shard)) for shard in range(num_shards)]
    for shard, (path, size) in enumerate(zip(paths, sizes, strict=True)):
        with tf.io.TFRecordWriter(path) as file:
            for row in range(size):
                file.write(f"{shard} {row}")
    turns = {
        first + row * NUM_SHARDS_IN_TURN: f"{shard} {row}".encode()
        for shard, (first, size) in enumerate(zip(first_turns(sizes), sizes, strict=True))
        for row in range(size)
    }
    read = tf.data.TFRecordDataset(paths, num_parallel_reads=NUM_SHARDS_IN_TURN)
    assert [turns[turn] for turn in sorted(turns)] == list(read.as_numpy_iterator())


SHARD_ROWS = st.lists(st.integers(1, 9), min_size=1, max_size=8)


def make_order(num_rows_per_shard, seed=0, window_rows=7):
    paths = [f"gs://bucket/train/dataset-{index:05d}-{rows}.tfrecord" for index, rows in enumerate(num_rows_per_shard)]
    return SampleOrder(paths, num_rows_per_shard, seed, window_rows)


def stream(order, start_row, num_rows):
    """Name every row that the windows hold by (epoch seed, place in the window), as the reader would read it."""
    rows = []
    for window in order.from_row(start_row, num_rows):
        rows += [(window.seed, place) for place in range(window.num_skipped_rows, window.num_rows)]
    return rows[:num_rows]


@given(num_rows_per_shard=SHARD_ROWS, seed=st.integers(0, 100), window_rows=st.integers(1, 30), epoch=st.integers(0, 3))
def test_every_epoch_reads_every_shard_once(num_rows_per_shard, seed, window_rows, epoch):
    order = make_order(num_rows_per_shard, seed, window_rows)
    windows = order.windows(epoch)
    read = [index for window in windows for index in window.shard_indices]
    assert sorted(read) == list(range(len(num_rows_per_shard)))
    assert sum(window.num_rows for window in windows) == order.num_rows
    assert all(window.num_rows < window_rows + max(num_rows_per_shard) for window in windows)


@given(num_rows_per_shard=SHARD_ROWS, start_row=st.integers(0, 150), num_rows=st.integers(1, 60))
def test_a_late_start_reads_the_rows_of_an_uninterrupted_run(num_rows_per_shard, start_row, num_rows):
    order = make_order(num_rows_per_shard)
    assert stream(order, start_row, num_rows) == stream(order, 0, start_row + num_rows)[start_row:]


def test_windows_are_pinned_and_do_not_depend_on_where_the_shards_lie():
    windows = make_order([3, 4, 5, 6], seed=5).windows(1)
    assert [window.shard_indices for window in windows] == [(3, 2), (0, 1)]
    assert windows[0].seed == (-172486520, -441837002)
    order = make_order([4] * 8)
    moved = SampleOrder([path.replace("gs://bucket", "/mnt") for path in order.shard_paths], [4] * 8, 0, 7)
    assert order.windows(3) == moved.windows(3)


def test_no_thread_tunes_the_input(shards):
    """It can miss the end of its iterator, which then waits for it, up to a minute, when a run is stopped."""
    order = SampleOrder(shards.paths, shards.num_rows_per_shard, 0, window_rows=6)
    for batches in (
        training_batches(order, FEATURES, global_batch_rows=4, start_step=0, num_steps=4),
        evaluation_batches(shards, FEATURES, masked, global_batch_rows=4),
    ):
        assert batches.options().autotune.enabled is False
