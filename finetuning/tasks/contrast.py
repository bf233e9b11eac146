"""Losses of embeddings: contrast of a batch over all replicas (van den Oord et al. 2018), and cosines as numbers."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from train.runtime.named_scopes import custom_gradient, named
from train.step.sharding import placed

# Instead of the logit of a passage that is no negative: e to it is 0.
NEVER = -1e9


def unit(vectors: tf.Tensor) -> tf.Tensor:
    """Scale vectors, (…, width), to length 1."""
    return tf.math.l2_normalize(vectors, axis=-1)


def gather_rows(rows: tf.Tensor) -> tf.Tensor:
    """Gather the rows of all replicas, (rows, …) to (rows of the global batch, …), in the order of the replicas.

    Every kind of device can sum over replicas, so each puts its rows in their places among zeros; not every kind can
    concatenate, or derive the sum. The gradient is the sum of all replicas' gradients, of which each takes its rows.
    """
    replica = tf.distribute.get_replica_context()
    if replica.num_replicas_in_sync == 1:
        return rows

    def add_up(values: tf.Tensor) -> tf.Tensor:
        return replica.all_reduce(tf.distribute.ReduceOp.SUM, values)

    @custom_gradient
    def gather(rows: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        def gradient(by_all: tf.Tensor) -> tf.Tensor:
            of_replicas = tf.reshape(add_up(by_all), (replica.num_replicas_in_sync, *rows.shape))
            return tf.gather(of_replicas, tf.cast(replica.replica_id_in_sync_group, tf.int32))

        return add_up(placed(rows)), gradient

    return gather(rows)


def in_any(some: tf.Tensor, others: tf.Tensor) -> tf.Tensor:
    """Return where some[i, k] and others[k, j] are both true for any k, bool (i, j); as a product, fast on a TPU."""
    return tf.matmul(tf.cast(some, tf.float32), tf.cast(others, tf.float32)) > 0.5


@named("contrast")
def contrastive_losses(
    vectors: tf.Tensor, texts: tf.Tensor, *, temperature: float, dims: Sequence[int], is_symmetric: bool
) -> tuple[tf.Tensor, tf.Tensor]:
    """Compute InfoNCE with the passages of the global batch as negatives, as sentence-transformers does.

    A passage is no negative of a query that has it as positive in any row of the global batch; equal texts are one.

    Args:
        vectors: float32 (rows, 1 + passages, width) of this replica: query, positive, hard negatives.
        texts: int32 (rows, 1 + passages), equal where texts are, queries and passages apart; -1 in rows of padding.
        temperature: divides the cosines.
        dims: the loss is the sum of those of the first N numbers of each vector, for each N of these.
        is_symmetric: take the mean with the loss of positives that choose among the queries.

    Returns:
        The loss of each row, and whether the largest logit of the last of `dims` is that of the positive, (rows,).
    """
    num_rows, num_passages = vectors.shape[0], vectors.shape[1] - 1
    all_vectors, all_texts = gather_rows(vectors), gather_rows(texts)
    num_all = all_vectors.shape[0]
    first_row = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.int32) * num_rows
    targets = first_row + tf.range(num_rows)

    def by_passage(values: tf.Tensor) -> tf.Tensor:  # the positives of all rows first
        return tf.concat(tf.unstack(values[:, 1:], axis=1), axis=0)

    def is_equal(some: tf.Tensor, others: tf.Tensor) -> tf.Tensor:  # (some,) and (others,) to (some, others)
        return some[:, tf.newaxis] == others

    queries, positives, of_passages = all_texts[:, 0], all_texts[:, 1], by_passage(all_texts)
    is_positive = tf.range(num_passages * num_all) == targets[:, tf.newaxis]  # (rows, all passages)
    # (rows, all passages): the query has the passage in some row.
    belong = in_any(is_equal(texts[:, 0], queries), is_equal(positives, of_passages))
    is_left_out = (belong | (of_passages < 0)) & ~is_positive
    # (rows, all queries): the positive has the query in some row.
    query_is_left_out = (in_any(is_equal(texts[:, 1], positives), is_equal(queries, queries)) | (queries < 0)) & (
        ~is_positive[:, :num_all]
    )

    def cross_entropy(chosen_by: tf.Tensor, among: tf.Tensor, is_left_out: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        logits = tf.matmul(unit(chosen_by), unit(among), transpose_b=True) / temperature
        logits = tf.where(is_left_out, NEVER, logits)
        is_right = tf.cast(tf.argmax(logits, axis=-1, output_type=tf.int32) == targets, tf.float32)
        return tf.nn.sparse_softmax_cross_entropy_with_logits(targets, logits), is_right

    total, is_right = tf.zeros(num_rows), tf.zeros(num_rows)
    for dim in dims:
        here, everywhere = vectors[..., :dim], all_vectors[..., :dim]
        losses, is_right = cross_entropy(here[:, 0], by_passage(everywhere), is_left_out)
        if is_symmetric:
            back, _ = cross_entropy(here[:, 1], everywhere[:, 0], query_is_left_out)
            losses = (losses + back) / 2
        total += losses
    return total, is_right


@named("cosine")
def cosine_losses(vectors: tf.Tensor, scores: tf.Tensor, dims: Sequence[int]) -> tf.Tensor:
    """Compute the squared difference of the cosine of two vectors, (rows, 2, width), and a score, (rows,), by row."""
    total = tf.zeros(vectors.shape[0])
    for dim in dims:
        units = unit(vectors[..., :dim])
        total += tf.square(tf.reduce_sum(units[:, 0] * units[:, 1], axis=-1) - scores)
    return total
