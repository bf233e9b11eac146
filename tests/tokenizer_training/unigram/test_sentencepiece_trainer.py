"""Pieces trained in a process of their own: as many as asked for, and no trace of a process that was stopped."""

import math
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlm_common.errors import RunFailedError
from tests.fixtures.generated_text import generated_lines
from tokenizer_training.unigram.normalization import NormalizationConfig
from tokenizer_training.unigram.sentencepiece_trainer import SegmentTable, TooManyPiecesError, _num_rounds_left
from tokenizer_training.unigram.word_counts import count_words

CHARACTERS = set("\n".join(generated_lines(2000))) - set(" \n") | {"▁"}


@pytest.fixture(scope="module")
def table() -> Iterator[SegmentTable]:
    counts = count_words(generated_lines(2000), NormalizationConfig())
    with SegmentTable(sorted(counts.segments.items())) as table:
        yield table


@pytest.fixture
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, empty."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def children() -> set[int]:
    """Return the processes that train for this one."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            command = (folder / "cmdline").read_text()
        except OSError:  # it has ended
            continue
        if parent == os.getpid() and "train_model" in command:
            found.add(int(folder.name))
    return found


@pytest.mark.parametrize("num_pieces", [len(CHARACTERS) + 1, 100, 777, 1500])
def test_as_many_pieces_as_asked_for(table: SegmentTable, num_pieces: int) -> None:
    trained = table.train(num_pieces)
    pieces = [piece for piece, _ in trained]
    assert len(set(pieces)) == len(pieces) == num_pieces
    assert set(pieces) >= CHARACTERS
    scores = [score for _, score in trained]
    assert scores == sorted(scores, reverse=True)
    assert all(score < 0 for score in scores)
    # The probabilities of the pieces; what is missing was of those that were pruned at last.
    assert 0.5 < sum(map(math.exp, scores)) < 1.1


def test_same_table_gives_the_same_pieces(table: SegmentTable) -> None:
    assert table.train(300) == table.train(300)


def test_largest_number_of_the_error_can_be_had_and_one_more_cannot() -> None:
    counts = count_words(generated_lines(200, num_words=200), NormalizationConfig())
    with SegmentTable(sorted(counts.segments.items())) as table:
        with pytest.raises(TooManyPiecesError) as caught:
            table.train(5000)
        largest = caught.value.largest
        assert largest > 150
        assert len(table.train(largest)) == largest
        with pytest.raises(TooManyPiecesError) as caught:
            table.train(largest + 1)
        assert caught.value.largest == largest


def test_counts_decide() -> None:
    letters = [(letter, 1) for letter in "▁abcdef"]
    for frequent, rare in (("▁abc", "▁def"), ("▁def", "▁abc")):
        with SegmentTable([(frequent, 1000), (rare, 2), *letters]) as table:
            longest = [piece for piece, _ in table.train(8) if len(piece) > 1]
        assert longest == [frequent]


def test_reserved_strings_do_not_become_pieces() -> None:
    segments = [("▁word", 50), ("sword", 50), ("▁words", 20), *((letter, 1) for letter in "▁words")]
    with SegmentTable(segments) as table:
        assert "▁word" in dict(table.train(7))
        assert "▁word" not in dict(table.train(7, reserved=["▁word", "sword"]))


def test_rounds_are_counted_to_their_end(table: SegmentTable) -> None:
    shown: list[tuple[int, int]] = []
    table.train(300, on_round=lambda done, total: shown.append((done, total)))
    assert [done for done, _ in shown] == list(range(1, len(shown) + 1))
    assert all(done <= total for done, total in shown)
    totals = [total for _, total in shown]
    assert totals == sorted(totals, reverse=True), "the estimate is never too low"
    assert totals[-1] == len(shown)


@pytest.mark.parametrize(
    ("num_pieces", "num_rounds", "last", "left"),
    [
        (1000, 1, 1000, 1),
        (1000, 2, 1000, 0),
        (1000, 2, 750, 0),
        (1000, 1, 749, 3),
        (1000, 2, 562, 2),
        (1000, 2, 561, 4),
    ],
)
def test_rounds_left(num_pieces: int, num_rounds: int, last: int, left: int) -> None:
    assert _num_rounds_left(num_pieces, num_rounds, last) == left


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGSEGV])
def test_killed_trainer_is_named(table: SegmentTable, stop: signal.Signals) -> None:
    def kill(done: int, total: int) -> None:  # noqa: ARG001
        for child in children():
            os.kill(child, stop)

    with pytest.raises(RunFailedError, match=rf"ended by {stop.name}.*smaller --max-bytes or --vocab-size") as caught:
        table.train(300, on_round=kill)
    assert "\n" not in str(caught.value)
    assert len(table.train(300)) == 300, "the table can be trained on again"


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_interrupted_training_leaves_no_process_and_no_files(temporary_folder: Path) -> None:
    def interrupt(done: int, total: int) -> None:  # noqa: ARG001
        assert len(children()) == 1
        assert len(list(temporary_folder.iterdir())) == 1
        raise KeyboardInterrupt

    counts = count_words(generated_lines(500), NormalizationConfig())
    with SegmentTable(counts.pop_segments()) as table:
        with pytest.raises(KeyboardInterrupt):
            table.train(300, on_round=interrupt)
        assert not children()
        assert not list(temporary_folder.glob("*/model*")), "it was let come to its end"
    assert not list(temporary_folder.iterdir())


def test_failure_while_writing_leaves_no_files(temporary_folder: Path) -> None:
    def segments() -> Iterator[tuple[str, int]]:
        yield "▁a", 1
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        SegmentTable(segments())
    assert not list(temporary_folder.iterdir())


def test_what_sentencepiece_cannot_train_on_is_one_line() -> None:
    with SegmentTable([("a", 1)]) as table, pytest.raises(RunFailedError, match="SentencePiece could not") as caught:
        table.train(0)
    assert "\n" not in str(caught.value)
