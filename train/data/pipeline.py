"""tf.data pipelines over the shards of stage 2, with a stateless shuffle.

The order of training rows is a pure function of (seed, epoch, position), without a shuffle buffer: in each epoch the
shards are permuted by a hash of (seed, epoch, name); consecutive shards form a window, which is permuted as a whole. So
the row at any position is found by arithmetic, and a run resumes by opening one window.

Each input pipeline (one per host) gives the batches of its replicas, cut out of the global batches: on P pipelines
and R replicas, rows g * p / P to g * (p + 1) / P of each global batch of g rows belong to pipeline p, as R / P batches.
So the rows of a global batch, and the place of each in it, do not depend on how many hosts and replicas there are.
"""

import hashlib
import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfrecord_prep.manifest import ShardSet
from train.data.inputs import Feature

# Shards read at once: enough to hide the latency of Cloud Storage.
NUM_PARALLEL_READS = 8
ONE_PIPELINE = tf.distribute.InputContext()


@dataclass(frozen=True)
class Window:
    """Shards that are read together and permuted with `seed`; the first `num_skipped_rows` rows are left out."""

    shard_indices: tuple[int, ...]
    seed: tuple[int, int]
    num_rows: int
    num_skipped_rows: int = 0


@dataclass(frozen=True)
class SampleOrder:
    """The order over shards given as paths and rows; `window_rows` bounds the rows in memory from below.

    A window is closed as soon as it holds `window_rows`, so it has at most that many and one shard more.
    """

    shard_paths: Sequence[str]
    num_rows_per_shard: Sequence[int]
    seed: int
    window_rows: int

    @property
    def num_rows(self) -> int:
        return sum(self.num_rows_per_shard)

    def windows(self, epoch: int) -> list[Window]:
        """Make the windows of one epoch, in the order they are read."""
        names = [posixpath.basename(path) for path in self.shard_paths]
        order = sorted(range(len(names)), key=lambda index: self._digest(epoch, names[index]))
        windows: list[Window] = []
        members: list[int] = []
        for position, index in enumerate(order):
            members.append(index)
            num_rows = sum(self.num_rows_per_shard[member] for member in members)
            if num_rows >= self.window_rows or position == len(order) - 1:
                digest = self._digest(epoch, f"window {len(windows)}")
                seed = tuple(int.from_bytes(digest[at : at + 4], "little", signed=True) for at in (0, 4))
                windows.append(Window(tuple(members), (seed[0], seed[1]), num_rows))
                members = []
        return windows

    def from_row(self, start_row: int, num_rows: int) -> Iterator[Window]:
        """Yield the windows that hold rows `start_row` to `start_row + num_rows` of the endless stream of epochs.

        Rows before `start_row` are skipped in the first window; the last may hold more than is needed.
        """
        epoch, skip = divmod(start_row, self.num_rows)
        while num_rows > 0:
            for window in self.windows(epoch):
                if skip >= window.num_rows:
                    skip -= window.num_rows
                    continue
                yield Window(window.shard_indices, window.seed, window.num_rows, skip)
                num_rows -= window.num_rows - skip
                skip = 0
                if num_rows <= 0:
                    return
            epoch += 1

    def _digest(self, epoch: int, name: str) -> bytes:
        return hashlib.sha256(f"{self.seed}/{epoch}/{name}".encode()).digest()


def training_batches(
    order: SampleOrder,
    features: Mapping[str, Feature],
    context: tf.distribute.InputContext = ONE_PIPELINE,
    *,
    global_batch_rows: int,
    start_step: int,
    num_steps: int,
    num_left_out_rows: int = 0,
) -> tf.data.Dataset:
    """Read what `Inputs.training_batches` says, in a random order.

    Batches continue over the end of an epoch, so no row is dropped between epochs. A pipeline reads whole windows,
    since they are permuted as a whole, and parses only its rows.
    """
    windows = list(order.from_row(start_step * global_batch_rows + num_left_out_rows, num_steps * global_batch_rows))
    num_rows = np.array([window.num_rows for window in windows])
    num_skipped_rows = np.array([window.num_skipped_rows for window in windows])
    # The place in its global batch of the first row of a window that is not skipped.
    first_places = (np.cumsum(num_rows - num_skipped_rows) - (num_rows - num_skipped_rows)) % global_batch_rows
    paths = tf.constant(list(order.shard_paths))

    @tf.autograph.experimental.do_not_convert
    def read_window(
        shard_indices: tf.Tensor, seed: tf.Tensor, num_rows: tf.Tensor, num_skipped_rows: tf.Tensor, first: tf.Tensor
    ) -> tf.Tensor:
        records = tf.data.TFRecordDataset(tf.gather(paths, shard_indices), num_parallel_reads=NUM_PARALLEL_READS)
        records = records.batch(order.num_rows + 1).get_single_element()  # (rows of the window,)
        message = "shards must hold as many rows as their names say; prepare them again"
        with tf.control_dependencies([tf.debugging.assert_equal(tf.size(records), num_rows, message)]):
            records = tf.identity(records)
        draws = tf.random.stateless_uniform(
            tf.shape(records), seed, minval=None, maxval=None, dtype=tf.int32, alg="philox"
        )
        permuted = tf.argsort(draws, stable=True)[num_skipped_rows:]
        places = (first + tf.range(tf.size(permuted))) % global_batch_rows
        is_mine = places // _pipeline_rows(context, global_batch_rows) == context.input_pipeline_id
        return tf.gather(records, tf.boolean_mask(permuted, is_mine))

    dataset = tf.data.Dataset.from_tensor_slices(
        (
            tf.ragged.constant([window.shard_indices for window in windows], dtype=tf.int32),
            tf.constant([window.seed for window in windows], tf.int32),
            tf.constant(num_rows, tf.int32),
            tf.constant(num_skipped_rows, tf.int32),
            tf.constant(first_places, tf.int32),
        )
    )
    replica_rows = context.get_per_replica_batch_size(global_batch_rows)
    dataset = dataset.map(read_window).prefetch(1).rebatch(replica_rows, drop_remainder=True)
    dataset = dataset.take(num_steps * _num_replicas(context))

    @tf.autograph.experimental.do_not_convert
    def parse(records: tf.Tensor) -> dict[str, tf.Tensor]:
        return parse_records(tf.ensure_shape(records, (replica_rows,)), features)

    return _deterministic(dataset.map(parse, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE))


def evaluation_batches(
    shards: ShardSet,
    features: Mapping[str, Feature],
    prepare_row: Callable[[dict[str, tf.Tensor]], Any],
    context: tf.distribute.InputContext = ONE_PIPELINE,
    *,
    global_batch_rows: int,
) -> tf.data.Dataset:
    """Read what `Inputs.evaluation_batches` says; a pipeline reads all records and parses its part of them."""
    num_batches = -(-shards.num_rows // global_batch_rows)
    pipeline_rows = _pipeline_rows(context, global_batch_rows)
    padding = {
        name: tf.fill(feature.shape, tf.constant(feature.padding, feature.batch_dtype))
        for name, feature in features.items()
    }
    records = tf.data.TFRecordDataset(list(shards.paths), num_parallel_reads=NUM_PARALLEL_READS)
    batches = records.batch(pipeline_rows).shard(context.num_input_pipelines, context.input_pipeline_id)
    parse = tf.autograph.experimental.do_not_convert(lambda batch: parse_records(batch, features))
    rows = batches.map(parse, num_parallel_calls=tf.data.AUTOTUNE).unbatch()
    rows = rows.concatenate(tf.data.Dataset.from_tensors(padding).repeat()).take(num_batches * pipeline_rows)
    prepare = tf.autograph.experimental.do_not_convert(prepare_row)
    rows = rows.map(prepare, num_parallel_calls=tf.data.AUTOTUNE)
    replica_rows = context.get_per_replica_batch_size(global_batch_rows)
    return _deterministic(rows.batch(replica_rows, drop_remainder=True).prefetch(tf.data.AUTOTUNE))


def parse_records(records: tf.Tensor, features: Mapping[str, Feature]) -> dict[str, tf.Tensor]:
    """Parse serialized tf.train.Examples: string (rows,) -> {feature: (rows, …)}."""
    specs = {name: tf.io.FixedLenFeature(feature.shape, feature.dtype) for name, feature in features.items()}
    parsed = tf.io.parse_example(records, specs)
    return {name: tf.cast(parsed[name], feature.batch_dtype) for name, feature in features.items()}


def batch_spec(features: Mapping[str, Feature], num_rows: int) -> dict[str, tf.TensorSpec]:
    """Describe a batch of `num_rows`: {feature: shape and type}."""
    return {name: tf.TensorSpec((num_rows, *one.shape), one.batch_dtype) for name, one in features.items()}


def _pipeline_rows(context: tf.distribute.InputContext, global_batch_rows: int) -> int:
    """Count the rows of a global batch that belong to one input pipeline."""
    return context.get_per_replica_batch_size(global_batch_rows) * _num_replicas(context)


def _num_replicas(context: tf.distribute.InputContext) -> int:
    """Count the replicas that one input pipeline feeds."""
    return context.num_replicas_in_sync // context.num_input_pipelines


def _deterministic(dataset: tf.data.Dataset) -> tf.data.Dataset:
    options = tf.data.Options()
    options.deterministic = True
    return dataset.with_options(options)
