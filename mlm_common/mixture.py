"""Mixtures of several sources of text: the file in which a folder lists its sources, and the sources' weights."""

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
# The prefix of the address of a data set on the Hub, which is accepted instead of a path.
HUB_PREFIX = "hub:"
# Names of sources become part of the names of folders and metrics (`eval_loss_de`), and of NAME=VALUE in flags.
SOURCE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
MIN_WEIGHT = 1e-6  # relative to the sum of all weights


@dataclass(frozen=True)
class MixtureSource:
    """One source of a mixture.

    Attributes:
        train: folder of the training shards, relative to the folder of the mixture.
        validation: folder of the validation shards, relative to the folder of the mixture; None if there are none.
        weight: sampling weight relative to the other sources; None to use the size of the source.
    """

    train: str
    validation: str | None = None
    weight: float | None = None


def write_mixture(folder: str, sources: Mapping[str, MixtureSource]) -> None:
    """Write `folder/mixture.json`, {"format_version", "sources"}, in the order of the sources."""
    record = {"format_version": FORMAT_VERSION, "sources": {name: asdict(source) for name, source in sources.items()}}
    open_folder(folder).write_json(MIXTURE_NAME, record)


def read_mixture(folder: str) -> dict[str, MixtureSource] | None:
    """Read the sources of a folder, local or `gs://`, by name; None if it has no `mixture.json`.

    Raises:
        InputError: the file is not JSON, has a different format version, lacks fields, or has invalid names or weights.
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
        sources = {name: MixtureSource(**fields) for name, fields in record["sources"].items()}
        for source in sources.values():
            if not (isinstance(source.train, str) and isinstance(source.validation, str | None)):
                raise TypeError("its folders must be strings")
    if not sources:
        raise InputError(f"{path} must name at least one source. {hint}")
    check_names(sources, path)
    check_weights({name: source.weight for name, source in sources.items() if source.weight is not None}, path)
    return sources


def named_paths(text: str, flag: str) -> dict[str, list[str]]:
    """Read the value of a flag that takes one path, or several paths as `NAME=PATH …`.

    Returns:
        {name: paths}; {"": [path]} for a single path without a name.
    """
    try:
        words = shlex.split(text) if "=" in text else [text]
    except ValueError:  # a quote that is never closed
        words = []
    name, equals, _ = "".join(words[:1]).partition("=")
    if equals and (SOURCE_NAME.fullmatch(name) or len(words) > 1):
        return _named_lists(words, flag)
    several = text.split()
    if len(several) > 1 and not Path(text).exists() and all(Path(path).exists() for path in several):
        named = " ".join(f"{chr(ord('a') + index)}={path}" for index, path in enumerate(several[:26]))
        raise InputError(f"{flag} must be one path, or several with names, such as {named}; received {text}.")
    if len(words) != 1:
        raise InputError(f"{flag} must be a path, or NAME=PATH for each source; received {text}.")
    return {"": words}


def named_folders(text: str, flag: str) -> dict[str, str]:
    """Read the value of a flag as `named_paths` does, but allow only one folder for each name."""
    return _once_each(named_paths(text, flag), flag)


def named_weights(pairs: Sequence[str], flag: str, names: Collection[str]) -> dict[str, float]:
    """Read the words after a flag, `NAME=X …`, which give a number above 0 for each of the names.

    Returns:
        {name: number} in the order of `names`.

    Raises:
        InputError: a word is not NAME=X, or a name is missing, unknown or given twice.
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
    for name, source_values in values.items():
        if len(source_values) > 1:
            raise InputError(f"{flag} must name each source once; received {name} {len(source_values)} times.")
    return {name: value for name, (value,) in values.items()}


def check_names(names: Sequence[str] | Mapping[str, Any], where: str) -> None:
    for name in names:
        if not SOURCE_NAME.fullmatch(name):
            raise InputError(
                f"In {where} the name of a source must consist of letters, digits, `_`, `-` and `.`, and start with a "
                f"letter or digit; received {name!r}."
            )


def check_weights(weights: Mapping[str, float], where: str) -> None:
    for name, weight in weights.items():
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not (is_number and math.isfinite(weight) and weight > 0):
            raise InputError(
                f"{where} must give each source a weight above 0; received {name}={weight}. To exclude a source, leave "
                "it out."
            )
    if weights and min(weights.values()) < MIN_WEIGHT * sum(weights.values()):
        shown = " ".join(f"{name}={weight}" for name, weight in weights.items())
        raise InputError(
            f"{where} must give each source at least a millionth of the sum of all weights; received {shown}."
        )


def normalized(weights: Mapping[str, float]) -> dict[str, float]:
    """Divide weights above 0 by their sum."""
    total = math.fsum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def sampling_weights(sizes: Mapping[str, float], alpha: float) -> dict[str, float]:
    """Compute weights that are proportional to size^alpha (Conneau et al. 2020) and sum to 1.

    Args:
        sizes: sizes of the sources, above 0, in any unit.
        alpha: 1 samples in proportion to size, and 0 samples all sources equally often. XLM-R used 0.3.
    """
    return normalized({name: size**alpha for name, size in sizes.items()})
