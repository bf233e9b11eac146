"""Minimal pairs of sentences, in BLiMP's format (Warstadt et al. 2020): JSON lines, compressed or not."""

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

# Keys of a line, in the order of the fields of `Pair`. Some copies of BLiMP have `UID` instead of `linguistics_term`.
SENTENCES = ("sentence_good", "sentence_bad")
FIELD, TERMS = "field", ("linguistics_term", "UID")


@dataclass(frozen=True)
class Pair:
    """A sentence that speakers accept, and a similar one that they reject.

    In seven of BLiMP's 67,000 pairs, the two sentences are equal.
    """

    good: str
    bad: str
    field: str
    term: str


def read_pairs(paths: Sequence[str], flag: str = "--minimal-pairs") -> list[Pair]:
    """Read files in BLiMP's format, .gz or not, local or `gs://`; warn of pairs of two equal sentences.

    Raises:
        InputError: a file is missing or is not in BLiMP's format.
    """
    pairs = []
    for path in paths:
        with guarded_read(path, "a file of JSON lines", flag=flag):
            content = read_file(path)
            text = (gzip.decompress(content) if path.endswith(".gz") else content).decode("utf-8-sig")
        for number, line in enumerate(text.split("\n"), 1):  # JSON strings may contain other line separators
            if line.strip():
                try:
                    pairs.append(_parse(line))
                except (ValueError, RecursionError) as error:
                    raise InputError(
                        f"{flag} takes lines of JSON with two texts, {' and '.join(SENTENCES)}; {path}, line "
                        f"{number:,}: {error}: {line[:80]}"
                    ) from error
    if not pairs:
        raise InputError(f"{flag} must name files that contain pairs; {', '.join(paths)} have none.")
    if num_equal := num_equal_pairs(pairs):
        logger.warning(
            "%d of %s minimal pairs have two equal sentences. Each counts as half right.", num_equal, f"{len(pairs):,}"
        )
    return pairs


def num_equal_pairs(pairs: Sequence[Pair]) -> int:
    return sum(pair.good == pair.bad for pair in pairs)


def _parse(line: str) -> Pair:
    """Parse a line; raise a ValueError with the reason if it is invalid."""
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
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
        raise ValueError(f"{key} is not a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        surrogate = ord(value[error.start])
        raise ValueError(f"{key} is not valid Unicode: U+{surrogate:04X} is half of a surrogate pair") from error
    return value
