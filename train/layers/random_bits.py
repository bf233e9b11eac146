"""Random bits, and dropout, as pure functions of keys: the same on every device, in XLA and out of it.

Each row of a global batch has its key, and a bit follows from the key and its position in the row, however a batch is
cut. So a resumed run draws what the run before it would have, and a replica draws for its rows what one device would
have. The bits are made by mixing integers: on a TPU that costs a few operations an element, in the very loop that uses
them, where a draw of TensorFlow's costs more than the attention scores that dropout needs it for.

What a layer drops follows from (key of the row, layer, which call of the layer, position), so a layer that is called
again under gradient checkpointing drops the same.
"""

import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf
import tf_keras

from train.runtime.named_scopes import named

# Words of a key.
KEY_WORDS = 2
# 2^32 divided by the golden ratio: neighbours in a count come far apart (Knuth, The Art of Computer Programming, 6.4).
GOLDEN = 0x9E3779B9
# Multipliers of a mixer of 32 bits with little bias, found by search: https://github.com/skeeto/hash-prospector.
MIXERS = (0x7FEB352D, 0x846CA68B)
# The key that all others derive from; any but 0 would do. The first digits of pi.
FIRST_KEY = (0x243F6A88, 0x85A308D3)


def key_of(numbers: Iterable[int | tf.Tensor]) -> tf.Tensor:
    """Make the key of integers such as a seed and a step, uint32 (KEY_WORDS,); other numbers give another key."""
    key = tf.constant(FIRST_KEY, tf.uint32)
    for number in numbers:
        key = fold_in(key, number)
    return key


@named("row_keys")
def row_keys(numbers: Iterable[int | tf.Tensor], num_rows: int, first_row: int | tf.Tensor = 0) -> tf.Tensor:
    """Make the keys of rows `first_row` and following of a global batch, uint32 (num_rows, KEY_WORDS).

    Args:
        numbers: as of `key_of`.
        first_row: where it begins in the global batch; a row's key does not depend on how that is cut.
    """
    return fold_in(key_of(numbers), tf.cast(first_row, tf.int32) + tf.range(num_rows))


def fold_in(keys: tf.Tensor, number: int | tf.Tensor) -> tf.Tensor:
    """Make other keys for each number, uint32 (…, KEY_WORDS); `number` broadcasts to `keys` without its last axis."""
    number = tf.cast(number, tf.uint32) * _word(GOLDEN)
    first = _mixed(number + keys[..., 0], keys[..., 1])
    return tf.stack([first, _mixed(number + keys[..., 1], first)], axis=-1)


def draw_bits(keys: tf.Tensor, shape: tf.TensorShape | tuple[int, ...]) -> tf.Tensor:
    """Draw uint32 (…, *shape) under keys, uint32 (…, KEY_WORDS): all values as likely, none twice under one key."""
    word, other_key = keys[..., 0], keys[..., 1]
    stride = tf.TensorShape(shape).num_elements()
    for size in shape:
        # Axis by axis, beginning with the key: else the numbers of all elements would be a constant of the program.
        stride //= size
        word = word[..., tf.newaxis] + tf.cast(tf.range(size), tf.uint32) * _word(stride * GOLDEN)
        other_key = other_key[..., tf.newaxis]
    return _mixed(word, other_key)


def fall_under(bits: tf.Tensor, probability: float) -> tf.Tensor:
    """Return which of uniform uint32 `bits` fall under `probability`, exactly none at 0 and all at 1.

    Integers are compared, since float draws differ between devices.
    """
    threshold = round(min(max(probability, 0.0), 1.0) * 2**32)
    if threshold == 0:
        return tf.zeros_like(bits, tf.bool)
    return bits <= tf.constant(threshold - 1, tf.uint32)


def to_integers(bits: tf.Tensor, num_values: int) -> tf.Tensor:
    """Make int32 from 0 to `num_values`, which is excluded, of uniform uint32 `bits`: their product's high word.

    Each value comes from 2^32 / num_values of the words, rounded up or down: so its probability is off by at most
    num_values / 2^32 of itself, which is 1 in 17,000 for the largest vocabularies of 250,000.
    """
    product = tf.cast(bits, tf.uint64) * tf.constant(num_values, tf.uint64)
    return tf.cast(tf.bitwise.right_shift(product, tf.constant(32, tf.uint64)), tf.int32)


def _mixed(word: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
    """Mix uint32 until they look drawn at random; under one key no two words give the same."""
    word = _shifted_into(word, 16) * _word(MIXERS[0]) ^ key
    word = _shifted_into(word, 15) * _word(MIXERS[1])
    return _shifted_into(word, 16)


def _shifted_into(word: tf.Tensor, num_bits: int) -> tf.Tensor:
    return word ^ tf.bitwise.right_shift(word, _word(num_bits))


def _word(value: int) -> tf.Tensor:
    return tf.constant(value % 2**32, tf.uint32)


@dataclass
class _Scope:
    """The keys of the rows in the model, and how often each layer was called with them."""

    row_keys: tf.Tensor  # uint32 (batch, KEY_WORDS)
    shared_key: tf.Tensor | None  # uint32 (KEY_WORDS,)
    num_calls: dict[int, int] = field(default_factory=dict)


# In DeBERTa, where its input is the table of relative positions.
SHARED_LAYER = "pos_dropout"
# One scope per thread: MirroredStrategy traces each replica in its own thread.
_traced = threading.local()


@contextmanager
def dropping_out_by(row_keys: tf.Tensor, shared_key: tf.Tensor | None = None) -> Iterator[None]:
    """Within it, the layers prepared by `key_dropout` drop by keys.

    Args:
        row_keys: uint32 (batch, KEY_WORDS), of the rows.
        shared_key: uint32 (KEY_WORDS,), of what all rows of the global batch share: DeBERTa's relative positions.
    """
    previous = getattr(_traced, "scope", None)
    _traced.scope = _Scope(row_keys, shared_key)
    try:
        yield
    finally:
        _traced.scope = previous


@contextmanager
def dropping_out_texts(texts: Sequence[int]) -> Iterator[None]:
    """Within `dropping_out_by`, let each row of the batch be several rows of the model: its texts of these numbers.

    The texts of a row follow each other, and drop by keys that differ.
    """
    scope = getattr(_traced, "scope", None)
    if scope is None:
        yield
        return
    keys = tf.stack([fold_in(scope.row_keys, text) for text in texts], axis=1)  # (batch, texts, KEY_WORDS)
    with dropping_out_by(tf.reshape(keys, (-1, keys.shape[-1])), scope.shared_key):
        yield


def repeatable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let all calls of a function, which calls layers, drop what the first does.

    For functions that are called a second time to save memory, as `tf.recompute_grad` does.
    """
    first_call: list[dict[int, int]] = []

    @functools.wraps(function)
    def repeat(*args: Any, **kwargs: Any) -> Any:
        scope = getattr(_traced, "scope", None)
        if scope is None:
            return function(*args, **kwargs)
        if not first_call:
            first_call.append(dict(scope.num_calls))
            return function(*args, **kwargs)
        later, scope.num_calls = scope.num_calls, dict(first_call[0])
        try:
            return function(*args, **kwargs)
        finally:
            scope.num_calls = later

    return repeat


def next_keys(number: int, *, is_shared: bool = False) -> tf.Tensor | None:
    """Make the keys of the rows for one call of the dropout layer of this number, uint32 (batch, KEY_WORDS).

    For inputs that all rows share it is one key, uint32 (KEY_WORDS,). None outside `dropping_out_by`.
    """
    scope = getattr(_traced, "scope", None)
    if scope is None:
        return None
    num_calls = scope.num_calls.get(number, 0)
    scope.num_calls[number] = num_calls + 1
    return fold_in(fold_in(scope.shared_key if is_shared else scope.row_keys, number), num_calls)


class KeyedDropout(tf_keras.layers.Dropout):
    """Drops by the keys of `dropping_out_by`; outside that context as Keras does.

    number: of the layer in its network, given by `key_dropout`. It is a part of what the layer draws.
    drops_heads: draw each head of attention probabilities under a key of its own, as `train.layers.tpu_attention` does.
    """

    number: int | None = None
    drops_heads = False

    def call(self, inputs: tf.Tensor, training: Any = None) -> tf.Tensor:
        """Drop of (batch, …); where `drops_heads`, of (batch, …, heads, queries, keys)."""
        if self.number is None or not isinstance(training, bool) or not is_keyed():
            return super().call(inputs, training=training)
        if not training or self.rate == 0:
            return inputs
        keys = self.next_keys()
        return _drop_heads(inputs, keys, self.rate) if self.drops_heads else drop(inputs, keys, self.rate)

    def next_keys(self) -> tf.Tensor | None:
        """Make the keys by which this call drops its rows; None where Keras would drop them."""
        return None if self.number is None else next_keys(self.number)


def is_keyed() -> bool:
    """Return whether layers that are called now are within `dropping_out_by`."""
    return getattr(_traced, "scope", None) is not None


def key_dropout(model: tf_keras.Model) -> None:
    """Number the model's dropout layers, so that they drop by the keys of `dropping_out_by`.

    The order is that of `dropout_layers`, where the model has it, then Keras's. Another order would be another draw.
    Layers that are no `KeyedDropout`, such as those of a custom head, get another `call`, which draws by keys. Called
    again after the model has more layers, it numbers all of them again.
    """
    layers = list(getattr(model, "dropout_layers", ()))
    listed = set(map(id, layers))
    layers += [layer for layer in model.submodules if _rate(layer) is not None and id(layer) not in listed]
    for number, layer in enumerate(layers):
        if isinstance(layer, KeyedDropout):
            layer.number = number
        else:
            layer.call = _keyed_call(layer, number)


def _rate(layer: tf.Module) -> float | None:
    """Look up the fraction that a dropout layer drops; None for any other layer."""
    if isinstance(layer, tf_keras.layers.Dropout):
        return float(layer.rate)
    # DeBERTa's class.
    return float(layer.drop_prob) if type(layer).__name__.endswith("StableDropout") else None


def _keyed_call(layer: Any, number: int) -> Callable[..., tf.Tensor]:
    reference_call = getattr(layer.call, "reference_call", layer.call)
    rate, is_shared = _rate(layer), layer.name == SHARED_LAYER
    assert rate is not None

    @functools.wraps(reference_call)
    def call(inputs: tf.Tensor, training: Any = None) -> tf.Tensor:
        if not isinstance(training, bool) or not is_keyed():
            return reference_call(inputs, training=training)
        if not training or rate == 0:
            return inputs
        return drop(inputs, next_keys(number, is_shared=is_shared), rate)

    call.reference_call = reference_call  # type: ignore[attr-defined]
    return call


def _drop_heads(probabilities: tf.Tensor, keys: tf.Tensor, rate: float) -> tf.Tensor:
    """Drop of (batch, heads, queries, keys), or of blocks, (batch, blocks, heads, queries, keys)."""
    for size in probabilities.shape[1:-2]:
        keys = fold_in(keys[..., tf.newaxis, :], tf.range(size))
    is_dropped = tf.linalg.matrix_transpose(dropout_mask(keys, probabilities.shape[:-3:-1], rate))
    return tf.where(is_dropped, tf.zeros((), probabilities.dtype), probabilities / (1 - rate))


def drop(inputs: tf.Tensor, keys: tf.Tensor, rate: float) -> tf.Tensor:
    """Set a fraction of `rate` of `inputs` to 0 and scale the rest up; all is 0 at rate 1.

    Args:
        inputs: (batch, …) under keys of rows; any shape under one key.
        keys: uint32 (batch, KEY_WORDS) or (KEY_WORDS,).
        rate: fraction that is dropped.
    """
    if rate >= 1:
        return tf.zeros_like(inputs)
    scaled = inputs * tf.cast(1 / (1 - rate), inputs.dtype)
    return tf.where(dropout_mask(keys, inputs.shape[keys.shape.rank - 1 :], rate), tf.zeros((), inputs.dtype), scaled)


def dropout_mask(keys: tf.Tensor, shape: tf.TensorShape | tuple[int, ...], rate: float) -> tf.Tensor:
    """Draw which elements are dropped, bool (…, *shape).

    Args:
        keys: uint32 (…, KEY_WORDS).
        rate: fraction that is dropped, exactly none at 0 and all at 1.
    """
    return fall_under(draw_bits(keys, shape), rate)
