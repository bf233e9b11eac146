"""What models are scored on: words of a text, and minimal pairs of sentences."""

import bisect
import gzip
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mlm_common.errors import InputError
from mlm_common.storage import read_file

# A character of Chinese or Japanese, or else letters and digits up to what is none.
CHARACTER = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
WORD = re.compile(f"[{CHARACTER}]|[^\\W{CHARACTER}]+")


@dataclass(frozen=True)
class Pair:
    """A sentence that speakers accept, and one nearly like it that they do not (Warstadt et al. 2020)."""

    good: str
    bad: str
    field: str
    term: str


class Word(NamedTuple):
    """A word of a text by the places of its characters."""

    document: int
    start: int
    stop: int


def read_pairs(paths: Sequence[str], flag: str = "--minimal-pairs") -> list[Pair]:
    """Read files in BLiMP's form: JSON lines with `sentence_good` and `sentence_bad`, .gz or not, local or `gs://`.

    Raises:
        InputError: a file that is missing or has another form.
    """
    pairs = []
    for path in paths:
        try:
            content = read_file(path)
            lines = (gzip.decompress(content) if path.endswith(".gz") else content).decode("utf-8").splitlines()
        except (OSError, EOFError, UnicodeDecodeError) as error:
            raise InputError(f"{flag} must name readable files; {path}: {error}") from error
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                good, bad = row["sentence_good"], row["sentence_bad"]
                pairs.append(Pair(good, bad, row.get("field", ""), row.get("linguistics_term", row.get("UID", ""))))
                is_pair = isinstance(good, str) and isinstance(bad, str) and good != bad
            except (ValueError, KeyError, TypeError, AttributeError):
                is_pair = False
            if not is_pair:
                raise InputError(
                    f"{flag} takes lines of JSON with two different texts, sentence_good and sentence_bad; "
                    f"{path}, line {number}: {line[:80]}"
                )
    if not pairs:
        raise InputError(f"{flag} must name files with pairs; {', '.join(paths)} have none.")
    return pairs


def draw_words(documents: Sequence[str], num_words: int, seed: int) -> list[Word]:
    """Draw different words of the documents, all with the same probability; all words where there are fewer."""
    spans = [[match.span() for match in WORD.finditer(document)] for document in documents]
    ends = np.cumsum([len(of_document) for of_document in spans])
    total = int(ends[-1]) if len(ends) else 0
    if not total:
        raise InputError("--text must have words; none was found.")
    drawn = np.random.default_rng(seed).choice(total, size=min(num_words, total), replace=False)
    words = []
    for number in np.sort(drawn).tolist():
        document = bisect.bisect_right(ends, number)
        words.append(Word(document, *spans[document][number - int(ends[document])]))  # from the end
    return words


@dataclass(frozen=True)
class Material:
    """What every model is asked: words of `documents`, and pairs; either may be empty."""

    documents: Sequence[str]
    words: Sequence[Word]
    pairs: Sequence[Pair]

    @property
    def sentences(self) -> list[str]:
        """The sentences of the pairs, the good one of each first."""
        return [sentence for pair in self.pairs for sentence in (pair.good, pair.bad)]
