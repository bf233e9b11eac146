"""Orthogonalize matrices (bring their singular values near 1) with Newton-Schulz iterations, shared among replicas."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

from train.step.sharding import Sharding, replica_index

# From Jordan et al. 2024: five iterations of x ← a·x + b·x³ + c·x⁵ bring singular values from 0.002-1 into 0.7-1.2.
COEFFICIENTS = ((3.4445, -4.7750, 2.0315),) * 5


def orthogonalized(matrices: tf.Tensor) -> tf.Tensor:
    """Bring the nonzero singular values of matrices near 1; the singular vectors do not change.

    Args:
        matrices: (…, rows, columns).

    Returns:
        A tensor of the same shape, in the network's compute type, because matrix products are most of the work.
    """
    return _orthogonalized(matrices, _compute_dtype())


# As a function of its own, it is traced only once for all matrices of the same shape, so a run starts sooner.
@tf.function(autograph=False)
def _orthogonalized(matrices: tf.Tensor, dtype: str) -> tf.Tensor:
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    if is_tall:
        matrices = tf.linalg.matrix_transpose(matrices)
    matrices = tf.cast(matrices, tf.float32)
    norms = tf.norm(matrices, axis=(-2, -1), keepdims=True)
    x = tf.cast(tf.math.divide_no_nan(matrices, norms), dtype)
    for a, b, c in COEFFICIENTS:
        squares = tf.matmul(x, x, transpose_b=True)
        x = a * x + tf.matmul(b * squares + c * tf.matmul(squares, squares), x)
    return tf.linalg.matrix_transpose(x) if is_tall else x


def orthogonalized_in_shares(
    shards: Sequence[tf.Tensor], axes: Sequence[int | None], sharding: Sharding
) -> list[tf.Tensor]:
    """Orthogonalize matrices that are sharded over the replicas; each replica orthogonalizes a share of the matrices.

    Every replica sends its shard of a matrix to the replica that orthogonalizes it, and then all replicas get the
    results. Matrices of the same shape, or of the transposed shape, are distributed together, so that the replicas
    have nearly equal work.

    Args:
        shards: this replica's shard of each matrix, float32.
        axes: the axis along which each matrix is sharded. None if every replica has the whole matrix; then every
            replica orthogonalizes this matrix.
        sharding: how matrices are divided among the replicas.

    Returns:
        The whole matrices, in the order of `shards`.
    """
    results: list[Any] = [None] * len(shards)
    groups: dict[tuple[int, int], list[tuple[int, bool, tf.Tensor, int]]] = defaultdict(list)
    for index, (shard, axis) in enumerate(zip(shards, axes, strict=True)):
        if axis is None:
            results[index] = orthogonalized(shard)
            continue
        rows, columns = (size * (sharding.num_replicas if i == axis else 1) for i, size in enumerate(shard.shape))
        is_tall = rows > columns
        shard = tf.cast(shard, _compute_dtype())  # bfloat16 halves the bytes to send
        wide = tf.linalg.matrix_transpose(shard) if is_tall else shard
        groups[min(rows, columns), max(rows, columns)].append((index, is_tall, wide, 1 - axis if is_tall else axis))
    for shape, group in groups.items():
        matrices = _whole_matrices([shard for _, _, shard, _ in group], [axis for *_, axis in group], shape, sharding)
        num_padded = matrices.shape[0] * sharding.num_replicas
        gathered = tf.unstack(sharding.gather(orthogonalized(matrices), (num_padded, *shape)))
        for (index, is_tall, _, _), matrix in zip(group, gathered, strict=False):
            results[index] = tf.transpose(matrix) if is_tall else matrix
    return results


def _whole_matrices(
    shards: Sequence[tf.Tensor], axes: Sequence[int], shape: tuple[int, int], sharding: Sharding
) -> tf.Tensor:
    """Exchange shards between replicas, and return this replica's share of whole matrices, all of one shape.

    If the number of matrices is not a multiple of the number of replicas, the last shares are padded with zeros.

    Args:
        shards: this replica's shard of each matrix.
        axes: the axis along which each matrix is sharded.
        shape: (rows, columns) of a whole matrix.
        sharding: how matrices are divided among the replicas.

    Returns:
        (matrices of this replica, rows, columns).
    """
    (rows, columns), num_replicas = shape, sharding.num_replicas
    num_parts = -(-len(shards) // num_replicas)
    padding = num_parts * num_replicas - len(shards)
    flat = tf.pad(tf.stack([tf.reshape(shard, [-1]) for shard in shards]), [[0, padding], [0, 0]])
    parts = sharding.exchange(tf.reshape(flat, (num_replicas, num_parts, -1)))  # (replicas, parts, shard)
    parts = tf.transpose(parts, (1, 0, 2))
    by_rows = tf.reshape(parts, (num_parts, rows, columns))
    if not any(axes):
        return by_rows
    by_columns = tf.reshape(parts, (num_parts, num_replicas, rows, -1))
    by_columns = tf.reshape(tf.transpose(by_columns, (0, 2, 1, 3)), (num_parts, rows, columns))
    is_by_columns = np.reshape([*map(bool, axes), *[True] * padding], (num_replicas, num_parts))
    return tf.where(tf.gather(is_by_columns, replica_index())[:, tf.newaxis, tf.newaxis], by_columns, by_rows)


def _compute_dtype() -> str:
    return tf_keras.mixed_precision.global_policy().compute_dtype
