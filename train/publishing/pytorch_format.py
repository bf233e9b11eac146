"""Export a model as a folder that transformers 4 and 5 open in PyTorch with the auto class of its head.

The weights are renamed and transposed to the layout of the PyTorch class (`train.model.weight_names`). The export does
not need torch. Format: https://huggingface.co/docs/safetensors.
"""

import copy
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from transformers import PretrainedConfig, PreTrainedTokenizerFast
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_NAME

from mlm_common.storage import PARTIAL_SUFFIX
from mlm_common.tokenizer import role_tokens, write_tokenizer
from train.checkpoints.store import write_safetensors
from train.model.architectures import (
    DELTA,
    TRAINING_ONLY,
    architecture_of,
    check_architecture,
    cut_vocabulary,
    not_in_pytorch,
    pytorch_class_of,
    uses_token_types,
    vocabulary_axis,
    with_both_biases,
)
from train.model.weight_names import pytorch_name, to_pytorch, variables_within

# Settings that transformers' BERT tokenizer needs. Without them, the tokenizer would lower-case all text.
CASE_SETTINGS = ("do_lower_case", "strip_accents", "tokenize_chinese_chars")


@dataclass(frozen=True)
class ModelSnapshot:
    """A copy of a TF model and of its training log, which further training does not change.

    Attributes:
        class_name: name of the PyTorch class.
        config: the model's configuration.
        arrays: {name of a weight in TF, prefixed with the model's name: values}.
        step: the step after which the model was copied.
        metrics: all lines of `metrics.jsonl` up to this step.
    """

    class_name: str
    config: PretrainedConfig
    arrays: dict[str, np.ndarray]
    step: int = 0
    metrics: Sequence[dict[str, Any]] = ()


def take_snapshot(model: Any, step: int = 0, metrics: Sequence[dict[str, Any]] = ()) -> ModelSnapshot:
    """Copy a built network and its weights to host memory."""
    check_architecture(model.config)
    arrays = {
        f"{model.name}/{name}": np.asarray(variable.numpy()) for name, variable in variables_within(model).items()
    }
    return ModelSnapshot(pytorch_class_of(model), copy.deepcopy(model.config), arrays, step, list(metrics))


def num_parameters(snapshot: ModelSnapshot, vocabulary_size: int) -> int:
    """Count the parameters of the exported model: no padding of the vocabulary, no weights that only training uses."""
    count = 0
    for name, array in snapshot.arrays.items():
        if {DELTA, TRAINING_ONLY}.isdisjoint(name.split("/")):
            axis = vocabulary_axis(name, snapshot.config.model_type)
            count += array.size if axis is None else array.size // array.shape[axis] * vocabulary_size
    return count


def export_model(
    model: Any,
    tokenizer: PreTrainedTokenizerFast,
    folder: str,
    *,
    model_max_length: int,
    vocabulary_size: int | None = None,
) -> list[str]:
    """Write the model and its tokenizer to a local folder; replace each file atomically, `config.json` last.

    The tokenizer is saved as a `PreTrainedTokenizerFast`, because transformers 4 and 5 then compute the same ids from
    its `tokenizer.json`.

    Args:
        model: a network built by `train.model.build.new_network`, or a snapshot.
        tokenizer: the model's tokenizer.
        folder: the local folder; created if it does not exist.
        model_max_length: the longest input of the model, in tokens; the tokenizer truncates longer texts on request.
        vocabulary_size: number of ids to keep, without the padding of the model's vocabulary. By default all ids are
            kept.

    Returns:
        The names of the files.
    """
    snapshot = model if isinstance(model, ModelSnapshot) else take_snapshot(model)
    return write_model(
        folder,
        pytorch_weights(snapshot, vocabulary_size),
        pytorch_config(snapshot.config, snapshot.class_name, vocabulary_size),
        exported_tokenizer(tokenizer, snapshot.config, model_max_length),
    )


def write_model(
    folder: str, weights: dict[str, np.ndarray], config: PretrainedConfig, tokenizer: PreTrainedTokenizerFast
) -> list[str]:
    """Write a PyTorch model to a local folder; replace files atomically, `config.json` last; return their names.

    Args:
        folder: the local folder; created if it does not exist.
        weights: result of `pytorch_weights`.
        config: result of `pytorch_config`.
        tokenizer: result of `exported_tokenizer`.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".export-", suffix=PARTIAL_SUFFIX) as staging:
        write_safetensors(Path(staging, SAFE_WEIGHTS_NAME), weights, metadata={"format": "pt"})
        write_tokenizer(tokenizer, staging)
        config.save_pretrained(staging)
        paths = sorted(Path(staging).iterdir(), key=lambda path: path.name == CONFIG_NAME)
        for path in paths:
            path.replace(Path(folder, path.name))
    return [path.name for path in paths]


def pytorch_weights(model: Any, vocabulary_size: int | None = None) -> dict[str, np.ndarray]:
    """Return the weights of a network or snapshot, {name in the PyTorch class: float32 array in its layout}.

    Weights for training only are left out, and each delta is added to the weight that it changes. Only the first
    `vocabulary_size` ids are kept; by default all ids.
    """
    snapshot = model if isinstance(model, ModelSnapshot) else take_snapshot(model)
    model_type = snapshot.config.model_type
    left_out = (f"{TRAINING_ONLY}.", *not_in_pytorch(snapshot.class_name, snapshot.config))
    weights: dict[str, np.ndarray] = {}
    for full_name, values in snapshot.arrays.items():
        tf_name = full_name.partition("/")[2]
        name = pytorch_name(tf_name, model_type)
        if name.startswith(left_out):
            continue
        if name in weights:
            raise ValueError(f"Two variables of the TF model have the same name in PyTorch: {name}.")
        array = to_pytorch(tf_name, values, model_type)
        if vocabulary_size is not None:
            array = cut_vocabulary(array, vocabulary_axis(name, model_type), vocabulary_size)
        weights[name] = np.ascontiguousarray(array, dtype=np.float32)
    for delta_name in [name for name in weights if name.startswith(f"{DELTA}.")]:
        name = delta_name.removeprefix(f"{DELTA}.")
        weights[name] = weights[name] + weights.pop(delta_name)
    return with_both_biases(weights, model_type)


def pytorch_config(config: PretrainedConfig, class_name: str, vocabulary_size: int | None = None) -> PretrainedConfig:
    """Return the configuration for a PyTorch class, with `vocabulary_size` ids, by default all ids."""
    config = copy.deepcopy(config)
    config.vocab_size = vocabulary_size or config.vocab_size
    config.architectures = [class_name]
    config.tie_word_embeddings = architecture_of(config).tied
    config.dtype = "float32"
    for name, other in architecture_of(config).same_where_none.items():
        if getattr(config, name) is None:
            setattr(config, name, getattr(config, other))
    return config


def exported_tokenizer(
    tokenizer: PreTrainedTokenizerFast, config: PretrainedConfig, model_max_length: int
) -> PreTrainedTokenizerFast:
    """Return the tokenizer to save with a model, with the model's length limit and the inputs of its architecture."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    token_types = ["token_type_ids"] if uses_token_types(config) else []
    case = {name: tokenizer.init_kwargs[name] for name in CASE_SETTINGS if name in tokenizer.init_kwargs}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=model_max_length,
        model_input_names=["input_ids", *token_types, "attention_mask"],
        clean_up_tokenization_spaces=False,
        **case,
        **role_tokens(tokenizer),
    )
