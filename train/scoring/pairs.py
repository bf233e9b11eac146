"""Minimal pairs of sentences, in BLiMP's form (Warstadt et al. 2020): JSON lines, compressed or not."""

import gzip
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlm_common.errors import InputError
from mlm_common.storage import read_file
from mlm_common.storage.guard import guarded_read

logger = logging.getLogger(__name__)

# Keys of a line, and the fields of `Pair` that they fill; BLiMP has no `linguistics_term` in some copies, but a `UID`.
SENTENCES = ("sentence_good", "sentence_bad")
FIELD, TERMS = "field", ("linguistics_term", "UID")


@dataclass(frozen=True)
class Pair:
    """A sentence that speakers accept, and one nearly like it that they do not; equal in 7 pairs of BLiMP's 67,000."""

    good: str
    bad: str
    field: str
    term: str


def read_pairs(paths: Sequence[str], flag: str = "--minimal-pairs") -> list[Pair]:
    """Read files in BLiMP's form, .gz or not, local or `gs://`; log how many pairs have two equal sentences.

    Raises:
        InputError: a file that is missing or has another form.
    """
    pairs = []
    for path in paths:
        with guarded_read(path, "a file of JSON lines", flag=flag):
            content = read_file(path)
            text = (gzip.decompress(content) if path.endswith(".gz") else content).decode("utf-8-sig")
        for number, line in enumerate(text.split("\n"), 1):  # JSON may have other separators of lines within texts
            if line.strip():
                try:
                    pairs.append(_parse(line))
                except (ValueError, RecursionError) as error:
                    raise InputError(
                        f"{flag} takes lines of JSON with two texts, {' and '.join(SENTENCES)}; {path}, line "
                        f"{number:,}: {error}: {line[:80]}"
                    ) from error
    if not pairs:
        raise InputError(f"{flag} must name files with pairs; {', '.join(paths)} have none.")
    if num_equal := num_equal_pairs(pairs):
        logger.warning(
            "minimal pairs of two equal sentences: %d of %s. Each counts as half right.", num_equal, f"{len(pairs):,}"
        )
    return pairs


def num_equal_pairs(pairs: Sequence[Pair]) -> int:
    return sum(pair.good == pair.bad for pair in pairs)


def _parse(line: str) -> Pair:
    """Make a pair of a line; ValueError, with the reason, for a line of another form."""
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError("no object")
    term = next(filter(None, (_text(row, key) for key in TERMS)), "")
    good, bad = (_text(row, key) for key in SENTENCES)
    missing = [key for key, sentence in zip(SENTENCES, (good, bad), strict=True) if not sentence]
    if missing:
        raise ValueError(f"no {missing[0]}")
    return Pair(good, bad, _text(row, FIELD), term)


def _text(row: dict[str, Any], key: str) -> str:
    value = row.get(key)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"{key} is no text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        surrogate = ord(value[error.start])
        raise ValueError(f"{key} is not valid Unicode: U+{surrogate:04X} is half of a surrogate pair") from error
    return value
