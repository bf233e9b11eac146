"""Read checkpoints of Google's BERT and ALBERT, in the formats of google-research and of Model Garden."""

import json
import logging
import re
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
from transformers import AlbertTokenizerFast, BertTokenizerFast, PretrainedConfig, PreTrainedTokenizerFast

from mlm_common.errors import InputError
from mlm_common.storage import Folder, folder_and_name, open_folder, read_file
from mlm_common.storage.guard import guarded_read
from mlm_common.tokenizer import special_ids, vocabulary_size
from train import load_tensorflow
from train.model.architectures import check_architecture, with_both_biases
from train.model.configurations import make_config
from train.publishing.google_variables import (
    OBJECT_GRAPH,
    Conversion,
    Variables,
    model_type_of,
    plan_conversion,
    read_object_graph,
)

logger = logging.getLogger(__name__)

INDEX_SUFFIX = ".index"
COMPLETE_CHECKPOINT = "a checkpoint whose files are all complete"
# Suffix of the file with the graph, which is not needed.
META_SUFFIX = ".meta"
ARCHIVE_SUFFIX = ".zip"
# The file in which TensorFlow stores the name of the newest checkpoint in a folder.
STATE_FILE = "checkpoint"
NEWEST = re.compile(r'^model_checkpoint_path: "(?:.*/)?([^/"]+)"', re.MULTILINE)
CONFIG_FILE = re.compile(r".*config.*\.json")
VOCABULARY_FILE = re.compile(r".*vocab.*\.txt|.*\.model")
SENTENCEPIECE_SUFFIX = ".model"
# These settings are required, because the shapes of variables do not determine all of them, and the defaults fit only
# one model.
NEEDED_SETTINGS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size",
    "max_position_embeddings", "type_vocab_size", "hidden_act",
)  # fmt: skip
WORDPIECE_SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@dataclass(frozen=True)
class GoogleCheckpoint:
    """A converted checkpoint.

    Attributes:
        weights: {name in the PyTorch class: float32 array in the layout of that class}.
        class_name: name of the PyTorch class.
        left_out: names of variables that were not converted, because they belong to other heads.
    """

    config: PretrainedConfig
    weights: dict[str, np.ndarray]
    tokenizer: PreTrainedTokenizerFast
    class_name: str
    left_out: list[str]


def read_google_checkpoint(
    checkpoint: str, *, config: str | None = None, vocabulary: str | None = None, do_lower_case: bool | None = None
) -> GoogleCheckpoint:
    """Read a checkpoint with its configuration and vocabulary.

    Args:
        checkpoint: a folder, a .zip of a folder, or the path of a checkpoint's files without `.index`; local or `gs://`.
        config: configuration file. Default: the configuration file in the folder of the checkpoint.
        vocabulary: WordPiece's vocab.txt or SentencePiece's .model. Default: such a file in the folder of the
            checkpoint.
        do_lower_case: whether the model was trained on lower-cased text. Default: taken from `cased` or `uncased` in
            the name of the folder or .zip.

    Raises:
        InputError: a file is missing or damaged, or the files do not belong together.
    """
    with _opened(checkpoint) as (folder, name):
        config_path = config or _only_file(folder, CONFIG_FILE, "--bert-config")
        vocabulary_path = vocabulary or _only_file(folder, VOCABULARY_FILE, "--vocabulary")
        files = [file for file in folder.list_files() if file.startswith(f"{name}.") and not file.endswith(META_SUFFIX)]
        with folder.local_copy(files) as local, _local_file(vocabulary_path, "--vocabulary") as vocabulary_file:
            variables = _variables(Path(local, name), checkpoint)
            model_config = _read_config(config_path, model_type_of(variables.shapes, checkpoint))
            folder_name = Path(folder.path).resolve().name if folder.is_local else PurePosixPath(folder.path).name
            if do_lower_case is None:
                do_lower_case = _find_lower_case((folder_name, PurePosixPath(checkpoint).name), checkpoint)
            tokenizer = _read_tokenizer(vocabulary_file, vocabulary_path, model_config, do_lower_case)
            ids = special_ids(tokenizer)
            model_config.update({"pad_token_id": ids["pad"], "bos_token_id": ids["cls"], "eos_token_id": ids["sep"]})
            model_config.update({f"{name}_token_id": ids[name] for name in ("cls", "sep", "mask")})
            check_architecture(model_config, f"Set {{name}} to {{value}} in {config_path}")
            conversion = plan_conversion(variables.shapes, model_config, checkpoint)
            weights = _read_weights(variables, conversion, model_config)
    class_name = type(model_config).__name__.removesuffix("Config") + conversion.model_class
    left_out = conversion.left_out + variables.left_out
    return GoogleCheckpoint(model_config, weights, tokenizer, class_name, left_out)


@contextmanager
def _opened(checkpoint: str) -> Iterator[tuple[Folder, str]]:
    """Yield the folder of a checkpoint's files, and the prefix of their names; a .zip is unpacked temporarily."""
    if checkpoint.endswith(ARCHIVE_SUFFIX):
        with _local_file(checkpoint, "CHECKPOINT") as archive, tempfile.TemporaryDirectory() as unpacked:
            with guarded_read(checkpoint, "a complete .zip"):
                zipfile.ZipFile(archive).extractall(unpacked)
            folders = sorted({path.parent for path in Path(unpacked).rglob(f"*{INDEX_SUFFIX}")})
            if len(folders) != 1:
                raise InputError(
                    f"A .zip must contain exactly one folder with a checkpoint (*{INDEX_SUFFIX}); {checkpoint} has "
                    f"{len(folders)}."
                )
            folder = open_folder(str(folders[0]))
            yield folder, _newest_checkpoint(folder, checkpoint)
        return
    folder = open_folder(checkpoint)
    if folder.list_files():
        yield folder, _newest_checkpoint(folder, checkpoint)
        return
    folder, name = folder_and_name(checkpoint.rstrip("/"))
    if name + INDEX_SUFFIX not in folder.list_files():
        raise InputError(
            "CHECKPOINT must be a folder, a .zip of a folder, or the path of a checkpoint's files without .index; "
            f"there is no {checkpoint}{INDEX_SUFFIX}."
        )
    yield folder, name


def _newest_checkpoint(folder: Folder, checkpoint: str) -> str:
    files = folder.list_files()
    names = sorted(name.removesuffix(INDEX_SUFFIX) for name in files if name.endswith(INDEX_SUFFIX))
    if len(names) == 1:
        return names[0]
    with guarded_read(folder.path_of(STATE_FILE), "the list of a folder's checkpoints"):
        newest = NEWEST.search(folder.read_text(STATE_FILE)) if STATE_FILE in files else None
    if newest and newest[1] in names:
        logger.info("using the newest of %d checkpoints in %s: %s", len(names), checkpoint, newest[1])
        return newest[1]
    received = f"has {', '.join(names)}. Pass the path of one of them." if names else "has none."
    raise InputError(f"A folder must contain exactly one checkpoint (*{INDEX_SUFFIX}); {checkpoint} {received}")


def _only_file(folder: Folder, pattern: re.Pattern[str], flag: str) -> str:
    names = sorted(name for name in folder.list_files() if pattern.fullmatch(name))
    if len(names) != 1:
        raise InputError(
            f"{folder.path}, the folder of the checkpoint, must contain exactly one file like {pattern.pattern}; it "
            f"has {', '.join(names) or 'none'}. Name the file with {flag}."
        )
    return folder.path_of(names[0])


@contextmanager
def _local_file(path: str, flag: str) -> Iterator[str]:
    folder, name = folder_and_name(path)
    if name not in folder.list_files():
        raise InputError(f"{flag} must name an existing file; there is no {path}.")
    with folder.local_copy([name]) as local:
        yield str(Path(local, name))


def _variables(prefix: Path, checkpoint: str) -> Variables:
    with guarded_read(checkpoint, COMPLETE_CHECKPOINT):
        load_tensorflow()
        import tensorflow as tf

        reader = tf.train.load_checkpoint(str(prefix))
        shapes = {name: tuple(shape) for name, shape in reader.get_variable_to_shape_map().items()}
        if OBJECT_GRAPH in shapes:
            return read_object_graph(reader, checkpoint)
        return Variables(shapes, reader.get_tensor, [])


def _read_config(path: str, model_type: str) -> PretrainedConfig:
    with guarded_read(path, "a file of JSON", flag="--bert-config"):
        settings = json.loads(read_file(path))
    missing = [name for name in NEEDED_SETTINGS if name not in settings] if isinstance(settings, dict) else ["{"]
    if missing:
        raise InputError(f"The configuration of a {model_type} must contain {', '.join(missing)}; {path} does not.")
    wrong = next((name for name in NEEDED_SETTINGS[:-1] if type(settings[name]) is not int or settings[name] < 1), None)
    if wrong is not None:
        raise InputError(f"{wrong} must be a whole number above 0; {path} has {settings[wrong]!r}.")
    with guarded_read(path, f"the configuration of a {model_type}", flag="--bert-config"):
        config = make_config(settings | {"model_type": model_type})
    if config.hidden_size % config.num_attention_heads:
        raise InputError(
            f"num_attention_heads must divide hidden_size; {path} has {config.num_attention_heads} and "
            f"{config.hidden_size}."
        )
    return config


def _find_lower_case(names: tuple[str, ...], checkpoint: str) -> bool:
    """Return whether these folder names contain `uncased`; they must contain either `cased` or `uncased`."""
    answers = {"uncased" in name.lower() for name in names if "cased" in name.lower()}
    if len(answers) != 1:
        raise InputError(
            f"No file name in {checkpoint} contains cased or uncased, so nothing says whether the model's text is "
            "lower-cased. Pass --do-lower-case or --no-do-lower-case."
        )
    return answers.pop()


def _read_tokenizer(
    local_path: str, path: str, config: PretrainedConfig, do_lower_case: bool
) -> PreTrainedTokenizerFast:
    # The tokenizer is loaded from a folder, because the classes of transformers 4 and 5 take different arguments.
    with guarded_read(path, "a vocabulary", flag="--vocabulary"), tempfile.TemporaryDirectory() as folder:
        if path.endswith(SENTENCEPIECE_SUFFIX):
            shutil.copyfile(local_path, Path(folder, "spiece.model"))
            tokenizer = AlbertTokenizerFast.from_pretrained(folder, do_lower_case=do_lower_case)
        else:
            tokens = "".join(f"{token}\n" for token in _read_wordpieces(local_path, path))
            Path(folder, "vocab.txt").write_text(tokens, encoding="utf-8")
            tokenizer = BertTokenizerFast.from_pretrained(folder, do_lower_case=do_lower_case)
    if vocabulary_size(tokenizer) != config.vocab_size:
        raise InputError(
            f"The vocabulary must have {config.vocab_size:,} tokens, as the configuration says; {path} has "
            f"{vocabulary_size(tokenizer):,}. Pass the right one with --vocabulary; if the model's vocabulary was "
            "padded, add lines [unused…]."
        )
    return tokenizer


def _read_wordpieces(local_path: str, path: str) -> list[str]:
    """Read the tokens in the order of their ids; strip each line, as Google's `load_vocab` does.

    If several lines have the same token, the last line counts, as in `load_vocab`. The other lines get a token that
    does not occur in text.
    """
    lines = Path(local_path).read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")
    tokens = [line.strip() for line in lines]
    missing = [token for token in WORDPIECE_SPECIALS if token not in tokens]
    if missing:
        raise InputError(f"A WordPiece vocabulary must contain {', '.join(missing)}; {path} does not.")
    if not any(token.isalpha() and len(token) == 1 for token in tokens):
        raise InputError(f"A WordPiece vocabulary must contain letters; {path} has none, so all text would be [UNK].")
    last_index = {token: index for index, token in enumerate(tokens)}
    if num_repeated := len(tokens) - len(last_index):
        logger.warning(
            "%s has %d lines whose token occurs again in a later line; their ids are never used", path, num_repeated
        )
    return [token if last_index[token] == index else f"[duplicate{index}]" for index, token in enumerate(tokens)]


def _read_weights(variables: Variables, conversion: Conversion, config: PretrainedConfig) -> dict[str, np.ndarray]:
    weights = {}
    for variable, (name, _, is_transposed) in conversion.weights.items():
        with guarded_read(variable, COMPLETE_CHECKPOINT):
            array = variables.read(variable)
        weights[name] = np.ascontiguousarray(array.T if is_transposed else array, dtype=np.float32)
    return with_both_biases(weights, config.model_type)
