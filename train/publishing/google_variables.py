"""Map the variables of Google's BERT and ALBERT checkpoints to weights in PyTorch, by their names in TF1.

Names and shapes are the same as in `modeling.py` and `run_pretraining.py` of google-research/bert and
google-research/albert. A TensorFlow 2 checkpoint of Model Garden stores a graph of objects instead: the attributes of a
root object, their attributes, and so on down to the variables. `read_object_graph` gives these variables their TF1
names. The objects are `BertEncoder`, `BertEncoderV2`, `BertPretrainerV2` and their layers in official/nlp/modeling of
tensorflow/models.
"""

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from transformers import PretrainedConfig

from mlm_common.errors import InputError

# Optimizer state of google-research/bert and albert, of NVIDIA (with loss scaling), and of tf.train.AdamOptimizer.
OPTIMIZER_STATE = re.compile(
    r"(^|/)(adam_[mv]|lamb_[mv]|Adam(_1)?|AdamWeightDecayOptimizer\w*|LAMB\w*)(/|$)"
    r"|^(global_step|beta[12]_power|loss_scale|current_loss_scale|good_steps|num_good_steps)$"
)
# The heads of run_classifier.py and run_squad.py.
FINE_TUNING_HEADS = ("output_weights", "output_bias", "cls/squad/output_weights", "cls/squad/output_bias")
# The matrix of the head for pairs; it is already stored in PyTorch's layout.
PAIR_WEIGHTS = "cls/seq_relationship/output_weights"
# Prefix of all names in modules of TF Hub.
HUB_PREFIX = "module/"
# A part that only the names of ALBERT's layers contain.
ALBERT_MARK = "/inner_group_"
NUM_SHOWN = 5


class Variables(NamedTuple):
    """The variables of a checkpoint.

    Attributes:
        shapes: {name: shape}.
        read: reads a variable by name.
        left_out: names of variables of other heads, which are not in `shapes`.
    """

    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], np.ndarray]
    left_out: list[str]


class Weight(NamedTuple):
    """A weight of the PyTorch class: its name, the variable's shape, and whether the variable must be transposed."""

    name: str
    shape: tuple[int, ...]
    is_transposed: bool = False


Weights = dict[str, Weight]  # by the name of the variable


class Conversion(NamedTuple):
    """How a checkpoint is converted.

    Attributes:
        weights: the weight that each used variable becomes.
        left_out: names of the variables of a fine-tuned head, which are not used.
        model_class: the PyTorch class without the name of the architecture, such as `ForMaskedLM`.
    """

    weights: Weights
    left_out: list[str]
    model_class: str


def model_type_of(variables: Collection[str], checkpoint: str) -> str:
    """Return the model type of a checkpoint, `bert` or `albert`; raise an InputError if it is neither."""
    names = {name.removeprefix(HUB_PREFIX) for name in variables}
    if "bert/embeddings/word_embeddings" not in names:
        shown = listed(sorted(name for name in names if not OPTIMIZER_STATE.search(name)))
        raise InputError(
            "A checkpoint of Google's BERT or ALBERT must contain bert/embeddings/word_embeddings; "
            f"{checkpoint} contains {shown}."
        )
    return "albert" if any(ALBERT_MARK in name for name in names) else "bert"


def plan_conversion(shapes: Mapping[str, tuple[int, ...]], config: PretrainedConfig, checkpoint: str) -> Conversion:
    """Find the weight that each variable becomes.

    The encoder must be complete, and each head must be complete or absent.

    Args:
        shapes: the checkpoint's variables, {name: shape}.
        config: the model's configuration, which determines the expected variables and shapes.
        checkpoint: the checkpoint's path, used in error messages.

    Raises:
        InputError: variables are missing, unknown, or of a shape that does not fit the configuration.
    """
    encoder, masked_lm_head, pair_head = TABLES[config.model_type](config)
    full_names = {name.removeprefix(HUB_PREFIX): name for name in shapes if not OPTIMIZER_STATE.search(name)}
    names = full_names.keys()
    expected, model_class = encoder, "Model"
    if names & (masked_lm_head.keys() | pair_head.keys()):
        expected, model_class = expected | masked_lm_head, "ForMaskedLM"
    if names & pair_head.keys():
        expected, model_class = expected | pair_head, "ForPreTraining"
    left_out = sorted(names & set(FINE_TUNING_HEADS))
    problems = {
        "missing": sorted(expected.keys() - names),
        "unknown": sorted(names - expected.keys() - set(left_out)),
        "of the wrong shape": [
            f"{name} {tuple(shapes[full_names[name]])}, not {weight.shape}"
            for name, weight in expected.items()
            if name in names and tuple(shapes[full_names[name]]) != weight.shape
        ],
    }
    if any(problems.values()):
        raise InputError(
            f"The variables in {checkpoint} do not fit its configuration of a {config.model_type}; "
            + "; ".join(f"{kind}: {listed(variables)}" for kind, variables in problems.items() if variables)
            + "."
        )
    return Conversion({full_names[name]: weight for name, weight in expected.items()}, left_out, model_class)


def listed(names: Sequence[str]) -> str:
    others = f" and {len(names) - NUM_SHOWN:,} more" if len(names) > NUM_SHOWN else ""
    return ", ".join(names[:NUM_SHOWN]) + others


def _dense(scope: str, name: str, width_in: int, width_out: int) -> Weights:
    return {
        f"{scope}/kernel": Weight(f"{name}.weight", (width_in, width_out), is_transposed=True),
        f"{scope}/bias": Weight(f"{name}.bias", (width_out,)),
    }


def _norm(scope: str, name: str, width: int) -> Weights:
    return {f"{scope}/gamma": Weight(f"{name}.weight", (width,)), f"{scope}/beta": Weight(f"{name}.bias", (width,))}


def _embeddings(config: PretrainedConfig, name: str, width: int) -> Weights:
    numbers = config.vocab_size, config.max_position_embeddings, config.type_vocab_size
    tables = {
        f"bert/embeddings/{kind}_embeddings": Weight(f"{name}.{kind}_embeddings.weight", (number, width))
        for kind, number in zip(("word", "position", "token_type"), numbers, strict=True)
    }
    return tables | _norm("bert/embeddings/LayerNorm", f"{name}.LayerNorm", width)


def _masked_lm_head(config: PretrainedConfig, name: str, dense: str, norm: str, width: int) -> Weights:
    """Return the weights of the head except its matrix, which is the word embedding with `width` columns."""
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


# Functions of a configuration that return the weights of the encoder, of the masked-LM head and of the head for pairs.
TABLES = {"bert": _bert, "albert": _albert}


# The name under which a TensorFlow 2 checkpoint stores its graph of objects among the variables. TF1 checkpoints have
# no graph of objects.
OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
ROOT = 0
# Possible paths of an object: by attribute or, in the functional models of older checkpoints, by number.
ENCODERS = ("encoder", "model/encoder_network", "model/encoder", "model/layer_with_weights-0", "model", "")
EMBEDDINGS = {
    "word_embeddings": ("_embedding_layer/embeddings", "layer_with_weights-0/embeddings"),
    "position_embeddings": ("_position_embedding_layer/embeddings", "layer_with_weights-1/embeddings"),
    "token_type_embeddings": ("_type_embedding_layer/embeddings", "layer_with_weights-2/embeddings"),
    "LayerNorm": ("_embedding_norm_layer", "layer_with_weights-3"),
}
TRANSFORMER_LAYER = {
    "attention/self/query": ("_attention_layer/_query_dense",),
    "attention/self/key": ("_attention_layer/_key_dense",),
    "attention/self/value": ("_attention_layer/_value_dense",),
    "attention/output/dense": ("_attention_layer/_output_dense", "_attention_output_dense"),
    "attention/output/LayerNorm": ("_attention_layer_norm",),
    "intermediate/dense": ("_intermediate_dense",),
    "output/dense": ("_output_dense",),
    "output/LayerNorm": ("_output_layer_norm",),
}
MASKED_LM_HEADS = ("masked_lm", "model/masked_lm")
MASKED_LM_HEAD = {"transform/dense": ("dense",), "transform/LayerNorm": ("layer_norm",), "output_bias": ("bias",)}
# The pooler of the head for pairs; if a checkpoint has this pooler, the pooler of the encoder is untrained.
PAIR_POOLER = "next_sentence.pooler_dense"
PAIR_HEADS = "model/classification_heads"
LAYER_VARIABLES = ("kernel", "bias", "gamma", "beta")
# Attributes that are never part of a model.
TRAINING_STATE = ("optimizer", "global_step", "save_counter")


class ObjectGraph:
    """The objects of a checkpoint, each identified by a number.

    Attributes:
        children: for each object, {attribute: number of the object it refers to}.
        keys: for each object that is a variable, its key in the checkpoint; otherwise "".
    """

    def __init__(self, serialized: bytes):
        from tensorflow.core.protobuf.trackable_object_graph_pb2 import TrackableObjectGraph

        nodes = TrackableObjectGraph.FromString(serialized).nodes
        self.children = [{child.local_name: child.node_id for child in node.children} for node in nodes]
        self.keys = [next((value.checkpoint_key for value in node.attributes), "") for node in nodes]

    def find(self, start: int | None, *paths: str) -> int | None:
        """Follow paths of attributes from an object; return the object at the first path that exists, or None."""
        for path in paths:
            node = start
            for name in filter(None, path.split("/")):
                node = None if node is None else self.children[node].get(name)
            if node is not None:
                return node
        return None

    def find_all(self, start: int | None, scope: str, paths: Mapping[str, tuple[str, ...]]) -> dict[str, int]:
        """Return {`scope`/name: object} for each name in `paths` that has a path leading to an object."""
        nodes = {f"{scope}/{name}": self.find(start, *paths_of_name) for name, paths_of_name in paths.items()}
        return {name: node for name, node in nodes.items() if node is not None}

    def keys_below(self, start: int | None) -> set[str]:
        """Return the keys of all variables below an object, except the training state."""
        visited: set[int] = set()
        pending = [] if start is None else [start]
        while pending:
            node = pending.pop()
            if node not in visited:
                visited.add(node)
                pending += [child for name, child in self.children[node].items() if name not in TRAINING_STATE]
        return {self.keys[node] for node in visited} - {""}


def read_object_graph(reader: Any, checkpoint: str) -> Variables:
    """Return the variables of an object checkpoint under their names in google-research/bert.

    Unknown variables of the model keep their keys as names.
    """
    graph = ObjectGraph(reader.get_tensor(OBJECT_GRAPH))
    candidates = [graph.find(ROOT, path) for path in ENCODERS]
    encoders = [node for node in candidates if graph.find(node, *EMBEDDINGS["word_embeddings"]) is not None]
    if not encoders:
        raise InputError(
            "An object checkpoint of TensorFlow 2 must contain a BertEncoder of Model Garden, as encoder or model; "
            f"{checkpoint} contains {listed(sorted(graph.children[ROOT]))}. Use Google's TF1 files of the same model, "
            "or a conversion for PyTorch, which --init-from reads directly."
        )
    nodes = _named_objects(graph, encoders[0])
    keys = {name: graph.keys[node] for name, node in nodes.items() if graph.keys[node]}
    for scope, node in nodes.items():
        variables = {name: child for name, child in graph.children[node].items() if name in LAYER_VARIABLES}
        keys |= {f"{scope}/{name}": graph.keys[child] for name, child in variables.items()}
    unnamed_keys = graph.keys_below(ROOT) - set(keys.values())
    model_keys = graph.keys_below(encoders[0]) | graph.keys_below(graph.find(ROOT, *MASKED_LM_HEADS))
    if graph.find(ROOT, PAIR_POOLER) is not None:
        model_keys -= graph.keys_below(graph.find(encoders[0], "_pooler_layer"))
    keys |= {key: key for key in unnamed_keys & model_keys}
    shapes = reader.get_variable_to_shape_map()
    shapes = {name: _matrix_shape(name, shapes[key]) for name, key in keys.items()}

    def read(name: str) -> np.ndarray:
        array = reader.get_tensor(keys[name])
        return (array.T if name == PAIR_WEIGHTS else array).reshape(shapes[name])

    return Variables(shapes, read, sorted(unnamed_keys - model_keys))


def _named_objects(graph: ObjectGraph, encoder: int | None) -> dict[str, int]:
    """Return {name in google-research/bert: object} for all layers, and for variables outside layers."""
    nodes = graph.find_all(encoder, "bert/embeddings", EMBEDDINGS)
    for index in count():
        numbered = f"layer_with_weights-{len(EMBEDDINGS) + index}"
        layer = graph.find(encoder, f"_transformer_layers/{index}", numbered)
        if graph.find(layer, "_attention_layer") is None:
            break
        nodes |= graph.find_all(layer, f"bert/encoder/layer_{index}", TRANSFORMER_LAYER)
    nodes |= graph.find_all(encoder, "bert/pooler", {"dense": ("_pooler_layer", numbered)})
    nodes |= graph.find_all(graph.find(ROOT, *MASKED_LM_HEADS), "cls/predictions", MASKED_LM_HEAD)
    pair_pooler, pair_heads = graph.find(ROOT, PAIR_POOLER), graph.find(ROOT, PAIR_HEADS)
    if pair_pooler is not None:
        nodes["bert/pooler/dense"] = pair_pooler
        for head in graph.children[pair_heads].values() if pair_heads is not None else ():
            if graph.find(head, "dense") == pair_pooler:
                paths = {"output_weights": ("out_proj/kernel",), "output_bias": ("out_proj/bias",)}
                nodes |= graph.find_all(head, "cls/seq_relationship", paths)
    return nodes


def _matrix_shape(name: str, shape: list[int]) -> tuple[int, ...]:
    """Return a variable's shape in google-research/bert. In Keras, attention has a separate axis for the heads."""
    last = name.rpartition("/")[2]
    if name == PAIR_WEIGHTS:
        return tuple(reversed(shape))
    if last == "kernel":
        num_axes_in = 1 if "/self/" in name else len(shape) - 1
        return math.prod(shape[:num_axes_in]), math.prod(shape[num_axes_in:])
    return (math.prod(shape),) if last == "bias" else tuple(shape)
