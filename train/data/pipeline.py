"""tf.data pipelines over the shards of stage 2, with a stateless shuffle.

The order of training rows is a pure function of (seed, epoch, position), without a shuffle buffer: in each epoch the
shards are permuted by a hash of (seed, epoch, name); consecutive shards form a window, which is permuted as a whole. So
the row at any position is found by arithmetic, and a run resumes by opening one window.

In a mixture each source is such an order, and `train.data.sources` says which source a position belongs to. One reader
goes through the windows of all sources, in the order in which their first rows are needed, and holds the rows whose
position has not come yet. A window that is large for the weight of its source is read several times, a part of its rows
at a time, so that many sources of large shards fit into memory.

Each input pipeline (one per host) gives the batches of its replicas, cut out of the global batches: on P pipelines
and R replicas, rows g * p / P to g * (p + 1) / P of each global batch of g rows belong to pipeline p, as R / P batches.
So the rows of a global batch, and the place of each in it, do not depend on how many hosts and replicas there are.
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
# Before a window is permuted, its rows are in this order: this number of shards take turns, a row each.
NUM_SHARDS_IN_TURN = 8
NUM_PREFETCHED_STEPS = 8
# A source of a mixture holds this many times its part of the buffer, or this part of a window if that is more. More
# rows take memory; with fewer, a shard is read more often.
MAX_BUFFER_PARTS, MAX_READS_PER_WINDOW = 8, 16
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


@dataclass(frozen=True)
class MixtureOrder:
    """The order over several sources; `first_rows` are the rows of each that are used before position 0."""

    sources: Sequence[SampleOrder]
    interleaving: Interleaving
    first_rows: Sequence[int]

    @classmethod
    def of_one(cls, order: SampleOrder) -> "MixtureOrder":
        return cls((order,), Interleaving((1,)), (0,))

    def from_row(self, start_row: int, num_rows: int) -> list["MixtureWindow"]:
        """List what is read for positions `start_row` to `start_row + num_rows`, by the first position of each."""
        windows = []
        for index, order in enumerate(self.sources):
            row, stop = (self.interleaving.num_rows(index, one) for one in (start_row, start_row + num_rows))
            for window in order.from_row(self.first_rows[index] + row, stop - row):
                part_rows = window.num_rows
                if len(self.sources) > 1:
                    part_rows = max(MAX_BUFFER_PARTS * order.window_rows, -(-part_rows // MAX_READS_PER_WINDOW))
                for start in range(window.num_skipped_rows, window.num_rows, part_rows):
                    if row >= stop:
                        break
                    rows = range(start, min(start + part_rows, window.num_rows))
                    first, last = (self.interleaving.position(index, one) for one in (row, row + len(rows) - 1))
                    windows.append(MixtureWindow(window, rows, index, row, first, last))
                    row += len(rows)
        return sorted(windows, key=lambda window: window.first_position)


@dataclass(frozen=True)
class MixtureWindow:
    """Some rows of a permuted window of a source, held at once; the first is row `first_row` from position 0 on."""

    window: Window
    rows: range
    source: int
    first_row: int
    first_position: int
    last_position: int


class ReadingGroups(NamedTuple):
    """Windows `starts` to `ends` of a list are read at once, and cut into pieces for `first_chunks` to `last_chunks`.

    All are (num_groups,); `num_pieces` of each chunk, (num_chunks + 1,), the last 0.
    """

    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    first_chunks: NDArray[np.int64]
    last_chunks: NDArray[np.int64]
    num_pieces: NDArray[np.int64]


def reading_groups(windows: Sequence[MixtureWindow], start_row: int, num_rows: int, chunk_rows: int) -> ReadingGroups:
    """Group the windows that hold `num_rows` positions from `start_row` on, which are cut into chunks of `chunk_rows`.

    The last chunk of a group is that of its rows or, if that is later, of a group before it. So a chunk is complete
    when no group that begins in it is still to be read, and chunks are complete in their order.
    """
    num_chunks = -(-num_rows // chunk_rows)

    def chunks(positions: Iterable[int]) -> NDArray[np.int64]:
        return np.minimum((np.fromiter(positions, np.int64) - start_row) // chunk_rows, num_chunks - 1)

    window_rows = np.array([len(one.rows) for one in windows])
    starts = np.flatnonzero(np.diff((np.cumsum(window_rows) - window_rows) // chunk_rows, prepend=-1))
    first_chunks = chunks(windows[start].first_position for start in starts.tolist())
    last_chunks = np.maximum.accumulate(np.maximum.reduceat(chunks(one.last_position for one in windows), starts))
    num_begun, num_ended = (np.bincount(one, minlength=num_chunks + 1) for one in (first_chunks, last_chunks + 1))
    ends = np.append(starts[1:], len(windows))
    return ReadingGroups(starts, ends, first_chunks, last_chunks, np.cumsum(num_begun - num_ended))


def first_turns(num_rows_per_shard: Sequence[int]) -> list[int]:
    """Return the turn of the first row of each shard of a window; its next rows follow every NUM_SHARDS_IN_TURN turns.

    A shard that has ended passes once; then the next one takes its place.
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
    """Read what `Inputs.training_batches` says, in a random order.

    Batches continue over the end of an epoch, so no row is dropped between epochs. A pipeline reads whole windows,
    since they are permuted as a whole, and parses only its rows.
    """
    mixture = order if isinstance(order, MixtureOrder) else MixtureOrder.of_one(order)
    start_row = start_step * global_batch_rows + num_left_out_rows
    windows = mixture.from_row(start_row, num_steps * global_batch_rows)
    paths = tf.constant([path for source in mixture.sources for path in source.shard_paths])
    rows_of_shards = [number for source in mixture.sources for number in source.num_rows_per_shard]
    first_shards = np.cumsum([0, *(len(source.shard_paths) for source in mixture.sources)]).tolist()
    shards_of_windows = [[first_shards[one.source] + index for index in one.window.shard_indices] for one in windows]
    is_one_shard = all(len(of_window) == 1 for of_window in shards_of_windows)
    # Of each shard its index, rows and first turn: (windows, shards of each, 3). With many windows `tf.ragged.constant`
    # would take minutes.
    described = [
        [
            (shard, rows_of_shards[shard], turn)
            for shard, turn in zip(of_window, first_turns([rows_of_shards[one] for one in of_window]), strict=True)
            if rows_of_shards[shard]
        ]
        for of_window in shards_of_windows
    ]
    shards = tf.RaggedTensor.from_row_lengths(
        np.array(list(chain.from_iterable(described)), np.int64).reshape(-1, 3), list(map(len, described))
    )
    seeds = tf.constant([one.window.seed for one in windows], tf.int32)
    numbers = [(one.rows.start, one.rows.stop, one.source, one.first_row) for one in windows]
    starts, ends, source_indices, first_rows = tf.unstack(tf.constant(numbers, tf.int64), axis=1)

    @tf.autograph.experimental.do_not_convert
    def read_shard(shard: tf.Tensor) -> tf.Tensor:
        size = shard[1]
        records = tf.data.TFRecordDataset(paths[shard[0]]).take(size + 1).batch(size + 1).get_single_element()
        message = "shards must hold as many rows as their names say; prepare them again"
        with tf.control_dependencies([tf.debugging.assert_equal(tf.size(records, tf.int64), size, message)]):
            return tf.identity(records)

    @tf.autograph.experimental.do_not_convert
    def read_window(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Read the records of this pipeline in a window, and their positions."""
        of_window = shards[index]
        if is_one_shard:
            records = read_shard(of_window[0])
        else:
            read = tf.data.Dataset.from_tensor_slices(of_window).map(read_shard, num_parallel_calls=NUM_PARALLEL_READS)
            records = read.ragged_batch(tf.shape(of_window, tf.int64)[0]).get_single_element().values
            _, sizes, first = tf.unstack(of_window, axis=1)
            turns = tf.ragged.range(first, first + NUM_SHARDS_IN_TURN * sizes, NUM_SHARDS_IN_TURN).values
        draws = tf.random.stateless_uniform(
            tf.shape(records), seeds[index], minval=None, maxval=None, dtype=tf.int32, alg="philox"
        )
        permuted = tf.argsort(draws, stable=True)[starts[index] : ends[index]]
        rows = first_rows[index] + tf.range(tf.size(permuted, tf.int64))
        positions = _positions(mixture.interleaving, source_indices[index], rows)
        places = (positions - start_row) % global_batch_rows
        is_mine = places // _pipeline_rows(context, global_batch_rows) == context.input_pipeline_id
        mine = tf.boolean_mask(permuted, is_mine)
        if not is_one_shard:
            mine = tf.gather(tf.argsort(turns), mine)
        return tf.gather(records, mine), tf.boolean_mask(positions, is_mine)

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
    """Read the windows in groups, and put their records in the order of their positions: a chunk at a time.

    A group is cut into pieces, one for each chunk, so that a record is held once.
    """
    # More rows take memory, fewer take time.
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
        tf.data.Dataset.from_tensor_slices(tuple(tf.constant(one, tf.int64) for one in groups))
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
    """Find the positions of a source's rows as `Interleaving.position` does: int64 (rows,)."""
    depth = max(map(len, interleaving.branches))
    ends = [[(branch.weight, branch.parent_weight, branch.is_left) for branch in one] for one in interleaving.branches]
    # Where all rows are already of the root, nothing changes: weights of 1 and 1.
    branches = tf.constant([[*one, *[(1, 1, 0)] * (depth - len(one))] for one in ends], tf.int64, (len(ends), depth, 3))
    for level in range(depth):
        weight, parent_weight, is_left = tf.unstack(branches[source, level])
        # The quotient apart from the remainder, so that no product exceeds 64 bits.
        whole, rest = rows // weight, rows % weight
        rows = whole * parent_weight + (parent_weight * (2 * rest + 1) - is_left) // (2 * weight)
    return rows


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
    return prefetched(rows.batch(replica_rows, drop_remainder=True), context)


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


def prefetched(dataset: tf.data.Dataset, context: tf.distribute.InputContext) -> tf.data.Dataset:
    """Prepare a few steps ahead, in order.

    Nothing is tuned meanwhile: the thread that does so can miss that its iterator is destroyed, and holds up the
    process for a minute. It would also double the buffer each time the input falls behind.
    """
    options = tf.data.Options()
    options.deterministic = True
    options.autotune.enabled = False
    return dataset.prefetch(NUM_PREFETCHED_STEPS * _num_replicas(context)).with_options(options)
