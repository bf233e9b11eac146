"""One training run at a time in a folder, and what a start that is refused leaves of the run that is there."""

import os
import shutil
from pathlib import Path

import pytest

from mlm_common.folder_lock import locked_folder
from tests.fixtures.folder_owners import look_often
from tests.fixtures.tiny_corpus import contents
from tests.fixtures.tiny_run import run_flags
from train.run_mlm import main

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture
def old_run(finished_run, tmp_path) -> Path:
    shutil.copytree(finished_run, tmp_path / "run")
    return tmp_path / "run"


def test_a_second_run_is_refused_while_the_first_lives(old_run, shards, run, monkeypatch):
    look_often(monkeypatch)
    before = contents(old_run)
    with locked_folder(str(old_run), heartbeat_seconds=0.05):
        for flags in ((), ("--overwrite-output-dir",)):
            refused = run(main, *run_flags(shards, old_run, *flags))
            assert f"{old_run} belongs to the run of process {os.getpid()} on " in refused.refusal
    assert contents(old_run) == before


def test_weights_that_do_not_load_delete_no_run(old_run, shards, tmp_path, run):
    shutil.copytree(old_run / "export", tmp_path / "model")
    flags = ("--init-from", str(tmp_path / "model"), "--config-overrides", "type_vocab_size=3")
    before = contents(old_run)
    refused = run(main, *run_flags(shards, old_run, *flags, "--overwrite-output-dir"))
    assert "The weights of --init-from must be those of the trained model" in refused.refusal
    assert contents(old_run) == before
