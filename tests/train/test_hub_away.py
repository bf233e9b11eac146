"""A Hub that is away: what is needed of it may be tried again, and a run with a checkpoint resumes without it."""

import shutil
import time
from collections.abc import Callable
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import constants, file_download

from mlm_common.errors import EXIT_FAILED, FINAL_STATUSES, InputError
from mlm_common.hub.retries import HubAwayError
from mlm_common.tokenizer import load_tokenizer
from tests.fixtures.plans import config_of
from tests.fixtures.tiny_run import run_flags
from train.config.settings import parse_training_config
from train.loop.lifecycle import Pretraining, prepare
from train.model.pretrained_files import find_weights, read_config
from train.publishing.publisher import resume_from_hub
from train.run_mlm import main
from train.runtime.machines import Cluster
from train.runtime.run_folder import RunFolder

MODEL = "alice/not-on-this-machine"


def fetch_a_checkpoint() -> None:
    config = config_of("--hub-model-id", MODEL, "--resume-from-hub")
    resume_from_hub(RunFolder("nowhere"), config.hub, Cluster())


NEEDS: dict[str, Callable[[], object]] = {
    "tokenizer": lambda: load_tokenizer(MODEL),
    "configuration": lambda: read_config(MODEL),
    "weights": lambda: find_weights(MODEL),
    "checkpoint": fetch_a_checkpoint,
}


@pytest.fixture
def refused_connections(hub_of_transformers, monkeypatch) -> None:  # noqa: ARG001
    """The Hub's port refuses."""
    for module in (constants, file_download):
        monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9/{repo_id}/{revision}/{filename}")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    without_waits = SimpleNamespace(sleep=lambda _: None, time=time.time)
    monkeypatch.setattr(huggingface_hub.utils._http, "time", without_waits)


@pytest.mark.usefixtures("refused_connections")
@pytest.mark.parametrize("what", NEEDS)
def test_without_the_hub_another_try_may_help_unless_it_is_forbidden_to_ask(what, monkeypatch):
    with pytest.raises(HubAwayError):
        NEEDS[what]()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError):
        NEEDS[what]()


@pytest.mark.usefixtures("hub_of_transformers")
@pytest.mark.parametrize("what", NEEDS)
def test_what_the_hub_does_not_have_is_bad_input(what):
    with pytest.raises(InputError):
        NEEDS[what]()


def test_a_run_resumes_without_the_hub_but_does_not_start(hub_here, finished_run, shards, tmp_path, caplog):
    hub_here.fault("whoami", times=1000)
    shutil.copytree(finished_run, tmp_path / "run")
    resumed = parse_training_config(run_flags(shards, tmp_path / "run", "--hub-model-id", "alice/model"), "")
    prepare(resumed, Pretraining())
    assert "The run resumes although the Hub cannot be reached: Pushing to alice/model needs the Hub" in caplog.text
    for flags in (
        run_flags(shards, tmp_path / "new", "--hub-model-id", "alice/model"),
        run_flags(shards, tmp_path / "run", "--hub-model-id", "alice/model", "--overwrite-output-dir"),
    ):
        assert main(flags) == EXIT_FAILED
        assert EXIT_FAILED not in FINAL_STATUSES
