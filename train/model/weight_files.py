"""Files of weights: PyTorch's or TensorFlow's safetensors and TensorFlow's h5, read without the class that wrote them.

Format of h5: https://www.tensorflow.org/tutorials/keras/save_and_load. transformers 4 writes a group for each part of a
network, with a data set for each weight; files that are shards have the data sets without groups.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import h5py
import numpy as np
import tf_keras
from safetensors.tensorflow import load_file

from mlm_common.errors import InputError
from mlm_common.storage.guard import guarded_read
from train.model.pretrained_files import SAFETENSORS, WeightsFile, find_file
from train.model.weight_names import of_today, pytorch_name, to_pytorch

H5 = "weights of TensorFlow's h5 format"
# Maximum number of bytes of names in one attribute of an h5 file. Keras splits longer lists into numbered attributes.
MAX_ATTRIBUTE_BYTES = 64_000

Arrays = dict[str, np.ndarray]


def read_weights(folder_or_hub_id: str, weights: WeightsFile, model_type: str) -> Arrays:
    """Read {name in PyTorch: array in PyTorch's layout} of a checkpoint; names in old checkpoints become current names.

    Raises:
        InputError: a file is missing or damaged.
    """
    is_h5 = ".h5" in Path(weights.path).name
    read, kind = (_read_h5, H5) if is_h5 else (_read_safetensors, SAFETENSORS)
    arrays: Arrays = {}
    for path in _shards(folder_or_hub_id, weights.path, is_h5) if weights.is_index else [weights.path]:
        with guarded_read(path, kind):
            arrays |= read(path)
    if weights.layout == "pytorch":
        return {of_today(name): array for name, array in arrays.items()}
    if is_h5 and not weights.is_index:  # paths in such a file begin with the names of group and network
        arrays = {path.split("/", 2)[-1]: array for path, array in arrays.items()}
    return {pytorch_name(name, model_type): to_pytorch(name, array, model_type) for name, array in arrays.items()}


def _shards(folder_or_hub_id: str, index_path: str, is_h5: bool) -> Iterator[str]:
    with guarded_read(index_path, f"an index of {'h5' if is_h5 else 'safetensors'} files"):
        names = set(json.loads(Path(index_path).read_bytes())["weight_map"].values())
        if not names or any(Path(name).name != name for name in names):
            raise ValueError("its weight_map must name files in the same folder")
    for name in sorted(names):
        path = find_file(folder_or_hub_id, name)
        if path is None:
            raise InputError(f"{folder_or_hub_id} lacks {name}, which its {Path(index_path).name} names.")
        yield path


def _read_safetensors(path: str) -> Arrays:
    return {name: np.asarray(tensor) for name, tensor in load_file(path).items()}  # NumPy's reader has no bfloat16


def _read_h5(path: str) -> Arrays:
    """Read {path in the file: array}."""
    arrays: Arrays = {}

    def read(name: str, item: h5py.Group | h5py.Dataset) -> None:
        if isinstance(item, h5py.Dataset):
            arrays[name] = np.asarray(item[()])

    with h5py.File(path, "r") as file:
        file.visititems(read)
    return arrays


def write_h5(path: Path, weights: Mapping[str, np.ndarray]) -> None:
    """Write {name that begins with the network's name: weight} as Keras does, so that transformers 4 can read it."""
    parts: dict[str, Arrays] = {}
    for name, array in weights.items():
        parts.setdefault(name.split("/")[1], {})[name] = array
    tables = [name for name in weights if name.endswith("/embeddings:0")]  # transformers looks for tables in every part
    with h5py.File(path, "w") as file:
        file.attrs.update(backend="tensorflow", keras_version=tf_keras.__version__)
        _write_names(file, "layer_names", parts)
        for part, arrays in parts.items():
            for name, array in arrays.items():
                file[f"{part}/{name}"] = array
        for part, arrays in parts.items():
            _write_names(file[part], "weight_names", dict.fromkeys([*arrays, *tables]))
            for name in tables:
                if name not in arrays:
                    file[f"{part}/{name}"] = file[f"{name.split('/')[1]}/{name}"]  # a link


def _write_names(group: h5py.Group, attribute: str, names: Iterable[str]) -> None:
    encoded = np.array([name.encode() for name in names])
    num_attributes = -(-encoded.nbytes // MAX_ATTRIBUTE_BYTES)
    if num_attributes == 1:
        group.attrs[attribute] = encoded
        return
    for index, names_of_attribute in enumerate(np.array_split(encoded, num_attributes)):
        group.attrs[f"{attribute}{index}"] = names_of_attribute
