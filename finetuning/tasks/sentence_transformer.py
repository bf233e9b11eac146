"""Read the settings of models in sentence-transformers' format, and compute vectors as their modules do.

An unsupported module or setting causes an error that names it.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mlm_common.errors import InputError
from mlm_common.storage.guard import guarded_read
from train.model.pretrained_files import find_file

if TYPE_CHECKING:
    import tensorflow as tf

SETTINGS, MODULES = "config_sentence_transformers.json", "modules.json"
# Files with the settings of the transformer; the first existing file is read. Only very old models do not have the
# first file.
KINDS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
TRANSFORMER_SETTINGS = tuple(f"sentence_{kind}_config.json" for kind in KINDS)
# {setting of older models: pooling}, in the order in which the vectors of several poolings are concatenated.
OLD_POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid")
# Names of the prompts of queries and of passages; the first existing prompt is used.
QUERY_PROMPTS, PASSAGE_PROMPTS = ("query",), ("document", "passage", "corpus")
DOT, COSINE = "dot", "cosine"


@dataclass(frozen=True)
class Normalize:
    """Scales vectors to length 1."""

    identity = "Normalize"

    def apply(self, vectors: "tf.Tensor") -> "tf.Tensor":
        from finetuning.tasks.contrast import unit

        return unit(vectors)


@dataclass(frozen=True)
class Dense:
    """A linear layer and an activation.

    Attributes:
        weight: (width of the output, width of the input).
        bias: (width of the output,), or None.
        activation: one of `ACTIVATIONS`.
    """

    weight: NDArray[np.float32]
    bias: NDArray[np.float32] | None
    activation: str

    @property
    def identity(self) -> list[str]:
        arrays = (self.weight, self.bias) if self.bias is not None else (self.weight,)
        return [self.activation, *(hashlib.sha256(array.tobytes()).hexdigest() for array in arrays)]

    def apply(self, vectors: "tf.Tensor") -> "tf.Tensor":
        import tensorflow as tf

        activations = {"Tanh": tf.tanh, "ReLU": tf.nn.relu, "SiLU": tf.nn.silu, "Sigmoid": tf.sigmoid}
        activations |= {"Identity": tf.identity, "GELU": tf.nn.gelu}
        products = tf.matmul(vectors, self.weight, transpose_b=True)
        return activations[self.activation](products if self.bias is None else products + self.bias)


@dataclass(frozen=True)
class SentenceModel:
    """How a model computes vectors of texts.

    Attributes:
        transformer: subfolder of the transformer; empty if it is in the model's folder itself.
        poolings: pooling modes, whose vectors are concatenated.
        includes_prompt: whether the prompt's tokens are also pooled.
        layers: layers applied after pooling.
        prompts: texts that are prepended to queries and to passages.
        max_length: maximum number of tokens per text; None if the tokenizer's settings decide.
        is_lower: whether texts are converted to lower case.
        truncate_dim: use only the first N numbers of a vector; None means all numbers.
        similarity: how vectors are compared, `cosine` or `dot`.
    """

    transformer: str
    poolings: tuple[str, ...]
    includes_prompt: bool
    layers: tuple[Dense | Normalize, ...]
    prompts: tuple[str, str]
    max_length: int | None
    is_lower: bool
    truncate_dim: int | None
    similarity: str

    @property
    def identity(self) -> list[Any]:
        """Everything that determines the vector of a passage, apart from transformer and tokenizer, as JSON values."""
        settings = [self.prompts[1], self.max_length, self.is_lower, self.truncate_dim]
        return [self.poolings, self.includes_prompt, [layer.identity for layer in self.layers], *settings]

    def check_widths(self, hidden_size: int, name: str) -> None:
        """Check that each Dense layer's input width is the width of the vectors that it receives.

        Args:
            hidden_size: width of the transformer's states.
            name: name of the model, used in error messages.
        """
        width = hidden_size * len(self.poolings)
        for layer in self.layers:
            if isinstance(layer, Dense):
                if layer.weight.shape[1] != width:
                    raise InputError(
                        f"--model: a Dense layer of {name} must take vectors of width {width}, because the hidden size "
                        f"is {hidden_size} and the pooling {' and '.join(self.poolings)}; it takes width "
                        f"{layer.weight.shape[1]}. Use another model."
                    )
                width = layer.weight.shape[0]

    def vectors(self, states: "tf.Tensor", mask: "tf.Tensor", prompt_length: "tf.Tensor") -> "tf.Tensor":
        """Compute vectors, float32 (texts, width).

        Args:
            states: states of the transformer, (texts, length, hidden).
            mask: 1 for tokens, 0 for padding, (texts, length).
            prompt_length: number of tokens of the prompt, including the special tokens before it; 0 without a prompt.
        """
        import tensorflow as tf

        states = tf.cast(states, tf.float32)
        if not self.includes_prompt:
            mask *= tf.cast(tf.range(tf.shape(mask)[1]) >= prompt_length, mask.dtype)
        vectors = tf.concat([pooled(states, mask, mode) for mode in self.poolings], axis=-1)
        for layer in self.layers:
            vectors = layer.apply(vectors)
        return vectors[:, : self.truncate_dim]


def pooled(states: "tf.Tensor", mask: "tf.Tensor", mode: str) -> "tf.Tensor":
    """Pool states to (texts, hidden).

    Args:
        states: (texts, length, hidden).
        mask: 1 for tokens to pool, else 0, (texts, length).
        mode: a pooling of `OLD_POOLINGS`.
    """
    import tensorflow as tf

    length = tf.shape(mask)[1]
    if mode == "cls":
        return tf.gather(states, tf.argmax(mask, axis=1, output_type=tf.int32), batch_dims=1)
    if mode == "lasttoken":
        from_end = tf.argmax(mask[:, ::-1], axis=1, output_type=tf.int32)
        return tf.gather(states, length - 1 - from_end, batch_dims=1)
    weights = tf.cast(mask, tf.float32)[..., tf.newaxis]
    if mode == "max":
        return tf.reduce_max(tf.where(weights > 0, states, -np.inf), axis=1)
    if mode == "weightedmean":
        weights *= tf.cast(tf.range(1, length + 1), tf.float32)[tf.newaxis, :, tf.newaxis]
    total, weight = tf.reduce_sum(states * weights, axis=1), tf.maximum(tf.reduce_sum(weights, axis=1), 1e-9)
    return total / (tf.sqrt(weight) if mode == "mean_sqrt_len_tokens" else weight)


def read_sentence_model(folder: str, name: str) -> SentenceModel:
    """Read the settings of a model in a local folder or on the Hub.

    Args:
        folder: local folder or Hub id.
        name: name of the model, used in error messages.

    Raises:
        InputError: the model does not embed texts, or a module or setting is not supported.
    """
    modules = read_json(folder, MODULES, list)
    if modules is None:
        raise InputError(f"--model: {name} does not embed texts. Train it with finetuning/run_embedding.py first.")
    refuse = _Refusals(name)
    modules = [refuse.module(module) for module in modules]
    kinds = [kind for kind, _ in modules]
    if kinds[:2] != ["Transformer", "Pooling"]:
        raise refuse.error("modules", ", ".join(kinds), "start with Transformer and Pooling")
    (_, transformer), (_, pooling), *layers = modules
    settings, pooling_settings = read_json(folder, SETTINGS) or {}, read_json(folder, f"{pooling}/config.json") or {}
    refuse.other(
        SETTINGS,
        settings,
        {"__version__", "prompts", "default_prompt_name", "truncate_dim", "similarity_fn_name"},
        {"model_type": "SentenceTransformer"},
    )
    similarity = settings.get("similarity_fn_name") or COSINE
    if similarity not in (COSINE, DOT):
        raise refuse.error("similarity_fn_name", similarity, "be cosine or dot")
    length, is_lower = _read_transformer(folder, transformer, refuse)
    for setting, number in (("max_seq_length", length), ("truncate_dim", settings.get("truncate_dim"))):
        if number is not None and (type(number) is not int or number < 1):
            raise refuse.error(setting, number, "be a whole number above 0")
    sizes = {"word_embedding_dimension", "embedding_dimension"}
    refuse.other(f"{pooling}/config.json", pooling_settings, {*OLD_POOLINGS, *sizes, "pooling_mode", "include_prompt"})
    return SentenceModel(
        transformer,
        _poolings(pooling_settings, refuse),
        pooling_settings.get("include_prompt", True),
        tuple(_read_layer(folder, kind, path, refuse) for kind, path in layers if kind != "Dropout"),
        _prompts(settings, refuse),
        length,
        is_lower,
        settings.get("truncate_dim"),
        similarity,
    )


class _Refusals:
    """Raises errors about unsupported modules and settings of a model."""

    def __init__(self, model: str):
        self.model = model

    def error(self, setting: str, value: Any, rule: str) -> InputError:
        """Return the error for a setting that breaks a rule."""
        text = value if isinstance(value, str) else json.dumps(value)
        return InputError(f"--model: {setting} of {self.model} must {rule}; it is {text[:100]}. Use another model.")

    def module(self, module: Any) -> tuple[str, str]:
        """Return the kind and the folder of an entry of `modules.json`."""
        if not isinstance(module, dict):
            raise self.error("each module", module, "be an object with a type and a path")
        full_name = str(module.get("type"))
        kind = full_name.rpartition(".")[2]
        supported = ("Transformer", "Pooling", "Dense", "Normalize", "Dropout")
        if not full_name.startswith("sentence_transformers.") or kind not in supported or module.get("kwargs"):
            raise self.error("each module", full_name, f"be one of sentence-transformers' {', '.join(supported)}")
        return kind, str(module.get("path") or "")

    def other(
        self, file: str, settings: Mapping[str, Any], supported: set[str], only: Mapping[str, Any] | None = None
    ) -> None:
        """Raise InputError if there are unsupported settings.

        Args:
            file: file with the settings, used in error messages.
            settings: settings to check. Empty settings are accepted.
            supported: settings that may have any value.
            only: {setting: its only supported value}.
        """
        for key, value in settings.items():
            if key in (only or {}):
                if value not in (None, (only or {})[key]):
                    raise self.error(f"{key} in {file}", value, f"be {json.dumps((only or {})[key])}")
            elif key not in supported and value not in (None, {}, [], "", False):
                raise self.error(f"{key} in {file}", value, "not be set")


def read_json(folder: str, file: str, kind: type[dict] | type[list] = dict) -> Any:
    """Read a JSON file of a model, which must contain a value of this kind; return None if the file does not exist."""
    path = find_file(folder, file)
    if path is None:
        return None
    with guarded_read(path, "a JSON file"):
        content = json.loads(Path(path).read_text(encoding="utf-8-sig"))
        if not isinstance(content, kind):
            raise ValueError(f"it does not hold {'an object' if kind is dict else 'a list'}")
        return content


def inside(path: str, file: str) -> str:
    """Return the path of a file in the subfolder `path`; an empty `path` means no subfolder."""
    return f"{path}/{file}" if path else file


def _read_transformer(folder: str, path: str, refuse: _Refusals) -> tuple[int | None, bool]:
    """Read the maximum number of tokens per text (None if not set), and whether texts are converted to lower case."""
    settings: dict[str, Any] = {}
    for name in TRANSFORMER_SETTINGS:
        file = inside(path, name)
        if settings := read_json(folder, file) or {}:
            break
    text = {"method": "forward", "method_output_name": "last_hidden_state"}
    refuse.other(
        file,
        settings,
        {"max_seq_length", "do_lower_case", "unpad_inputs"},
        {
            "transformer_task": "feature-extraction",
            "modality_config": {"text": text},
            "module_output_name": "token_embeddings",
        },
    )
    return settings.get("max_seq_length"), bool(settings.get("do_lower_case"))


def _poolings(settings: Mapping[str, Any], refuse: _Refusals) -> tuple[str, ...]:
    setting: Any = settings.get("pooling_mode")
    if setting is None:
        setting = [mode for key, mode in OLD_POOLINGS.items() if settings.get(key)] or ["mean"]
    modes = tuple(setting) if isinstance(setting, list) else (setting,)
    if unknown := [mode for mode in modes if mode not in OLD_POOLINGS.values()]:
        raise refuse.error("pooling_mode", unknown[0], f"be one of {', '.join(OLD_POOLINGS.values())}")
    return modes


def _prompts(settings: Mapping[str, Any], refuse: _Refusals) -> tuple[str, str]:
    """Return the prompts of queries and of passages: the prompts with the usual names, else the default prompt."""
    setting: Any = settings.get("prompts") or {}
    if not isinstance(setting, dict):
        raise refuse.error("prompts", setting, "map names to texts")
    prompts: dict[Any, str] = {name: str(prompt) for name, prompt in setting.items() if prompt is not None}
    default = settings.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise refuse.error("default_prompt_name", default, "be the name of a prompt")

    def first(names: Sequence[str]) -> str:
        return next((prompts[name] for name in names if name in prompts), prompts.get(default, ""))

    return first(QUERY_PROMPTS), first(PASSAGE_PROMPTS)


def _read_layer(folder: str, kind: str, path: str, refuse: _Refusals) -> Dense | Normalize:
    if kind == "Normalize":
        return Normalize()
    if kind != "Dense":
        raise refuse.error("each module after Pooling", kind, "be Dense, Normalize or Dropout")
    settings, file = read_json(folder, inside(path, "config.json")) or {}, inside(path, "config.json")
    name = "sentence_embedding"
    refuse.other(
        file,
        settings,
        {"in_features", "out_features", "bias", "activation_function"},
        {"module_input_name": name, "module_output_name": name},
    )
    activation = settings.get("activation_function", "torch.nn.modules.activation.Tanh")
    kind = str(activation).rpartition(".")[2]
    if not str(activation).startswith("torch.") or kind not in ACTIVATIONS:
        raise refuse.error(f"activation_function in {file}", activation, f"be torch's {', '.join(ACTIVATIONS)}")
    weights = find_file(folder, inside(path, "model.safetensors"))
    if weights is None:
        raise refuse.error(f"the weights of {path}", "missing", "be in model.safetensors; save it with PyTorch again")
    from safetensors.numpy import load_file

    with guarded_read(weights, "a safetensors file"):
        arrays = {key: value.astype(np.float32) for key, value in load_file(weights).items()}
        weight = arrays["linear.weight"]
        return Dense(weight, arrays["linear.bias"] if settings.get("bias", True) else None, kind)
