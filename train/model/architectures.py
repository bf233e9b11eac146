"""The architectures that can be trained here, and the special properties of each.

Tests prove three things about each supported architecture: its weights give the same logits in the PyTorch
class, its head can be computed at the masked positions alone, and its training step compiles under XLA.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import transformers
from transformers import PretrainedConfig
from transformers.utils import CONFIG_NAME

from mlm_common.errors import InputError


@dataclass(frozen=True)
class Architecture:
    """The special properties of one `model_type`.

    Inputs and settings:
    counts_positions: the position of the first token is the padding id plus 1, as in RoBERTa, instead of 0.
    learns_positions: the table of absolute positions is trained, if there is one; RoFormer's table is fixed.
    has_token_types: the tokenizer marks a first and a second sentence.
    has_pair_head: the class for pretraining has a head that classifies the relation between two segments.
    activations: the settings that name activation functions: for feed-forward layers and, if it differs, for the head.
    dropouts: the settings with the dropout rates of hidden states and of attention in pretraining.
    tied: the network uses the input embedding as the head's matrix, whatever `tie_word_embeddings` says.
    required: {setting: the only supported value}, if the network ignores other values or computes wrong results with
        them.

    Layers:
    layer_list: attribute with the list of layers in the encoder of the TF class.
    prefix: name of our encoder (`train.model.encoder`), as an attribute of its network and in the names of variables;
        None if the network is a TF class of transformers 4.
    flops: the formula that counts operations, a key of `train.model.computation.FORMULAS`; None if no formula is known.
    transposed_vocabulary: pattern of the weight whose second axis, not its first, runs over the ids.
    fused: {part of a layer: the number of matrices side by side in its kernel}.

    Exceptions to the rules of `train.model.weight_names` in the PyTorch class:
    not_in_pytorch: prefixes of the PyTorch names of weights that only TF classes have, except for multiple choice.
    renamed: {part of a name according to those rules: the part in PyTorch}.
    depthwise: suffixes of names whose weights are (channels, 1, …) in PyTorch, because the convolution is separable.
    head_bias: both names of the head's bias, if PyTorch has it twice. PyTorch adds the bias with the first name to the
        logits.
    same_where_none: {a: b}: setting `a` defaults to the value of `b`; transformers 5 dropped this rule.
    """

    counts_positions: bool = False
    learns_positions: bool = True
    has_token_types: bool = True
    has_pair_head: bool = False
    activations: tuple[str, ...] = ("hidden_act",)
    dropouts: tuple[str, ...] = ("hidden_dropout_prob", "attention_probs_dropout_prob")
    tied: bool = True
    required: Mapping[str, Any] = field(default_factory=dict)

    layer_list: str = "layer"
    prefix: str | None = None
    flops: Literal["bert", "deberta-v2", "modernbert"] | None = "bert"
    transposed_vocabulary: str | None = None
    fused: Mapping[str, int] = field(default_factory=dict)

    not_in_pytorch: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict)
    depthwise: tuple[str, ...] = ()
    head_bias: tuple[str, ...] = ()
    same_where_none: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_ours(self) -> bool:
        """Whether the network is ours, so that its layers can be TPU-optimized and can separate a row's documents."""
        return self.prefix is not None


ABSOLUTE = {"position_embedding_type": "absolute"}
BERT = Architecture(required=ABSOLUTE, prefix="bert")
ROBERTA = replace(BERT, prefix="roberta", counts_positions=True, has_token_types=False)

ARCHITECTURES = {
    # ALBERT's layers are groups that are applied several times. Its TF class has both biases, and uses the first.
    "albert": Architecture(
        has_pair_head=True,
        required=ABSOLUTE,
        layer_list="albert_layer_groups",
        head_bias=("predictions.decoder.bias", "predictions.bias"),
    ),
    "bert": replace(BERT, has_pair_head=True),
    "camembert": ROBERTA,
    # `flops`: the cost of its convolutions depends on the implementation.
    "convbert": Architecture(
        flops=None, depthwise=("key_conv_attn_layer.bias", "key_conv_attn_layer.depthwise.weight")
    ),
    # `legacy`: the TF class has only the legacy head. `conv_kernel_size`: the convolution fails in bfloat16.
    "deberta-v2": Architecture(
        required={"legacy": True, "conv_kernel_size": 0},
        flops="deberta-v2",
        renamed={".pos_proj.": ".pos_key_proj.", ".pos_q_proj.": ".pos_query_proj."},
    ),
    "distilbert": Architecture(
        prefix="distilbert",
        has_token_types=False,
        activations=("activation",),
        dropouts=("dropout", "attention_dropout"),
        required={"sinusoidal_pos_embds": False},
    ),
    "electra": replace(BERT, prefix="electra"),
    # `normalization_type`: the layer norm of the TF class has a different epsilon. `transposed_vocabulary`: an extra
    # matrix of the head, because the embedding is narrower than the hidden states. The TF class has only the second
    # bias.
    "mobilebert": Architecture(
        has_pair_head=True,
        tied=False,
        required={"normalization_type": "no_norm"},
        flops=None,
        transposed_vocabulary=r"predictions[./]dense[./]weight(:0)?$",
        head_bias=("cls.predictions.decoder.bias", "cls.predictions.bias"),
    ),
    # `learns_positions`: there is no table, because positions are rotations.
    "modernbert": Architecture(
        learns_positions=False,
        has_token_types=False,
        activations=("hidden_activation", "classifier_activation"),
        dropouts=("embedding_dropout", "attention_dropout", "mlp_dropout"),
        required={"initializer_cutoff_factor": 2.0},
        prefix="model",
        flops="modernbert",
        fused={"Wqkv": 3, "Wi": 2},
        same_where_none={"local_rope_theta": "global_rope_theta"},
    ),
    # `pad_token_id`: its TF and PyTorch classes count positions from 1, whatever the padding id.
    "mpnet": Architecture(
        counts_positions=True, has_token_types=False, required={"pad_token_id": 1}, not_in_pytorch=("mpnet.pooler.",)
    ),
    "rembert": Architecture(tied=False),
    "roberta": ROBERTA,
    "roberta-prelayernorm": replace(ROBERTA, prefix="roberta_prelayernorm"),
    "roformer": Architecture(learns_positions=False),
    "xlm-roberta": ROBERTA,
}
SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "embedding_size")
# Every architecture here attends in both directions.
REQUIRED_OF_ALL = {"is_decoder": False, "add_cross_attention": False}
# Functions that TensorFlow and PyTorch compute in the same way.
ACTIVATIONS = (
    "gelu", "gelu_10", "gelu_fast", "gelu_new", "mish", "quick_gelu", "relu", "sigmoid", "silu", "swish", "tanh",
)  # fmt: skip

# Name of a head that no class of transformers has: the attribute of the network, and a part of the weights' names.
OWN_HEAD = "custom_head"
# Name of a part that only training uses: checkpoints contain it, exports do not.
TRAINING_ONLY = "training_only"
# Name of a part whose weights an export adds to the network's weights of the same names.
DELTA = "delta"
# Matches the end of the names of weights with one entry per id, in our network or in the PyTorch class.
VOCABULARY_WEIGHT = re.compile(
    r"((word|tok)_embeddings[./]weight|((predictions|lm_head|vocab_projector)([./]decoder)?|(^|[./])decoder)[./]"
    r"(bias|weight))(:0)?$"
)


def architecture_of(config: PretrainedConfig) -> Architecture:
    return ARCHITECTURES[config.model_type]


def pytorch_class(model_class: str, config: PretrainedConfig) -> str:
    """Return the name of the PyTorch class, such as `RobertaForMaskedLM`, that belongs to an auto class."""
    head = model_class.removeprefix("TFAutoModel") or "Model"
    if head == "ForPreTraining" and not (architecture_of(config).has_pair_head or config.model_type == "electra"):
        head = "ForMaskedLM"
    return type(config).__name__.removesuffix("Config") + head


def pytorch_class_of(network: Any) -> str:
    """Return the name of a network's PyTorch class."""
    return getattr(network, "class_name", type(network).__name__).removeprefix("TF")


def not_in_pytorch(class_name: str, config: PretrainedConfig) -> tuple[str, ...]:
    """Return prefixes of the PyTorch names of weights that only the network has."""
    return () if class_name.endswith("ForMultipleChoice") else architecture_of(config).not_in_pytorch


def check_architecture(config: PretrainedConfig, hint: str = "Give --config-overrides {name}={value}") -> None:
    """Check that a model of this configuration can be trained here, and that its export will be right.

    Args:
        hint: how to change a setting, used in error messages.

    Raises:
        InputError: the type is not supported, or a setting has a value that the network does not support. The message
            names the file of the configuration.
    """
    try:
        _check_settings(config, hint)
    except InputError as error:
        if not config.name_or_path:
            raise
        raise InputError(f"{config.name_or_path}/{CONFIG_NAME}: {error}") from error


def check_computable(config: PretrainedConfig) -> None:
    """Check that a supported network can be built, with our class or with a TensorFlow class of transformers."""
    if not architecture_of(config).is_ours:
        check_tensorflow_classes(f"model_type {config.model_type}")


def check_tensorflow_classes(subject: str) -> None:
    """Check that transformers has TensorFlow classes, and that they find TensorFlow.

    Args:
        subject: what needs the classes, used in error messages.
    """
    is_tf_available = getattr(transformers.utils, "is_tf_available", None)  # not in version 5
    if is_tf_available is None:
        raise InputError(
            f"{subject} needs the TensorFlow classes of transformers 4; transformers {transformers.__version__} is "
            "installed. Install version 4: python3 install.py --with legacy"
        )
    if not is_tf_available():
        raise InputError(
            f"{subject} needs the TensorFlow classes of transformers, which was imported before train and does not see "
            "the TensorFlow installed. Import train first, or set FORCE_TF_AVAILABLE=1."
        )


def _check_settings(config: PretrainedConfig, hint: str) -> None:
    model_type = config.model_type
    architecture = ARCHITECTURES.get(model_type)
    if architecture is None:
        raise InputError(
            f"--pretrained-model-config must be of a supported type: {', '.join(ARCHITECTURES)}; received "
            f"{model_type}, whose training and export have not been verified."
        )
    required = {**REQUIRED_OF_ALL, **architecture.required, "tie_word_embeddings": architecture.tied}
    for name, value in required.items():
        if getattr(config, name, value) != value:
            # The padding id is the tokenizer's, so an override cannot change it.
            is_of_tokenizer = name == "pad_token_id"
            fix = f"Use a tokenizer with {name} {value}" if is_of_tokenizer else hint.format(name=name, value=value)
            raise InputError(
                f"{name} of a {model_type} must be {value}, the only value that is supported; "
                f"received {getattr(config, name)}. {fix}."
            )
    for name in SIZES:
        least = 0 if name == "num_hidden_layers" else 1  # embeddings alone, without layers, can be trained for search
        if (size := getattr(config, name, least)) < least:
            raise InputError(f"{name} of a {model_type} must be at least {least}; received {size}.")
    # Rotations turn pairs of numbers in a head, so the head size must be even.
    multiple = config.num_attention_heads * (1 if architecture.learns_positions else 2)
    if config.hidden_size % multiple:
        twice, value = "" if architecture.learns_positions else "twice ", -(-config.hidden_size // multiple) * multiple
        raise InputError(
            f"hidden_size of a {model_type} must be a multiple of {multiple}, {twice}num_attention_heads; received "
            f"{config.hidden_size}. {hint.format(name='hidden_size', value=value)}."
        )
    for name in architecture.activations:
        if getattr(config, name) not in ACTIVATIONS:
            raise InputError(
                f"{name} must be one of {', '.join(ACTIVATIONS)}; received {getattr(config, name)}. "
                f"{hint.format(name=name, value='gelu')}, if that suits the model."
            )
    if architecture.counts_positions and config.pad_token_id is None:
        raise InputError(f"A {model_type} counts its positions from pad_token_id, which its configuration lacks.")


def position_offset(config: PretrainedConfig) -> int:
    """Return the position of the first token: the padding id plus 1 for RoBERTa's family and MPNet, otherwise 0.

    `max_position_embeddings` is the length of the longest row plus this offset.
    """
    return config.pad_token_id + 1 if architecture_of(config).counts_positions else 0


def max_positions(config: PretrainedConfig) -> int | None:
    """Return the length of the longest row that the model takes, in tokens; None if it has only relative positions."""
    if not getattr(config, "position_biased_input", True):
        return None
    return config.max_position_embeddings - position_offset(config)


def learns_positions(config: PretrainedConfig) -> bool:
    return max_positions(config) is not None and architecture_of(config).learns_positions


def uses_token_types(config: PretrainedConfig) -> bool:
    return architecture_of(config).has_token_types and config.type_vocab_size > 1


def vocabulary_axis(name: str, model_type: str) -> int | None:
    """Return the axis of a weight that runs over the ids, or None; `name` is its name in our network or in PyTorch."""
    if OWN_HEAD in re.split("[./]", name):
        return None
    if VOCABULARY_WEIGHT.search(name):
        return 0
    transposed = ARCHITECTURES[model_type].transposed_vocabulary
    return 1 if transposed and re.search(transposed, name) else None


def with_both_biases(weights: dict[str, np.ndarray], model_type: str) -> dict[str, np.ndarray]:
    """Add the head's bias under all of its names to {name in PyTorch: array}, if at least one name is there."""
    names = ARCHITECTURES[model_type].head_bias
    biases = [weights[name] for name in names if name in weights]
    return weights | {name: biases[0].copy() for name in names if biases}


def cut_vocabulary(array: np.ndarray, axis: int | None, vocabulary_size: int) -> np.ndarray:
    """Cut an array to the first `vocabulary_size` ids along `axis`; return it unchanged if `axis` is None."""
    return array if axis is None else array.take(np.arange(vocabulary_size), axis)
