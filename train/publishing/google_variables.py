"""Map the variables of Google's checkpoints of BERT and ALBERT, by their names in TF1, to weights in PyTorch.

Names and shapes are those of `modeling.py` and `run_pretraining.py` in google-research/bert and google-research/albert.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from transformers import PretrainedConfig

from mlm_common.errors import InputError

# Optimizer state: google-research/bert's and albert's, NVIDIA's with its loss scaling, tf.train.AdamOptimizer.
OPTIMIZER_STATE = re.compile(
    r"(^|/)(adam_[mv]|lamb_[mv]|Adam(_1)?|AdamWeightDecayOptimizer\w*|LAMB\w*)(/|$)"
    r"|^(global_step|beta[12]_power|loss_scale|current_loss_scale|good_steps|num_good_steps)$"
)
# The heads of run_classifier.py and run_squad.py.
FINE_TUNING_HEADS = ("output_weights", "output_bias", "cls/squad/output_weights", "cls/squad/output_bias")
# The matrix of the head for pairs, stored in PyTorch's layout.
PAIR_WEIGHTS = "cls/seq_relationship/output_weights"
# Prefix of all names in modules of TF Hub.
HUB_PREFIX = "module/"
# Only in the names of ALBERT's layers.
ALBERT_MARK = "/inner_group_"
NUM_SHOWN = 5


class Variables(NamedTuple):
    """The variables of a checkpoint.

    shapes: {name: shape}.
    read: reads a variable by name.
    left_out: names of variables of other heads, not in `shapes`.
    """

    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], np.ndarray]
    left_out: list[str]


class Weight(NamedTuple):
    """A weight of the PyTorch class: its name, the variable's shape, and whether the weight is its transpose."""

    name: str
    shape: tuple[int, ...]
    is_transposed: bool = False


Weights = dict[str, Weight]  # by the names of the variables


class Conversion(NamedTuple):
    """How a checkpoint is converted.

    weights: of the variables that are used.
    left_out: variables of a fine-tuned head.
    model_class: name of the PyTorch class after that of its architecture.
    """

    weights: Weights
    left_out: list[str]
    model_class: str


def model_type_of(variables: Collection[str], checkpoint: str) -> str:
    """Return whether a checkpoint is a `bert` or an `albert`.

    Raises:
        InputError: it is another model.
    """
    names = {_name_in_tf1(name) for name in variables}
    if "bert/embeddings/word_embeddings" not in names:
        shown = listed(sorted(name for name in names if not OPTIMIZER_STATE.search(name)))
        raise InputError(
            "A checkpoint of Google's BERT or ALBERT holds bert/embeddings/word_embeddings; in "
            f"{checkpoint} are: {shown}."
        )
    return "albert" if any(ALBERT_MARK in name for name in names) else "bert"


def plan_conversion(shapes: Mapping[str, tuple[int, ...]], config: PretrainedConfig, checkpoint: str) -> Conversion:
    """Find the weight for each variable; the encoder must be complete, each head complete or missing.

    Args:
        shapes: {name of a variable: shape}.
        config: determines the expected variables.
        checkpoint: named in errors.

    Raises:
        InputError: names the variables that are missing, unknown, or of another shape than the configuration says.
    """
    encoder, masked_lm_head, pair_head = TABLES[config.model_type](config)
    found = {_name_in_tf1(name): name for name in shapes if not OPTIMIZER_STATE.search(name)}
    expected, model_class = encoder, "Model"
    if found.keys() & (masked_lm_head.keys() | pair_head.keys()):
        expected, model_class = expected | masked_lm_head, "ForMaskedLM"
    if found.keys() & pair_head.keys():
        expected, model_class = expected | pair_head, "ForPreTraining"
    left_out = sorted(found.keys() & set(FINE_TUNING_HEADS))
    wrong = {
        "missing": sorted(expected.keys() - found.keys()),
        "unknown": sorted(found.keys() - expected.keys() - set(left_out)),
        "of another shape": [
            f"{name} {tuple(shapes[found[name]])}, not {weight.shape}"
            for name, weight in expected.items()
            if name in found and tuple(shapes[found[name]]) != weight.shape
        ],
    }
    if any(wrong.values()):
        raise InputError(
            f"The variables must be those that the configuration says, of a {config.model_type}; in {checkpoint} are "
            + "; ".join(f"{kind}: {listed(names)}" for kind, names in wrong.items() if names)
        )
    return Conversion({found[name]: weight for name, weight in expected.items()}, left_out, model_class)


def _name_in_tf1(variable: str) -> str:
    return variable.removeprefix(HUB_PREFIX)


def listed(names: Sequence[str]) -> str:
    """Join the first names, and count the rest."""
    more = f" and {len(names) - NUM_SHOWN:,} more" if len(names) > NUM_SHOWN else ""
    return ", ".join(names[:NUM_SHOWN]) + more


def _dense(scope: str, name: str, width_in: int, width_out: int) -> Weights:
    return {
        f"{scope}/kernel": Weight(f"{name}.weight", (width_in, width_out), is_transposed=True),
        f"{scope}/bias": Weight(f"{name}.bias", (width_out,)),
    }


def _norm(scope: str, name: str, width: int) -> Weights:
    return {
        f"{scope}/gamma": Weight(f"{name}.weight", (width,)),
        f"{scope}/beta": Weight(f"{name}.bias", (width,)),
    }


def _embeddings(config: PretrainedConfig, name: str, width: int) -> Weights:
    sizes = {
        "word": config.vocab_size,
        "position": config.max_position_embeddings,
        "token_type": config.type_vocab_size,
    }
    tables = {
        f"bert/embeddings/{kind}_embeddings": Weight(f"{name}.{kind}_embeddings.weight", (size, width))
        for kind, size in sizes.items()
    }
    return tables | _norm("bert/embeddings/LayerNorm", f"{name}.LayerNorm", width)


def _masked_lm_head(config: PretrainedConfig, name: str, dense: str, norm: str, width: int) -> Weights:
    """Return the weights of the head; its matrix is the embedding, of `width` columns."""
    scope = "cls/predictions"
    bias = {f"{scope}/output_bias": Weight(f"{name}.bias", (config.vocab_size,))}
    transform = _dense(f"{scope}/transform/dense", f"{name}.{dense}", config.hidden_size, width)
    return bias | transform | _norm(f"{scope}/transform/LayerNorm", f"{name}.{norm}", width)


def _pair_head(config: PretrainedConfig, name: str) -> Weights:
    return {
        PAIR_WEIGHTS: Weight(f"{name}.weight", (2, config.hidden_size)),
        "cls/seq_relationship/output_bias": Weight(f"{name}.bias", (2,)),
    }


def _bert(config: PretrainedConfig) -> tuple[Weights, Weights, Weights]:
    width, inner = config.hidden_size, config.intermediate_size
    encoder = _embeddings(config, "bert.embeddings", width)
    for index in range(config.num_hidden_layers):
        scope, name = f"bert/encoder/layer_{index}", f"bert.encoder.layer.{index}"
        for part in ("query", "key", "value"):
            encoder |= _dense(f"{scope}/attention/self/{part}", f"{name}.attention.self.{part}", width, width)
        encoder |= _dense(f"{scope}/attention/output/dense", f"{name}.attention.output.dense", width, width)
        encoder |= _norm(f"{scope}/attention/output/LayerNorm", f"{name}.attention.output.LayerNorm", width)
        encoder |= _dense(f"{scope}/intermediate/dense", f"{name}.intermediate.dense", width, inner)
        encoder |= _dense(f"{scope}/output/dense", f"{name}.output.dense", inner, width)
        encoder |= _norm(f"{scope}/output/LayerNorm", f"{name}.output.LayerNorm", width)
    encoder |= _dense("bert/pooler/dense", "bert.pooler.dense", width, width)
    head = _masked_lm_head(config, "cls.predictions", "transform.dense", "transform.LayerNorm", width)
    return encoder, head, _pair_head(config, "cls.seq_relationship")


def _albert(config: PretrainedConfig) -> tuple[Weights, Weights, Weights]:
    width, inner, narrow = config.hidden_size, config.intermediate_size, config.embedding_size
    encoder = _embeddings(config, "albert.embeddings", narrow)
    mapping = "embedding_hidden_mapping_in"
    encoder |= _dense(f"bert/encoder/{mapping}", f"albert.encoder.{mapping}", narrow, width)
    for group in range(config.num_hidden_groups):
        for index in range(config.inner_group_num):
            scope = f"bert/encoder/transformer/group_{group}/inner_group_{index}"
            name = f"albert.encoder.albert_layer_groups.{group}.albert_layers.{index}"
            for part in ("query", "key", "value"):
                encoder |= _dense(f"{scope}/attention_1/self/{part}", f"{name}.attention.{part}", width, width)
            encoder |= _dense(f"{scope}/attention_1/output/dense", f"{name}.attention.dense", width, width)
            encoder |= _norm(f"{scope}/LayerNorm", f"{name}.attention.LayerNorm", width)
            encoder |= _dense(f"{scope}/ffn_1/intermediate/dense", f"{name}.ffn", width, inner)
            encoder |= _dense(f"{scope}/ffn_1/intermediate/output/dense", f"{name}.ffn_output", inner, width)
            encoder |= _norm(f"{scope}/LayerNorm_1", f"{name}.full_layer_layer_norm", width)
    encoder |= _dense("bert/pooler/dense", "albert.pooler", width, width)
    head = _masked_lm_head(config, "predictions", "dense", "LayerNorm", narrow)
    return encoder, head, _pair_head(config, "sop_classifier.classifier")


# They return the weights of the encoder, of the masked-LM head, and of the head for pairs.
TABLES = {"bert": _bert, "albert": _albert}
