"""Find documents that occur more than once, by comparing hashes of their text.

Two texts count as equal if they are the same after Unicode's NFKC, case folding, and replacing each run of white space
with one space. The first of equal documents is kept, in the order of `in_order_of_precedence`, which starts with the
splits that models are evaluated on. Blank documents are never duplicates.

Workers write one file of hashes per partition to a folder next to the splits. The files stay until all splits are
complete, so an interrupted run does not hash the text again.
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
# Sorting takes three times the memory of the data to be sorted, so the hashes are sorted one sixteenth at a time.
NUM_BUCKETS = 16


def hash_document(text: str) -> bytes:
    """Hash the normalized text; return zeros for a blank text."""
    normalized = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return hashlib.blake2b(normalized.encode(), digest_size=HASH_BYTES).digest() if normalized else bytes(HASH_BYTES)


def hashes_name(index: int, sha256: str) -> str:
    """Return the name of the file with the hashes of partition `index`, whose `partition_sha256` is `sha256`."""
    return f"{index:05d}-{sha256}"


def write_hashes(folder: str, name: str, documents: Iterable[str]) -> None:
    open_folder(folder).write_bytes(name, b"".join(map(hash_document, documents)))


def in_order_of_precedence(mixture: Mixture) -> list[tuple[str, str]]:
    """List (source, split): the validation splits of all sources, then their test splits, then their training splits.

    Within each of these three groups, the sources keep their order.
    """
    parts = [(name, split) for name, corpus in mixture.corpora.items() for split in corpus.split_names]
    return sorted(parts, key=lambda part: [*HELD_OUT_SPLITS, part[1]].index(part[1]))


def texts_compared(mixture: Mixture) -> dict[tuple[str, str], dict[str, str]]:
    """Identify the text that each split is compared with to find duplicates.

    Returns:
        {(source, split): {SOURCE/SPLIT: hash}}. The inner dictionary has the hashes of this split and of all splits
        before it.
    """
    compared: dict[str, str] = {}
    result = {}
    for name, split in in_order_of_precedence(mixture):
        record = record_of_split(mixture.corpora[name].record, split)
        digest = hashlib.sha256(json.dumps(identity(record), sort_keys=True).encode()).hexdigest()
        compared = {**compared, f"{name}/{split}".lstrip("/"): digest[:16]}
        result[name, split] = compared
    return result


def find_duplicates(paths: Mapping[str, Sequence[str]]) -> dict[str, dict[int, bytes]]:
    """Read files of hashes and find the documents that occurred before.

    Args:
        paths: {key: paths of the files by partition number}, in the order of precedence.

    Returns:
        {key: {partition number: flags}}, with one byte per document, 1 for a document that occurred before. Partitions
        without such documents are left out.
    """
    hashes, ends = bytearray(), [0]
    with ThreadPoolExecutor(NUM_READERS) as pool:
        for content in pool.map(read_file, chain.from_iterable(paths.values())):
            hashes += content
            ends.append(len(hashes) // HASH_BYTES)
    is_duplicate = are_seen(np.frombuffer(hashes, np.uint8).reshape(-1, HASH_BYTES))
    flags = (is_duplicate[start:end] for start, end in pairwise(ends))
    flags_by_key = {key: dict(enumerate(islice(flags, len(key_paths)))) for key, key_paths in paths.items()}
    return {
        key: {index: is_copy.tobytes() for index, is_copy in key_flags.items() if is_copy.any()}
        for key, key_flags in flags_by_key.items()
    }


def are_seen(hashes: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return for each hash whether an equal hash comes before it; (num_documents,).

    Args:
        hashes: (num_documents, HASH_BYTES). A hash of zeros, of a blank document, is never a duplicate.
    """
    seen = np.zeros(len(hashes), bool)
    for bucket in range(NUM_BUCKETS):
        numbers = np.flatnonzero(hashes[:, 0] % NUM_BUCKETS == bucket)
        words = hashes[numbers].view(np.uint64)
        order = np.lexsort(words.T)  # stable: the first of equal hashes stays first
        seen[numbers[order[1:]]] = (words[order[1:]] == words[order[:-1]]).all(axis=1)
    return seen & hashes.any(axis=1)
