"""The log of a run is written in the background: whatever fails or stalls, training goes on, and nothing is lost."""

import json
import re
import statistics
import time
from pathlib import Path
from typing import Any

import pytest
import requests
from google.cloud.storage.retry import DEFAULT_RETRY
from tensorboard.summary.writer import event_file_writer
from tensorboard.summary.writer.record_writer import RecordWriter

from mlm_common import workers
from mlm_common.storage.folder import LocalFolder
from tests.fixtures.same_run import logged, tensorboard_points
from train.metrics.log import ROLLBACK, TRAIN, VALIDATION, MetricsFile, MetricsLog, TensorBoardFiles
from train.runtime.run_folder import TENSORBOARD_SPLITS, RunFolder

FILES = r"metrics\.jsonl|loss\.png|tensorboard"


def log_of(folder: Path | str) -> MetricsLog:
    return MetricsLog(RunFolder(folder), lambda lines: b"\x89PNG of %d lines" % len(lines))


def started_log(folder: Path | str, step: int = 0, **unwritten: Any) -> MetricsLog:
    log = log_of(folder)
    log.restore(step, **unwritten)
    return log


def add(log: MetricsLog, *steps: int) -> float:
    """Add lines as training does; return the seconds that this took."""
    started_seconds = time.perf_counter()
    for step in steps:
        log.add(step, TRAIN, {"loss": 4.0 - step / 100})
        log.flush()
    log.add(steps[-1], VALIDATION, {"loss": 4.0})
    log.flush()
    log.draw()
    return time.perf_counter() - started_seconds


def steps_in(folder: Path | str) -> list[int]:
    return [line["step"] for line in logged(folder, TRAIN)]


def points(folder: Path) -> list[int]:
    return [step for step, _ in tensorboard_points(folder)["train/loss"]]


@pytest.fixture
def scaled_client(monkeypatch) -> None:
    """Cloud Storage's client waits 300 times less: 10 minutes are 2 seconds."""
    request = requests.Session.request

    def scaled(self: requests.Session, *arguments: Any, **options: Any) -> Any:
        options["timeout"] = (options.get("timeout") or 60) / 300
        return request(self, *arguments, **options)

    monkeypatch.setattr(requests.Session, "request", scaled)
    for name in ("_initial", "_maximum", "_timeout", "_deadline"):
        monkeypatch.setattr(DEFAULT_RETRY, name, getattr(DEFAULT_RETRY, name) / 300)


@pytest.mark.usefixtures("scaled_client")
def test_a_stalled_bucket_costs_no_time_and_no_line(cloud, caplog, tmp_path):
    """The bucket answers nothing about the log for ten minutes, at 1:300; then it does what it was asked long ago."""
    folder = f"{cloud.bucket_url}/run"
    log = started_log(folder)
    cloud.fault(FILES, mode="hold", times=10**6)
    started_seconds, seconds, step = time.perf_counter(), [], 0
    with log:
        while time.perf_counter() - started_seconds < 2 or step < 40:
            step += 1
            seconds.append(add(log, step))
            time.sleep(0.01)
        num_held = len(cloud.requests("", "run"))
        cloud.release()
    assert statistics.median(seconds) < 0.1  # a request that is waited for takes 0.2 s
    assert steps_in(folder) == list(range(1, step + 1))
    assert cloud.objects()["run/loss.png"].startswith(b"\x89PNG")
    for name, content in cloud.objects().items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert points(tmp_path / "run") == list(range(1, step + 1))
    assert "; the missing lines have been written since" in caplog.text
    # One write of all that was missing, not one for each line.
    assert len(cloud.requests("", "run")) - num_held < 30 < step


def test_a_stopped_run_does_not_wait_for_a_stalled_bucket(cloud, caplog, monkeypatch):
    monkeypatch.setattr(workers, "STOP_SECONDS", 0.3)
    folder = f"{cloud.bucket_url}/run"
    log = started_log(folder)
    log.wait()
    cloud.fault(FILES, mode="hold", times=10**6)
    add(log, 1, 2, 3)
    started_seconds = time.perf_counter()
    with pytest.raises(InterruptedError), log:
        raise InterruptedError
    assert time.perf_counter() - started_seconds < 30  # the client would wait for a minute
    assert "the log is incomplete" in caplog.text
    assert "(0 of 4 lines are in the files); the next start of this run writes the missing lines" in caplog.text
    saved = {"num_written": log.num_written, "unwritten": json.loads(json.dumps(log.lines))}
    cloud.release()
    with started_log(folder, step=3, **saved) as log:
        add(log, 4)
    assert steps_in(folder) == [1, 2, 3, 4]


class Failing:
    """Fails the next calls of a function as a full disk does."""

    def __init__(self, function: Any, num_failures: int):
        self.function, self.num_failures = function, num_failures

    def __get__(self, instance: Any, owner: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            if self.num_failures:
                self.num_failures -= 1
                raise OSError(28, "No space left on device")
            return self.function(instance, *arguments, **options)

        return call


@pytest.mark.parametrize(
    ("place", "name"),
    [(LocalFolder, "append_text"), (LocalFolder, "write_bytes"), (RecordWriter, "flush")],
)
def test_a_write_that_fails_is_made_up_for_and_told(place, name, tmp_path, monkeypatch, caplog):
    with started_log(tmp_path) as log:
        add(log, 1)
        log.wait()
        monkeypatch.setattr(place, name, Failing(getattr(place, name), 1))
        add(log, 2)
        add(log, 3)
    assert steps_in(tmp_path) == points(tmp_path) == [1, 2, 3]
    assert (tmp_path / "loss.png").exists()
    assert caplog.text.count("could not be updated; training continues, and the update is tried again: [Errno 28]") == 1
    assert "failed writes of the log: 1; the missing lines have been written since" in caplog.text


def test_a_last_write_that_fails_is_tried_once_more(tmp_path, monkeypatch):
    log = started_log(tmp_path)
    log.wait()
    monkeypatch.setattr(MetricsFile, "update", Failing(MetricsFile.update, 1))
    with log:
        log.add(1, TRAIN, {"loss": 1.0})
    assert steps_in(tmp_path) == [1]


def test_a_line_that_a_full_disk_cuts_off_is_whole_in_the_end(tmp_path, monkeypatch):
    def append_half(self, name, text, **_):
        monkeypatch.undo()
        with Path(self.path_of(name)).open("a", encoding="utf-8") as file:
            file.write(text[: len(text) // 2])
        raise OSError(28, "No space left on device")

    with started_log(tmp_path) as log:
        add(log, 1)
        log.wait()
        monkeypatch.setattr(LocalFolder, "append_text", append_half)
        add(log, 2)
    assert logged(tmp_path) == log.lines
    assert len(log.lines) == 4


@pytest.mark.parametrize("seconds", [(5000.0, 5000.0, 5000.0), (5000.0, 4000.0, 3000.0)], ids=["one second", "behind"])
def test_event_files_sort_as_written(tmp_path, monkeypatch, seconds):
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(8))
    for number, second in enumerate(seconds):
        monkeypatch.setattr(time, "time", lambda second=second: second)
        with started_log(tmp_path, 2 * number, num_written=3 * number) as log:
            add(log, 2 * number + 1, 2 * number + 2)
    for split in TENSORBOARD_SPLITS:
        assert len(list((tmp_path / "tensorboard" / split).iterdir())) == len(seconds)
    assert points(tmp_path) == [1, 2, 3, 4, 5, 6]


def test_event_files_of_a_bucket_sort_as_written(cloud, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 5000.0)
    for number in range(2):
        with started_log(f"{cloud.bucket_url}/run", number, num_written=2 * number) as log:
            add(log, number + 1)
    names = sorted(re.sub(r"(tfevents\.\d+).*", r"\1", name) for name in cloud.objects() if "tfevents" in name)
    files = [f"events.out.tfevents.{second}" for second in ("0000005000", "0000005001")]
    assert names == [f"run/tensorboard/{split}/{name}" for split in TENSORBOARD_SPLITS for name in files]


@pytest.mark.parametrize(
    "damage",
    [b"\0" * 40 + b"\n", b'{"step": 3, "split": "\xff"}\n', b"[3]\n", b'{"split": "train", "loss": 1.0}\n'],
    ids=["zeros after a power cut", "no UTF-8", "no object", "no step"],
)
def test_lines_before_a_damaged_one_are_read(tmp_path, damage, caplog):
    lines = [b'{"step": %d, "split": "train", "loss": 1.0}\n' % step for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_bytes(b"".join([*lines[:2], damage, lines[2]]))
    assert steps_in(tmp_path) == [1, 2]
    assert f"{tmp_path}/metrics.jsonl: line 3 is damaged; only the lines before it are used" in caplog.text


def test_a_damaged_log_is_kept_and_the_run_resumes(tmp_path, caplog):
    with started_log(tmp_path) as log:
        add(log, 1, 2, 3)
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    for number in (1, 2):
        content = b"".join([*lines[:2], b"garbage\n", *lines[2:]])
        (tmp_path / "metrics.jsonl").write_bytes(content)
        with started_log(tmp_path, 3, num_written=4) as log:
            add(log, 4)
        assert steps_in(tmp_path) == [1, 2, 4]
        assert (tmp_path / f"metrics.damaged-{number}.jsonl").read_bytes() == content
        assert f"the damaged file was kept as {tmp_path}/metrics.damaged-{number}.jsonl" in caplog.text
    # TensorBoard has the points of the lines that were lost.
    assert points(tmp_path) == [1, 2, 3, 4]


def test_a_programming_error_is_told_once_and_costs_only_its_file(tmp_path, monkeypatch, caplog):
    def update(_self, _lines):
        return None + 1  # type: ignore[operator]

    monkeypatch.setattr(TensorBoardFiles, "update", update)
    with started_log(tmp_path) as log:
        add(log, 1)
        log.wait()
        add(log, 2)
    assert steps_in(tmp_path) == [1, 2]
    assert (tmp_path / "loss.png").exists()
    path = tmp_path / "tensorboard"
    assert caplog.text.count(f"{path} could not be updated; training continues") == 1
    assert "TypeError: unsupported operand type(s) for +: 'NoneType' and 'int' (test_log.py, line " in caplog.text
    assert f"the log is incomplete; not up to date: {path} (" in caplog.text


def test_lines_in_a_checkpoint_are_written_at_the_next_start(tmp_path):
    with started_log(tmp_path) as log:
        add(log, 1, 2)
    num_written = log.num_written
    add(log, 3)
    unwritten = json.loads(json.dumps(log.lines[num_written:]))
    log.wait()
    complete = (tmp_path / "metrics.jsonl").read_bytes()
    # In the file or not, in part, or others of a way that was given up.
    lines = complete.splitlines(keepends=True)
    for content in (
        complete,
        b"".join(lines[:num_written]),
        complete[:-20],
        b"".join([*lines[:num_written], lines[0]]),
    ):
        (tmp_path / "metrics.jsonl").write_bytes(content)
        with started_log(tmp_path, 3, num_written=num_written, unwritten=unwritten) as log:
            log.draw()
        assert (tmp_path / "metrics.jsonl").read_bytes() == complete
        assert points(tmp_path) == [1, 2, 3]
    assert steps_in(tmp_path) == [1, 2, 3]


def test_a_rollback_drops_lines_and_points(tmp_path):
    with started_log(tmp_path) as log:
        add(log, 1, 2, 3)
        log.wait()
        log.rewind_to(1)
        log.add(3, ROLLBACK, {"to_step": 1})
        assert log.num_written == 1
        add(log, 2, 3)
    assert [(line["step"], line["split"]) for line in logged(tmp_path)] == [
        (1, TRAIN), (3, ROLLBACK), (2, TRAIN), (3, TRAIN), (3, VALIDATION),
    ]  # fmt: skip
    assert points(tmp_path) == [1, 2, 3]
