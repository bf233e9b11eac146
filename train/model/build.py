"""Build networks with fresh weights: ours, or TF classes of transformers for other architectures."""

from typing import Any

import numpy as np
import tf_keras
from transformers import PretrainedConfig

from mlm_common.errors import InputError
from train.model import legacy
from train.model.architectures import architecture_of, vocabulary_axis
from train.model.networks import (
    MaskedLM,
    MultipleChoice,
    Network,
    PairPretraining,
    QuestionAnswering,
    ReplacedTokenDetection,
    RowClassifier,
    TokenClassifier,
)
from train.model.weight_names import variables_within

# Settings that contain a size of hidden states: between layers, or before the logits.
HIDDEN_SIZES = ("hidden_size", "embedding_size", "output_embedding_size")
# The networks of our architectures, by the head in the name of the auto class: TFAutoModelFor…
NETWORKS: dict[str, type[Network]] = {
    "": Network,
    "ForMaskedLM": MaskedLM,
    "ForMultipleChoice": MultipleChoice,
    "ForQuestionAnswering": QuestionAnswering,
    "ForSequenceClassification": RowClassifier,
    "ForTokenClassification": TokenClassifier,
}
# The networks of TFAutoModelForPreTraining; other architectures use the network for masked tokens.
PRETRAINING: dict[str, type[Network]] = {"bert": PairPretraining, "electra": ReplacedTokenDetection}


def build_network(
    model_config: PretrainedConfig,
    *,
    vocabulary_size: int,
    seed: int,
    tpu_layers: bool = False,
    model_class: str = "TFAutoModelForMaskedLM",
    by_transformers: bool = False,
    gradient_checkpointing: bool = False,
    sinusoidal_positions: bool = False,
    block_attention: bool = False,
) -> Any:
    """Build a network with fresh weights, which depend only on the seed.

    Args:
        model_config: the result of `resolve_model_config`, with a padded vocabulary.
        vocabulary_size: number of the tokenizer's ids; weights of padding ids above are 0.
        tpu_layers: use the TPU-optimized layers, if the architecture has them.
        model_class: the auto class of transformers.
        by_transformers: use transformers' TensorFlow class, with the fresh weights of our network.
        gradient_checkpointing: recompute each layer in the backward pass.
        sinusoidal_positions: initialize the position table with sinusoids.
        block_attention: let tokens attend only to tokens of their document.
    """
    tf_keras.utils.set_random_seed(seed)
    network = new_network(model_class, model_config)
    if sinusoidal_positions:
        start_positions_as_sinusoids(network)
    clear_padding(network, vocabulary_size)
    if by_transformers and isinstance(network, Network):
        network = _by_transformers(network, model_class)
    if gradient_checkpointing:
        recompute_layers(network)
    if isinstance(network, Network):
        network.encoder.separates_documents = block_attention
        if tpu_layers:
            use_tpu_layers(network)
    return network


def new_network(model_class: str, config: PretrainedConfig) -> Any:
    """Make a network with fresh weights.

    Args:
        model_class: the auto class of transformers with the network's head, such as `TFAutoModelForMaskedLM`.
        config: configuration of a supported architecture. Architectures that are not ours need transformers 4.

    Raises:
        InputError: the head is unknown, or transformers has no TensorFlow classes.
    """
    if not architecture_of(config).is_ours:
        return legacy.new_network(model_class, config)
    head = model_class.removeprefix("TFAutoModel")
    if head not in {*NETWORKS, "ForPreTraining"}:
        names = ", ".join(f"TFAutoModel{name}" for name in sorted({*NETWORKS, "ForPreTraining"}))
        raise InputError(f"The model_class of a {config.model_type} must be one of {names}; received {model_class}.")
    network = (PRETRAINING.get(config.model_type, MaskedLM) if head == "ForPreTraining" else NETWORKS[head])(config)
    network(network.dummy_inputs, training=False)
    return network


def _by_transformers(ours: Network, model_class: str) -> Any:
    theirs = legacy.new_network(model_class, ours.config)
    weights = variables_within(ours)
    for name, variable in variables_within(theirs).items():
        variable.assign(weights[name])
    return theirs


def start_positions_as_sinusoids(model: Any) -> None:
    """Fill the position table of a new masked language model with sinusoids that are as large as its random values.

    The table stays trainable, and the architecture does not change. With sinusoids (Vaswani et al. 2017, section 3.5),
    a shift by n positions is the same rotation everywhere, so the model learns "the previous token" once. With random
    rows it would have to learn it for each position. benchmarks/position_init.py compares the two.
    """
    tables = [variable for variable in model.trainable_variables if "position_embeddings" in variable.name]
    for table in tables:
        num_positions, width = table.shape
        root_mean_square = float(np.sqrt(np.mean(np.square(table.numpy()))))
        table.assign(sinusoids(num_positions, width) * root_mean_square * np.sqrt(2))


def sinusoids(num_positions: int, width: int) -> np.ndarray:
    """Compute sines, then cosines, of wavelengths 2π to 20,000π: float32 (num_positions, width)."""
    half = -(-width // 2)
    frequencies = 10_000.0 ** (-np.arange(half) / half)
    angles = np.arange(num_positions)[:, np.newaxis] * frequencies  # (num_positions, half)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1)[:, :width].astype(np.float32)


def clear_padding(model: Any, vocabulary_size: int) -> None:
    """Set to 0 the weights of all ids that are not in the vocabulary, `vocabulary_size` and above.

    These weights get no gradient, so they stay 0 and add nothing to norms, such as LAMB's norm of each weight.
    """
    for variable in model.weights:
        axis = vocabulary_axis(variable.name, model.config.model_type)
        if axis is not None and variable.shape[axis] > vocabulary_size:
            is_real = np.arange(variable.shape[axis]) < vocabulary_size
            variable.assign(variable.numpy() * np.expand_dims(is_real, tuple(set(range(variable.shape.rank)) - {axis})))


def encoder_layers(network: Any) -> list[Any]:
    """Return the layers of a network's encoder, first to last."""
    return list(network.encoder.layer) if isinstance(network, Network) else legacy.encoder_layers(network)


def recompute_layers(network: Any) -> None:
    """Let a network compute each layer again for the layer's gradient (`train.layers.recomputing`)."""
    owner = network.encoder if isinstance(network, Network) else network
    owner.recomputes_layers = True


def use_tpu_layers(network: Network) -> None:
    """Let the layers compute with `train.layers.tpu_layers`."""
    from train.layers import tpu_layers  # CPUs do not need it

    network.encoder.functions = tpu_layers


def hidden_matrices(model: Any) -> tuple[int, ...]:
    """Return the number of hidden matrices in each trainable variable of a model, in the order of the variables.

    A hidden matrix turns hidden states into hidden states. Layers contain such matrices, several side by side in a
    fused variable. A head contains them before its logits. Embeddings, positions and the matrix of the logits count as
    0. Networks that are parts of the model are included.
    """
    counts: dict[int, int] = {}
    parts = [part for part in model.submodules if hasattr(part, "base_model_prefix")]
    for network in [model, *parts]:
        config = network.config
        fused = architecture_of(config).fused
        for layer in encoder_layers(network):
            for variable in layer.trainable_variables:
                is_matrix = len(variable.shape) == 2 and min(variable.shape) > 1
                counts[id(variable)] = fused.get(variable.name.split("/")[-2], 1) if is_matrix else 0
        sizes = {getattr(config, name, config.hidden_size) for name in HIDDEN_SIZES}
        for variable in network.trainable_variables:
            is_of_encoder = f"/{network.base_model_prefix}/" in variable.name  # or its pooler
            is_head = not is_of_encoder and vocabulary_axis(variable.name, config.model_type) is None
            if is_head and len(variable.shape) == 2 and sizes.issuperset(variable.shape):
                counts.setdefault(id(variable), 1)
    return tuple(counts.get(id(variable), 0) for variable in model.trainable_variables)
