"""Batches of encoded rows as tf.data, each of the static length of its bucket.

Each input pipeline (one a host) gives the batches of its own replicas, cut out of the global batches: those of a step
follow each other in the order of the replicas. All is made by operations of TensorFlow, which any host can run.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from finetuning.data.buckets import Batches
from finetuning.data.rows import ATTENTION_MASK, EncodedRows
from train.data.inputs import Feature


def batches_of_rows(
    encoded: EncodedRows,
    batches: Batches,
    features: Mapping[str, Feature],
    context: tf.distribute.InputContext,
    prepare_row: Callable[[dict[str, tf.Tensor]], Any] | None = None,
) -> tf.data.Dataset:
    """Make batches {feature: (rows of a replica, …)}; features of tokens are filled up to the length of their batch.

    `ATTENTION_MASK` follows from the lengths of the rows.

    Args:
        encoded: the rows.
        batches: which of them make the global batches.
        features: that are read; those of rows of padding are their `padding`.
        context: of the pipeline.
        prepare_row: makes each row what the task wants it to be.
    """
    num_replicas = context.num_replicas_in_sync // context.num_input_pipelines
    rows = batches.rows.reshape(len(batches), context.num_input_pipelines, num_replicas, -1)
    own_rows = rows[:, context.input_pipeline_id].reshape(len(batches) * num_replicas, -1)
    replica_rows = own_rows.shape[1]
    of_tokens = {name: tf.constant(encoded.of_tokens[name]) for name in features if name in encoded.of_tokens}
    of_rows = {
        name: _with_padding(encoded.of_rows[name], feature)
        for name, feature in features.items()
        if name not in (*of_tokens, ATTENTION_MASK)
    }
    starts = tf.constant(np.append(encoded.starts, encoded.starts[-1]))  # after the last row one of no tokens: padding

    @tf.autograph.experimental.do_not_convert
    def make(rows: tf.Tensor, length: tf.Tensor) -> dict[str, tf.Tensor]:
        rows = tf.where(rows < 0, encoded.num_rows, rows)
        begins, ends = tf.gather(starts, rows), tf.gather(starts, rows + 1)
        places = begins[:, tf.newaxis] + tf.cast(tf.range(length), tf.int64)  # (rows, length)
        is_token = places < ends[:, tf.newaxis]
        places = tf.where(is_token, places, 0)
        batch = {}
        for name, feature in features.items():
            if name == ATTENTION_MASK:
                batch[name] = tf.ensure_shape(tf.cast(is_token, feature.batch_dtype), (replica_rows, None))
            elif name in of_tokens:
                padding = tf.constant(feature.padding, feature.batch_dtype)
                values = tf.where(is_token, tf.gather(of_tokens[name], places), padding)
                batch[name] = tf.ensure_shape(values, (replica_rows, None))
            else:
                batch[name] = tf.ensure_shape(tf.gather(of_rows[name], rows), (replica_rows, *feature.shape))
        return batch

    lengths = np.repeat(batches.lengths, num_replicas)
    dataset = tf.data.Dataset.from_tensor_slices((own_rows, lengths)).map(make, num_parallel_calls=tf.data.AUTOTUNE)
    if prepare_row is not None:
        make_rows = functools.partial(_row_by_row, prepare_row=prepare_row, num_rows=replica_rows)
        dataset = dataset.map(tf.autograph.experimental.do_not_convert(make_rows))
    options = tf.data.Options()
    options.deterministic = True
    return dataset.prefetch(tf.data.AUTOTUNE).with_options(options)


def _with_padding(values: np.ndarray, feature: Feature) -> tf.Tensor:
    """Put a row of padding after the last."""
    values = values.astype(feature.batch_dtype)
    return tf.constant(np.concatenate([values, np.full((1, *values.shape[1:]), feature.padding, values.dtype)]))


def _row_by_row(batch: dict[str, tf.Tensor], prepare_row: Callable, num_rows: int) -> Any:
    rows = tf.data.Dataset.from_tensor_slices(batch).map(prepare_row).batch(num_rows, drop_remainder=True)
    return rows.get_single_element()
