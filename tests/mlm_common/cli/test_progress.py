import logging
import time

import pytest

from mlm_common.cli.progress import progress_bar


def test_lines_every_ten_seconds_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seconds = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: seconds[0])
    caplog.set_level(logging.INFO, "mlm_common.cli.progress")
    with progress_bar("Reading", " files", 1000) as bar:
        for _ in range(6):
            seconds[0] += 5
            bar.update(100)
    with progress_bar("Counting", " words") as bar:
        seconds[0] += 10
        bar.update(1234)
    assert [record.getMessage() for record in caplog.records] == [
        "Reading.",
        "Reading: 20 %, 40 s left.",
        "Reading: 40 %, 30 s left.",
        "Reading: 60 %, 20 s left.",
        "Counting.",
        "Counting: 1,234 words so far.",
    ]
