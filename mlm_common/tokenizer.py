"""Load, save and hash tokenizers, and look up their special tokens and which tokens start a word."""

import codecs
import hashlib
import io
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlm_common.errors import InputError
from mlm_common.hub.retries import hub_error, one_line
from mlm_common.storage import check_folder_or_hub, local_or_hub, open_folder
from mlm_common.storage.guard import LFS_POINTER_START, guarded_read, start_of_file, unreadable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerFast

# The special tokens of tokenizers trained here, by id. The RoBERTa family expects padding at id 1, and the tokens for
# the start and end of a text at 0 and 2.
SPECIAL_TOKENS = {"cls": "[CLS]", "pad": "<pad>", "sep": "[SEP]", "unk": "<unk>", "mask": "[MASK]"}
# The tokens of the 256 bytes, which spell characters that have no token. SentencePiece and `tokenizers` use these
# names.
BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(256))
# The tokens that pad a vocabulary to a round size.
UNUSED_TOKEN = re.compile(r"<unused\d+>")
# The class that `tokenizer_config.json` names, and the name of this class in transformers 5, which version 4 cannot
# load.
FAST_TOKENIZER_CLASS = "PreTrainedTokenizerFast"
NEWER_FAST_TOKENIZER_CLASS = "TokenizersBackend"
# Keys of `tokenizer_config.json` in which transformers 5 records how it loaded the tokenizer.
KEYS_OF_LOADING = ("backend", "is_local", "local_files_only")
NO_TRUNCATION_OR_PADDING = {"truncation": None, "padding": None}
WORD_STARTS_FILE = "word_starts.npy"
# Names of the files that `save_tokenizer` writes. The files of the vocabulary depend on the class of the tokenizer.
TOKENIZER_FILES = re.compile(
    r"(tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab)\.json|vocab\.txt|merges\.txt|[\w.-]+\.model"
    r"|chat_template\.jinja|word_starts\.npy"
)
VOCABULARY_FILES = re.compile(r"tokenizer\.json|vocab\.json|vocab\.txt|[\w.-]+\.model|tekken\.json")
TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
# Files that train_unigram.py writes next to a tokenizer: how it was made, and its quality.
RECORD_FILE = "training.json"
REPORT_FILE = "report.json"
PLOT_FILE = "report.png"
WHITE_SPACE = " \t\n\v\f\r"


def load_tokenizer(name_or_path: str, *, needs_special_tokens: bool = True) -> "PreTrainedTokenizerFast":
    """Load a fast tokenizer.

    Args:
        name_or_path: a local or `gs://` folder, or the id of a model on the Hub.
        needs_special_tokens: whether the tokenizer must have five different tokens for cls, pad, sep, unk and mask.

    Raises:
        InputError: there is no such tokenizer, it is not a fast tokenizer, it lacks a special token, or two special
            tokens share an id.
        HubAwayError: the Hub cannot be reached.
    """
    check_folder_or_hub(name_or_path)
    with local_or_hub(name_or_path) as name:
        tokenizer = _load(name, name_or_path)
    longest = tokenizer.model_max_length
    if not isinstance(longest, int | float) or longest != longest // 1:
        raise InputError(
            f"model_max_length in the tokenizer_config.json of {name_or_path} must be a whole number of tokens; it is "
            f"{longest!r}. Correct it, or save the tokenizer again."
        )
    if not tokenizer.is_fast:
        raise InputError(
            f"The tokenizer must be a fast one, with a {TOKENIZER_FILE}; {name_or_path} is a slow one. Convert it, or "
            "train one with train_unigram.py."
        )
    missing = [name for name, token_id in special_ids(tokenizer).items() if token_id is None]
    if missing and needs_special_tokens:
        raise InputError(
            f"The tokenizer must have cls, pad, sep, unk and mask tokens; {name_or_path} lacks {', '.join(missing)}. "
            "Train one with train_unigram.py."
        )
    if needs_special_tokens:
        _check_different(tokenizer, name_or_path)
    return tokenizer


def _check_different(tokenizer: "PreTrainedTokenizerFast", shown_name: str) -> None:
    """Check that no two of the five special tokens share an id, because code recognizes them by their ids.

    Raises:
        InputError: two of them share an id.
    """
    roles: dict[int, list[str]] = {}
    for name, token_id in special_ids(tokenizer).items():
        roles.setdefault(token_id, []).append(name)
    if shared := [f"{' and '.join(names)} are both id {token_id}" for token_id, names in roles.items() if names[1:]]:
        raise InputError(
            f"The tokenizer must have five different tokens for cls, pad, sep, unk and mask; in {shown_name} "
            f"{', '.join(shared)}. Add tokens, such as `tokenizer.add_special_tokens({{'pad_token': '<pad>'}})`, and "
            "save it, or train one with train_unigram.py."
        )


def _load(name: str, shown_name: str) -> "PreTrainedTokenizerFast":
    """Load a tokenizer. If its folder names a class that is known, do not import all of transformers."""
    if Path(name).is_dir():
        _check_files(Path(name), shown_name)
    try:
        config = Path(name, CONFIG_FILE)
        class_name = json.loads(config.read_text("utf-8")).get("tokenizer_class") if config.is_file() else None
        if class_name in (FAST_TOKENIZER_CLASS, NEWER_FAST_TOKENIZER_CLASS):
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(name)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(name)
    except Exception as error:  # a missing or malformed file can raise nearly any exception
        _check_contents(Path(name), shown_name)
        raise hub_error(f"The tokenizer {shown_name} cannot be loaded: {one_line(error)}", error) from error


def _check_files(folder: Path, shown_name: str) -> None:
    """Check that a folder has a vocabulary without a byte-order mark, and no Git LFS pointer in place of a file."""
    if not any(VOCABULARY_FILES.fullmatch(path.name) for path in folder.iterdir()):
        nested = next((path.name for path in sorted(folder.iterdir()) if Path(path, TOKENIZER_FILE).is_file()), None)
        hint = f"; did you mean {shown_name.rstrip('/')}/{nested}?" if nested else "."
        raise InputError(f"There is no tokenizer in {shown_name}: it has no {TOKENIZER_FILE}{hint}")
    for path in sorted(folder.iterdir()):
        is_read = VOCABULARY_FILES.fullmatch(path.name) or path.name == CONFIG_FILE
        if is_read and (start_of_file(path) or b"").startswith(LFS_POINTER_START):
            raise InputError(
                f"{shown_name}/{path.name} must be a file of a tokenizer; it is a Git LFS pointer. Fetch the file "
                "itself with `git lfs pull`."
            )
    words = Path(folder, "vocab.txt")
    if not Path(folder, TOKENIZER_FILE).exists() and (start_of_file(words) or b"").startswith(codecs.BOM_UTF8):
        raise InputError(
            f"{shown_name}/vocab.txt must start with a token; it starts with a byte-order mark. Remove the mark with "
            f"`sed -i '1s/^\\xef\\xbb\\xbf//' {words.name}`."
        )


def _check_contents(folder: Path, shown_name: str) -> None:
    """Look for the damaged file of a tokenizer that cannot be loaded.

    Raises:
        InputError: a file is damaged; the message names the first damaged file.
    """
    from tokenizers import Tokenizer

    names = [path.name for path in sorted(folder.iterdir())] if folder.is_dir() else []
    for name in [name for name in names if TOKENIZER_FILES.fullmatch(name) and name.endswith(".json")]:
        try:
            content = json.loads((folder / name).read_text("utf-8"))
            if not isinstance(content, dict | list):
                raise TypeError("it is not a JSON object")
            if name == TOKENIZER_FILE:
                Tokenizer.from_file(str(folder / name))
        except Exception as error:  # `tokenizers` raises nothing more specific
            raise unreadable(f"{shown_name.rstrip('/')}/{name}", "a file of a tokenizer", error) from error


def plain_text_tokenizer_json(tokenizer_json: str) -> str:
    """Return a `tokenizer.json` with the same ids, but with special tokens that no text can produce.

    `encode_special_tokens` of `tokenizers` is not enough: a unigram model has the special tokens in its vocabulary, so
    it still finds them in text. Here they are renamed with a hash of the tokenizer, which no text contains. BPE merges
    that produce or use a special token are removed.

    Args:
        tokenizer_json: content of `tokenizer.json`.

    Raises:
        InputError: `tokenizers` cannot load the result.
    """
    from tokenizers import Tokenizer

    settings = json.loads(tokenizer_json)
    special_tokens = {token["content"] for token in settings["added_tokens"] if token["special"]}
    not_in_text = hashlib.sha256(tokenizer_json.encode()).hexdigest()

    def renamed(token: str) -> str:
        return not_in_text + token if token in special_tokens else token

    for token in settings["added_tokens"]:
        token["content"] = renamed(token["content"])
    model = settings["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {renamed(token): index for token, index in vocabulary.items()}
    else:
        model["vocab"] = [[renamed(token), score] for token, score in vocabulary]
    if model.get("unk_token"):
        model["unk_token"] = renamed(model["unk_token"])
    if "merges" in model:
        prefix = model.get("continuing_subword_prefix") or ""
        model["merges"] = [merge for merge in model["merges"] if special_tokens.isdisjoint(_tokens_of(merge, prefix))]
    settings["truncation"] = settings["padding"] = settings["post_processor"] = None
    changed = json.dumps(settings, ensure_ascii=False)
    try:
        Tokenizer.from_str(changed)
    except Exception as error:  # `tokenizers` raises nothing more specific
        names = ", ".join(sorted(special_tokens))
        raise InputError(
            f"No text may produce the special tokens of the tokenizer ({names}), but `tokenizers` cannot load its "
            f"model without them: {error}. Train one with train_unigram.py, or remove what refers to them from the "
            "model."
        ) from error
    return changed


def _tokens_of(merge: list[str] | str, prefix: str) -> tuple[str, str, str]:
    left, right = merge.split(" ", 1) if isinstance(merge, str) else merge
    return left, right, left + right[len(prefix) :]


def special_ids(tokenizer: "PreTrainedTokenizerFast") -> dict[str, int]:
    """Return the ids of the special tokens, with the keys cls, pad, sep, unk and mask."""
    return {name: getattr(tokenizer, f"{name}_token_id") for name in SPECIAL_TOKENS}


def role_tokens(tokenizer: "PreTrainedTokenizerFast") -> dict[str, Any]:
    """Return the arguments of a tokenizer's class that name its special tokens, including those without a role."""
    added = tokenizer.added_tokens_decoder

    def as_added(token: str) -> Any:
        return added.get(tokenizer.convert_tokens_to_ids(token), token)

    roles = {f"{name}_token": getattr(tokenizer, f"{name}_token") for name in (*SPECIAL_TOKENS, "bos", "eos")}
    # Special tokens without a role have these names in transformers 4 and 5.
    others = getattr(tokenizer, "additional_special_tokens", None) or getattr(tokenizer, "extra_special_tokens", None)
    named = {name: as_added(token) for name, token in roles.items() if token is not None}
    return named | ({"additional_special_tokens": list(map(as_added, others))} if others else {})


def special_token_ids(tokenizer: "PreTrainedTokenizerFast") -> set[int]:
    """Return the ids of all special tokens, including those without a role."""
    added = tokenizer.added_tokens_decoder
    return {token_id for token_id in added if added[token_id].special} | set(tokenizer.all_special_ids)


def vocabulary_size(tokenizer: "PreTrainedTokenizerFast") -> int:
    """Return the number of rows that an embedding needs: the largest id + 1, because ids may have gaps."""
    return max(tokenizer.get_vocab().values()) + 1


def tokenizer_sha256(tokenizer: "PreTrainedTokenizerFast") -> str:
    """Return a SHA-256, in hexadecimal, of everything that determines which ids a text gets, and of the special ids.

    Saving, loading, truncation and padding do not change the hash.
    """
    # `tokenizers` may change the last bit of a score when it reads its own file, so scores are rounded to six decimals.
    backend = json.loads(tokenizer.backend_tokenizer.to_str(), parse_float=lambda digits: f"{float(digits):.6f}")
    if _adds_nothing(backend["post_processor"]):  # transformers 5 adds such a post-processor where there is none
        backend["post_processor"] = None
    record = {"backend": backend | NO_TRUNCATION_OR_PADDING, "special_ids": special_ids(tokenizer)}
    return hashlib.sha256(json.dumps(record, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _adds_nothing(post_processor: dict[str, Any] | None) -> bool:
    """Return whether a post-processor only numbers the texts of a pair, which `tokenizers` does by default."""
    sequences = [{"Sequence": {"id": name, "type_id": number}} for number, name in enumerate("AB")]
    nothing = {"type": "TemplateProcessing", "single": sequences[:1], "pair": sequences, "special_tokens": {}}
    return post_processor in (None, nothing)


def save_tokenizer(tokenizer: "PreTrainedTokenizerFast", folder: str) -> None:
    """Save the files of a tokenizer and its `word_starts` to a local or `gs://` folder. Each file is all or nothing."""
    import numpy as np

    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    starts = word_starts(tokenizer)
    destination = open_folder(folder)
    if starts is None:
        destination.delete_files([WORD_STARTS_FILE])  # an earlier tokenizer may have left one
    with tempfile.TemporaryDirectory() as temporary_folder:
        write_tokenizer(tokenizer, temporary_folder)
        if starts is not None:
            np.save(Path(temporary_folder, WORD_STARTS_FILE), starts, allow_pickle=False)
        for path in sorted(Path(temporary_folder).iterdir()):
            destination.write_bytes(path.name, path.read_bytes())


def write_tokenizer(tokenizer: "PreTrainedTokenizerFast", folder: str) -> None:
    """Write the files of a tokenizer to a local folder in the format of transformers 4, which 5 also reads."""
    tokenizer.save_pretrained(folder)
    path, roles_path = Path(folder, CONFIG_FILE), Path(folder, SPECIAL_TOKENS_FILE)
    config = {key: value for key, value in json.loads(path.read_text("utf-8")).items() if key not in KEYS_OF_LOADING}
    if config.get("tokenizer_class") == NEWER_FAST_TOKENIZER_CLASS:
        config["tokenizer_class"] = FAST_TOKENIZER_CLASS
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    _write_json(path, config)
    if not roles_path.exists():
        roles = {name: token for name, token in config.items() if re.fullmatch(r"(?!add_).*_tokens?", name)}
        _write_json(roles_path, roles)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file with the formatting of transformers."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")


def word_starts(tokenizer: "PreTrainedTokenizerFast") -> "NDArray[np.bool_] | None":
    """Return for each id whether its token starts a word; None if the tokens do not show where words start.

    How a token shows that it starts a word depends on the tokenizer:

    - Metaspace: the token starts with the mark of a space (`▁`).
    - ByteLevel: the token starts with white space (`Ġ`, `Ċ`).
    - WordPiece: the token lacks the prefix that marks the continuation of a word (`##`).

    Word-level models, BPE that marks the ends of words (`</w>`), and tokenizers that drop spaces do not show where
    words start.

    Special tokens start a word. `<unk>` does not start a word if the mark is a token by itself, because the mark then
    also precedes `<unk>`. Tokens of single bytes and ids without a token do not start a word. The first word of a text
    may lack the mark, so callers must treat the token after a special token as the start of a word.

    Returns:
        An array with one truth value per id, (vocabulary_size,), or None.
    """
    import numpy as np

    settings = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary = tokenizer.get_vocab()
    marks = _marks(settings)
    begins_word = (lambda token: token.startswith(tuple(marks))) if marks else _lacks_prefix(settings["model"])
    if begins_word is None:
        return None
    starts = np.zeros(max(vocabulary.values()) + 1, np.bool_)
    for token, token_id in vocabulary.items():
        starts[token_id] = begins_word(token)
    starts[sorted(special_token_ids(tokenizer))] = True
    if tokenizer.unk_token_id is not None and any(mark in vocabulary for mark in marks):
        starts[tokenizer.unk_token_id] = False
    return starts


def load_word_starts(folder: str) -> "NDArray[np.bool_] | None":
    """Load the table of `word_starts` that was saved with a tokenizer, (vocabulary_size,), if there is one.

    Raises:
        InputError: the table is damaged.
    """
    import numpy as np

    files = open_folder(folder)
    if not files.exists(WORD_STARTS_FILE):
        return None
    path, hint = files.path_of(WORD_STARTS_FILE), "Delete it, or save the tokenizer again."
    with guarded_read(path, "one truth value per id, as saved with the tokenizer", hint=hint):
        starts = np.lib.format.read_array(io.BytesIO(files.read_bytes(WORD_STARTS_FILE)), allow_pickle=False)
        if starts.dtype != np.bool_ or starts.ndim != 1:
            raise ValueError(f"it contains {starts.dtype} values of shape {starts.shape}")
    return starts


def _marks(settings: dict[str, Any]) -> str:
    """Return the characters that mark a space in the tokens; none for WordPiece."""
    for component in (*steps_of(settings["pre_tokenizer"]), *steps_of(settings["decoder"])):
        if component["type"] == "Metaspace":
            return component["replacement"]
        if component["type"] == "ByteLevel":
            from tokenizers import pre_tokenizers

            byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            return "".join(token for token, _ in byte_level.pre_tokenize_str(WHITE_SPACE))
    return ""


def steps_of(component: dict[str, Any] | None) -> list[dict[str, Any]]:
    """List the steps of a component of `tokenizer.json`, which may be missing, a single step, or a nested sequence."""
    if component is None or component["type"] != "Sequence":
        return [component] if component else []
    (members,) = (value for value in component.values() if isinstance(value, list))
    return [step for member in members for step in steps_of(member)]


def _lacks_prefix(model: dict[str, Any]) -> Callable[[str], bool] | None:
    prefix = model.get("continuing_subword_prefix")
    # With byte fallback the missing prefix shows nothing: tokens of single bytes have none, even inside a word.
    if not prefix or model.get("byte_fallback"):
        return None
    return lambda token: not token.startswith(prefix)
