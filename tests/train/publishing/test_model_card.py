import copy
import json
import re
from typing import Any

import numpy as np
import pytest
from huggingface_hub import HfApi, ModelCard
from transformers import AutoConfig

from tests.fixtures.tiny_models import CONFIGS, tiny_tokenizer
from tests.servers.fixtures import HubHandle
from tokenizer_training.tokenizer import vocabulary_size
from train.config.settings import (
    DataConfig,
    HardwareConfig,
    HubConfig,
    MaskingConfig,
    ModelConfig,
    OptimizationConfig,
    RunConfig,
    TrainingConfig,
)
from train.publishing.model_card import model_card
from train.publishing.published_record import published_run
from train.publishing.publisher import Publication
from train.publishing.pytorch_format import ModelSnapshot
from train.tasks.masked_lm import MaskedLanguageModeling
from train.tasks.task import task_record

HUB = HubConfig(hub_model_id="alice/tiny", hub_license="apache-2.0", hub_language=["en", "de"])
TOTALS = {
    "num_documents": 1234,
    "num_blank_documents": 4,
    "num_tokens": 56789,
    "num_padding_tokens": 7,
    "num_rows": 130,
}
EVALUATION = {"split": "validation", "num_masked_tokens": 75}
METRICS = [
    {"step": 3, "split": "train", "loss": 5.0},
    EVALUATION | {"step": 3, "loss": 4.5, "perplexity": 90.0, "masked_accuracy": 0.1},
    EVALUATION | {"step": 6, "loss": 4.0, "perplexity": 54.6, "masked_accuracy": 0.25},
]


def corpus(**settings: Any) -> dict[str, Any]:
    nothing = {"dataset_name": None, "dataset_config": None, "dataset_revision": None, "split": "train"}
    return {
        "settings": nothing | settings,
        "data_files": [{"name": "/home/alice/private/a.txt", "num_bytes": 2_000_000}],
    }


def record(hub: HubConfig = HUB, init_from: str | None = None, **corpus_settings: Any) -> dict[str, Any]:
    """Make the `run.json` of a run of 6 steps of 8 rows of 16 tokens."""
    data = DataConfig(train_dataset="/home/alice/private/shards/train")
    model = ModelConfig(init_from=init_from)
    run = RunConfig(output_dir="/home/alice/private/run")
    config = TrainingConfig(data, model, MaskingConfig(), OptimizationConfig(), HardwareConfig(), run, hub)
    shards = {"split": "train", "max_length": 16, "chunking": "concat", "corpus": corpus(**corpus_settings)}
    shards |= {"totals": TOTALS, "unigram_entropy_nats": 4.2}
    plan = {"num_steps": 6, "global_batch_rows": 8, "num_rows": 130, "max_length": 16, "num_warmup_steps": 1}
    return {
        "settings": config.as_dict(),
        "versions": {"tensorflow": "2.21.0"},
        "hardware": "TPU v5e-8, 8 replicas",
        "computation": {"jit_compile": False, "tpu_layers": True},
        "hub_revision": "abc123",
        "plan": plan,
        "train_data": shards,
        "eval_data": shards | {"split": "validation"},
    }


def as_published(of: dict[str, Any]) -> dict[str, Any]:
    return published_run(of | {"model_config": {}, "tokenizer": "/home/alice/private", "fingerprint": {}})


def card(of: dict[str, Any], step: int = 6, metrics: list[dict[str, Any]] = METRICS, has_picture: bool = True) -> str:
    config = AutoConfig.for_model(**CONFIGS["roberta"])
    arrays = {"tf/word_embeddings/weight:0": np.zeros((200, 32)), "tf/dense/kernel:0": np.zeros((32, 64))}
    snapshot = ModelSnapshot("TFRobertaForMaskedLM", config, arrays)
    before = copy.deepcopy(of)
    text = model_card(of, tiny_tokenizer(), Publication(step, snapshot, metrics), ["loss.png"] if has_picture else [])
    assert of == before
    return text


def record_of_phases(**corpus_settings: Any) -> dict[str, Any]:
    """Make the `run.json` of a run whose last two steps, in a second phase, have 4 rows of 64 tokens."""
    first, second = record(), record(**corpus_settings)
    first["plan"]["num_steps"] = 4
    before = {"before": [{"num_steps": 4, "global_batch_rows": 8, "max_length": 16}]}
    second["plan"] |= before | {"global_batch_rows": 4, "max_length": 64}
    second["settings"]["masking"]["mlm_probability"] = 0.3
    of_phase = ("settings", "plan", "train_data", "eval_data")
    phases = [{name: one[name] for name in of_phase} | {"model_config": {}} for one in (first, second)]
    return second | {"phases": phases}


RECORDS = {
    "phases": record_of_phases(),
    "phases, as published": as_published(record_of_phases(dataset_name="alice/corpus")),
    "files": record(),
    "hub data set": record(dataset_name="alice/corpus", dataset_config="en", dataset_revision="v2"),
    "builtin": record(dataset_name="builtin"),
    "a folder": record(dataset_name="/home/alice/private/data", dataset_config="private"),
    "continued": record(init_from="bob/model"),
    "continued from a folder": record(init_from="/home/alice/private/export"),
    "continued, as published": as_published(record(init_from="/home/alice/private/export", dataset_name="/home/a")),
    "nothing stated": record(HubConfig()),
    "tutorial's shards": record() | {key: {"totals": {"num_rows": 130}} for key in ("train_data", "eval_data")},
}  # fmt: skip


def test_no_text_of_a_phase_leaves_that_is_not_known() -> None:
    assert "/home" not in json.dumps(as_published(record_of_phases(dataset_name="/home/alice/private/data")))


def test_phases_are_told_apart() -> None:
    text = card(record_of_phases(dataset_name="alice/corpus"))
    assert f"| tokens seen | {4 * 8 * 16 + 2 * 4 * 64:,}, padding included |" in text
    assert re.findall(r"^\| (\d) \| (\d) \| (\d+ tokens) \| (\d rows) \| token, (\d+%)", text, flags=re.M) == [
        ("1", "4", "16 tokens", "8 rows", "15%"), ("2", "6", "64 tokens", "4 rows", "30%"),
    ]  # fmt: skip
    assert "In phase 1:" in text
    assert ModelCard(text).data.datasets == ["alice/corpus"]
    assert "at most 64 tokens" in text
    assert "not finished: step 4 of 6" in card(record_of_phases(), step=4, metrics=[])


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("metrics", [METRICS, [], [METRICS[2] | {"perplexity": float("inf")}]])
def test_every_card_is_valid(name: str, metrics: list[dict[str, Any]], hub_here: HubHandle) -> None:
    text = card(RECORDS[name], metrics=metrics)
    HfApi()._validate_yaml(text)
    assert len(hub_here.requests("POST", "validate-yaml")) == 1
    data = ModelCard(text).data.to_dict()
    assert (data["library_name"], data["pipeline_tag"], data["mask_token"]) == ("transformers", "fill-mask", "[MASK]")
    assert ("model-index" in data) == bool(metrics)
    assert "base_model" not in data
    assert not re.search(r"fine.?tun", text, flags=re.IGNORECASE)
    assert "/home" not in text
    assert "private" not in text
    assert "None" not in text


def test_metadata_of_a_hub_data_set() -> None:
    data = ModelCard(card(RECORDS["hub data set"])).data
    assert (data.license, data.language, data.datasets) == ("apache-2.0", ["en", "de"], ["alice/corpus"])
    results = {result.metric_type: result for result in data.eval_results}
    assert {kind: result.metric_value for kind, result in results.items()} == {
        "loss": 4.0, "perplexity": 54.6, "accuracy": 0.25,
    }  # fmt: skip
    loss = results["loss"]
    assert (loss.task_type, loss.dataset_type, loss.dataset_config) == ("fill-mask", "alice/corpus", "en")
    assert (loss.dataset_revision, loss.dataset_split) == ("v2", "validation")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("files", ["pretrained from scratch.", "files of its author's: 1, 2.0 MB", "| tokens | 56,789 |"]),
        ("hub data set", ["`alice/corpus`, configuration `en`, split `train`", "| revision | v2 |"]),
        ("builtin", ["docstrings of Python's standard library"]),
        ("continued", ["continued from `bob/model`, revision `abc123`."]),
        ("continued from a folder", ["continued from a checkpoint of its author."]),
        ("continued, as published", ["continued from a checkpoint of its author.", "files of its author's: 1, 2.0 MB"]),
        ("a folder", ["files of its author's: 1, 2.0 MB"]),
        ("nothing stated", ["| license | not stated |", "| languages | not stated |", 'model="."']),
        ("tutorial's shards", ["| source | not recorded |"]),
    ],
)
def test_what_a_card_says(name: str, says: list[str]) -> None:
    text = card(RECORDS[name])
    num_parameters = vocabulary_size(tiny_tokenizer()) * 32 + 32 * 64
    always = [
        f"| parameters | {num_parameters:,} |", "RobertaForMaskedLM (`roberta`)", "mask token `[MASK]`",
        "| steps | 6 |", "| tokens seen | 768, padding included |", "| epochs | 0.37 |", "TPU v5e-8, 8 replicas",
        "| computation | compiled by XLA, layers for TPUs |",
        "| 6 | 4.0000 | 54.60 | 0.2500 |", "![Loss over the steps](loss.png)", "Over 75 masked tokens",
    ]  # fmt: skip
    for words in [*always, *says]:
        assert words in text, words


def test_the_task_is_read_from_the_record() -> None:
    of = record()
    assert "| masking | token, 15% of the tokens: 80% masked, 10% random, the rest kept |" in card(of)
    assert "Knowing the frequencies of the tokens only gives a loss of 4.2000." in card(of)
    task = json.loads(json.dumps(task_record(MaskedLanguageModeling)))
    assert card(of | {"task": task}) == card(of)
    task["card"] |= {"predicts_tokens": False, "usage": None, "procedure": {}, "pipeline_tag": "other"}
    text = card(of | {"task": task})
    assert ModelCard(text).data.pipeline_tag == "other"
    assert 'AutoModelForMaskedLM.from_pretrained("alice/tiny")' in text
    for words in ("| masking |", "frequencies", "widget"):
        assert words not in text


def test_documents_that_were_kept_apart_are_told() -> None:
    of = record()
    assert "| attention |" not in card(of)
    of["settings"]["model"]["block_attention"] = True
    assert "| attention | within each document of a row, as if it had a row of its own;" in card(of)
    del of["settings"]["model"]["block_attention"]  # as in runs of before
    assert "| attention |" not in card(of)


def test_of_an_unfinished_run_without_evaluation_or_picture() -> None:
    text = card(RECORDS["files"], step=3, metrics=[], has_picture=False)
    assert "**Training is not finished: step 3 of 6.**" in text
    assert "The model was not evaluated." in text
    assert "loss.png" not in text


def test_the_example_has_the_tokenizers_own_mask_token() -> None:
    hub = HubConfig(hub_model_id="alice/tiny", hub_revision="trial", hub_example="Das ist [MASK].")
    tokenizer = tiny_tokenizer()
    tokenizer.mask_token = "<m>"
    config = AutoConfig.for_model(**CONFIGS["roberta"])
    snapshot = ModelSnapshot("TFRobertaForMaskedLM", config, {})
    text = model_card(record(hub), tokenizer, Publication(6, snapshot, []), [])
    assert 'pipeline("fill-mask", model="alice/tiny", revision="trial")' in text
    assert 'fill_mask("Das ist <m>.")' in text
    assert ModelCard(text).data.to_dict()["widget"] == [{"text": "Das ist <m>."}]


def test_of_the_best_checkpoint_of_a_run_that_went_on() -> None:
    """Its figures are those of that checkpoint, not the run's last ones."""
    text = card(RECORDS["files"], step=3)
    assert "It is as after step 3 of 6, whose evaluation was the best." in text
    assert "not finished" not in text
    values = {one.metric_type: one.metric_value for one in ModelCard(text).data.eval_results}
    assert (values["loss"], values["perplexity"]) == (4.5, 90.0)
    assert "4.0000" not in text
