"""Which tokens attend to each other: those of one document of a row, or only near ones, at a cost linear in the length.

A packed row of documents that do not attend to each other gives what its documents would give in separate rows (Krell
et al. 2021). Which token belongs to which document follows from the ids: a [SEP] ends each, however stage 2 has cut
them, and masking leaves it unchanged. For local attention rows are cut into blocks, which see the ends of their
neighbours.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from train.model.architectures import architecture_of, position_offset

# One set of documents per thread: MirroredStrategy traces each replica in its own thread.
_traced = threading.local()
# What transformers adds to the scores of tokens that are not attended.
NOT_ATTENDED = -10000.0


@contextmanager
def attending_within(documents: tf.Tensor | None) -> Iterator[None]:
    """A context in which attention stays within documents, in the layers that support it.

    Args:
        documents: int32 (batch, length), the number of each token's document in its row, which never decreases; padding
            belongs to the last. None for rows that are attended as a whole.
    """
    previous = current_documents()
    _traced.documents = documents
    try:
        yield
    finally:
        _traced.documents = previous


def current_documents() -> tf.Tensor | None:
    """Look up the documents of `attending_within`, int32 (batch, length); None where rows are attended as a whole."""
    return getattr(_traced, "documents", None)


def number_documents(input_ids: tf.Tensor, sep_id: int, pad_id: int) -> tf.Tensor:
    """Number the documents of each row as `attending_within` takes them, from 0: int32 of the shape of `input_ids`."""
    ended = tf.cumsum(tf.cast(input_ids == sep_id, tf.int32), axis=1, exclusive=True)
    last = tf.reduce_max(tf.where(input_ids == pad_id, 0, ended), axis=1, keepdims=True)
    return tf.minimum(ended, last)


def positions_within(documents: tf.Tensor) -> tf.Tensor:
    """Count the tokens before each one in its document, int32 (batch, length)."""
    return tf.range(documents.shape[1]) - tf.searchsorted(documents, documents, side="left")


def attend_within_documents(model: Any) -> None:
    """Let a TF model keep the documents of each row apart, in every call.

    Its architecture allows it (`Architecture.block_attention`); its configuration has the ids of [SEP] and padding.
    """
    config, encoder = model.config, getattr(model, model.base_model_prefix)
    by_mask = architecture_of(config).block_attention == "by_mask"
    encode = encoder.call

    @functools.wraps(encode)
    def encode_documents(input_ids: tf.Tensor, *args: Any, **kwargs: Any) -> Any:
        documents = number_documents(input_ids, config.sep_token_id, config.pad_token_id)
        if by_mask:
            kwargs["position_ids"] = positions_within(documents) + position_offset(config)
        with attending_within(documents):
            return encode(input_ids, *args, **kwargs)

    encoder.call = encode_documents
    for layer in encoder.submodules if by_mask else ():
        if type(layer).__name__.endswith("SelfAttention"):
            layer.call = _mask_other_documents(layer.call)


def _mask_other_documents(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the `call` of transformers' attention so that it also hides the other documents of a row."""

    @functools.wraps(call)
    def call_within(hidden_states: tf.Tensor, attention_mask: tf.Tensor, *args: Any, **kwargs: Any) -> Any:
        documents = current_documents()
        if documents is not None:
            is_same = documents[:, tf.newaxis, :, tf.newaxis] == documents[:, tf.newaxis, tf.newaxis]
            attention_mask = tf.where(is_same, attention_mask, NOT_ATTENDED)  # (batch, 1, queries, keys)
        return call(hidden_states, attention_mask, *args, **kwargs)

    return call_within


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
