"""A run over shards on the Hub: that of the same shards in a folder, and resumed from its commit on any machine."""

import shutil

import pytest

from tests.fixtures.results import read_json
from tests.fixtures.same_run import assert_same_run, logged
from tests.fixtures.tiny_corpus import contents
from tests.fixtures.tiny_run import forget_checkpoint, run_flags
from train.run_mlm import main

REPO, MODEL = "alice/rows", "alice/model"
ADDRESS = f"hub:{REPO}"
ON_THE_HUB = ("--train-dataset", ADDRESS, "--eval-dataset", ADDRESS)


@pytest.mark.slow
@pytest.mark.usefixtures("one_device", "eagerly")
def test_a_run_resumes_from_the_commit_it_began_with(shards, finished_run, hub_here, tmp_path, capsys):
    for path, content in contents(shards).items():
        hub_here.put(REPO, path, content, kind="datasets")
    commit = hub_here.commit(REPO, kind="datasets")
    pushing = ("--hub-model-id", MODEL, "--hub-strategy", "checkpoint")
    shared = (*ON_THE_HUB, "--per-replica-batch-size", "8")
    flags = run_flags(shards, tmp_path / "run", *shared)
    assert main([*flags, *pushing]) == 0
    shutil.copytree(tmp_path / "run", tmp_path / "whole")
    losses = [[line["loss"] for line in logged(folder)] for folder in (tmp_path / "whole", finished_run)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    record = read_json(tmp_path / "run" / "run.json")
    assert record["hub_commits"] == {f"{REPO}@main": commit}
    forget_checkpoint(tmp_path / "run", 6)
    hub_here.put(REPO, "train/manifest.json", b'{"format_version": 0}', kind="datasets")
    assert main(flags) == 0
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    published = hub_here.files(MODEL, revision="checkpoints")["run.json"].decode()
    assert REPO not in published
    elsewhere = run_flags(shards, tmp_path / "elsewhere", *shared, *pushing, "--resume-from-hub")
    assert main(elsewhere) == 0
    assert_same_run(tmp_path / "elsewhere", tmp_path / "whole")
    record = read_json(tmp_path / "elsewhere" / "run.json")
    assert record["hub_commits"] == {f"{REPO}@main": commit}
    assert main([*flags, "--overwrite-output-dir"]) == 2
    assert f"This version reads format_version 1; train/manifest.json of hub:{REPO}" in capsys.readouterr().err
