"""Pieces trained in a process of their own, and the pieces that training starts from."""

import math
import os
import signal
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlm_common.errors import RunFailedError
from tests.fixtures.generated_text import generated_lines
from tokenizer_training.config import NormalizationConfig
from tokenizer_training.corpus_sample import count_words
from tokenizer_training.trainer import MAX_PIECE_CHARACTERS, SEGMENTS, seed_pieces, train_pieces, write_table

needs_proc = pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
CHARACTERS = set("\n".join(generated_lines(2000))) - set(" \n") | {"▁"}


class Table:
    """Counted segments, to train on."""

    def __init__(self, folder: Path, segments: Iterable[tuple[str, int]]):
        write_table(f"{folder}/{SEGMENTS}", segments)
        self.train = partial(train_pieces, str(folder))


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Table:
    counts = count_words(generated_lines(2000), NormalizationConfig())
    return Table(tmp_path_factory.mktemp("table"), sorted(counts.segments.items()))


def children() -> set[int]:
    """List the processes that train for this one."""
    pids = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
            command = (folder / "cmdline").read_text(encoding="utf-8")
        except OSError:  # it has ended
            continue
        if parent == os.getpid() and "train_model" in command:
            pids.add(int(folder.name))
    return pids


@pytest.mark.parametrize("num_pieces", [len(CHARACTERS) + 1, 777])
def test_as_many_pieces_as_asked_for(table, num_pieces):
    trained = table.train(num_pieces)
    pieces = [piece for piece, _ in trained]
    assert len(set(pieces)) == len(pieces) == num_pieces
    assert set(pieces) >= CHARACTERS
    scores = [score for _, score in trained]
    assert scores == sorted(scores, reverse=True)
    assert all(score < 0 for score in scores)
    # The probabilities of the pieces; what is missing was of those that were pruned at last.
    assert 0.5 < sum(map(math.exp, scores)) < 1.1


def test_counts_beyond_32_bits_decide(tmp_path):
    """Counts that wrap to 1 in 32 bits would lose to 1000."""
    letters = [(letter, 1) for letter in "▁abcdef"]
    table = Table(tmp_path, [("▁abc", 2**32 + 1), ("▁def", 1000), *letters])
    assert [piece for piece, _ in table.train(8) if len(piece) > 1] == ["▁abc"]


def test_reserved_strings_do_not_become_pieces(tmp_path):
    table = Table(tmp_path, [("▁word", 50), ("sword", 50), ("▁words", 20), *((letter, 1) for letter in "▁words")])
    assert "▁word" in dict(table.train(7))
    assert "▁word" not in dict(table.train(7, reserved=["▁word", "sword"]))


def test_rounds_are_counted_to_their_end(table):
    shown: list[tuple[int, int]] = []
    table.train(300, on_round=lambda done, total: shown.append((done, total)))
    assert [done for done, _ in shown] == list(range(1, len(shown) + 1))
    assert all(done <= total for done, total in shown)
    totals = [total for _, total in shown]
    assert totals == sorted(totals, reverse=True), "the estimate is never too low"
    assert totals[-1] == len(shown)


@needs_proc
def test_killed_trainer_is_named(table):
    def kill(done: int, total: int) -> None:  # noqa: ARG001
        for child in children():
            os.kill(child, signal.SIGKILL)

    with pytest.raises(RunFailedError, match=r"ended by SIGKILL.*smaller --max-bytes or --vocab-size") as caught:
        table.train(300, on_round=kill)
    assert "\n" not in str(caught.value)
    assert len(table.train(300)) == 300, "the table can be trained on again"


def test_what_sentencepiece_cannot_train_on_is_one_line(tmp_path):
    with pytest.raises(RunFailedError, match="SentencePiece could not") as caught:
        Table(tmp_path, [("a", 1)]).train(0)
    assert "\n" not in str(caught.value)


SEGMENTS_STRATEGY = st.dictionaries(
    st.text(st.sampled_from("ab語😀"), min_size=1, max_size=22), st.integers(1, 4), min_size=1, max_size=12
)


def counted_one_by_one(segments: dict[str, int]) -> dict[str, int]:
    """Count each substring of 2 to 16 characters that occurs twice and is not always followed alike."""
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


@given(SEGMENTS_STRATEGY)
@settings(max_examples=150)
def test_pieces_and_counts_are_those_of_a_count_one_by_one(segments):
    pieces = seeds(segments)
    assert len(dict(pieces)) == len(pieces), "a piece comes twice"
    assert dict(pieces) == counted_one_by_one(segments)


@given(SEGMENTS_STRATEGY, st.integers(1, 20))
def test_those_that_cover_most_come_first(segments, max_pieces):
    coverage = [len(piece) * count for piece, count in seeds(segments)]
    assert coverage == sorted(coverage, reverse=True)
    assert seeds(segments, max_pieces) == seeds(segments)[:max_pieces]


def test_seeds_do_not_depend_on_the_hash_of_strings():
    """Equal coverage is decided by place and length."""
    assert seeds({"abcd": 2, "efgh": 2}) == [
        ("abcd", 2), ("efgh", 2), ("bcd", 2), ("fgh", 2), ("cd", 2), ("gh", 2),
    ]  # fmt: skip
