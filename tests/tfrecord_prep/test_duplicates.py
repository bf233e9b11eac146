"""Duplicates: which documents are equal, and which of them stays."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tfrecord_prep.duplicates import HASH_BYTES, are_seen, find_duplicates, hash_document, write_hashes

TEXTS = st.lists(
    st.sampled_from(["a", "b", "c d", "C  D", " c\td\n", "", " \n", "ﬁn", "fin", "ß", "SS", "e"]), max_size=40
)


def seen_in_a_set(documents: Sequence[str]) -> list[bool]:
    """Look each hash up among those before it."""
    seen, flags = {bytes(HASH_BYTES)}, []
    for digest in map(hash_document, documents):
        flags.append(digest in seen and any(digest))
        seen.add(digest)
    return flags


@given(TEXTS)
def test_it_is_what_a_set_finds(documents):
    hashes = np.frombuffer(b"".join(map(hash_document, documents)), np.uint8).reshape(-1, HASH_BYTES)
    assert are_seen(hashes).tolist() == seen_in_a_set(documents)


@given(st.lists(st.binary(min_size=2, max_size=2), max_size=300))
def test_hashes_that_differ_in_any_byte_are_different(tails):
    digests = [tail[:1] + bytes(HASH_BYTES - 2) + tail[1:] for tail in tails]
    seen: set[bytes] = set()
    expected = [any(digest) and (digest in seen or bool(seen.add(digest))) for digest in digests]
    assert are_seen(np.frombuffer(b"".join(digests), np.uint8).reshape(-1, HASH_BYTES)).tolist() == expected


def test_case_compatible_forms_and_white_space_make_no_difference():
    equal = ["The ﬁrst Straße,  ①", " the first\nSTRASSE,\u00a01 "]
    assert len(set(map(hash_document, equal))) == 1
    others = ["", "the first strasse 1", "the first strasse, 2", "thefirst strasse, 1"]
    assert len({hash_document(text) for text in [*equal, *others]}) == 1 + len(others)
    assert hash_document(" \n\u3000") == bytes(HASH_BYTES)


@given(parts=st.lists(st.lists(TEXTS, max_size=3), max_size=4))
def test_partitions_keep_their_flags(parts, tmp_path_factory):
    folder = Path(tmp_path_factory.mktemp("hashes"))
    names: dict[str, list[str]] = {}
    for key, partitions in enumerate(parts):
        names[str(key)] = [f"{key}/{index}" for index in range(len(partitions))]
        for name, documents in zip(names[str(key)], partitions, strict=True):
            write_hashes(str(folder / name.split("/")[0]), name.split("/")[1], documents)
    expected = iter(seen_in_a_set([text for partitions in parts for documents in partitions for text in documents]))
    duplicates = find_duplicates({key: [f"{folder}/{name}" for name in of_key] for key, of_key in names.items()})
    for key, partitions in enumerate(parts):
        for index, documents in enumerate(partitions):
            flags = [next(expected) for _ in documents]
            assert list(duplicates.get(str(key), {}).get(index, b"")) == (flags if any(flags) else [])
