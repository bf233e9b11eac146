"""Runs that push to the Hub while they train and at their end, against a Hub with faults."""

import os
import re
import signal
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from huggingface_hub import constants

from mlm_common.errors import EXIT_FAILED, EXIT_STOPPED
from mlm_common.hub import access as hub_access
from mlm_common.hub import push as hub
from mlm_common.hub.redaction import REDACTED
from tests.fixtures.run_command import Outcome
from tests.fixtures.tiny_run import NUM_STEPS, run_flags
from tests.servers.fixtures import HubHandle
from train.config.learning import OptimizationConfig
from train.config.settings import HubConfig, RunConfig
from train.metrics.training_log import TrainingLog
from train.publishing import push_to_hub as train_hub
from train.publishing.push_to_hub import steps_of_pushes
from train.run_mlm import main
from train.runtime import supervisor
from train.runtime.plan import PhaseToPlan, make_plan, make_plans

REPO = "alice/tiny"
LAST = f"Pretrained for {NUM_STEPS} steps"
NO_EVALUATION = ("--eval-steps", "100", "--save-steps", "100")
EVERY_STEP = ("--hub-strategy", "steps", "--push-steps", "1")
UPLOAD = "/lfs/[0-9a-f]{64}[?]"
# Each request of a push, in order, by what its address has before its query.
REQUESTS = (
    "repos/create", "branch/trial", "validate-yaml", "preupload", "lfs/objects/batch", UPLOAD,
    "/lfs/[0-9a-f]{64}/verify", "commit/trial", "tag/",
)  # fmt: skip
FAULTS: tuple[dict[str, Any], ...] = (
    {"status": 503}, {"status": 429, "headers": {"Retry-After": "0"}}, {"mode": "reset"}, {"mode": "lost_answer"},
)  # fmt: skip


def train(shards: Path, folder: Path, *more: str) -> int:
    return main(hub_flags(shards, folder, *more))


def hub_flags(shards: Path, folder: Path, *more: str) -> list[str]:
    return run_flags(shards, folder, "--hub-model-id", REPO, *more)


def exported(folder: Path) -> dict[str, bytes]:
    export = folder / "export"
    return {str(path.relative_to(export)): path.read_bytes() for path in export.rglob("*") if path.is_file()}


def published(server: HubHandle, revision: str = "main") -> dict[str, bytes]:
    files = server.files(REPO, revision=revision)
    return {name: content for name, content in files.items() if name != ".gitattributes"}


def titles(server: HubHandle, revision: str = "main") -> list[str]:
    repository = server.repository(REPO, revision=revision)
    assert repository
    return repository["commits"][1:]


@pytest.mark.usefixtures("one_device")
def test_pushes_every_few_steps_and_at_the_end(hub_here: HubHandle, shards: Path, tmp_path: Path) -> None:
    more = ("--hub-strategy", "steps", "--push-steps", "4", "--steps-per-execution", "6", "--hub-tag", "v1")
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "thesis.txt").write_text("not of the run", encoding="utf-8")
    assert train(shards, tmp_path, *more, "--hub-private") == 0
    (tmp_path / "export" / "thesis.txt").unlink()
    assert titles(hub_here) == ["Step 4", LAST]
    assert published(hub_here) == exported(tmp_path)
    repository = hub_here.repository(REPO)
    assert repository["private"]
    assert repository["tags"] == {"v1": LAST}
    names = set(exported(tmp_path))
    assert {"README.md", "loss.png", "model.safetensors", "runs/train/events.out.tfevents.00000"} <= names
    token = hub_here.write_token.encode()
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and token in path.read_bytes()]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (HubConfig(), ()),
        (HubConfig(hub_model_id=REPO), ()),
        (HubConfig(hub_model_id=REPO, hub_strategy="steps"), (10, 20, 30)),
        (HubConfig(hub_model_id=REPO, hub_strategy="steps", push_steps=16), (16, 32)),
        (HubConfig(hub_model_id=REPO, hub_strategy="epoch"), (9, 17, 25, 33)),
    ],
)
def test_when_to_push(config: HubConfig, expected: tuple[int, ...]) -> None:
    """130 rows in batches of 16, and 35 steps."""
    optimization = OptimizationConfig(per_replica_batch_size=16, max_steps=35)
    plan = make_plan(optimization, RunConfig(save_steps=10), num_rows=130, max_length=16, num_replicas=1)
    assert steps_of_pushes(config, plan) == expected


def test_a_phase_ends_a_pass_that_the_one_before_began() -> None:
    """130 rows in batches of 16 for 12 steps, then in batches of 32 for 10."""
    sizes = ((16, 12), (32, 10))
    optimizations = (OptimizationConfig(per_replica_batch_size=rows, max_steps=steps) for rows, steps in sizes)
    phases = (PhaseToPlan(one, RunConfig(), 130, 16, goes_on_in_rows=True) for one in optimizations)
    config = HubConfig(hub_model_id=REPO, hub_strategy="epoch")
    # 192 rows are used in the first.
    assert [steps_of_pushes(config, plan) for plan in make_plans(tuple(phases), 1)] == [(9,), (15, 19)]


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_a_slow_upload_holds_up_nothing_and_the_newest_wins(
    hub_here: HubHandle, shards: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    hub_here.fault(UPLOAD, mode="delay", method="PUT", delay_seconds=2, times=1)
    assert train(shards, tmp_path, *EVERY_STEP, *NO_EVALUATION, "--max-steps", "12") == 0
    copied = [record for record in caplog.records if "goes to the Hub" in record.message]
    assert len(copied) == 11, "training continued"
    assert titles(hub_here)[0] == "Step 1"
    assert titles(hub_here)[-1] == "Pretrained for 12 steps"
    assert len(titles(hub_here)) < 11, "pushes that were late were skipped"
    assert published(hub_here) == exported(tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_the_last_state_is_published_whatever_passes(
    hub_here: HubHandle, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every request of the sequence fails in each way, on a branch that is made and a tag."""
    monkeypatch.setattr(hub, "RETRY_DELAYS_SECONDS", (0.01,) * 60)
    monkeypatch.setattr(hub_access, "CHECK_RETRY_DELAYS_SECONDS", (0.01,) * 60)
    for request_path in REQUESTS:
        for fault in FAULTS:
            hub_here.fault(request_path, method="POST|PUT", **fault)
    assert train(shards, tmp_path, "--hub-revision", "trial", "--hub-tag", "v1") == 0
    assert published(hub_here, "trial") == exported(tmp_path)
    assert titles(hub_here, "trial") == [LAST]
    assert hub_here.repository(REPO)["tags"] == {"v1": LAST}
    assert titles(hub_here) == []
    log = hub_here.requests()
    for request_path in REQUESTS:
        modes = {entry["fault"] for entry in log if re.search(request_path, entry["path"] + "?")}
        # What was uploaded once is not verified again.
        assert modes >= ({"status"} if "verify" in request_path else {"status", "reset", "lost_answer"}), request_path


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_pushes_that_fail_end_nothing_but_the_last_does(
    hub_here: HubHandle, shards: Path, tmp_path: Path, run: Callable[..., Outcome]
) -> None:
    hub_here.fault("commit/", status=503, times=1000)
    outcome = run(main, *hub_flags(shards, tmp_path, "--hub-strategy", "steps", "--push-steps", "3"))
    assert outcome.status == 1
    assert outcome.error.startswith(f"error: The push to {REPO} failed: 503")
    assert outcome.error.endswith(
        f"The files are kept in {tmp_path}/export; push them by hand: hf upload {REPO} {tmp_path}/export . --include "
        + " ".join(sorted(exported(tmp_path)))
    )
    assert {"model.safetensors", "README.md"} <= set(exported(tmp_path))
    assert hub_here.repository(REPO)["commits"] == ["initial commit"]


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_a_newer_state_does_not_wait_for_older_retries(
    hub_here: HubHandle, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "RETRY_DELAYS_SECONDS", (3600.0,))
    hub_here.fault("commit/", status=503)
    assert train(shards, tmp_path, "--hub-strategy", "steps", "--push-steps", "3") == 0
    assert titles(hub_here) == [LAST]
    assert published(hub_here) == exported(tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_a_run_that_fails_publishes_what_it_has(
    hub_here: HubHandle, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first upload is slow, so the copy of step 3 waits when step 4 fails."""
    hub_here.fault(UPLOAD, mode="delay", method="PUT", delay_seconds=3)
    monkeypatch.setattr(TrainingLog, "write_train", failing_at_step_4)
    with pytest.raises(ZeroDivisionError):
        train(shards, tmp_path, *EVERY_STEP, *NO_EVALUATION)
    assert titles(hub_here) == ["Step 1", "Step 3"]
    assert published(hub_here) == exported(tmp_path)
    assert "Training is not finished: step 3 of 6" in published(hub_here)["README.md"].decode()


def failing_at_step_4(_: TrainingLog, step: int) -> None:
    if step == 4:
        raise ZeroDivisionError


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_a_slow_upload_at_the_end_is_no_stall(
    hub_here: HubHandle, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    monkeypatch.setenv(supervisor.PIPE_VARIABLE, str(writing))
    monkeypatch.setattr(supervisor, "INTERVAL_SECONDS", 0.1)
    hub_here.fault(UPLOAD, mode="delay", method="PUT", delay_seconds=2)
    assert train(shards, tmp_path) == 0
    assert os.read(reading, 1 << 16).decode().count(f"publish {NUM_STEPS}") >= 10


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_an_interrupted_run_ends_in_bounded_time(
    hub_here: HubHandle, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_hub, "GRACE_SECONDS", 0.2)
    hub_here.fault(UPLOAD, mode="delay", method="PUT", delay_seconds=10, times=2)
    monkeypatch.setattr(TrainingLog, "write_train", Mock(side_effect=KeyboardInterrupt))
    assert train(shards, tmp_path, *EVERY_STEP, *NO_EVALUATION) == 130
    assert titles(hub_here) == []


@pytest.mark.slow
@pytest.mark.usefixtures("one_device")
def test_a_run_that_is_to_stop_saves_publishes_and_says_so(
    hub_here: HubHandle, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_here.fault(UPLOAD, mode="delay", method="PUT", delay_seconds=1)
    monkeypatch.setattr(TrainingLog, "write_train", lambda *_: signal.raise_signal(signal.SIGTERM))
    assert train(shards, tmp_path, *EVERY_STEP, *NO_EVALUATION) == EXIT_STOPPED
    assert titles(hub_here)[0] == "Step 1"
    assert published(hub_here) == exported(tmp_path)
    assert (tmp_path / "checkpoints" / "step-00000002.json").exists()


@pytest.mark.slow
def test_resuming_from_the_hub_on_another_machine(
    hub_here: HubHandle, shards: Path, finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    run: Callable[..., Outcome],
) -> None:  # fmt: skip
    by_checkpoint = ("--hub-strategy", "checkpoint", "--save-steps", "2")
    with monkeypatch.context() as patch:
        patch.setattr(TrainingLog, "write_train", failing_at_step_4)
        with pytest.raises(ZeroDivisionError):
            train(shards, tmp_path / "first", *by_checkpoint, "--push-steps", "3")
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
    # Differences of bytes would be looked for through minutes.
    assert sha256(weights).digest() == sha256((finished_run / "export" / "model.safetensors").read_bytes()).digest()
    assert published(hub_here)["model.safetensors"] == weights
    newest = hub_here.files(REPO, revision="checkpoints")
    assert {path for path in newest if path.startswith("checkpoints/")} == {
        f"checkpoints/step-{NUM_STEPS:08d}.json", f"checkpoints/step-{NUM_STEPS:08d}.safetensors",
    }  # fmt: skip


@pytest.mark.parametrize("branch", ["main", "checkpoints"])
def test_a_repository_of_others_is_refused_before_the_run(
    branch: str, hub_here: HubHandle, shards: Path, tmp_path: Path, run: Callable[..., Outcome]
) -> None:
    hub_here.put(REPO, "model.safetensors", b"somebody's", revision=branch)
    before = hub_here.repository(REPO)
    more = ("--hub-strategy", "checkpoint", "--hub-revision", "main" if branch == "main" else "mine")
    refused = run(main, *hub_flags(shards, tmp_path / "run", *more))
    assert refused.status == 2
    assert f"{REPO} already contains files that this tool did not create (model.safetensors)" in refused.error
    assert hub_here.repository(REPO) == before
    assert not (tmp_path / "run").exists()


def test_there_must_be_something_to_resume_from(
    hub_here: HubHandle, shards: Path, tmp_path: Path, run: Callable[..., Outcome]
) -> None:
    refused = run(main, *hub_flags(shards, tmp_path / "run", "--resume-from-hub"))
    assert refused.status == 2
    assert "needs a checkpoint on the branch checkpoints of alice/tiny" in refused.error
    assert not (tmp_path / "run").exists()
    assert hub_here.repository(REPO) is None


@pytest.mark.parametrize(
    ("flags", "token", "message"),
    [
        ((), "hf_unknown", "needs a valid Hub token"),
        ((), HubHandle.read_token, "role is 'read'"),
        (("--hub-license", "my-own"), HubHandle.write_token, "The Hub must accept the card's metadata"),
        (("--hub-language", "english"), HubHandle.write_token, "The Hub must accept the card's metadata"),
        (("--hub-revision", "a branch"), HubHandle.write_token, "--hub-revision must be a name"),
    ],
)
def test_what_cannot_be_pushed_is_told_before_the_run(
    flags: tuple[str, ...], token: str, message: str, hub_here: HubHandle, shards: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, run: Callable[..., Outcome],
) -> None:  # fmt: skip
    monkeypatch.setenv("HF_TOKEN", token)
    refused = run(main, *hub_flags(shards, tmp_path / "run", *flags))
    assert refused.status == 2
    assert message in refused.error
    assert token not in refused.err
    assert not (tmp_path / "run").exists()
    assert not hub_here.requests("POST", "create")


@pytest.mark.usefixtures("hub_here")
def test_without_a_network_a_run_does_not_begin(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[..., Outcome]
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    refused = run(main, *hub_flags(shards, tmp_path / "run"))
    assert refused.status == EXIT_FAILED
    assert "127.0.0.1:9 does not serve it" in refused.error
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("hub_here", "one_device")
def test_a_network_that_goes_away_costs_the_push_alone(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[..., Outcome]
) -> None:
    check = "train.loop.lifecycle.check_hub_access"
    monkeypatch.setattr(check, lambda *_, **__: monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9"))
    failed = run(main, *hub_flags(shards, tmp_path))
    assert failed.status == 1
    assert "push them by hand" in failed.error
    assert "model.safetensors" in exported(tmp_path)
