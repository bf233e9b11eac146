"""Find the documents whose text was seen before, by hashes of all of them, made in the partitions of the shards.

Texts are equal if they are after Unicode's NFKC, case folding, and with each run of white space as one space. Of equal
documents the first stays, in the order of `in_order_of_precedence`: those that models are evaluated on come first. A
blank document is equal to none. Until all splits are complete the hashes are in a folder beside them: workers anywhere
can write there, and an interrupted run does not repeat them.
"""

import hashlib
import json
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice, pairwise

import numpy as np
from numpy.typing import NDArray

from mlm_common.corpus.config import HELD_OUT_SPLITS
from mlm_common.corpus.identity import identity, record_of_split
from mlm_common.corpus.sources import Mixture
from mlm_common.storage import open_folder, read_file

FOLDER_NAME = ".duplicates"
HASH_BYTES = 16
NUM_READERS = 8
# Sorting takes three times the memory of the hashes, so a sixteenth of them is sorted at a time.
NUM_BUCKETS = 16


def hash_document(text: str) -> bytes:
    """Hash the normalized text; zeros for a blank one."""
    normalized = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return hashlib.blake2b(normalized.encode(), digest_size=HASH_BYTES).digest() if normalized else bytes(HASH_BYTES)


def hashes_name(index: int, sha256: str) -> str:
    """Name the file of the hashes of partition `index`, whose content has this hash."""
    return f"{index:05d}-{sha256}"


def write_hashes(folder: str, name: str, documents: Iterable[str]) -> None:
    open_folder(folder).write_bytes(name, b"".join(map(hash_document, documents)))


def in_order_of_precedence(mixture: Mixture) -> list[tuple[str, str]]:
    """List (source, split): validation of all sources, in their order, then test, then the splits to train on."""
    parts = [(name, split) for name, corpus in mixture.corpora.items() for split in corpus.split_names]
    return sorted(parts, key=lambda part: [*HELD_OUT_SPLITS, part[1]].index(part[1]))


def texts_compared(mixture: Mixture) -> dict[tuple[str, str], dict[str, str]]:
    """Identify, for each (source, split), the text that decides what is left out of it: {SOURCE/SPLIT: hash}."""
    compared: dict[str, str] = {}
    result = {}
    for name, split in in_order_of_precedence(mixture):
        record = record_of_split(mixture.corpora[name].record, split)
        digest = hashlib.sha256(json.dumps(identity(record), sort_keys=True).encode()).hexdigest()
        compared = {**compared, f"{name}/{split}".lstrip("/"): digest[:16]}
        result[name, split] = compared
    return result


def find_duplicates(paths: Mapping[str, Sequence[str]]) -> dict[str, dict[int, bytes]]:
    """Read files of hashes, {key: paths by partition}, in order, and find the documents that were seen before.

    Return for each key and number of a partition with such documents a byte for each document: 1 if it was seen.
    """
    hashes, ends = bytearray(), [0]
    with ThreadPoolExecutor(NUM_READERS) as pool:
        for content in pool.map(read_file, chain.from_iterable(paths.values())):
            hashes += content
            ends.append(len(hashes) // HASH_BYTES)
    is_duplicate = are_seen(np.frombuffer(hashes, np.uint8).reshape(-1, HASH_BYTES))
    flags = (is_duplicate[start:end] for start, end in pairwise(ends))
    by_key = {key: dict(enumerate(islice(flags, len(of_key)))) for key, of_key in paths.items()}
    return {key: {index: one.tobytes() for index, one in of_key.items() if one.any()} for key, of_key in by_key.items()}


def are_seen(hashes: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return for each hash, (num_documents, HASH_BYTES), whether one before is equal; (num_documents,)."""
    seen = np.zeros(len(hashes), bool)
    for bucket in range(NUM_BUCKETS):
        numbers = np.flatnonzero(hashes[:, 0] % NUM_BUCKETS == bucket)
        words = hashes[numbers].view(np.uint64)
        order = np.lexsort(words.T)  # stable: of equal hashes the first stays first
        seen[numbers[order[1:]]] = (words[order[1:]] == words[order[:-1]]).all(axis=1)
    return seen & hashes.any(axis=1)
