"""The pieces that training starts from, against a count of all substrings."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenizer_training.unigram.sentencepiece_trainer import MAX_PIECE_CHARACTERS, seed_pieces

SEGMENTS = st.dictionaries(
    st.text(st.sampled_from("ab語😀"), min_size=1, max_size=22), st.integers(1, 4), min_size=1, max_size=12
)


def counted_one_by_one(segments: dict[str, int]) -> dict[str, int]:
    """Return the count of each substring of 2 to 16 characters that occurs twice and is not always followed alike."""
    counts: Counter[str] = Counter()
    for segment, count in segments.items():
        for start in range(len(segment)):
            for end in range(start + 2, min(start + MAX_PIECE_CHARACTERS, len(segment)) + 1):
                counts[segment[start:end]] += count
    longer: Counter[str] = Counter()  # the highest count of the substrings with one more character
    for piece, count in counts.items():
        longer[piece[:-1]] = max(longer[piece[:-1]], count)
    return {piece: count for piece, count in counts.items() if count >= 2 and longer[piece] < count}


def seeds(segments: dict[str, int], max_pieces: int = 10**6) -> list[tuple[str, int]]:
    return seed_pieces(list(segments), list(segments.values()), max_pieces)


@given(SEGMENTS)
@settings(max_examples=400, deadline=None)
def test_pieces_and_counts_are_those_of_a_count_one_by_one(segments: dict[str, int]) -> None:
    found = seeds(segments)
    assert len(dict(found)) == len(found), "a piece comes twice"
    assert dict(found) == counted_one_by_one(segments)


@given(SEGMENTS, st.integers(1, 20))
def test_those_that_cover_most_come_first(segments: dict[str, int], max_pieces: int) -> None:
    coverage = [len(piece) * count for piece, count in seeds(segments)]
    assert coverage == sorted(coverage, reverse=True)
    assert seeds(segments, max_pieces) == seeds(segments)[:max_pieces]


@pytest.mark.parametrize(
    ("segments", "expected"),
    [
        ({"▁the": 3, "▁then": 1, "▁thaw": 2}, {"▁the": 4, "▁th": 6, "the": 4, "th": 6, "he": 4, "▁thaw": 2, "thaw": 2,
                                              "haw": 2, "aw": 2}),
        ({"aaa": 1}, {"aa": 2}),
        ({"aaaa": 1, "b": 9}, {"aa": 3, "aaa": 2}),
        ({"ab": 1, "cab": 1}, {"ab": 2}),
        ({"ab": 1, "a": 5, "b": 5}, {}),
        ({"x": 7}, {}),
    ],
)  # fmt: skip
def test_examples(segments: dict[str, int], expected: dict[str, int]) -> None:
    assert dict(seeds(segments)) == expected


def test_no_piece_is_longer_than_sentencepiece_takes() -> None:
    segment = "abcdefghijklmnopqrstuvwxyz"
    pieces = dict(seeds({segment: 5}))
    # Shorter ones are always followed by the same letter, but for those at the end.
    windows = {segment[start : start + 16] for start in range(11)}
    assert set(pieces) == windows | {segment[start:] for start in range(11, 25)}
    assert set(pieces.values()) == {5}


def test_large_counts_are_exact() -> None:
    assert dict(seeds({"ab": 2**50 + 1, "abc": 2})) == {"ab": 2**50 + 3, "abc": 2, "bc": 2}


def test_seeds_do_not_depend_on_the_hash_of_strings() -> None:
    """Equal coverage is decided by place and length."""
    assert seeds({"abcd": 2, "efgh": 2}) == [
        ("abcd", 2), ("efgh", 2), ("bcd", 2), ("fgh", 2), ("cd", 2), ("gh", 2),
    ]  # fmt: skip
