"""Networks of other architectures: classes of transformers 4 for TensorFlow, changed where our training needs it.

transformers 5 has no such classes. `new_network` changes a network in this order: positions counted from the padding
id, a head computed at chosen positions only; then `build_network` may let layers be recomputed, and the training step
lets dropout draw by keys (`train.layers.random_bits.key_dropout`). Nothing of this is undone: a network is built anew.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
import transformers
from transformers import PretrainedConfig

from mlm_common.errors import InputError
from train.layers.recomputing import recomputed
from train.model.architectures import architecture_of

# One set of positions per thread: MirroredStrategy traces each replica in its own thread.
_traced = threading.local()


def new_network(model_class: str, config: PretrainedConfig) -> Any:
    """Make a network with fresh weights, given the name of an auto class of transformers.

    Raises:
        InputError: transformers 5 is installed, which has no classes for TensorFlow.
    """
    auto_class = getattr(transformers, model_class, None)
    if auto_class is None:
        raise InputError(
            f"A {config.model_type} is computed by TensorFlow classes of transformers 4; installed is "
            f"{transformers.__version__}. pip install 'transformers>=4.57,<5' 'huggingface-hub>=0.34,<1', or train "
            "another model."
        )
    network = auto_class.from_config(config)
    network(network.dummy_inputs, training=False)
    count_positions_from_padding(network)
    gather_before_head(network)
    return network


def count_positions_from_padding(network: Any) -> None:
    """Let MPNet and the RoBERTa family count their positions from `config.pad_token_id`, as their PyTorch classes do.

    Their TF classes count from 1 whatever the configuration says.
    """
    if architecture_of(network.config).counts_positions:
        getattr(network, network.base_model_prefix).embeddings.padding_idx = network.config.pad_token_id


@contextmanager
def predicting_at(positions: tf.Tensor) -> Iterator[list[tf.Tensor]]:
    """A context in which networks give logits at `positions` only, as `predict_at` of `train.model.networks` says.

    Applies to the calls made by this thread, and to one network: the positions are those of its batch. What it yields
    has, after the call, the encoder's last states of all tokens, (batch, length, hidden).
    """
    previous = getattr(_traced, "positions", None), getattr(_traced, "states", None)
    _traced.positions, _traced.states = positions, []
    try:
        yield _traced.states
    finally:
        _traced.positions, _traced.states = previous


def gather_before_head(network: Any) -> None:
    """Let `predicting_at` decide where the network, a TF…ForMaskedLM of transformers, computes its head."""
    encoder = getattr(network, network.base_model_prefix)
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
        if isinstance(outputs, tuple):
            return (gathered, *outputs[1:])
        return type(outputs)(**{**outputs, "last_hidden_state": gathered})

    encoder.call = encode_and_gather


def recompute_layers(network: Any) -> None:
    """Compute each layer again where its gradient is taken (`train.layers.recomputing`)."""
    for layer in encoder_layers(network):
        layer.call = _recomputing(layer.call)


def _recomputing(call: Callable[..., Any]) -> Callable[..., Any]:
    """Make of a layer's `call` one that keeps only its tensor arguments for the backward pass.

    It returns the new hidden states alone, (hidden_states,): attentions are not for training.
    """

    @functools.wraps(call)
    def call_and_forget(*args: Any, **kwargs: Any) -> tuple[tf.Tensor]:
        arguments = tf.nest.flatten((args, kwargs))

        def compute(*tensors: tf.Tensor) -> tf.Tensor:
            remaining = iter(tensors)
            filled = [next(remaining) if tf.is_tensor(argument) else argument for argument in arguments]
            new_args, new_kwargs = tf.nest.pack_sequence_as((args, kwargs), filled)
            return call(*new_args, **new_kwargs)[0]

        return (recomputed(compute, *(argument for argument in arguments if tf.is_tensor(argument))),)

    return call_and_forget


def encoder_layers(network: Any) -> list[Any]:
    """List the layers of the encoder, first to last."""
    encoder = getattr(network, network.base_model_prefix)
    name = architecture_of(network.config).layer_list
    modules = (encoder, *encoder.submodules)
    lists = [getattr(module, name) for module in modules if isinstance(getattr(module, name, None), list)]
    if len(lists) != 1:
        raise ValueError(f"The layers of a {network.config.model_type} are not found: {len(lists)} lists of layers.")
    return list(lists[0])
