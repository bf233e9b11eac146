"""A run over shards on the Hub: that of the same shards in a folder, and resumed from its commit on any machine."""

import pytest

from tests.fixtures.results import read_json
from tests.fixtures.same_run import assert_same_run
from tests.fixtures.tiny_corpus import contents
from tests.fixtures.tiny_run import forget_checkpoint, run_flags
from train.run_mlm import main

REPO, MODEL = "alice/rows", "alice/model"
ADDRESS = f"hub:{REPO}"
ON_THE_HUB = ("--train-dataset", ADDRESS, "--eval-dataset", ADDRESS)


@pytest.mark.slow
def test_a_run_resumes_from_the_commit_it_began_with(shards, finished_run, hub_here, tmp_path, capsys):
    for path, content in contents(shards).items():
        hub_here.put(REPO, path, content, kind="datasets")
    commit = hub_here.commit(REPO, kind="datasets")
    pushing = ("--hub-model-id", MODEL, "--hub-strategy", "checkpoint")
    flags = run_flags(shards, tmp_path / "run", *ON_THE_HUB)
    assert main([*flags, *pushing]) == 0
    assert_same_run(tmp_path / "run", finished_run)
    record = read_json(tmp_path / "run" / "run.json")
    assert record["hub_commits"] == {f"{REPO}@main": commit}
    forget_checkpoint(tmp_path / "run", 6)
    hub_here.put(REPO, "train/manifest.json", b'{"format_version": 0}', kind="datasets")
    assert main(flags) == 0
    assert_same_run(tmp_path / "run", finished_run)
    published = hub_here.files(MODEL, revision="checkpoints")["run.json"].decode()
    assert REPO not in published
    elsewhere = run_flags(shards, tmp_path / "elsewhere", *ON_THE_HUB, *pushing, "--resume-from-hub")
    assert main(elsewhere) == 0
    assert_same_run(tmp_path / "elsewhere", finished_run)
    record = read_json(tmp_path / "elsewhere" / "run.json")
    assert record["hub_commits"] == {f"{REPO}@main": commit}
    assert main([*flags, "--overwrite-output-dir"]) == 2
    assert f"This version reads format_version 1; train/manifest.json of hub:{REPO}" in capsys.readouterr().err
