"""Which tokens of a row attend to each other: all tokens, tokens of the same document, or nearby tokens.

If the documents of a packed row do not attend to each other, the row gives the same results as separate rows for each
document (Krell et al. 2021). The ids show where documents end: stage 2 ends each document with a [SEP], whatever the
packing, and masking never replaces a [SEP].

For local attention, rows are cut into blocks that also see the ends of their neighbours, so that the cost is linear in
the length of the row.
"""

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf


class Rows(NamedTuple):
    """The properties of rows that attention needs.

    Attributes:
        attended: bool (batch, length), False at padding.
        documents: int32 (batch, length), the number of each token's document in its row, which never decreases; padding
            belongs to the last document. Tokens attend only within their document. None if they attend to the whole
            row.
    """

    attended: tf.Tensor
    documents: tf.Tensor | None = None


def number_documents(input_ids: tf.Tensor, sep_id: int, pad_id: int) -> tf.Tensor:
    """Number the documents of each row from 0, as `Rows.documents`: int32 in the shape of `input_ids`."""
    ended = tf.cumsum(tf.cast(input_ids == sep_id, tf.int32), axis=1, exclusive=True)
    last = tf.reduce_max(tf.where(input_ids == pad_id, 0, ended), axis=1, keepdims=True)
    return tf.minimum(ended, last)


def positions_within(documents: tf.Tensor) -> tf.Tensor:
    """Return the position of each token within its document, from 0: int32 (batch, length)."""
    return tf.range(documents.shape[1]) - tf.searchsorted(documents, documents, side="left")


# Number of queries in a block, in multiples of the reach. A block's keys extend beyond its queries by one reach at both
# ends. According to a TPU's compiler, larger blocks compute more scores, and smaller blocks copy more.
BLOCK_REACHES = 4


def can_use_blocks(length: int, reach: int) -> bool:
    """Return whether attention in blocks is cheaper than computing all scores and masking them."""
    return length > 2 * BLOCK_REACHES * reach > 0  # with a reach of 0 there are no blocks


def is_near(num_queries: int, num_keys: int, reach: int) -> np.ndarray:
    """Return which keys are at most `reach` away from each query, bool (queries, keys).

    The keys extend beyond the queries by the same number at both ends.
    """
    queries = np.arange(num_queries)[:, np.newaxis] + (num_keys - num_queries) // 2
    return np.abs(np.arange(num_keys) - queries) <= reach


def in_blocks(tensor: Any, reach: int) -> Any:
    """Cut (batch, length, …) into (batch, blocks, queries, …) and pad the last block with 0; None stays None."""
    if tensor is None:
        return None
    block = BLOCK_REACHES * reach
    added = -tensor.shape[1] % block
    filled = tf.pad(tensor, ((0, 0), (0, added), *((0, 0),) * (tensor.shape.rank - 2))) if added else tensor
    return tf.reshape(filled, (-1, filled.shape[1] // block, block, *tensor.shape[2:]))


def with_halo(tensor: Any, reach: int) -> Any:
    """Cut (batch, length, …) into blocks that extend by `reach` at both ends, (batch, blocks, keys, …).

    Beyond the ends of the row, blocks are padded with 0. None stays None.
    """
    blocks = in_blocks(tensor, reach)
    if blocks is None:
        return None
    ends = ((0, 0),) * (blocks.shape.rank - 2)
    before = tf.pad(blocks[:, :-1, -reach:], ((0, 0), (1, 0), *ends))
    after = tf.pad(blocks[:, 1:, :reach], ((0, 0), (0, 1), *ends))
    return tf.concat([before, blocks, after], axis=2)
