"""Losses of embeddings: contrastive over the global batch (van den Oord et al. 2018), and regression of cosines."""

from collections.abc import Callable, Sequence

import tensorflow as tf

from train.runtime.named_scopes import custom_gradient, named
from train.step.sharding import placed

# Logit given to passages that are not negatives, so low that their probability becomes 0.
NEVER = -1e9


def unit(vectors: tf.Tensor) -> tf.Tensor:
    """Scale vectors, (…, width), to length 1."""
    return tf.math.l2_normalize(vectors, axis=-1)


def gather_rows(rows: tf.Tensor) -> tf.Tensor:
    """Gather the rows of all replicas, (rows, …) to (rows of the global batch, …), in the order of the replicas.

    Not every kind of device can concatenate over replicas, or differentiate a sum over replicas, but all kinds can sum.
    So each replica puts its rows into an array of zeros, and the arrays are summed. The gradient is the sum of all
    replicas' gradients, and each replica takes the slice that belongs to its rows.
    """
    replica = tf.distribute.get_replica_context()
    if replica.num_replicas_in_sync == 1:
        return rows

    def add_up(values: tf.Tensor) -> tf.Tensor:
        return replica.all_reduce(tf.distribute.ReduceOp.SUM, values)

    @custom_gradient
    def gather(rows: tf.Tensor) -> tuple[tf.Tensor, Callable]:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            by_replica = tf.reshape(add_up(upstream), (replica.num_replicas_in_sync, *rows.shape))
            return tf.gather(by_replica, tf.cast(replica.replica_id_in_sync_group, tf.int32))

        return add_up(placed(rows)), gradient

    return gather(rows)


def in_any(first: tf.Tensor, second: tf.Tensor) -> tf.Tensor:
    """Return bool (i, j), true if first[i, k] and second[k, j] are both true for some k.

    The computation is a matrix product, which is fast on a TPU.
    """
    return tf.matmul(tf.cast(first, tf.float32), tf.cast(second, tf.float32)) > 0.5


@named("contrast")
def contrastive_losses(
    vectors: tf.Tensor, texts: tf.Tensor, *, temperature: float, dims: Sequence[int], is_symmetric: bool
) -> tuple[tf.Tensor, tf.Tensor]:
    """Compute InfoNCE with the passages of the global batch as negatives, as sentence-transformers does.

    A passage is not a negative of a query if it is the query's positive in any row of the global batch. Equal texts are
    treated as one text.

    Args:
        vectors: float32 (rows, 1 + passages, width) of this replica: query, positive, hard negatives.
        texts: int32 (rows, 1 + passages), numbers that are equal for equal texts. Queries and passages are numbered
            independently. In rows of padding the numbers are -1.
        temperature: number by which cosines are divided.
        dims: widths. The loss is the sum over these widths N of the loss with the first N numbers of each vector.
        is_symmetric: whether to average this loss with the loss of choosing the query of each positive.

    Returns:
        The loss of each row, (rows,); and for each row, (rows,), 1 if the positive has the largest logit when vectors
        are cut to the last width of `dims`, otherwise 0.
    """
    num_rows, num_passages = vectors.shape[0], vectors.shape[1] - 1
    all_vectors, all_texts = gather_rows(vectors), gather_rows(texts)
    num_all = all_vectors.shape[0]
    first_row = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.int32) * num_rows
    targets = first_row + tf.range(num_rows)

    def by_passage(values: tf.Tensor) -> tf.Tensor:  # the positives of all rows come first
        return tf.concat(tf.unstack(values[:, 1:], axis=1), axis=0)

    def is_equal(first: tf.Tensor, second: tf.Tensor) -> tf.Tensor:  # (first,) and (second,) to (first, second)
        return first[:, tf.newaxis] == second

    queries, positives, passages = all_texts[:, 0], all_texts[:, 1], by_passage(all_texts)
    is_positive = tf.range(num_passages * num_all) == targets[:, tf.newaxis]  # (rows, all passages)
    # (rows, all passages): whether the passage is the positive of the row's query in any row.
    belongs = in_any(is_equal(texts[:, 0], queries), is_equal(positives, passages))
    is_left_out = (belongs | (passages < 0)) & ~is_positive
    # (rows, all queries): whether the row's positive is the positive of the query in any row.
    query_is_left_out = (in_any(is_equal(texts[:, 1], positives), is_equal(queries, queries)) | (queries < 0)) & (
        ~is_positive[:, :num_all]
    )

    def cross_entropy(anchors: tf.Tensor, candidates: tf.Tensor, is_left_out: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        logits = tf.matmul(unit(anchors), unit(candidates), transpose_b=True) / temperature
        logits = tf.where(is_left_out, NEVER, logits)
        is_right = tf.cast(tf.argmax(logits, axis=-1, output_type=tf.int32) == targets, tf.float32)
        return tf.nn.sparse_softmax_cross_entropy_with_logits(targets, logits), is_right

    total, is_right = tf.zeros(num_rows), tf.zeros(num_rows)
    for dim in dims:
        local, gathered = vectors[..., :dim], all_vectors[..., :dim]
        losses, is_right = cross_entropy(local[:, 0], by_passage(gathered), is_left_out)
        if is_symmetric:
            reverse_losses, _ = cross_entropy(local[:, 1], gathered[:, 0], query_is_left_out)
            losses = (losses + reverse_losses) / 2
        total += losses
    return total, is_right


@named("cosine")
def cosine_losses(vectors: tf.Tensor, scores: tf.Tensor, dims: Sequence[int]) -> tf.Tensor:
    """Compute the squared difference between the cosine of two texts and their score, (rows,), summed over `dims`.

    Args:
        vectors: (rows, 2, width).
        scores: (rows,).
        dims: widths. For each width N, the cosine of the first N numbers of the vectors is compared.
    """
    total = tf.zeros(vectors.shape[0])
    for dim in dims:
        units = unit(vectors[..., :dim])
        total += tf.square(tf.reduce_sum(units[:, 0] * units[:, 1], axis=-1) - scores)
    return total
