"""The masked-LM head over the masked positions only, for any architecture.

The head (a projection onto the vocabulary) costs as much as several encoder layers, and the loss reads it at the masked
positions alone. Gathering the encoder's output before the head leaves transformers' own code for both untouched.
"""

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

# One set of positions per thread: MirroredStrategy traces each replica in a thread of its own.
_traced = threading.local()


@contextmanager
def predicting_at(positions: tf.Tensor) -> Iterator[None]:
    """Within it, models prepared by `gather_before_head` give logits at `positions` only, in their order.

    Args:
        positions: int32 (num_predictions,) into the rows of the batch laid end to end; a position may occur more
            than once. The logits are (1, num_predictions, vocabulary) instead of (batch, length, vocabulary): one
            list for the batch needs fewer spare slots than one for each row.

    Applies to the calls made by this thread, and to one model: the positions are those of its batch.
    """
    previous = getattr(_traced, "positions", None)
    _traced.positions = positions
    try:
        yield
    finally:
        _traced.positions = previous


def gather_before_head(model: Any) -> None:
    """Let `predicting_at` decide where `model` (any TF…ForMaskedLM of transformers) computes its head.

    Outside that context the model computes what it did before. Preparing a model twice changes nothing.
    """
    encoder = getattr(model, model.base_model_prefix)
    if getattr(encoder.call, "gathers_before_head", False):
        return
    encode = encoder.call

    @functools.wraps(encode)
    def encode_and_gather(*args: Any, **kwargs: Any) -> Any:
        outputs = encode(*args, **kwargs)
        positions = getattr(_traced, "positions", None)
        return outputs if positions is None else _gathered(outputs, positions)

    encode_and_gather.gathers_before_head = True  # type: ignore[attr-defined]
    encoder.call = encode_and_gather


def _gathered(outputs: Any, positions: tf.Tensor) -> Any:
    """Gather the last hidden state, always the first of the encoder's outputs, at `positions`."""
    rows = outputs[0]  # (batch, length, hidden)
    hidden = tf.gather(tf.reshape(rows, (-1, rows.shape[-1])), positions)[tf.newaxis]  # (1, num_predictions, hidden)
    if isinstance(outputs, tuple):
        return (hidden, *outputs[1:])
    return type(outputs)(**{**outputs, "last_hidden_state": hidden})
