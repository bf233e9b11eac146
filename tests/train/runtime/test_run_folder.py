"""Whose run a folder holds, and what of it is deleted."""

import shutil
from pathlib import Path

import pytest

from mlm_common.errors import InputError
from tests.fixtures.tiny_corpus import contents
from train.runtime.run_folder import RunFolder


def test_clearing_deletes_all_that_a_run_wrote_and_nothing_else(finished_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    (run / "tensorboard" / "plugins" / "profile").mkdir(parents=True)
    (run / "tensorboard" / "plugins" / "profile" / "trace").write_text("ours", encoding="utf-8")
    (run / "metrics.damaged-1.jsonl").write_text("ours", encoding="utf-8")
    foreign = {"thesis.txt", "checkpoints/notes.txt", "export/thesis.txt", "tensorboard/mine.csv", "export/old/a"}
    for name in foreign:
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text("mine", encoding="utf-8")
    RunFolder(run).clear()
    assert contents(run).keys() == foreign


def test_nothing_is_deleted_in_a_folder_that_holds_no_run(tmp_path: Path) -> None:
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "README.md").write_text("mine", encoding="utf-8")
    RunFolder(tmp_path).check({}, resume="auto", overwrite=True)
    RunFolder(tmp_path).clear()
    assert (tmp_path / "export" / "README.md").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("record", [None, "[]", "{}", "no JSON"])
def test_a_folder_with_files_and_no_run_is_not_overwritten(tmp_path: Path, record: str | None) -> None:
    (tmp_path / "metrics.jsonl").write_text("mine", encoding="utf-8")
    if record is not None:
        (tmp_path / "run.json").write_text(record, encoding="utf-8")
    with pytest.raises(InputError, match=r"must be an empty folder .* holds metrics.jsonl and no run.json of a run"):
        RunFolder(tmp_path).check({}, resume="auto", overwrite=True)


def test_a_deletion_that_was_killed_is_taken_up_again(finished_run: Path, tmp_path: Path) -> None:
    """Its record is deleted last."""
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    (run / "checkpoints" / "step-00000003.json").unlink()
    (run / "checkpoints" / "step-00000006.json").unlink()
    (run / "metrics.jsonl").unlink()
    RunFolder(run).check({}, resume="auto", overwrite=True)
    RunFolder(run).clear()
    assert not contents(run)
