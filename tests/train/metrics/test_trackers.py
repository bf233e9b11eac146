"""Sending the log to a tracker, here to one that fails when told to; the real ones have tests in their environment."""

import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlm_common import workers
from train.metrics import trackers
from train.metrics.log import TRAIN, VALIDATION, MetricsLog, read_metrics
from train.metrics.trackers import OpenRun, Tracker
from train.runtime.run_folder import TENSORBOARD_SPLITS, RunFolder


class FakeTracker:
    """A tracker in memory, which knows the last steps or does not, and refuses the calls whose numbers are given."""

    def __init__(self, *, knows_steps: bool, failing_calls: set[int]) -> None:
        self.knows_steps, self.failing_calls, self.num_calls = knows_steps, failing_calls, 0
        self.runs: dict[str, list[tuple[str, int, float]]] = {}
        self.finished: list[bool] = []

    def call(self) -> None:
        self.num_calls += 1
        if self.num_calls in self.failing_calls:
            raise ConnectionError("the tracker is away")

    def open(self, run_id: str | None, run_name: str, about: dict[str, Any]) -> OpenRun:
        assert about == {"run.seed": 1}
        self.call()
        run_id = run_id or f"{run_name}-{len(self.runs)}"
        has = self.runs.setdefault(run_id, [])

        def send(figures: dict[str, float], step: int, seconds: float) -> None:
            self.call()
            assert seconds > 0
            has.extend((name, step, value) for name, value in figures.items())

        last = {
            split: max((step for name, step, _ in has if name == f"{split}/loss"), default=-1)
            for split in TENSORBOARD_SPLITS
        }
        return OpenRun(run_id, last if self.knows_steps else None, send, self.finished.append)


def log_of(folder: RunFolder, fake: FakeTracker, monkeypatch: pytest.MonkeyPatch) -> MetricsLog:
    monkeypatch.setitem(trackers.OPENERS, "wandb", fake.open)
    tracker = Tracker("wandb", folder.files.subfolder("trackers"), "run", {"run.seed": 1})
    return MetricsLog(folder, lambda _: b"", trackers=[tracker])


@given(
    knows_steps=st.booleans(),
    failing_calls=st.sets(st.integers(1, 30), max_size=12),
    sessions=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), min_size=1, max_size=4),
)
@settings(max_examples=25)
def test_each_step_is_sent_once_whatever_fails_and_however_often_the_run_resumes(
    knows_steps, failing_calls, sessions, tmp_path_factory
):
    """Each session resumes some steps before the end of the last one, makes these again, and then new ones."""
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    fake, step = FakeTracker(knows_steps=knows_steps, failing_calls=failing_calls), 0
    for num_repeated, num_new in (*sessions, (0, 0)):
        if not num_new:
            fake.failing_calls = set()
        with pytest.MonkeyPatch.context() as patch:
            log = log_of(folder, fake, patch)
            first, step = max(0, step - num_repeated), step + num_new
            log.restore(first)
            with log:
                for made in range(first + 1, step + 1):
                    log.add(made, TRAIN, {"loss": 1 / made, "epoch": 0.5})
                    if made % 2 == 0:
                        log.add(made, VALIDATION, {"loss": 2 / made})
                    log.flush()
    (sent,) = fake.runs.values()
    expected = [
        (f"{line['split']}/{name}", line["step"], line[name])
        for line in read_metrics(folder)
        for name in ("loss", "epoch")
        if name in line
    ]
    assert sent == expected
    losses = [line for line in sent if line[0] == "train/loss"]
    assert losses == [("train/loss", logged_step, 1 / logged_step) for logged_step in range(1, step + 1)]
    assert fake.finished[-1] is True


def test_a_tracker_that_hangs_holds_up_nothing(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(workers, "END_SECONDS", 0.3)
    released = threading.Event()
    fake = FakeTracker(knows_steps=True, failing_calls=set())
    monkeypatch.setattr(fake, "call", released.wait)
    folder = RunFolder(tmp_path)
    log = log_of(folder, fake, monkeypatch)
    with log:
        log.add(1, TRAIN, {"loss": 1.0})
        log.flush()
        log._line_followers[0].wait()
    assert [line["step"] for line in read_metrics(folder)] == [1]
    assert "not up to date: wandb (" in caplog.text
    released.set()
