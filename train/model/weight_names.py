"""Names and layouts of weights: of a network, as transformers' TF classes name them, and of its PyTorch class.

A network's `tf_bert_for_masked_lm/bert/encoder/layer_._0/output/dense/kernel:0`, (in, out), is PyTorch's
`bert.encoder.layer.0.output.dense.weight`, (out, in). What the rules here miss of an architecture its table has.
"""

from typing import Any

import numpy as np

from train.model.architectures import ARCHITECTURES

# The last part of a name: in PyTorch. All others are the same.
LAST_PARTS = {
    "kernel": "weight",
    "embeddings": "weight",
    "gamma": "weight",
    "beta": "bias",
    "depthwise_kernel": "depthwise.weight",
    "pointwise_kernel": "pointwise.weight",
}
KERNELS = ("kernel", "depthwise_kernel", "pointwise_kernel")
# What old PyTorch checkpoints call the weights of a layer norm.
OLD_LAST_PARTS = {"gamma": "weight", "beta": "bias"}


def variables_within(network: Any) -> dict[str, Any]:
    """Map the name of each of a network's variables, without the name of the network, to the variable."""
    start = f"{network.name}/"  # a model that holds the network adds its own in front
    return {variable.name.partition(start)[2]: variable for variable in network.weights}


def pytorch_name(name: str, model_type: str) -> str:
    """Return the name in the PyTorch class of a variable; as everywhere here, without the name of the network."""
    *path, last = name.removesuffix(":0").replace("_._", "/").split("/")
    # `mlm___cls` is `cls`: two parts of a network have that name in PyTorch.
    parts = [part.rpartition("___")[2] for part in path]
    found = ".".join([*parts, LAST_PARTS.get(last, last)])
    for part, pytorch_part in ARCHITECTURES[model_type].renamed.items():
        found = found.replace(part, pytorch_part)
    return found


def to_pytorch(name: str, array: np.ndarray, model_type: str) -> np.ndarray:
    """Return the weight of that name in PyTorch's layout; it may be a view."""
    if _is_kernel(name):
        array = array.transpose(_axes(array.ndim))
    if _is_depthwise(name, model_type):
        array = array.reshape(-1, 1, *array.shape[2:])  # (channels, 1, …)
    return array


def to_tensorflow(name: str, array: np.ndarray, shape: tuple[int, ...], model_type: str) -> np.ndarray:
    """Return a weight in PyTorch's layout in that of the network's variable of that name and shape."""
    if _is_kernel(name):
        array = array.transpose(np.argsort(_axes(array.ndim)))
    return array.reshape(shape) if _is_depthwise(name, model_type) else array


def _is_kernel(name: str) -> bool:
    return name.removesuffix(":0").rpartition("/")[2] in KERNELS


def _axes(rank: int) -> tuple[int, ...]:
    """Return the axes of a kernel in PyTorch's order: those of one number are reversed, an image's come last."""
    return (3, 2, 0, 1) if rank == 4 else tuple(reversed(range(rank)))


def _is_depthwise(name: str, model_type: str) -> bool:
    return pytorch_name(name, model_type).endswith(ARCHITECTURES[model_type].depthwise)


def of_today(name: str) -> str:
    """Return the name of a weight in a PyTorch checkpoint that may be old."""
    start, dot, last = name.rpartition(".")
    return start + dot + OLD_LAST_PARTS.get(last, last)
