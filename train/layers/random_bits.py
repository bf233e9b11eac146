"""Random bits and dropout as pure functions of keys: the same on every device, with and without XLA.

Each row of a global batch has a key, and each bit depends only on this key and the bit's position in the row. So a
resumed run draws the same bits as an uninterrupted run, and replicas draw the same bits as a single device.

Bits are made by mixing integers. On a TPU this costs a few operations per element, in the same loop that uses the bits.
TensorFlow's random numbers would cost more than the attention scores that they mask.

A layer's dropout depends on (key of the row, number of the layer, number of the call, position), so a layer that is
called again under gradient checkpointing drops the same elements.
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

# Number of 32-bit words in a key.
KEY_WORDS = 2
# 2^32 divided by the golden ratio. The multiples of this number are far apart (Knuth, The Art of Computer Programming,
# 6.4).
GOLDEN = 0x9E3779B9
# Multipliers of a 32-bit mixing function with little bias, found by search: https://github.com/skeeto/hash-prospector.
MIXERS = (0x7FEB352D, 0x846CA68B)
# The key that all other keys derive from: the first digits of pi. Any value but 0 would work.
FIRST_KEY = (0x243F6A88, 0x85A308D3)


def key_of(numbers: Iterable[int | tf.Tensor]) -> tf.Tensor:
    """Make a key, uint32 (KEY_WORDS,), from integers such as a seed and a step."""
    key = tf.constant(FIRST_KEY, tf.uint32)
    for number in numbers:
        key = fold_in(key, number)
    return key


@named("row_keys")
def row_keys(numbers: Iterable[int | tf.Tensor], num_rows: int, first_row: int | tf.Tensor = 0) -> tf.Tensor:
    """Make the keys of `num_rows` rows of a global batch, from `first_row` on: uint32 (num_rows, KEY_WORDS).

    Args:
        numbers: as in `key_of`.
        first_row: index of the first row in the global batch.
    """
    return fold_in(key_of(numbers), tf.cast(first_row, tf.int32) + tf.range(num_rows))


def fold_in(keys: tf.Tensor, number: int | tf.Tensor) -> tf.Tensor:
    """Derive keys for a number, uint32 (…, KEY_WORDS); `number` broadcasts to `keys` without their last axis."""
    number = tf.cast(number, tf.uint32) * _word(GOLDEN)
    first = _mixed(number + keys[..., 0], keys[..., 1])
    return tf.stack([first, _mixed(number + keys[..., 1], first)], axis=-1)


def draw_bits(keys: tf.Tensor, shape: tf.TensorShape | tuple[int, ...]) -> tf.Tensor:
    """Draw uniform values, uint32 (…, *shape), from keys, uint32 (…, KEY_WORDS). Values of the same key differ."""
    word, other_key = keys[..., 0], keys[..., 1]
    stride = tf.TensorShape(shape).num_elements()
    for size in shape:
        # Number the elements axis by axis, starting from the key. Otherwise the numbers would be one large constant.
        stride //= size
        word = word[..., tf.newaxis] + tf.cast(tf.range(size), tf.uint32) * _word(stride * GOLDEN)
        other_key = other_key[..., tf.newaxis]
    return _mixed(word, other_key)


def fall_under(bits: tf.Tensor, probability: float) -> tf.Tensor:
    """Return which of the uniform uint32 `bits` are selected, each with `probability`: exactly none at 0, all at 1.

    The function compares integers, because random floats differ between devices.
    """
    threshold = round(min(max(probability, 0.0), 1.0) * 2**32)
    if threshold == 0:
        return tf.zeros_like(bits, tf.bool)
    return bits <= tf.constant(threshold - 1, tf.uint32)


def to_integers(bits: tf.Tensor, num_values: int) -> tf.Tensor:
    """Map uniform uint32 `bits` to int32 below `num_values`: the high word of `bits` times `num_values`.

    Each value comes from 2^32 / num_values of the possible words, rounded up or down. So the relative error of its
    probability is at most num_values / 2^32, which is 1 in 17,000 for the largest vocabularies (250,000 tokens).
    """
    product = tf.cast(bits, tf.uint64) * tf.constant(num_values, tf.uint64)
    return tf.cast(tf.bitwise.right_shift(product, tf.constant(32, tf.uint64)), tf.int32)


def _mixed(word: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
    """Mix uint32 words until they look random; with the same key, different words give different results."""
    word = _shifted_into(word, 16) * _word(MIXERS[0]) ^ key
    word = _shifted_into(word, 15) * _word(MIXERS[1])
    return _shifted_into(word, 16)


def _shifted_into(word: tf.Tensor, num_bits: int) -> tf.Tensor:
    return word ^ tf.bitwise.right_shift(word, _word(num_bits))


def _word(value: int) -> tf.Tensor:
    return tf.constant(value % 2**32, tf.uint32)


@dataclass
class _Scope:
    """The keys of the rows in the model, and the number of calls of each layer so far."""

    row_keys: tf.Tensor  # uint32 (batch, KEY_WORDS)
    shared_key: tf.Tensor | None  # uint32 (KEY_WORDS,)
    num_calls: dict[int, int] = field(default_factory=dict)


# Name of DeBERTa's dropout layer for the table of relative positions.
SHARED_LAYER = "pos_dropout"
# One scope per thread: MirroredStrategy traces each replica in its own thread.
_traced = threading.local()


@contextmanager
def dropping_out_by(row_keys: tf.Tensor, shared_key: tf.Tensor | None = None) -> Iterator[None]:
    """A context in which layers that `key_dropout` has numbered draw their dropout from keys.

    Args:
        row_keys: keys of the rows, uint32 (batch, KEY_WORDS).
        shared_key: key of inputs that all rows of the global batch share, such as DeBERTa's relative positions, uint32
            (KEY_WORDS,).
    """
    previous = getattr(_traced, "scope", None)
    _traced.scope = _Scope(row_keys, shared_key)
    try:
        yield
    finally:
        _traced.scope = previous


@contextmanager
def dropping_out_texts(texts: Sequence[int]) -> Iterator[None]:
    """A context within `dropping_out_by` for models that get several texts of each row, as consecutive rows.

    Each text has a different key. `texts` are the numbers of a row's texts.
    """
    scope = getattr(_traced, "scope", None)
    if scope is None:
        yield
        return
    keys = tf.stack([fold_in(scope.row_keys, text) for text in texts], axis=1)  # (batch, texts, KEY_WORDS)
    with dropping_out_by(tf.reshape(keys, (-1, keys.shape[-1])), scope.shared_key):
        yield


def repeatable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let layers drop the same elements in all calls of a function.

    Use it for functions that are called again to save memory, as in gradient checkpointing.
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
    """Make the rows' keys for the next call of the dropout layer with this number, uint32 (batch, KEY_WORDS).

    For inputs that all rows share, make a single key, uint32 (KEY_WORDS,). Return None outside `dropping_out_by`.
    """
    scope = getattr(_traced, "scope", None)
    if scope is None:
        return None
    num_calls = scope.num_calls.get(number, 0)
    scope.num_calls[number] = num_calls + 1
    return fold_in(fold_in(scope.shared_key if is_shared else scope.row_keys, number), num_calls)


class KeyedDropout(tf_keras.layers.Dropout):
    """Dropout that draws from the keys of `dropping_out_by`; outside that context it draws like Keras's class.

    Attributes:
        number: number of the layer in its network, which `key_dropout` assigns. The draw depends on this number.
        drops_heads: derive a key for each head of attention probabilities, as `train.layers.tpu_attention` does.
    """

    number: int | None = None
    drops_heads = False

    def call(self, inputs: tf.Tensor, training: Any = None) -> tf.Tensor:
        """Drop elements of (batch, …), or of (batch, …, heads, queries, keys) with `drops_heads`."""
        if self.number is None or not isinstance(training, bool) or not is_keyed():
            return super().call(inputs, training=training)
        if not training or self.rate == 0:
            return inputs
        keys = self.next_keys()
        return _drop_heads(inputs, keys, self.rate) if self.drops_heads else drop(inputs, keys, self.rate)

    def next_keys(self) -> tf.Tensor | None:
        """Make the rows' keys for the next call; None if the layer drops elements as Keras's class does."""
        return None if self.number is None else next_keys(self.number)


def is_keyed() -> bool:
    """Return whether this thread is within `dropping_out_by`."""
    return getattr(_traced, "scope", None) is not None


def key_dropout(model: tf_keras.Model) -> None:
    """Number the model's dropout layers, so that they draw from the keys of `dropping_out_by`.

    Layers in the model's attribute `dropout_layers` come first, then all other layers in Keras's order. A different
    order would change the draws of every run. Layers of other classes, such as layers of a custom head, get a new
    `call` that draws from keys. If layers were added to a model, call this function again: it renumbers all layers.
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
    """Return the rate of a dropout layer; None for any other layer."""
    if isinstance(layer, tf_keras.layers.Dropout):
        return float(layer.rate)
    # DeBERTa's dropout class, which calls its rate `drop_prob`.
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
    """Drop elements of (batch, heads, queries, keys), or in blocks, (batch, blocks, heads, queries, keys)."""
    for size in probabilities.shape[1:-2]:
        keys = fold_in(keys[..., tf.newaxis, :], tf.range(size))
    is_dropped = tf.linalg.matrix_transpose(dropout_mask(keys, probabilities.shape[:-3:-1], rate))
    return tf.where(is_dropped, tf.zeros((), probabilities.dtype), probabilities / (1 - rate))


def drop(inputs: tf.Tensor, keys: tf.Tensor, rate: float) -> tf.Tensor:
    """Set a fraction `rate` of the elements to 0, and scale up the other elements. At rate 1, all become 0.

    Args:
        inputs: (batch, …) with keys of rows; any shape with a single key.
        keys: uint32 (batch, KEY_WORDS) or (KEY_WORDS,).
        rate: fraction of the elements to drop.
    """
    if rate >= 1:
        return tf.zeros_like(inputs)
    scaled = inputs * tf.cast(1 / (1 - rate), inputs.dtype)
    return tf.where(dropout_mask(keys, inputs.shape[keys.shape.rank - 1 :], rate), tf.zeros((), inputs.dtype), scaled)


def dropout_mask(keys: tf.Tensor, shape: tf.TensorShape | tuple[int, ...], rate: float) -> tf.Tensor:
    """Draw which elements are dropped, bool (…, *shape).

    Args:
        keys: uint32 (…, KEY_WORDS).
        rate: fraction of the elements to drop; exactly none at 0, and all at 1.
    """
    return fall_under(draw_bits(keys, shape), rate)
