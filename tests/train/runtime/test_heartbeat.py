import os
import time
from collections.abc import Iterator

import pytest

from train.publishing.push_to_hub import PushToHub
from train.runtime import heartbeat


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The end of the pipe that a supervisor reads; reports are repeated every 10 ms."""
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    monkeypatch.setenv(heartbeat.VARIABLE, str(writing))
    monkeypatch.setattr(heartbeat, "INTERVAL_SECONDS", 0.01)
    yield reading
    os.close(reading)
    os.close(writing)


def test_what_takes_long_is_reported_over_and_over_until_it_ends(reports: int) -> None:
    with heartbeat.kept_up("publish", 6):
        time.sleep(0.2)
    lines = os.read(reports, 1 << 16).decode().splitlines()
    assert len(lines) >= 5
    assert set(lines) == {"publish 6"}
    time.sleep(0.05)
    heartbeat.report("train", 7)
    assert os.read(reports, 1 << 16).decode().splitlines()[-1] == "train 7"


def test_what_hangs_for_hours_is_not_reported_for_ever(reports: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "MAX_KEPT_UP_SECONDS", 0.05)
    with heartbeat.kept_up("publish", 6):
        time.sleep(0.2)
        assert os.read(reports, 1 << 16)
        heartbeat.report("train", 1)
        assert os.read(reports, 1 << 16) == b"train 1\n"


def test_a_push_that_is_waited_for_is_reported(reports: int) -> None:
    pushing = PushToHub(None, (), metrics=list)
    pushing._pushes._handle = lambda _: time.sleep(0.2)
    with pushing:
        pushing._pushes.submit("a publication")  # type: ignore[arg-type]
        time.sleep(0.05)
    assert os.read(reports, 1 << 16).decode().count("push 0") >= 5
