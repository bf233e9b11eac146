"""The architectures that can be trained here, and what is special about each.

An architecture is supported when three things are proven by tests: its weights give the same logits in the PyTorch
class, its head can be computed at the masked positions alone, and its training step compiles under XLA.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from transformers import PretrainedConfig

from mlm_common.errors import InputError

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class Architecture:
    """What is special about one `model_type`.

    counts_positions: the first token has the position after the padding id, as in RoBERTa, not 0.
    learns_positions: its table of absolute positions, where it has one, is trained; RoFormer's is fixed.
    has_token_types: its tokenizer tells a first sentence from a second.
    tied: its TF class uses the input embedding as the head's matrix, whatever `tie_word_embeddings` says.
    repeats_dropout: what its layers drop can be drawn once more, as recomputing them needs.
    dropouts: the settings of its dropout in pretraining: of hidden states and of attention.
    required: settings that its TF class ignores, or does not get right, with the only value that is supported.
    """

    counts_positions: bool = False
    learns_positions: bool = True
    has_token_types: bool = True
    tied: bool = True
    repeats_dropout: bool = True
    dropouts: tuple[str, str] = ("hidden_dropout_prob", "attention_probs_dropout_prob")
    required: Mapping[str, Any] = field(default_factory=dict)


ABSOLUTE = {"position_embedding_type": "absolute"}
BERT = Architecture(required=ABSOLUTE)
ROBERTA = Architecture(counts_positions=True, has_token_types=False, required=ABSOLUTE)

ARCHITECTURES = {
    "albert": BERT,
    "bert": BERT,
    "camembert": ROBERTA,
    "convbert": Architecture(),
    # `legacy`: the TF class has the legacy head only. `conv_kernel_size`: its convolution fails in bfloat16. It has a
    # dropout layer of its own, whose random numbers have a state.
    "deberta-v2": Architecture(repeats_dropout=False, required={"legacy": True, "conv_kernel_size": 0}),
    "distilbert": Architecture(
        has_token_types=False, dropouts=("dropout", "attention_dropout"), required={"sinusoidal_pos_embds": False}
    ),
    "electra": BERT,
    # `normalization_type`: the TF class gives its layer norm an epsilon of its own.
    "mobilebert": Architecture(tied=False, required={"normalization_type": "no_norm"}),
    # Both its TF and its PyTorch class count from 1, whatever the padding id.
    "mpnet": Architecture(counts_positions=True, has_token_types=False, required={"pad_token_id": 1}),
    "rembert": Architecture(tied=False),
    "roberta": ROBERTA,
    "roberta-prelayernorm": ROBERTA,
    "roformer": Architecture(learns_positions=False),
    "xlm-roberta": ROBERTA,
}
# Every architecture here attends in both directions.
REQUIRED_OF_ALL = {"is_decoder": False, "add_cross_attention": False}
# In TensorFlow and PyTorch, with the same values.
ACTIVATIONS = (
    "gelu", "gelu_10", "gelu_fast", "gelu_new", "mish", "quick_gelu", "relu", "sigmoid", "silu", "swish", "tanh",
)  # fmt: skip

REASONS_AGAINST = {
    "deberta": "the gradient of its TF class does not compile under XLA (deberta-v2 does)",
    "esm": "its TF class makes the input embedding and the head two variables of one name",
    "flaubert": "it takes its special ids from settings of its own",
    "funnel": "transformers 5 sets the embedding of its padding token to zero when it loads a model",
    "layoutlm": "it needs the place of each word on the page",
    "longformer": "the gradient of its TF class does not compile under XLA",
    "tapas": "it reads tables",
    "xlm": "it takes its special ids from settings of its own",
}


def check_architecture(config: "PretrainedConfig") -> None:
    """Check that a model of this configuration can be trained here and exported right.

    Raises:
        InputError: the type is not supported, or the configuration asks of it what its TF class does not do.
    """
    model_type = config.model_type
    architecture = ARCHITECTURES.get(model_type)
    if architecture is None:
        reason = REASONS_AGAINST.get(model_type, "its training and export have not been proven")
        raise InputError(
            f"--pretrained-model-config must be of a supported type: {', '.join(ARCHITECTURES)}; "
            f"received {model_type}: {reason}."
        )
    required = {**REQUIRED_OF_ALL, **architecture.required, "tie_word_embeddings": architecture.tied}
    for name, value in required.items():
        if getattr(config, name, value) != value:
            # The padding id is the tokenizer's, so an override cannot change it.
            cure = (
                f"a tokenizer with {name} {value}" if name == "pad_token_id" else f"--config-overrides {name}={value}"
            )
            raise InputError(
                f"{name} of a {model_type} must be {value}, the only value that its TensorFlow class supports; "
                f"received {getattr(config, name)}. Cure: {cure}."
            )
    activation_name = "activation" if model_type == "distilbert" else "hidden_act"
    activation = getattr(config, activation_name)
    if activation not in ACTIVATIONS:
        raise InputError(
            f"{activation_name} must be one of {', '.join(ACTIVATIONS)}; received {activation}. "
            f"Cure: --config-overrides {activation_name}=gelu."
        )
    if architecture.counts_positions and config.pad_token_id is None:
        raise InputError(f"A {model_type} counts its positions from pad_token_id, which its configuration lacks.")


def position_offset(config: "PretrainedConfig") -> int:
    """Return the position of the first token: `max_position_embeddings` is the row length plus this.

    0 for most; the padding id plus 1 for the RoBERTa family and MPNet.
    """
    return config.pad_token_id + 1 if ARCHITECTURES[config.model_type].counts_positions else 0


def max_positions(config: "PretrainedConfig") -> int | None:
    """Return the longest row that the model can take, in tokens; None when its positions are relative only."""
    if not getattr(config, "position_biased_input", True):
        return None
    return config.max_position_embeddings - position_offset(config)


def learns_positions(config: "PretrainedConfig") -> bool:
    """Return whether the model has a table of positions that is trained."""
    return max_positions(config) is not None and ARCHITECTURES[config.model_type].learns_positions


def uses_token_types(config: "PretrainedConfig") -> bool:
    """Return whether the model's tokenizer gives `token_type_ids`."""
    return ARCHITECTURES[config.model_type].has_token_types and config.type_vocab_size > 1


def align_padding_positions(model: Any) -> None:
    """Let a new TF…ForMaskedLM of the RoBERTa family count its positions from `config.pad_token_id`.

    transformers' TF classes count from 1 whatever the configuration says, its PyTorch classes from `pad_token_id`.
    To be called before the model is first trained; other architectures stay as they are.
    """
    if ARCHITECTURES[model.config.model_type].counts_positions:
        encoder = getattr(model, model.base_model_prefix)
        encoder.embeddings.padding_idx = model.config.pad_token_id


# Built by the TF class, absent from the PyTorch class.
NOT_IN_PYTORCH = {"mpnet": "mpnet.pooler."}
# {model type: {part of a name in TF: in PyTorch}}, where transformers' rules miss it.
RENAMED = {"deberta-v2": {".pos_proj.": ".pos_key_proj.", ".pos_q_proj.": ".pos_query_proj."}}
# The PyTorch class has the bias of the head under two names: the one that it adds to the logits, and another. Of the TF
# classes, albert's has both and uses the first, mobilebert's has the second only.
HEAD_BIAS = {
    "albert": ("predictions.decoder.bias", "predictions.bias"),
    "mobilebert": ("cls.predictions.decoder.bias", "cls.predictions.bias"),
}


def renamed(model_type: str, name: str) -> str:
    """Return the name of a weight in the PyTorch class, given what transformers' rules make of its TF name."""
    for tf_part, pytorch_part in RENAMED.get(model_type, {}).items():
        name = name.replace(tf_part, pytorch_part)
    return name
