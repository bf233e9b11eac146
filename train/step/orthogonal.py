"""Matrices with their singular values brought near 1, by Newton-Schulz iterations; divided among replicas."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras

from train.step.sharding import Sharding, replica_index

# Of Jordan et al. 2024: five iterations x ← a·x + b·x³ + c·x⁵ bring singular values of 0.002 to 1 into 0.7 to 1.2.
COEFFICIENTS = ((3.4445, -4.7750, 2.0315),) * 5


def orthogonalized(matrices: tf.Tensor) -> tf.Tensor:
    """Bring the singular values of matrices near 1, but for those that are 0; singular vectors stay as they are.

    Args:
        matrices: (…, rows, columns).

    Returns:
        The same shape, in the type that the network computes in: products of matrices are most of the work.
    """
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    if is_tall:
        matrices = tf.linalg.matrix_transpose(matrices)
    matrices = tf.cast(matrices, tf.float32)
    norms = tf.norm(matrices, axis=(-2, -1), keepdims=True)
    x = tf.cast(tf.math.divide_no_nan(matrices, norms), _compute_dtype())
    for a, b, c in COEFFICIENTS:
        squares = tf.matmul(x, x, transpose_b=True)
        x = a * x + tf.matmul(b * squares + c * tf.matmul(squares, squares), x)
    return tf.linalg.matrix_transpose(x) if is_tall else x


def orthogonalized_in_shares(
    shards: Sequence[tf.Tensor], axes: Sequence[int | None], sharding: Sharding
) -> list[tf.Tensor]:
    """Compute `orthogonalized` of matrices of which each replica has a shard: each replica of some, as wholes.

    A replica sends the shards of a matrix to the replica that orthogonalizes it, and all get the results. Matrices of
    one shape, or of that of their transpose, are shared out together, so that few replicas have one less to do.

    Args:
        shards: float32, this replica's shard of each matrix.
        axes: the axis along which each is divided; None where the replicas have it whole, as they then compute it.

    Returns:
        The matrices, whole, in the order of the shards.
    """
    results: list[Any] = [None] * len(shards)
    groups: dict[tuple[int, int], list[tuple[int, bool, tf.Tensor, int]]] = defaultdict(list)
    for index, (shard, axis) in enumerate(zip(shards, axes, strict=True)):
        if axis is None:
            results[index] = orthogonalized(shard)
            continue
        rows, columns = (size * (sharding.num_replicas if axis == one else 1) for one, size in enumerate(shard.shape))
        is_tall = rows > columns
        shard = tf.cast(shard, _compute_dtype())  # half of the bytes travel
        wide = tf.linalg.matrix_transpose(shard) if is_tall else shard
        groups[min(rows, columns), max(rows, columns)].append((index, is_tall, wide, 1 - axis if is_tall else axis))
    for shape, group in groups.items():
        mine = _whole_matrices([shard for _, _, shard, _ in group], [axis for *_, axis in group], shape, sharding)
        num_padded = mine.shape[0] * sharding.num_replicas
        found = tf.unstack(sharding.gather(orthogonalized(mine), (num_padded, *shape)))
        for (index, is_tall, _, _), matrix in zip(group, found, strict=False):
            results[index] = tf.transpose(matrix) if is_tall else matrix
    return results


def _whole_matrices(
    shards: Sequence[tf.Tensor], axes: Sequence[int], shape: tuple[int, int], sharding: Sharding
) -> tf.Tensor:
    """Exchange the shards of matrices of one shape for this replica's part of the matrices, (part, rows, columns).

    Where the replicas cannot share them evenly, the last parts are filled up with zeros.
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
