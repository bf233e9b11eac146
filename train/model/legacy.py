"""Networks of architectures that are not ours: TensorFlow classes of transformers 4, with patches for our training.

A patch replaces attributes of a network and its layers, and leaves the classes unchanged. `PATCHES` lists all patches
in the order in which `new_network` applies them, and `undo_patches` removes them.
"""

import functools
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
import transformers
from transformers import PretrainedConfig

from train.layers.random_bits import key_dropout
from train.layers.recomputing import recomputed
from train.model.architectures import architecture_of, check_tensorflow_classes

# The padding id from which TF classes count positions, whatever the configuration says.
TF_PADDING_ID = 1
# One set of positions per thread: MirroredStrategy traces each replica in its own thread.
_traced = threading.local()
# The warning that transformers logs for each network.
WARNING = "TensorFlow and JAX classes are deprecated"
logging.getLogger("transformers.modeling_tf_utils").addFilter(lambda record: WARNING not in record.getMessage())


def new_network(model_class: str, config: PretrainedConfig) -> Any:
    """Create a network with random weights from one of transformers' auto classes, and patch it.

    Raises:
        InputError: transformers has no TensorFlow classes, or was imported before `train`.
    """
    check_tensorflow_classes(f"model_type {config.model_type}")
    network = getattr(transformers, model_class).from_config(config)
    network(network.dummy_inputs, training=False)
    for patch in PATCHES:
        patch(network)
    return network


def count_positions_from_padding(network: Any) -> None:
    """Let RoBERTa's family and MPNet count positions from `config.pad_token_id`, as their PyTorch classes do.

    Replaces `padding_idx` of the embeddings, which is 1 in every TF class.
    """
    if architecture_of(network.config).counts_positions:
        _encoder(network).embeddings.padding_idx = network.config.pad_token_id


def gather_before_head(network: Any) -> None:
    """Let the network compute its head only at the positions of `predicting_at`, because no other logits are used.

    Replaces `call` of the encoder. Outside `predicting_at`, the new `call` returns the same as transformers' `call`.
    """
    encoder = _encoder(network)
    encode = encoder.call

    @functools.wraps(encode)
    def encode_and_gather(*args: Any, **kwargs: Any) -> Any:
        outputs = encode(*args, **kwargs)
        positions = getattr(_traced, "positions", None)
        if positions is None:
            return outputs
        rows = outputs[0]  # the last states, (batch, length, hidden)
        _traced.states.append(rows)
        gathered = tf.gather(tf.reshape(rows, (-1, rows.shape[-1])), positions)[tf.newaxis]
        if isinstance(outputs, tuple):  # if config.return_dict is false
            return (gathered, *outputs[1:])
        return type(outputs)(**{**outputs, "last_hidden_state": gathered})

    encoder.call = encode_and_gather


@contextmanager
def predicting_at(positions: tf.Tensor) -> Iterator[list[tf.Tensor]]:
    """A context in which networks give logits at `positions` only, like `predict_at` of `train.model.networks`.

    The context applies to this thread's calls of one network, because the positions belong to that network's batch.
        After the call, the yielded list contains the encoder's last states of all tokens, (batch, length, hidden).
    """
    _traced.positions, _traced.states = positions, []
    try:
        yield _traced.states
    finally:
        _traced.positions = None


def let_layers_be_recomputed(network: Any) -> None:
    """Let the network compute each layer again for its gradient while `network.recomputes_layers` is true.

    Replaces `call` of each layer. `tf.recompute_grad` cannot be used instead (see `train.layers.recomputing`).
    """
    network.recomputes_layers = False
    for layer in encoder_layers(network):
        layer.call = _recomputing(network, layer.call)


def _recomputing(network: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a layer's `call`. While layers are recomputed, it returns only the hidden states, (hidden_states,)."""

    @functools.wraps(call)
    def call_and_forget(*args: Any, **kwargs: Any) -> Any:
        if not network.recomputes_layers:
            return call(*args, **kwargs)
        arguments = tf.nest.flatten((args, kwargs))

        def compute(*tensors: tf.Tensor) -> tf.Tensor:
            remaining = iter(tensors)
            filled = [next(remaining) if tf.is_tensor(argument) else argument for argument in arguments]
            new_args, new_kwargs = tf.nest.pack_sequence_as((args, kwargs), filled)
            return call(*new_args, **new_kwargs)[0]

        return (recomputed(compute, *(argument for argument in arguments if tf.is_tensor(argument))),)

    return call_and_forget


# `key_dropout` replaces `call` of dropout layers. Otherwise their masks would depend on the device, and change on
# resuming.
PATCHES = (count_positions_from_padding, gather_before_head, let_layers_be_recomputed, key_dropout)


def undo_patches(network: Any) -> None:
    """Restore a network to the state in which transformers created it."""
    if architecture_of(network.config).counts_positions:
        _encoder(network).embeddings.padding_idx = TF_PADDING_ID
    del network.recomputes_layers
    for module in network.submodules:
        if "call" in vars(module):  # otherwise `call` is the method of the class
            del module.call


def encoder_layers(network: Any) -> list[Any]:
    """Return the layers of the encoder, first to last."""
    encoder, name = _encoder(network), architecture_of(network.config).layer_list
    lists = [vars(module).get(name) for module in (encoder, *encoder.submodules)]
    (layers,) = (layers for layers in lists if isinstance(layers, list))
    return list(layers)


def _encoder(network: Any) -> Any:
    return getattr(network, network.base_model_prefix)
