"""Documents that share a row but do not attend to each other: attention and positions are within each document.

A packed row then gives what its documents would give in separate rows (Krell et al. 2021). Which token belongs to which
document follows from the ids: a [SEP] ends each, however stage 2 has cut them, and masking leaves it unchanged.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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

    Args:
        model: of an architecture for which that is known (`Architecture.block_attention`), whose configuration has the
            ids of [SEP] and padding.
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
