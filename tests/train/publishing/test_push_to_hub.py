"""Runs that push to the Hub while they train and at their end, and that resume from it."""

from pathlib import Path

import pytest
from safetensors.numpy import load, load_file

from mlm_common.hub.redaction import REDACTED
from tests.fixtures.arrays import assert_same_arrays
from tests.fixtures.tiny_corpus import contents
from tests.fixtures.tiny_run import NUM_STEPS, run_flags
from tests.servers.fixtures import HubHandle
from train.metrics.training_log import TrainingLog
from train.run_mlm import main

REPO = "alice/tiny"


def hub_flags(shards: Path, folder: Path, *extra_flags: str) -> list[str]:
    return run_flags(shards, folder, "--hub-model-id", REPO, *extra_flags)


@pytest.mark.slow
@pytest.mark.usefixtures("one_device", "eagerly")
def test_pushes_every_few_steps_and_at_the_end(hub_here, shards, tmp_path):
    push_flags = ("--hub-strategy", "steps", "--push-steps", "4", "--steps-per-execution", "6", "--hub-tag", "v1")
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "thesis.txt").write_text("not of the run", encoding="utf-8")
    assert main(hub_flags(shards, tmp_path, *push_flags, "--hub-private")) == 0
    (tmp_path / "export" / "thesis.txt").unlink()
    repository, last = hub_here.repository(REPO), f"Pretrained for {NUM_STEPS} steps"
    assert repository
    assert repository["commits"][1:] == ["Step 4", last]
    assert repository["private"]
    assert repository["tags"] == {"v1": last}
    pushed = hub_here.files(REPO)
    del pushed[".gitattributes"]
    assert pushed == contents(tmp_path / "export")
    assert {"README.md", "loss.png", "model.safetensors", "runs/train/events.out.tfevents.00000"} <= pushed.keys()
    token = hub_here.write_token.encode()
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and token in path.read_bytes()]


def failing_at_step_4(_: TrainingLog, step: int) -> None:
    if step == 4:
        raise ZeroDivisionError


@pytest.mark.slow
@pytest.mark.usefixtures("one_device", "eagerly")
def test_resuming_from_the_hub_on_another_machine(hub_here, shards, finished_run, tmp_path, monkeypatch, run):
    by_checkpoint = ("--hub-strategy", "checkpoint", "--save-steps", "2", "--per-replica-batch-size", "8")
    with monkeypatch.context() as patch:
        patch.setattr(TrainingLog, "write_train", failing_at_step_4)
        with pytest.raises(ZeroDivisionError):
            main(hub_flags(shards, tmp_path / "first", *by_checkpoint, "--push-steps", "3"))
    (step,) = {path[17:25] for path in hub_here.files(REPO, revision="checkpoints") if path.startswith("checkpoints/")}
    assert step == "00000002"
    for branch in ("main", "checkpoints"):
        for path, content in hub_here.files(REPO, revision=branch).items():
            assert str(tmp_path).encode() not in content, path
            assert str(shards).encode() not in content, path
    resumed = run(main, *hub_flags(shards, tmp_path / "second", *by_checkpoint, "--resume-from-hub"))
    assert resumed.status == 0
    assert REDACTED not in resumed.out
    assert not (tmp_path / "second" / "checkpoints" / "step-00000002.json").exists()
    weights = (tmp_path / "second" / "export" / "model.safetensors").read_bytes()
    assert_same_arrays(load(weights), load_file(finished_run / "export" / "model.safetensors"), atol=2e-5)
    assert hub_here.files(REPO)["model.safetensors"] == weights
    newest = hub_here.files(REPO, revision="checkpoints")
    last = f"checkpoints/step-{NUM_STEPS:08d}."
    assert {path for path in newest if path.startswith("checkpoints/")} == {f"{last}json", f"{last}safetensors"}


@pytest.mark.parametrize("branch", ["main", "checkpoints"])
def test_a_repository_of_others_is_refused_before_the_run(branch, hub_here, shards, tmp_path, run):
    hub_here.put(REPO, "model.safetensors", b"somebody's", revision=branch)
    before = hub_here.repository(REPO)
    push_flags = ("--hub-strategy", "checkpoint", "--hub-revision", "main" if branch == "main" else "mine")
    refused = run(main, *hub_flags(shards, tmp_path / "run", *push_flags))
    assert f"{REPO} already contains files that this tool did not create (model.safetensors)" in refused.refusal
    assert hub_here.repository(REPO) == before
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "token", "message"),
    [
        ((), HubHandle.read_token, "the role 'read'"),
        (("--hub-license", "my-own"), HubHandle.write_token, "The Hub rejects the metadata of the card"),
        (("--hub-language", "english"), HubHandle.write_token, "--hub-language must be ISO 639 codes of two or three"),
        (("--resume-from-hub",), HubHandle.write_token, f"needs a checkpoint on the branch checkpoints of {REPO}"),
    ],
)
def test_what_cannot_be_done_is_told_before_the_run(
    flags, token, message, hub_here, shards, tmp_path, monkeypatch, run
):
    monkeypatch.setenv("HF_TOKEN", token)
    refused = run(main, *hub_flags(shards, tmp_path / "run", *flags))
    assert message in refused.refusal
    assert token not in refused.err
    assert not (tmp_path / "run").exists()
    assert hub_here.repository(REPO) is None
