"""The differences between the encoders of `train.model.encoder`, read from a configuration of transformers.

The names below are parts of the variables' names, which checkpoints store; `train.model.weight_names` converts them to
PyTorch's names. A name with slashes stands for nested modules in PyTorch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from train.model.architectures import position_offset

# {part of an encoder or of a layer: name of the part}. `query_key_value` is a single matrix that makes all three.
BERT_ENCODER = {
    "tokens": "word_embeddings",
    "embeddings_norm": "LayerNorm",
    "layers": "encoder/layer",
}
BERT_LAYER = {
    "query": "attention/self/query",
    "key": "attention/self/key",
    "value": "attention/self/value",
    "attention_output": "attention/output/dense",
    "attention_norm": "attention/output/LayerNorm",
    "expansion": "intermediate/dense",
    "contraction": "output/dense",
    "feed_forward_norm": "output/LayerNorm",
}
PRE_NORM_LAYER = BERT_LAYER | {
    "attention_norm": "attention/LayerNorm",
    "feed_forward_norm": "intermediate/LayerNorm",
}
DISTILBERT_LAYER = {
    "query": "attention/q_lin",
    "key": "attention/k_lin",
    "value": "attention/v_lin",
    "attention_output": "attention/out_lin",
    "attention_norm": "sa_layer_norm",
    "expansion": "ffn/lin1",
    "contraction": "ffn/lin2",
    "feed_forward_norm": "output_layer_norm",
}
MODERNBERT_ENCODER = {
    "tokens": "tok_embeddings",
    "embeddings_norm": "norm",
    "layers": "layers",
    "final_norm": "final_norm",
}
MODERNBERT_LAYER = {
    "query_key_value": "attn/Wqkv",
    "attention_output": "attn/Wo",
    "attention_norm": "attn_norm",
    "expansion": "mlp/Wi",
    "contraction": "mlp/Wo",
    "feed_forward_norm": "mlp_norm",
}


@dataclass(frozen=True)
class Anatomy:
    """The encoder that a configuration describes.

    Attributes:
        encoder_names, layer_names: {part: name of the part}.
        num_token_types: rows in the table of token types; 0 if the encoder has no such table.
        num_positions: rows in the table of positions; 0 if positions are rotations of queries and keys.
        first_position: row of the first token in the table of positions. If it is above 0, padding uses the row
            before it, whose index is the padding id.
        is_pre_norm: attention and the feed-forward network read normalized states, and their outputs are added to the
            unnormalized states. Otherwise the sums are normalized.
        normalizes_first: the first pre-norm layer also normalizes before attention, although the embeddings already
            end in a norm.
        is_gated: one half of the expansion is multiplied by the activation of the other half (GeGLU).
        *_has_bias: whether dense layers and norms have biases.
        *_rate: dropout rate of the embeddings, of attention's probabilities, of attention's output, and of the
            feed-forward network (between its two matrices if it is gated, else after them).
        deviation: standard deviation of other fresh weights.
        output_deviation: standard deviation of fresh matrices that write to the residual stream.
    """

    encoder_names: Mapping[str, str]
    layer_names: Mapping[str, str]
    hidden_size: int
    embedding_size: int
    inner_size: int
    num_layers: int
    num_heads: int
    activation: str
    norm_epsilon: float
    embedding_rate: float
    probability_rate: float
    attention_rate: float
    feed_forward_rate: float
    deviation: float
    output_deviation: float
    num_token_types: int = 0
    num_positions: int = 0
    first_position: int = 0
    is_pre_norm: bool = False
    normalizes_first: bool = True
    is_gated: bool = False
    attention_has_bias: bool = True
    feed_forward_has_bias: bool = True
    norm_has_bias: bool = True

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads


def anatomy_of(config: PretrainedConfig) -> Anatomy:
    """Read the anatomy of one of our encoders from its configuration."""
    read = {"distilbert": _distilbert, "modernbert": _modernbert}.get(config.model_type, _bert)
    return Anatomy(
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        deviation=config.initializer_range,
        **read(config),
    )


def _bert(config: PretrainedConfig) -> dict[str, Any]:
    is_pre_norm = config.model_type == "roberta-prelayernorm"
    return {
        "encoder_names": BERT_ENCODER | ({"final_norm": "LayerNorm"} if is_pre_norm else {}),
        "layer_names": PRE_NORM_LAYER if is_pre_norm else BERT_LAYER,
        "embedding_size": getattr(config, "embedding_size", config.hidden_size),
        "inner_size": config.intermediate_size,
        "activation": config.hidden_act,
        "norm_epsilon": config.layer_norm_eps,
        "embedding_rate": config.hidden_dropout_prob,
        "probability_rate": config.attention_probs_dropout_prob,
        "attention_rate": config.hidden_dropout_prob,
        "feed_forward_rate": config.hidden_dropout_prob,
        "output_deviation": config.initializer_range,
        "num_token_types": config.type_vocab_size,
        "num_positions": config.max_position_embeddings,
        "first_position": position_offset(config),
        "is_pre_norm": is_pre_norm,
    }


def _distilbert(config: PretrainedConfig) -> dict[str, Any]:
    return {
        "encoder_names": BERT_ENCODER | {"layers": "transformer/layer"},
        "layer_names": DISTILBERT_LAYER,
        "embedding_size": config.hidden_size,
        "inner_size": config.hidden_dim,
        "activation": config.activation,
        "norm_epsilon": 1e-12,
        "embedding_rate": config.dropout,
        "probability_rate": config.attention_dropout,
        "attention_rate": 0.0,
        "feed_forward_rate": config.dropout,
        "output_deviation": config.initializer_range,
        "num_positions": config.max_position_embeddings,
    }


def _modernbert(config: PretrainedConfig) -> dict[str, Any]:
    return {
        "encoder_names": MODERNBERT_ENCODER,
        "layer_names": MODERNBERT_LAYER,
        "embedding_size": config.hidden_size,
        "inner_size": config.intermediate_size,
        "activation": config.hidden_activation,
        "norm_epsilon": config.norm_eps,
        "embedding_rate": config.embedding_dropout,
        "probability_rate": config.attention_dropout,
        "attention_rate": config.attention_dropout,
        "feed_forward_rate": config.mlp_dropout,
        # The deviation is smaller in deeper models, where more layers write to the residual stream (Warner et al. 2024,
        # Megatron-LM).
        "output_deviation": config.initializer_range / math.sqrt(2 * max(1, config.num_hidden_layers)),
        "is_pre_norm": True,
        "normalizes_first": False,
        "is_gated": True,
        "attention_has_bias": config.attention_bias,
        "feed_forward_has_bias": config.mlp_bias,
        "norm_has_bias": config.norm_bias,
    }


@dataclass(frozen=True)
class Attention:
    """The range of a layer's attention, and its rotary positions.

    Attributes:
        reach: largest distance to a token that is attended to; None for the whole row.
        rotary_base: base of the wavelengths at which positions rotate queries and keys; None without rotations.
    """

    reach: int | None = None
    rotary_base: float | None = None


def attention_of(config: PretrainedConfig, index: int) -> Attention:
    """Return how the layer with this index attends."""
    if config.model_type != "modernbert":
        return Attention()
    if index % config.global_attn_every_n_layers == 0:
        return Attention(rotary_base=config.global_rope_theta)
    base = config.global_rope_theta if config.local_rope_theta is None else config.local_rope_theta
    return Attention(config.local_attention // 2, base)
