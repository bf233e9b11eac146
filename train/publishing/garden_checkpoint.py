"""Read a TensorFlow 2 checkpoint of Model Garden under the names of google-research/bert.

It contains a graph of objects: the attributes of the root, theirs, and so on down to the variables. They are those of
`BertEncoder`, `BertEncoderV2`, `BertPretrainerV2` and their layers in official/nlp/modeling of tensorflow/models.
"""

import math
from collections.abc import Mapping
from itertools import count
from typing import Any

import numpy as np

from mlm_common.errors import InputError
from train.publishing.google_variables import PAIR_WEIGHTS, Variables, listed

# The name of the graph among the variables, which only a checkpoint of TensorFlow 2 has.
OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
ROOT = 0
# Possible places of a part: its attribute or, in functional models of older checkpoints, its number.
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
# The head for pairs has its own pooler, and the encoder's is not trained.
PAIR_POOLER = "next_sentence.pooler_dense"
PAIR_HEADS = "model/classification_heads"
OF_A_LAYER = ("kernel", "bias", "gamma", "beta")
# Never part of a model.
STATE_OF_TRAINING = ("optimizer", "global_step", "save_counter")


class ObjectGraph:
    """Objects by number: their attributes, which lead to other objects, and the keys of those that are variables."""

    def __init__(self, serialized: bytes):
        from tensorflow.core.protobuf.trackable_object_graph_pb2 import TrackableObjectGraph

        nodes = TrackableObjectGraph.FromString(serialized).nodes
        self.children = [{child.local_name: child.node_id for child in node.children} for node in nodes]
        self.keys = [next((one.checkpoint_key for one in node.attributes), "") for node in nodes]

    def find(self, start: int | None, *paths: str) -> int | None:
        """Return the object at the first of these paths that has one."""
        for path in paths:
            node = start
            for name in filter(None, path.split("/")):
                node = None if node is None else self.children[node].get(name)
            if node is not None:
                return node
        return None

    def find_all(self, start: int | None, scope: str, places: Mapping[str, tuple[str, ...]]) -> dict[str, int]:
        """Return {scope/name of a part: its object} for the parts that exist."""
        found = {f"{scope}/{name}": self.find(start, *paths) for name, paths in places.items()}
        return {name: node for name, node in found.items() if node is not None}

    def keys_below(self, start: int | None) -> set[str]:
        """Return the keys of all variables below an object, without the state of training."""
        found: set[int] = set()
        waiting = [] if start is None else [start]
        while waiting:
            node = waiting.pop()
            if node not in found:
                found.add(node)
                waiting += [child for name, child in self.children[node].items() if name not in STATE_OF_TRAINING]
        return {self.keys[node] for node in found} - {""}


def read_object_graph(reader: Any, checkpoint: str) -> Variables:
    """Name the variables of an object checkpoint as google-research/bert does; variables unknown there keep their keys.

    Args:
        reader: from `tf.train.load_checkpoint`.
        checkpoint: named in errors.

    Raises:
        InputError: it has no encoder like Model Garden's.
    """
    graph = ObjectGraph(reader.get_tensor(OBJECT_GRAPH))
    candidates = [graph.find(ROOT, path) for path in ENCODERS]
    encoders = [node for node in candidates if graph.find(node, *EMBEDDINGS["word_embeddings"]) is not None]
    if not encoders:
        raise InputError(
            "An object checkpoint of TensorFlow 2 must hold a BertEncoder of Model Garden, as encoder or model; in "
            f"{checkpoint} are: {listed(sorted(graph.children[ROOT]))}. Use Google's TF1 files of the same model, or a "
            "conversion for PyTorch, which --init-from reads as it is."
        )
    parts = _parts(graph, encoders[0])
    keys = {name: graph.keys[node] for name, node in parts.items() if graph.keys[node]}
    for part, node in parts.items():
        keys |= {
            f"{part}/{name}": graph.keys[child] for name, child in graph.children[node].items() if name in OF_A_LAYER
        }
    others = graph.keys_below(ROOT) - set(keys.values())
    of_model = graph.keys_below(encoders[0]) | graph.keys_below(graph.find(ROOT, *MASKED_LM_HEADS))
    if graph.find(ROOT, PAIR_POOLER) is not None:
        of_model -= graph.keys_below(graph.find(encoders[0], "_pooler_layer"))
    keys |= {key: key for key in others & of_model}
    shapes = reader.get_variable_to_shape_map()
    shapes = {name: _matrix_shape(name, shapes[key]) for name, key in keys.items()}

    def read(name: str) -> np.ndarray:
        array = reader.get_tensor(keys[name])
        return (array.T if name == PAIR_WEIGHTS else array).reshape(shapes[name])

    return Variables(shapes, read, sorted(others - of_model))


def _parts(graph: ObjectGraph, encoder: int | None) -> dict[str, int]:
    """Return {name in google-research/bert: object} of the layers, and of variables outside layers."""
    parts = graph.find_all(encoder, "bert/embeddings", EMBEDDINGS)
    for index in count():
        numbered = f"layer_with_weights-{len(EMBEDDINGS) + index}"
        layer = graph.find(encoder, f"_transformer_layers/{index}", numbered)
        if graph.find(layer, "_attention_layer") is None:
            break
        parts |= graph.find_all(layer, f"bert/encoder/layer_{index}", TRANSFORMER_LAYER)
    parts |= graph.find_all(encoder, "bert/pooler", {"dense": ("_pooler_layer", numbered)})
    parts |= graph.find_all(graph.find(ROOT, *MASKED_LM_HEADS), "cls/predictions", MASKED_LM_HEAD)
    pair_pooler, pair_heads = graph.find(ROOT, PAIR_POOLER), graph.find(ROOT, PAIR_HEADS)
    if pair_pooler is not None:
        parts["bert/pooler/dense"] = pair_pooler
        for head in graph.children[pair_heads].values() if pair_heads is not None else ():
            if graph.find(head, "dense") == pair_pooler:
                places = {"output_weights": ("out_proj/kernel",), "output_bias": ("out_proj/bias",)}
                parts |= graph.find_all(head, "cls/seq_relationship", places)
    return parts


def _matrix_shape(name: str, shape: list[int]) -> tuple[int, ...]:
    """Return the shape in google-research/bert; in Keras' attention the heads are a separate axis."""
    last = name.rpartition("/")[2]
    if name == PAIR_WEIGHTS:
        return tuple(reversed(shape))
    if last == "kernel":
        num_axes_in = 1 if "/self/" in name else len(shape) - 1
        return math.prod(shape[:num_axes_in]), math.prod(shape[num_axes_in:])
    return (math.prod(shape),) if last == "bias" else tuple(shape)
