from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi, ModelCard
from transformers import PretrainedConfig

from mlm_common.hub.push import HubRepository
from tests.fixtures.tiny_models import tiny_tokenizer
from tests.servers.fixtures import CloudStorageHandle, HubHandle
from train.publishing import publisher as publisher_module
from train.publishing.publisher import Publication, Publisher, read_log_files
from train.publishing.pytorch_format import ModelSnapshot
from train.runtime.run_folder import RunFolder


def test_unreadable_log_files_are_left_out_of_an_export(
    cloud: CloudStorageHandle, caplog: pytest.LogCaptureFixture
) -> None:
    names = ("loss.png", "tensorboard/train/events.out.tfevents.2")
    for name in (*names, "tensorboard/train/events.out.tfevents.3", "tensorboard/validation/events.out.tfevents.4"):
        cloud.put(f"run/{name}", name.encode())
    run = RunFolder(f"{cloud.bucket_url}/run")
    assert {name: content.decode() for name, content in read_log_files(run).items()} == {
        "loss.png": "loss.png",
        "runs/train/events.out.tfevents.00000": "tensorboard/train/events.out.tfevents.2",
        "runs/train/events.out.tfevents.00001": "tensorboard/train/events.out.tfevents.3",
        "runs/validation/events.out.tfevents.00000": "tensorboard/validation/events.out.tfevents.4",
    }
    assert not caplog.text
    cloud.fault("tfevents.2", status=403)
    assert set(read_log_files(run)) == {"loss.png"}
    assert "the export is made without some files of the log" in caplog.text


def test_a_card_that_fails_costs_neither_export_nor_push(
    cloud: CloudStorageHandle, hub_here: HubHandle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def export(_model: Any, _tokenizer: Any, folder: str, **_: Any) -> list[str]:
        Path(folder, "model.safetensors").write_bytes(b"weights")
        return ["model.safetensors"]

    def fail(_publication: Publication, _files: Collection[str]) -> str:
        raise KeyError("figure")

    monkeypatch.setattr(publisher_module, "export_model", export)
    run, snapshot = f"{cloud.bucket_url}/run", ModelSnapshot("", PretrainedConfig(), {})
    publisher = Publisher(RunFolder(run), f"{run}/export", tiny_tokenizer(), 16, fail, HubRepository("alice/tiny"))
    publisher.publish(Publication(3, snapshot, []), "Step 3")
    card = cloud.objects()["run/export/README.md"]
    assert cloud.objects()["run/export/model.safetensors"] == b"weights"
    pushed = hub_here.files("alice/tiny")
    assert (pushed["model.safetensors"], pushed["README.md"]) == (b"weights", card)
    HfApi()._validate_yaml(card.decode())
    assert ModelCard(card.decode()).data.library_name == "transformers"
    assert (
        caplog.text.count("the model's card cannot be built, so README.md is a minimal one: KeyError: 'figure' (") == 1
    )
