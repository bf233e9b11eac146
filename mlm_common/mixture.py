"""Several sources of text in one folder: the manifest that names them, and the weights by which they are sampled."""

import json
import math
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlm_common.errors import InputError
from mlm_common.storage import open_folder
from mlm_common.storage.guard import guarded_read

FORMAT_VERSION = 1
MIXTURE_NAME = "mixture.json"
# Begins the address of a data set on the Hub, instead of a path.
HUB_PREFIX = "hub:"
# A name is part of the names of folders and of figures (`eval_loss_de`), and of NAME=VALUE on the command line.
SOURCE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
MIN_WEIGHT = 1e-6  # of the sum of all weights


@dataclass(frozen=True)
class MixtureSource:
    """One source of a mixture.

    train, validation: folders of shards, relative to that of the mixture; validation is None where nothing is held out.
    weight: relative to those of the other sources; None leaves it to the size of the source.
    """

    train: str
    validation: str | None = None
    weight: float | None = None


def write_mixture(folder: str, sources: Mapping[str, MixtureSource]) -> None:
    """Write `folder/mixture.json`, {"format_version", "sources"}, in the order of the sources."""
    record = {"format_version": FORMAT_VERSION, "sources": {name: asdict(one) for name, one in sources.items()}}
    open_folder(folder).write_json(MIXTURE_NAME, record)


def read_mixture(folder: str) -> dict[str, MixtureSource] | None:
    """Read the sources of a folder, local or `gs://`, by name; None if it has no `mixture.json`.

    Raises:
        InputError: the file is not JSON, of another format version, or lacks fields; names or weights that do not suit.
    """
    files = open_folder(folder)
    path = files.path_of(MIXTURE_NAME)
    if not files.exists(MIXTURE_NAME):
        return None
    hint = "Prepare the shards again with --sources."
    with guarded_read(path, "the sources of a mixture, as JSON", hint=hint):
        record = json.loads(files.read_text(MIXTURE_NAME))
        if (version := record["format_version"]) != FORMAT_VERSION:
            raise InputError(f"This version reads format_version {FORMAT_VERSION}; {path} has {version!r}. {hint}")
        sources = {name: MixtureSource(**one) for name, one in record["sources"].items()}
        if not all(isinstance(one.train, str) and isinstance(one.validation, str | None) for one in sources.values()):
            raise TypeError("its folders must be texts")
    if not sources:
        raise InputError(f"{path} must name at least one source. {hint}")
    check_names(sources, path)
    check_weights({name: one.weight for name, one in sources.items() if one.weight is not None}, path)
    return sources


def named_paths(text: str, flag: str) -> dict[str, list[str]]:
    """Read the value of a flag that is one path, or several as `NAME=PATH …`: {name: paths}, {"": [path]} of one."""
    try:
        words = shlex.split(text) if "=" in text else [text]
    except ValueError:  # a quote without its other half
        words = []
    name, equals, _ = "".join(words[:1]).partition("=")
    if equals and (SOURCE_NAME.fullmatch(name) or len(words) > 1):
        return _named_lists(words, flag)
    several = text.split()
    if len(several) > 1 and not Path(text).exists() and all(Path(path).exists() for path in several):
        named = " ".join(f"{chr(ord('a') + index)}={path}" for index, path in enumerate(several[:26]))
        raise InputError(f"{flag} takes one path, or several with names, such as {named}; received {text}.")
    if len(words) != 1:
        raise InputError(f"{flag} must be a path, or NAME=PATH for each source; received {text}.")
    return {"": words}


def named_folders(text: str, flag: str) -> dict[str, str]:
    """Read `named_paths` of one folder each."""
    return _once_each(named_paths(text, flag), flag)


def named_weights(pairs: Sequence[str], flag: str, names: Collection[str]) -> dict[str, float]:
    """Read the words after a flag, `NAME=X …`: a number above 0 for each of the names, in their order.

    Raises:
        InputError: a word of another form; a name that is missing, unknown or given twice.
    """
    weights = _once_each(_named_lists(pairs, flag, float), flag)
    if weights.keys() != set(names):
        raise InputError(f"{flag} must name each source once ({', '.join(names)}); received {', '.join(weights)}.")
    check_weights(weights, flag)
    return {name: weights[name] for name in names}


def _named_lists(pairs: Sequence[str], flag: str, read: Callable[[str], Any] = str) -> dict[str, list[Any]]:
    values: dict[str, list[Any]] = {}
    for pair in pairs:
        name, _, text = pair.partition("=")
        try:
            value = read(text) if text else None
        except ValueError:
            value = None
        if value is None:
            raise InputError(f"{flag} must be NAME=VALUE for each source; received {pair!r}.")
        values.setdefault(name, []).append(value)
    check_names(values, flag)
    return values


def _once_each(values: Mapping[str, list[Any]], flag: str) -> dict[str, Any]:
    for name, of_name in values.items():
        if len(of_name) > 1:
            raise InputError(f"{flag} must name each source once; received {name} {len(of_name)} times.")
    return {name: value for name, (value,) in values.items()}


def check_names(names: Sequence[str] | Mapping[str, Any], where: str) -> None:
    for name in names:
        if not SOURCE_NAME.fullmatch(name):
            rule = "must name sources by letters, digits, `_`, `-` and `.`, and begin with a letter or digit"
            raise InputError(f"{where} {rule}; received {name!r}.")


def check_weights(weights: Mapping[str, float], where: str) -> None:
    for name, weight in weights.items():
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not (is_number and math.isfinite(weight) and weight > 0):
            rule = "must give each source a weight above 0: leave out a source that is not to be used"
            raise InputError(f"{where} {rule}; received {name}={weight}.")
    if weights and min(weights.values()) < MIN_WEIGHT * sum(weights.values()):
        shown = " ".join(f"{name}={weight}" for name, weight in weights.items())
        raise InputError(f"{where} must give each source a millionth of the sum or more; received {shown}.")


def normalized(weights: Mapping[str, float]) -> dict[str, float]:
    """Divide weights above 0 by their sum."""
    total = math.fsum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def sampling_weights(sizes: Mapping[str, float], alpha: float) -> dict[str, float]:
    """Compute weights in proportion to size^alpha (Conneau et al. 2020), which sum to 1.

    Args:
        sizes: of the sources, above 0, in any unit.
        alpha: 1 samples in proportion to size, 0 samples all sources alike; XLM-R used 0.3.
    """
    return normalized({name: size**alpha for name, size in sizes.items()})
