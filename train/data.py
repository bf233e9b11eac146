"""tf.data pipelines over the shards of stage 2."""

import tensorflow as tf

from tfrecord_prep.manifest import ShardSet
from train.masking import MaskedRows, mask_row_by_content
from train.masking_rule import MaskingRule
from train.sample_order import SampleOrder

# Shards read at once: enough to hide the latency of Cloud Storage.
NUM_PARALLEL_READS = 8


def training_batches(
    order: SampleOrder, *, length: int, global_batch_rows: int, start_step: int, num_steps: int
) -> tf.data.Dataset:
    """Return `num_steps` batches, int32 (global_batch_rows, length), from update `start_step` on.

    Batches run on over the end of an epoch, so no row is dropped between epochs.
    """
    windows = list(order.from_row(start_step * global_batch_rows, num_steps * global_batch_rows))
    paths = tf.constant(list(order.shard_paths))

    def read_window(
        shard_indices: tf.Tensor, seed: tf.Tensor, num_rows: tf.Tensor, num_skipped_rows: tf.Tensor
    ) -> tf.Tensor:
        records = tf.data.TFRecordDataset(tf.gather(paths, shard_indices), num_parallel_reads=NUM_PARALLEL_READS)
        records = records.batch(order.num_rows + 1).get_single_element()  # (rows of the window,)
        message = "shards must hold as many rows as their names say; prepare them again"
        with tf.control_dependencies([tf.debugging.assert_equal(tf.size(records), num_rows, message)]):
            records = tf.identity(records)
        draws = tf.random.stateless_uniform(
            tf.shape(records), seed, minval=None, maxval=None, dtype=tf.int32, alg="philox"
        )
        return tf.gather(records, tf.argsort(draws, stable=True)[num_skipped_rows:])

    dataset = tf.data.Dataset.from_tensor_slices(
        (
            tf.ragged.constant([window.shard_indices for window in windows], dtype=tf.int32),
            tf.constant([window.seed for window in windows], tf.int32),
            tf.constant([window.num_rows for window in windows], tf.int32),
            tf.constant([window.num_skipped_rows for window in windows], tf.int32),
        )
    )
    dataset = dataset.map(read_window).prefetch(1).rebatch(global_batch_rows, drop_remainder=True).take(num_steps)

    def parse(records: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(parse_input_ids(records, length), (global_batch_rows, length))

    return _with_options(dataset.map(parse, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE))


def evaluation_batches(
    shards: ShardSet, rule: MaskingRule, *, length: int, global_batch_rows: int, pad_token_id: int
) -> tf.data.Dataset:
    """Return every row once as a `MaskedRows` of `global_batch_rows`, masks fixed by the row's content.

    The last batch is filled up with rows of padding: they hold no masked token, so they do not count.
    """
    num_missing_rows = -shards.num_rows % global_batch_rows
    padding = tf.data.Dataset.from_tensors(tf.fill((length,), tf.constant(pad_token_id, tf.int32)))

    records = tf.data.TFRecordDataset(list(shards.paths), num_parallel_reads=NUM_PARALLEL_READS)
    rows = records.batch(1024).map(lambda batch: parse_input_ids(batch, length)).unbatch()
    rows = rows.concatenate(padding.repeat(num_missing_rows))

    def mask(row: tf.Tensor) -> MaskedRows:
        return mask_row_by_content(tf.ensure_shape(row, (length,)), rule)

    masked = rows.map(mask, num_parallel_calls=tf.data.AUTOTUNE)
    return _with_options(masked.batch(global_batch_rows, drop_remainder=True).prefetch(tf.data.AUTOTUNE))


def parse_input_ids(records: tf.Tensor, length: int) -> tf.Tensor:
    """Return the token ids of serialized tf.train.Examples: string (rows,) -> int32 (rows, length)."""
    features = tf.io.parse_example(records, {"input_ids": tf.io.FixedLenFeature((length,), tf.int64)})
    return tf.cast(features["input_ids"], tf.int32)


def _with_options(dataset: tf.data.Dataset) -> tf.data.Dataset:
    options = tf.data.Options()
    options.deterministic = True
    # Sharding by file would need as many shards as hosts; each host takes its rows of every global batch instead.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return dataset.with_options(options)
