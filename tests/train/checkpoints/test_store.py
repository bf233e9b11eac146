"""Checkpoints on disk and in Cloud Storage: whole or passed over, rotated, and safe from kills and faults."""

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mlm_common.errors import InputError, PermanentError, RunFailedError
from tests.fixtures.plans import config_of, plan_of
from train.checkpoints import manager, store
from train.checkpoints.manager import Checkpoints
from train.checkpoints.store import CheckpointRecord, CheckpointStore, DamagedCheckpointError, SkippedRows, parse_record
from train.runtime.run_folder import RunFolder

PLAN = plan_of(config_of("--max-steps", "10"))
RECORD = CheckpointRecord(
    0, 400, "ab", PLAN, {"run": {"seed": 1}}, {"numpy": "2"}, 7, skipped=(SkippedRows(3, num_rows=16),)
)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch):
    monkeypatch.setattr(manager, "RETRY_SECONDS", (0.01, 0.01))


def is_of_run(record):
    return record.fingerprint_sha256 == "ab"


def record_of(step, validation_loss=None):
    return dataclasses.replace(RECORD, step=step, validation_loss=validation_loss)


def arrays_of(step):
    return {"model/kernel": np.full((3, 4), step, np.float32), "optimizer/iterations": np.array(step)}


def opened(folder, num_kept=2, **settings):
    return Checkpoints(RunFolder(folder), num_kept=num_kept, **settings)


def save(checkpoints, *steps, validation_losses=()):
    losses = dict(zip(steps, validation_losses, strict=False))
    for step in steps:
        checkpoints.save(lambda step=step: (record_of(step, losses.get(step)), arrays_of(step)))
    checkpoints.wait()


def restored(folder, **arguments):
    """Restore (step, variables) as a new process would that resumes."""
    used = []
    checkpoints = opened(folder)
    record = checkpoints.restore_newest(is_of_run, lambda _, arrays: used.append(arrays), **arguments)
    return (record.step, used[0]) if record else None


def steps_in(folder):
    return CheckpointStore(RunFolder(folder).checkpoints).steps()


def names(folder):
    return sorted(path.name for path in (Path(folder) / "checkpoints").iterdir())


def test_a_record_comes_back_as_it_was():
    line = {"step": 4, "split": "train", "loss": 0.1}
    record = dataclasses.replace(RECORD, num_written_log_lines=7, unwritten_log_lines=(line,))
    assert parse_record(record.to_json()) == record


def of_another_version(text):
    """Take a field away that version 0.3 did not have, and sign the rest."""
    content = json.loads(text)
    del content["unwritten_log_lines"], content[store.CHECKSUM_FIELD]
    return json.dumps({**content, store.CHECKSUM_FIELD: store._content_checksum(content)})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda text: text[:-20], "cannot be read"),
        (lambda text: text.replace("400", "401"), "was changed since it was written"),
        (lambda _: "[]", "cannot be read"),
        (lambda _: dataclasses.replace(RECORD, format_version=2).to_json(), "its format is 2"),
        (of_another_version, "of another version of this project: 'unwritten_log_lines'"),
    ],
)
def test_a_record_that_was_changed_or_is_of_another_format_is_refused(change, reason):
    with pytest.raises(DamagedCheckpointError, match=reason):
        parse_record(change(RECORD.to_json()))


def test_the_newest_is_restored(tmp_path):
    assert restored(tmp_path) is None
    save(opened(tmp_path), 3, 20, 100)
    step, arrays = restored(tmp_path)
    assert step == 100
    np.testing.assert_array_equal(arrays["model/kernel"], arrays_of(100)["model/kernel"])
    assert arrays["optimizer/iterations"] == 100
    assert restored(tmp_path, up_to=99)[0] == 20
    assert restored(tmp_path, interval_steps=30) is None
    assert restored(tmp_path, since=20, up_to=99, interval_steps=30)[0] == 20
    assert restored(tmp_path, since=21, up_to=99) is None
    save(opened(tmp_path), 99_999_999, 100_000_000)  # whose name is longer, and before the other by the alphabet
    assert restored(tmp_path)[0] == 100_000_000


def truncate(path):
    path.write_bytes(path.read_bytes()[:-9])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "suffix"),
    [
        (truncate, "safetensors"),
        (flip, "safetensors"),
        (flip, "json"),
        (Path.unlink, "json"),
        (lambda path: path.write_bytes(b""), "json"),
    ],
)
def test_a_damaged_one_is_passed_over(tmp_path, damage, suffix, caplog):
    save(opened(tmp_path), 1, 2)
    damage(tmp_path / "checkpoints" / f"step-00000002.{suffix}")
    assert restored(tmp_path)[0] == 1
    if (tmp_path / "checkpoints" / "step-00000002.json").exists():
        assert "the checkpoint of step 2 is skipped" in caplog.text


def test_one_of_another_run_is_passed_over(tmp_path, caplog):
    save(opened(tmp_path), 1)
    record = dataclasses.replace(record_of(2), fingerprint_sha256="cd")
    CheckpointStore(RunFolder(tmp_path).checkpoints).write(record, arrays_of(2))
    assert restored(tmp_path)[0] == 1
    assert "it belongs to another run" in caplog.text


def test_nothing_whole_is_an_error_and_no_start_from_zero(tmp_path):
    save(opened(tmp_path), 1, 2)
    for path in (tmp_path / "checkpoints").glob("*.safetensors"):
        truncate(path)
    with pytest.raises(InputError, match=r"All 2 checkpoints in .* are damaged"):
        restored(tmp_path)


def test_the_remains_of_a_killed_write_go_away(tmp_path):
    save(opened(tmp_path), 1)
    folder = tmp_path / "checkpoints"
    (folder / ".step-00000002.safetensors.abc.partial").write_bytes(b"half")
    (folder / "step-00000003.safetensors").write_bytes(b"data without a record")
    checkpoints = opened(tmp_path)
    assert checkpoints.restore_newest(is_of_run, lambda *_: None).step == 1
    assert ".step-00000002.safetensors.abc.partial" not in names(tmp_path)
    save(checkpoints, 4)
    assert [name for name in names(tmp_path) if name.startswith("step-00000003")] == []


def test_the_remains_of_the_library_go_away_too(tmp_path):
    """Which is what it writes to until a file is whole."""
    program = f"""
import os, pathlib, signal
from train.checkpoints import store
from train.runtime.run_folder import RunFolder
from mlm_common.storage import open_folder

def killed(arrays, path, metadata=None):
    pathlib.Path(path).with_name(".tmpYyOD2t").write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)

store.save_file = killed
record = store.parse_record({record_of(1).to_json()!r})
store.CheckpointStore(open_folder({str(tmp_path / "checkpoints")!r})).write(record, {{}})
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGKILL
    assert list((tmp_path / "checkpoints").rglob(".tmp*"))
    assert restored(tmp_path) is None
    assert names(tmp_path) == []


@pytest.mark.parametrize(("umask", "mode"), [(0o002, 0o664), (0o077, 0o600)])
def test_files_may_be_read_by_whom_the_umask_lets(tmp_path, umask, mode):
    umask = os.umask(umask)
    try:
        save(opened(tmp_path), 1)
    finally:
        os.umask(umask)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "checkpoints").iterdir()} == {mode}


def test_rotation_keeps_the_newest_and_the_best(tmp_path):
    checkpoints = opened(tmp_path)
    save(checkpoints, 1, 2, 3, 4, 5, validation_losses=(4.0, 3.0, 3.5, 3.5, 3.2))
    assert steps_in(tmp_path) == [2, 4, 5]
    # A process that resumes knows them.
    checkpoints = opened(tmp_path, 1)
    checkpoints.restore_newest(is_of_run, lambda *_: None)
    save(checkpoints, 6)
    assert steps_in(tmp_path) == [2, 6]


def test_of_equal_scores_the_lower_loss_is_the_best(tmp_path):
    def ranked(record):
        return {1: (0.9, -0.6), 2: (0.9, -0.2), 3: (0.9, -0.2)}.get(record.step)

    save(opened(tmp_path, 1, rank=ranked), 1, 2, 3, 4, 5)
    assert steps_in(tmp_path) == [2, 5]
    record = dataclasses.replace(RECORD, validation_score=0.9, validation_loss=0.2)
    assert record.rank == (0.9, -0.2)
    assert dataclasses.replace(record, validation_score=float("nan")).rank == (-float("inf"), -0.2)
    assert RECORD.rank is None


@pytest.mark.parametrize(
    ("steps", "losses", "interval_steps", "first_step", "kept"),
    [
        ((10, 20, 23, 24, 25), (), 10, 0, [20, 24, 25]),
        ((5, 10, 15, 20, 25), (0.1, 0.2, 8.0, 8.1, 8.2), 50, 10, [10, 15, 20, 25]),
    ],
    ids=["a multiple of the interval", "the first of a phase, whose losses do not compare with those before"],
)
def test_rotation_keeps_the_newest_regular_one(tmp_path, steps, losses, interval_steps, first_step, kept):
    save(opened(tmp_path, kept_interval_steps=interval_steps, first_step=first_step), *steps, validation_losses=losses)
    assert steps_in(tmp_path) == kept


def test_checkpoints_of_a_way_not_taken_go_away(tmp_path):
    save(opened(tmp_path), 10, 20)
    truncate(tmp_path / "checkpoints" / "step-00000020.safetensors")
    checkpoints = opened(tmp_path)
    checkpoints.restore_newest(is_of_run, lambda *_: None)
    save(checkpoints, 15)
    assert steps_in(tmp_path) == [10, 15]
    checkpoints.discard_after(10)
    assert names(tmp_path) == ["step-00000010.json", "step-00000010.safetensors"]


def test_a_refused_checkpoint_is_not_tried_again(cloud):
    checkpoints = opened(f"{cloud.bucket_url}/run")
    save(checkpoints, 1)
    cloud.authorize(denied_permissions=["storage.objects.create"])
    with pytest.raises(PermanentError, match=r"storage\.objects\.create.*the newest one is from step 1\."):
        save(checkpoints, 2)


@pytest.mark.parametrize("suffix", [".json", ".safetensors"])
def test_a_file_that_the_disk_does_not_give_ends_the_run_in_one_line(suffix, tmp_path, monkeypatch):
    """It may be whole, so the run does not resume from an older one."""
    save(opened(tmp_path), 1, 2)
    read_bytes = Path.read_bytes

    def fail(path):
        if path.name == f"step-00000002{suffix}":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", fail)
    rule = (
        rf"step-00000002\{suffix} must be a file of a checkpoint; input/output error\. Check the disk, or the network"
    )
    with pytest.raises(RunFailedError, match=rule):
        restored(tmp_path)


def test_only_the_chief_writes(tmp_path):
    save(opened(tmp_path, is_chief=False), 1)
    assert not list(tmp_path.iterdir())


def test_training_waits_for_the_copy_and_not_for_the_writing(cloud):
    """Until its upload is answered, after half a second, the checkpoint is not there."""
    checkpoints = opened(f"{cloud.bucket_url}/run")
    cloud.fault("/upload/", method="POST", mode="delay", delay_seconds=0.5)
    checkpoints.save(lambda: (record_of(1), arrays_of(1)))
    checkpoints.check()
    assert "run/checkpoints/step-00000001.json" not in cloud.objects()
    checkpoints.wait()
    assert "run/checkpoints/step-00000001.json" in cloud.objects()


def test_a_failed_write_ends_the_run_and_keeps_the_last(tmp_path, monkeypatch):
    checkpoints = opened(tmp_path)
    save(checkpoints, 1)
    (tmp_path / "checkpoints" / "step-00000002.safetensors").mkdir()  # cannot be replaced by a file
    with pytest.raises(RunFailedError, match=r"could not be written to .*; the newest one is from step 1"):
        save(checkpoints, 2)
    assert restored(tmp_path)[0] == 1
    # No record describes data that was written later.
    checkpoint_store = CheckpointStore(RunFolder(tmp_path).checkpoints)
    monkeypatch.setattr(checkpoint_store.folder, "write_text", lambda *_: pytest.fail("the disk is full"))
    with pytest.raises(pytest.fail.Exception, match="full"):
        checkpoint_store.write(record_of(1), arrays_of(2))
    assert steps_in(tmp_path) == []


def test_a_deletion_that_fails_is_a_warning_and_is_made_up_for(cloud, caplog):
    folder = f"{cloud.bucket_url}/run"
    checkpoints = opened(folder, 1)
    save(checkpoints, 1)
    cloud.fault("step-00000001", method="DELETE", status=403)
    save(checkpoints, 2)
    assert f"old checkpoints in {folder}/checkpoints could not be deleted" in caplog.text
    assert steps_in(folder) == [1, 2]
    save(checkpoints, 3)
    assert {name.rpartition("/")[2] for name in cloud.objects()} == {"step-00000003.json", "step-00000003.safetensors"}
