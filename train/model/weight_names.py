"""Convert names and layouts of weights between our networks and PyTorch classes.

Our names are the names in transformers' TF classes. The weight
`tf_bert_for_masked_lm/bert/encoder/layer_._0/output/dense/kernel:0`, (in, out), is PyTorch's
`bert.encoder.layer.0.output.dense.weight`, (out, in). `Architecture` lists the exceptions to the rules here.
"""

from typing import Any

import numpy as np

from train.model.architectures import ARCHITECTURES

# {last part of a name: last part in PyTorch}. All other last parts are equal in PyTorch.
LAST_PARTS = {
    "kernel": "weight",
    "embeddings": "weight",
    "gamma": "weight",
    "beta": "bias",
    "depthwise_kernel": "depthwise.weight",
    "pointwise_kernel": "pointwise.weight",
}
KERNELS = ("kernel", "depthwise_kernel", "pointwise_kernel")
# The names of a layer norm's weights in old PyTorch checkpoints.
OLD_LAST_PARTS = {"gamma": "weight", "beta": "bias"}


def variables_within(network: Any) -> dict[str, Any]:
    """Return {name without the network's name: variable} of all weights of a network."""
    start = f"{network.name}/"  # preceded by the name of the model that contains the network, if any
    return {variable.name.partition(start)[2]: variable for variable in network.weights}


def pytorch_name(name: str, model_type: str) -> str:
    """Convert the name of a variable to PyTorch's name. Here and below, `name` does not include the network's name."""
    *path, last = name.removesuffix(":0").replace("_._", "/").split("/")
    # `mlm___cls` becomes `cls`, a name that two parts of a network share in PyTorch.
    parts = [part.rpartition("___")[2] for part in path]
    converted = ".".join([*parts, LAST_PARTS.get(last, last)])
    for part, pytorch_part in ARCHITECTURES[model_type].renamed.items():
        converted = converted.replace(part, pytorch_part)
    return converted


def to_pytorch(name: str, array: np.ndarray, model_type: str) -> np.ndarray:
    """Convert a weight to PyTorch's layout. The result may be a view."""
    if _is_kernel(name):
        array = array.transpose(_axes(array.ndim))
    if _is_depthwise(name, model_type):
        array = array.reshape(-1, 1, *array.shape[2:])  # (channels, 1, …)
    return array


def to_tensorflow(name: str, array: np.ndarray, shape: tuple[int, ...], model_type: str) -> np.ndarray:
    """Convert a weight from PyTorch's layout to the layout of the variable with this name and shape."""
    if _is_kernel(name):
        array = array.transpose(np.argsort(_axes(array.ndim)))
    return array.reshape(shape) if _is_depthwise(name, model_type) else array


def _is_kernel(name: str) -> bool:
    return name.removesuffix(":0").rpartition("/")[2] in KERNELS


def _axes(rank: int) -> tuple[int, ...]:
    """Return the axes of a kernel in PyTorch's order: reversed, or for images (out, in, height, width)."""
    return (3, 2, 0, 1) if rank == 4 else tuple(reversed(range(rank)))


def _is_depthwise(name: str, model_type: str) -> bool:
    return pytorch_name(name, model_type).endswith(ARCHITECTURES[model_type].depthwise)


def of_today(name: str) -> str:
    """Return the current PyTorch name of a weight, whose name in the checkpoint may be old."""
    start, dot, last = name.rpartition(".")
    return start + dot + OLD_LAST_PARTS.get(last, last)
