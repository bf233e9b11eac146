"""Local attention at a cost linear in the length: rows are cut into blocks, which see the ends of their neighbours."""

from typing import Any

import numpy as np
import tensorflow as tf

# Queries of a block, in reaches; it has the keys of one more reach at both ends. By the compiler of a TPU VM, larger
# blocks cost more scores, smaller ones more copies.
BLOCK_REACHES = 4


def can_use_blocks(length: int, reach: int) -> bool:
    """Return whether blocks are cheaper than all scores with a mask."""
    return length > 2 * BLOCK_REACHES * reach > 0  # with a reach of 0 there are no blocks


def is_near(num_queries: int, num_keys: int, reach: int) -> np.ndarray:
    """Return which keys are at most `reach` from each query, bool (queries, keys).

    The keys extend beyond the queries by the same number at both ends.
    """
    queries = np.arange(num_queries)[:, np.newaxis] + (num_keys - num_queries) // 2
    return np.abs(np.arange(num_keys) - queries) <= reach


def in_blocks(tensor: Any, reach: int) -> Any:
    """Cut (batch, length, …) into (batch, blocks, queries, …), filled up with 0; None stays None."""
    if tensor is None:
        return None
    block = BLOCK_REACHES * reach
    added = -tensor.shape[1] % block
    filled = tf.pad(tensor, ((0, 0), (0, added), *((0, 0),) * (tensor.shape.rank - 2))) if added else tensor
    return tf.reshape(filled, (-1, filled.shape[1] // block, block, *tensor.shape[2:]))


def with_halo(tensor: Any, reach: int) -> Any:
    """Cut (batch, length, …) into blocks with the `reach` before and after each, (batch, blocks, keys, …).

    Beyond the ends it is filled up with 0; None stays None.
    """
    blocks = in_blocks(tensor, reach)
    if blocks is None:
        return None
    ends = ((0, 0),) * (blocks.shape.rank - 2)
    before = tf.pad(blocks[:, :-1, -reach:], ((0, 0), (1, 0), *ends))
    after = tf.pad(blocks[:, 1:, :reach], ((0, 0), (0, 1), *ends))
    return tf.concat([before, blocks, after], axis=2)
