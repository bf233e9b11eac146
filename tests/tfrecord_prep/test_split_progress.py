"""Progress: rate, share and estimate, of this run alone where an earlier one has done part of the work."""

import io
import logging
import time

import pytest

from tfrecord_prep import split as module
from tfrecord_prep.split import SplitProgress, split_progress


class Clock:
    seconds = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: clock.seconds)
    return clock


def test_lines_in_the_log(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, module.__name__)
    with split_progress("train", 10_000_000) as progress:
        progress.skip(4_000_000)
        for _ in range(5):
            clock.seconds += 20
            progress.add(500_000, 1000)
        progress.skip(3_500_000)
    assert [record.getMessage() for record in caplog.records] == [
        "train: 50 % of 10.0 MB, 50 tokens/s, 3.3 minutes left",
        "train: 60 % of 10.0 MB, 50 tokens/s, 2.7 minutes left",
        "train: 100 % of 10.0 MB, 50 tokens/s",
    ]


def test_total_that_is_not_known(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, module.__name__)
    with split_progress("test", None) as progress:
        clock.seconds += 10
        progress.add(2_000_000, 100)
    assert [record.getMessage() for record in caplog.records] == ["test: 2.0 MB, 10 tokens/s"]


def test_bar_on_a_terminal() -> None:
    from tqdm import tqdm

    screen = io.StringIO()
    with tqdm(desc="train", total=10_000_000, unit="B", unit_scale=True, smoothing=0, file=screen, ncols=100) as bar:
        progress = SplitProgress("train", 10_000_000, bar)
        bar.start_t -= 20  # a run of twenty seconds
        progress.skip(4_000_000)
        progress.add(4_000_000, 1000)
        bar.refresh()
        shown = bar.format_dict
    assert (shown["n"], shown["initial"], shown["rate"]) == (8_000_000, 4_000_000, None)
    assert "80%" in screen.getvalue()
    assert "[00:20<00:10" in screen.getvalue()  # 4 MB took 20 seconds, 2 MB are left
    assert "tokens/s" in screen.getvalue()
