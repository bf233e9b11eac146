"""tf.data pipelines over the shards of stage 2, with a stateless shuffle.

The order of training rows depends only on (seed, epoch, position); there is no shuffle buffer. In each epoch the shards
are permuted by a hash of (seed, epoch, name). Consecutive shards form a window, whose rows are permuted together. So
the row at any position can be computed, and a run resumes by opening a single window.

In a mixture each source has such an order, and `train.data.sources` defines which source a position belongs to. A
reader goes through the windows of all sources, in the order in which their first rows are needed, and keeps rows in
memory until their position comes. A window much larger than its source's share of the memory is read in several passes,
each of which keeps a part of the window's rows, so that many sources with large shards fit into memory.

Each input pipeline (one per host) yields the batches of its replicas, which are parts of the global batches. With P
pipelines and R replicas, rows g * p / P to g * (p + 1) / P of each global batch of g rows belong to pipeline p, as R /
P batches. So the rows of a global batch, and their order, do not depend on the number of hosts and replicas.
"""

import hashlib
import heapq
import posixpath
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from tfrecord_prep.manifest import ShardSet
from train.data.inputs import Feature
from train.data.sources import Interleaving

# Shards read at once: enough to hide the latency of Cloud Storage.
NUM_PARALLEL_READS = 8
# Before a window is permuted, its rows are interleaved from this number of shards, one row from each shard in turn.
NUM_SHARDS_IN_TURN = 8
NUM_PREFETCHED_STEPS = 8
# Each source of a mixture has at most this number of rows in memory: MAX_BUFFER_PARTS times its share of the buffer, or
# 1 / MAX_READS_PER_WINDOW of a window's rows, whichever is more. More rows would need more memory; with fewer rows, the
# shards would be read more often.
MAX_BUFFER_PARTS, MAX_READS_PER_WINDOW = 8, 16
ONE_PIPELINE = tf.distribute.InputContext()


@dataclass(frozen=True)
class Window:
    """Shards that are read and permuted together.

    Attributes:
        shard_indices: the shards.
        seed: seed of the permutation.
        num_rows: number of rows of all shards.
        num_skipped_rows: number of rows to skip after the permutation.
    """

    shard_indices: tuple[int, ...]
    seed: tuple[int, int]
    num_rows: int
    num_skipped_rows: int = 0


@dataclass(frozen=True)
class SampleOrder:
    """The order of the rows of a data set.

    Attributes:
        shard_paths: paths of the shards.
        num_rows_per_shard: number of rows of each shard.
        seed: seed of the order.
        window_rows: a window ends as soon as it has this number of rows, so its size may exceed this number by almost
            one shard.
    """

    shard_paths: Sequence[str]
    num_rows_per_shard: Sequence[int]
    seed: int
    window_rows: int

    @property
    def num_rows(self) -> int:
        return sum(self.num_rows_per_shard)

    def windows(self, epoch: int) -> list[Window]:
        """Return the windows of an epoch, in the order in which they are read."""
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
        """Yield the windows with the rows from `start_row` to `start_row + num_rows`, counted across epochs.

        Rows before `start_row` are skipped in the first window. The last window may have more rows than needed.
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


@dataclass(frozen=True)
class MixtureOrder:
    """The order of the rows of several sources.

    Attributes:
        sources: the order within each source.
        interleaving: the order in which sources alternate.
        first_rows: for each source, the number of rows that were used before position 0.
    """

    sources: Sequence[SampleOrder]
    interleaving: Interleaving
    first_rows: Sequence[int]

    @classmethod
    def of_one(cls, order: SampleOrder) -> "MixtureOrder":
        return cls((order,), Interleaving((1,)), (0,))

    def from_row(self, start_row: int, num_rows: int) -> list["MixtureWindow"]:
        """Return the windows to read for positions `start_row` to `start_row + num_rows`, sorted by first position."""
        windows = []
        for index, order in enumerate(self.sources):
            row = self.interleaving.num_rows(index, start_row)
            stop = self.interleaving.num_rows(index, start_row + num_rows)
            for window in order.from_row(self.first_rows[index] + row, stop - row):
                part_rows = window.num_rows
                if len(self.sources) > 1:
                    part_rows = max(MAX_BUFFER_PARTS * order.window_rows, -(-part_rows // MAX_READS_PER_WINDOW))
                for start in range(window.num_skipped_rows, window.num_rows, part_rows):
                    if row >= stop:
                        break
                    rows = range(start, min(start + part_rows, window.num_rows))
                    first = self.interleaving.position(index, row)
                    last = self.interleaving.position(index, row + len(rows) - 1)
                    windows.append(MixtureWindow(window, rows, index, row, first, last))
                    row += len(rows)
        return sorted(windows, key=lambda window: window.first_position)


@dataclass(frozen=True)
class MixtureWindow:
    """A part of a permuted window of a source; its rows are in memory at the same time.

    Attributes:
        window: the window.
        rows: rows of the permuted window.
        source: index of the source.
        first_row: number of the first of these rows in the source, counted from the row at position 0.
        first_position: position of the first row.
        last_position: position of the last row.
    """

    window: Window
    rows: range
    source: int
    first_row: int
    first_position: int
    last_position: int


class ReadingGroups(NamedTuple):
    """Groups of windows that are read at once, and the chunks of positions that their rows belong to.

    The rows of a group are divided into pieces, one for each chunk from the group's first chunk to its last.

    Attributes:
        starts: first window of each group, (groups,).
        ends: window after the last of each group, (groups,).
        first_chunks: first chunk of each group, (groups,).
        last_chunks: last chunk of each group, (groups,).
        num_pieces: number of pieces of each chunk, (chunks + 1,). The last number is 0.
    """

    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    first_chunks: NDArray[np.int64]
    last_chunks: NDArray[np.int64]
    num_pieces: NDArray[np.int64]


def reading_groups(windows: Sequence[MixtureWindow], start_row: int, num_rows: int, chunk_rows: int) -> ReadingGroups:
    """Group the windows that contain `num_rows` positions from `start_row` on, divided into chunks of `chunk_rows`.

    A group's last chunk is never earlier than a previous group's last chunk, even if the group has no rows in that
    chunk. So chunks are completed in order: each is complete once all groups that start in it or before it have been
    read.
    """
    num_chunks = -(-num_rows // chunk_rows)

    def chunks(positions: Iterable[int]) -> NDArray[np.int64]:
        return np.minimum((np.fromiter(positions, np.int64) - start_row) // chunk_rows, num_chunks - 1)

    window_rows = np.array([len(window.rows) for window in windows])
    starts = np.flatnonzero(np.diff((np.cumsum(window_rows) - window_rows) // chunk_rows, prepend=-1))
    first_chunks = chunks(windows[start].first_position for start in starts.tolist())
    last_chunks = np.maximum.accumulate(np.maximum.reduceat(chunks(window.last_position for window in windows), starts))
    num_started = np.bincount(first_chunks, minlength=num_chunks + 1)
    num_ended = np.bincount(last_chunks + 1, minlength=num_chunks + 1)
    ends = np.append(starts[1:], len(windows))
    return ReadingGroups(starts, ends, first_chunks, last_chunks, np.cumsum(num_started - num_ended))


def first_turns(num_rows_per_shard: Sequence[int]) -> list[int]:
    """Return the turn of the first row of each shard of a window, in the order before the permutation.

    A shard's next rows follow at intervals of NUM_SHARDS_IN_TURN turns. After a shard has ended, its turn is skipped
    once; then the next shard takes its place.
    """
    places = list(range(NUM_SHARDS_IN_TURN))
    turns = []
    for num_rows in num_rows_per_shard:
        turns.append(heapq.heappop(places))
        heapq.heappush(places, turns[-1] + (num_rows + 1) * NUM_SHARDS_IN_TURN)
    return turns


def training_batches(
    order: SampleOrder | MixtureOrder,
    features: Mapping[str, Feature],
    context: tf.distribute.InputContext = ONE_PIPELINE,
    *,
    global_batch_rows: int,
    start_step: int,
    num_steps: int,
    num_left_out_rows: int = 0,
) -> tf.data.Dataset:
    """Return the batches described in `Inputs.training_batches`, in random order.

    A batch may contain rows of two epochs, so no row is dropped at the end of an epoch. An input pipeline reads whole
    windows, because they are permuted as a whole, and parses only the rows that belong to it.
    """
    mixture = order if isinstance(order, MixtureOrder) else MixtureOrder.of_one(order)
    start_row = start_step * global_batch_rows + num_left_out_rows
    windows = mixture.from_row(start_row, num_steps * global_batch_rows)
    paths = tf.constant([path for source in mixture.sources for path in source.shard_paths])
    rows_of_shards = [number for source in mixture.sources for number in source.num_rows_per_shard]
    first_shards = np.cumsum([0, *(len(source.shard_paths) for source in mixture.sources)]).tolist()
    shards_of_windows = [
        [first_shards[window.source] + index for index in window.window.shard_indices] for window in windows
    ]
    has_one_shard = all(len(window_shards) == 1 for window_shards in shards_of_windows)
    # For each shard its index, number of rows and first turn: (windows, shards per window, 3).
    shard_numbers = [
        [
            (shard, rows_of_shards[shard], turn)
            for shard, turn in zip(
                window_shards, first_turns([rows_of_shards[shard] for shard in window_shards]), strict=True
            )
            if rows_of_shards[shard]
        ]
        for window_shards in shards_of_windows
    ]
    # With many windows, `tf.ragged.constant` would take minutes.
    shards = tf.RaggedTensor.from_row_lengths(
        np.array(list(chain.from_iterable(shard_numbers)), np.int64).reshape(-1, 3), list(map(len, shard_numbers))
    )
    seeds = tf.constant([window.window.seed for window in windows], tf.int32)
    numbers = [(window.rows.start, window.rows.stop, window.source, window.first_row) for window in windows]
    starts, ends, source_indices, first_rows = tf.unstack(tf.constant(numbers, tf.int64), axis=1)

    @tf.autograph.experimental.do_not_convert
    def read_shard(shard: tf.Tensor) -> tf.Tensor:
        size = shard[1]
        records = tf.data.TFRecordDataset(paths[shard[0]]).take(size + 1).batch(size + 1).get_single_element()
        message = "shards must contain as many rows as their names say; prepare them again"
        with tf.control_dependencies([tf.debugging.assert_equal(tf.size(records, tf.int64), size, message)]):
            return tf.identity(records)

    @tf.autograph.experimental.do_not_convert
    def read_window(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Read this input pipeline's records of a window, and their positions."""
        window_shards = shards[index]
        if has_one_shard:
            records = read_shard(window_shards[0])
        else:
            shard_records = tf.data.Dataset.from_tensor_slices(window_shards).map(
                read_shard, num_parallel_calls=NUM_PARALLEL_READS
            )
            records = shard_records.ragged_batch(tf.shape(window_shards, tf.int64)[0]).get_single_element().values
            _, sizes, first = tf.unstack(window_shards, axis=1)
            turns = tf.ragged.range(first, first + NUM_SHARDS_IN_TURN * sizes, NUM_SHARDS_IN_TURN).values
        draws = tf.random.stateless_uniform(
            tf.shape(records), seeds[index], minval=None, maxval=None, dtype=tf.int32, alg="philox"
        )
        permuted = tf.argsort(draws, stable=True)[starts[index] : ends[index]]
        rows = first_rows[index] + tf.range(tf.size(permuted, tf.int64))
        positions = _positions(mixture.interleaving, source_indices[index], rows)
        places = (positions - start_row) % global_batch_rows
        is_in_pipeline = places // _pipeline_rows(context, global_batch_rows) == context.input_pipeline_id
        selected = tf.boolean_mask(permuted, is_in_pipeline)
        if not has_one_shard:
            selected = tf.gather(tf.argsort(turns), selected)
        return tf.gather(records, selected), tf.boolean_mask(positions, is_in_pipeline)

    if len(mixture.sources) == 1:
        only_records = tf.autograph.experimental.do_not_convert(lambda records, _: records)
        dataset = tf.data.Dataset.range(len(windows)).map(read_window).map(only_records).prefetch(1)
    else:
        dataset = _merged(mixture, windows, read_window, start_row, num_steps * global_batch_rows)
    replica_rows = context.get_per_replica_batch_size(global_batch_rows)
    dataset = dataset.rebatch(replica_rows, drop_remainder=True).take(num_steps * _num_replicas(context))

    @tf.autograph.experimental.do_not_convert
    def parse(records: tf.Tensor) -> dict[str, tf.Tensor]:
        return parse_records(tf.ensure_shape(records, (replica_rows,)), features)

    return prefetched(dataset.map(parse, num_parallel_calls=tf.data.AUTOTUNE), context)


def _merged(
    mixture: MixtureOrder,
    windows: Sequence[MixtureWindow],
    read_window: Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]],
    start_row: int,
    num_rows: int,
) -> tf.data.Dataset:
    """Read the windows in groups, and sort their records by position, one chunk at a time.

    A group is divided into one piece per chunk, so that each record is in memory only once.
    """
    # Larger chunks need more memory, smaller chunks cost more time.
    chunk_rows = max(1, sum(order.window_rows for order in mixture.sources) // 4)
    *groups, pieces_of_chunk = reading_groups(windows, start_row, num_rows, chunk_rows)
    num_pieces = tf.constant(pieces_of_chunk)

    @tf.autograph.experimental.do_not_convert
    def read_group(start: tf.Tensor, end: tf.Tensor, *chunks: tf.Tensor) -> tuple[tf.Tensor, ...]:
        group = tf.data.Dataset.range(start, end).map(read_window, num_parallel_calls=NUM_PARALLEL_READS)
        records, positions = group.ragged_batch(end - start).get_single_element()
        return records.values, positions.values, *chunks

    @tf.autograph.experimental.do_not_convert
    def cut(records: tf.Tensor, positions: tf.Tensor, first: tf.Tensor, last: tf.Tensor) -> tf.data.Dataset:
        order = tf.argsort(positions)
        positions = tf.gather(positions, order)
        bounds = tf.searchsorted(positions, start_row + chunk_rows * tf.range(first, last + 2))

        @tf.autograph.experimental.do_not_convert
        def piece(chunk: tf.Tensor, start: tf.Tensor, end: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            return chunk, tf.gather(records, order[start:end]), positions[start:end]

        return tf.data.Dataset.from_tensor_slices((tf.range(first, last + 1), bounds[:-1], bounds[1:])).map(piece)

    @tf.autograph.experimental.do_not_convert
    def put_in_order(chunk: tf.Tensor, pieces: tf.data.Dataset) -> tf.data.Dataset:
        _, records, positions = pieces.ragged_batch(num_pieces[chunk]).get_single_element()
        return tf.data.Dataset.from_tensors(tf.gather(records.values, tf.argsort(positions.values)))

    return (
        tf.data.Dataset.from_tensor_slices(tuple(tf.constant(numbers, tf.int64) for numbers in groups))
        .map(read_group)
        .prefetch(1)
        .flat_map(cut)
        .group_by_window(
            tf.autograph.experimental.do_not_convert(lambda chunk, *_: chunk),
            put_in_order,
            window_size_func=tf.autograph.experimental.do_not_convert(lambda chunk: num_pieces[chunk]),
        )
    )


def _positions(interleaving: Interleaving, source: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """Return the positions of a source's rows, as `Interleaving.position` does: int64 (rows,)."""
    depth = max(map(len, interleaving.branches))
    paths = [
        [(branch.weight, branch.parent_weight, branch.is_left) for branch in path] for path in interleaving.branches
    ]
    # Shorter paths are padded with branches that do not change rows: weights of 1 and 1.
    padded_paths = [[*path, *[(1, 1, 0)] * (depth - len(path))] for path in paths]
    branches = tf.constant(padded_paths, tf.int64, (len(paths), depth, 3))
    for level in range(depth):
        weight, parent_weight, is_left = tf.unstack(branches[source, level])
        # Quotient and remainder are multiplied separately, so that no product exceeds 64 bits.
        quotient, remainder = rows // weight, rows % weight
        rows = quotient * parent_weight + (parent_weight * (2 * remainder + 1) - is_left) // (2 * weight)
    return rows


def evaluation_batches(
    shards: ShardSet,
    features: Mapping[str, Feature],
    prepare_row: Callable[[dict[str, tf.Tensor]], Any],
    context: tf.distribute.InputContext = ONE_PIPELINE,
    *,
    global_batch_rows: int,
) -> tf.data.Dataset:
    """Return the batches described in `Inputs.evaluation_batches`.

    An input pipeline reads all records, but parses only the records that belong to it.
    """
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
    return prefetched(rows.batch(replica_rows, drop_remainder=True), context)


def parse_records(records: tf.Tensor, features: Mapping[str, Feature]) -> dict[str, tf.Tensor]:
    """Parse serialized tf.train.Examples, string (rows,), into {feature: (rows, …)}."""
    specs = {name: tf.io.FixedLenFeature(feature.shape, feature.dtype) for name, feature in features.items()}
    parsed = tf.io.parse_example(records, specs)
    return {name: tf.cast(parsed[name], feature.batch_dtype) for name, feature in features.items()}


def batch_spec(features: Mapping[str, Feature], num_rows: int) -> dict[str, tf.TensorSpec]:
    """Return shape and type of each feature in a batch of `num_rows`."""
    return {name: tf.TensorSpec((num_rows, *feature.shape), feature.batch_dtype) for name, feature in features.items()}


def _pipeline_rows(context: tf.distribute.InputContext, global_batch_rows: int) -> int:
    """Return the number of rows of a global batch that belong to an input pipeline."""
    return context.get_per_replica_batch_size(global_batch_rows) * _num_replicas(context)


def _num_replicas(context: tf.distribute.InputContext) -> int:
    """Return the number of replicas of an input pipeline."""
    return context.num_replicas_in_sync // context.num_input_pipelines


def prefetched(dataset: tf.data.Dataset, context: tf.distribute.InputContext) -> tf.data.Dataset:
    """Prefetch a few steps, in order.

    Autotuning is off, because its thread may not notice that the iterator is destroyed, and then delays the end of the
    process by a minute. Autotuning would also double the buffer each time the input falls behind.
    """
    options = tf.data.Options()
    options.deterministic = True
    options.autotune.enabled = False
    return dataset.prefetch(NUM_PREFETCHED_STEPS * _num_replicas(context)).with_options(options)
