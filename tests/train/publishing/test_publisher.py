"""Exports and pushes of a model, also while it trains, against a Hub with faults; the training itself is left out."""

import logging
import time
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf
from huggingface_hub import HfApi, ModelCard

from mlm_common.hub import push as hub
from tests.fixtures.plans import make_plan, phase_of
from tests.fixtures.results import read_json
from tests.fixtures.tiny_models import tiny_model, tiny_tokenizer
from tests.servers.fixtures import HubHandle
from train.config.learning import OptimizationConfig
from train.config.settings import HubConfig, RunConfig
from train.loop.phase import make_plans
from train.publishing import publisher as publisher_module
from train.publishing.publisher import Publisher, PushToHub, read_log_files, steps_of_pushes
from train.publishing.pytorch_format import take_snapshot
from train.runtime.run_folder import RunFolder
from train.runtime.tensorflow_runtime import TensorFlowRuntime

REPO = "alice/tiny"
UPLOAD = "/lfs/[0-9a-f]{64}[?]"


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
def test_when_to_push(config, expected):
    """130 rows in batches of 16, and 35 steps."""
    optimization = OptimizationConfig(per_replica_batch_size=16, max_steps=35)
    plan = make_plan(optimization, RunConfig(save_steps=10), num_rows=130, max_length=16, num_replicas=1)
    assert steps_of_pushes(config, plan) == expected


def test_a_phase_ends_a_pass_that_the_one_before_began():
    """130 rows in batches of 16 for 12 steps, then in batches of 32 for 10."""
    optimizations = [OptimizationConfig(per_replica_batch_size=16 * n, max_steps=14 - 2 * n) for n in (1, 2)]
    phases = [phase_of(optimization, RunConfig(), 130, 16, continues_rows=True) for optimization in optimizations]
    config = HubConfig(hub_model_id=REPO, hub_strategy="epoch")
    # 192 rows are used in the first.
    assert [steps_of_pushes(config, plan) for plan in make_plans(phases, 1)] == [(9,), (15, 19)]


def test_unreadable_log_files_are_left_out_of_an_export(cloud, caplog):
    names = ("loss.png", "tensorboard/train/events.out.tfevents.2")
    for name in (*names, "tensorboard/train/events.out.tfevents.3", "tensorboard/validation/events.out.tfevents.4"):
        cloud.put(f"run/{name}", name.encode())
    run = RunFolder(f"{cloud.bucket_url}/run")
    files = {"train/events.out.tfevents.00000": 2, "train/events.out.tfevents.00001": 3}
    files["validation/events.out.tfevents.00000"] = 4
    expected = {f"runs/{name}": f"tensorboard/{name[:-5]}{number}".encode() for name, number in files.items()}
    assert read_log_files(run) == expected | {"loss.png": b"loss.png"}
    assert not caplog.text
    cloud.fault("tfevents.2", status=403)
    assert set(read_log_files(run)) == {"loss.png"}
    assert "the export lacks some files of the log" in caplog.text


@pytest.fixture
def publisher(hub_here, finished_run, tmp_path) -> Publisher:  # noqa: ARG001
    """Of a run without log and plots."""
    record = read_json(finished_run / "run.json")
    record["settings"]["hub"] |= {"hub_model_id": REPO, "hub_tag": "last"}
    return Publisher(RunFolder(tmp_path / "run"), record, tiny_tokenizer())


@pytest.fixture(scope="module")
def model() -> Any:
    """A model in training, as far as a push needs it."""
    runtime = TensorFlowRuntime(tf.distribute.get_strategy())
    optimizer = SimpleNamespace(is_stopped=False, figures=[])
    return SimpleNamespace(network=tiny_model("roberta"), optimizer=optimizer, runtime=runtime)


def while_training(publisher: Publisher) -> PushToHub:
    return PushToHub(publisher, (1,), SimpleNamespace(lines=[]))  # type: ignore[arg-type]


def begin_push(pushing: PushToHub, model: Any, step: int) -> None:
    """Push, and return once the thread has taken the state: one that waits is replaced by the next."""
    pushing.push(model, step)
    while pushing._pushes.newer_waits.is_set():
        time.sleep(0.001)


def titles(server: HubHandle) -> list[str]:
    repository = server.repository(REPO)
    return repository["commits"][1:] if repository else []


def test_a_newer_state_does_not_wait_for_the_retries_of_an_older_one(hub_here, publisher, model, monkeypatch):
    monkeypatch.setattr(hub, "RETRY_DELAYS_SECONDS", (3600.0,))
    hub_here.fault("commit/", status=503)
    with while_training(publisher) as pushing:
        begin_push(pushing, model, 1)
        pushing.push(model, 2)
        assert pushing._pushes.wait(60)
    assert titles(hub_here) == ["Step 2"]


def fail_after_pushes(pushing, model, first, second):
    with pushing:
        begin_push(pushing, model, first)
        pushing.push(model, second)
        raise ZeroDivisionError


def test_a_run_that_fails_pushes_what_it_has(hub_here, publisher, model):
    hub_here.fault(UPLOAD, mode="delay", method="PUT", delay_seconds=1)
    with pytest.raises(ZeroDivisionError):
        fail_after_pushes(while_training(publisher), model, 1, 3)
    assert titles(hub_here) == ["Step 1", "Step 3"]
    assert "Training is not finished: step 3 of 6" in hub_here.files(REPO)["README.md"].decode()


def test_a_run_that_fails_ends_in_bounded_time(hub_here, publisher, model, monkeypatch, caplog):
    assert publisher_module.GRACE_SECONDS <= 60
    monkeypatch.setattr(publisher_module, "GRACE_SECONDS", 0.1)
    hub_here.fault(UPLOAD, mode="hold", method="PUT")
    pushing = while_training(publisher)
    with pytest.raises(ZeroDivisionError):
        fail_after_pushes(pushing, model, 1, 2)
    assert "gave up the last push to the Hub" in caplog.text
    hub_here.release()
    assert pushing._pushes.wait(60)
    assert "Step 2" not in titles(hub_here)


def test_pushes_that_fail_are_warnings(hub_here, publisher, model, caplog):
    hub_here.fault("commit/", status=403)
    with while_training(publisher) as pushing:
        pushing.push(model, 1)
        assert pushing._pushes.wait(60)
    assert "step 1 was not pushed to the Hub; training continues. The push to alice/tiny failed: 403" in caplog.text
    assert "pushes to the Hub that failed during training: steps 1" in caplog.text


def test_a_card_that_fails_costs_neither_export_nor_push(hub_here, publisher, model, caplog):
    caplog.set_level(logging.WARNING)
    del publisher.record["settings"]["optimization"]["schedule"]
    publisher.publish(take_snapshot(model.network, 3), "Step 3")
    pushed, export = hub_here.files(REPO), publisher.run_folder.export
    for name in ("model.safetensors", "README.md"):
        assert pushed[name] == export.read_bytes(name)
    HfApi()._validate_yaml(card := pushed["README.md"].decode())
    assert ModelCard(card).data.library_name == "transformers"
    message = "the model card cannot be built, so README.md is a minimal one: KeyError: 'schedule' ("
    assert caplog.text.count(message) == 1
