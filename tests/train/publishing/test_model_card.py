import copy
import json
import re
from collections.abc import Collection
from typing import Any

import numpy as np
import pytest
from huggingface_hub import HfApi, ModelCard
from transformers import AutoConfig, PreTrainedTokenizerFast

from mlm_common.tokenizer import vocabulary_size
from tests.fixtures.plans import plan_record
from tests.fixtures.tiny_models import CONFIGS, tiny_tokenizer
from train.config.learning import DataConfig, MaskingConfig, OptimizationConfig, PretrainedModel
from train.config.settings import PretrainingHardware, PretrainingHub, PretrainingRun, TrainingConfig
from train.publishing.model_card import check_card, model_card
from train.publishing.publisher import published_run
from train.publishing.pytorch_format import ModelSnapshot
from train.tasks.masked_lm import MaskedLanguageModeling
from train.tasks.task import task_record

HUB = PretrainingHub(hub_model_id="alice/tiny", hub_license="apache-2.0", hub_language=["en", "de"])
TOTALS = {"num_documents": 1234, "num_blank_documents": 4, "num_tokens": 56789, "num_padding_tokens": 7}
TOTALS |= {"num_rows": 130}
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


def record(hub: PretrainingHub = HUB, init_from: str | None = None, **corpus_settings: Any) -> dict[str, Any]:
    """Make the `run.json` of a run of 6 steps of 8 rows of 16 tokens."""
    data = DataConfig(train_dataset="/home/alice/private/shards/train")
    model = PretrainedModel(init_from=init_from)
    run = PretrainingRun(output_dir="/home/alice/private/run")
    config = TrainingConfig(data, model, MaskingConfig(), OptimizationConfig(), PretrainingHardware(), run, hub)
    shards = {"split": "train", "max_length": 16, "chunking": "concat", "corpus": corpus(**corpus_settings)}
    shards |= {"totals": TOTALS, "unigram_entropy_nats": 4.2}
    return {
        "settings": config.as_dict(),
        "versions": {"tensorflow": "2.21.0"},
        "hardware": "TPU v5e-8, 8 replicas",
        "computation": {"jit_compile": False, "tpu_layers": True},
        "hub_revision": "abc123",
        "task": json.loads(json.dumps(task_record(MaskedLanguageModeling))),
        "plan": plan_record(num_steps=6, num_warmup_steps=1),
        "train_data": shards,
        "eval_data": shards | {"split": "validation"},
    }


def as_published(of: dict[str, Any]) -> dict[str, Any]:
    return published_run(of | {"model_config": {}, "tokenizer": "/home/alice/private", "fingerprint": {}})


def card(
    of: dict[str, Any],
    step: int = 6,
    metrics: list[dict[str, Any]] = METRICS,
    files: Collection[str] = ("loss.png",),
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> str:
    arrays = {"tf/word_embeddings/weight:0": np.zeros((200, 32)), "tf/dense/kernel:0": np.zeros((32, 64))}
    config = AutoConfig.for_model(**CONFIGS["roberta"])
    before = copy.deepcopy(of)
    snapshot = ModelSnapshot("TFRobertaForMaskedLM", config, arrays, step, metrics)
    text = model_card(of, tokenizer or tiny_tokenizer(), snapshot, files)
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
    phases = [{name: phase[name] for name in of_phase} | {"model_config": {}} for phase in (first, second)]
    return second | {"phases": phases}


RECORDS = {
    "phases": record_of_phases(),
    "phases, as published": as_published(record_of_phases(dataset_name="/home/alice/private/data")),
    "files": record(),
    "hub data set": record(dataset_name="alice/corpus", dataset_config="en", dataset_revision="v2"),
    "builtin": record(dataset_name="builtin"),
    "a folder": record(dataset_name="/home/alice/private/data", dataset_config="private"),
    "continued": record(init_from="bob/model"),
    "continued from a folder": record(init_from="/home/alice/private/export"),
    "continued, as published": as_published(record(init_from="/home/alice/private/export", dataset_name="/home/a")),
    "nothing stated": record(PretrainingHub()),
    "tutorial's shards": record() | {key: {"totals": {"num_rows": 130}} for key in ("train_data", "eval_data")},
}  # fmt: skip


def test_phases_are_told_apart():
    text = card(record_of_phases(dataset_name="alice/corpus"))
    assert f"| tokens seen | {4 * 8 * 16 + 2 * 4 * 64:,}, padding included |" in text
    assert re.findall(r"^\| (\d) \| (\d) \| (\d+ tokens) \| (\d rows) \| token, (\d+%)", text, flags=re.M) == [
        ("1", "4", "16 tokens", "8 rows", "15%"), ("2", "6", "64 tokens", "4 rows", "30%"),
    ]  # fmt: skip
    assert "In phase 1:" in text
    assert ModelCard(text).data.datasets == ["alice/corpus"]
    assert "at most 64 tokens" in text
    assert "not finished: step 4 of 6" in card(record_of_phases(), step=4, metrics=[])


# Each one way in which a setting is recorded: in the settings, as a plan that follows from it, in the model.
@pytest.mark.parametrize(
    ("name", "place", "values", "shown"),
    [
        ("schedule", "settings", ("linear", "wsd"), ("linear", "wsd")),
        ("dropout", "settings", (None, 0.3), ("default", "0.3")),
        ("mlm_probability", "settings", (0.12, 0.34), ("12%", "34%")),
        ("weight_decay_rate", "settings", (0.0125, 0.0333), ("0.0125", "0.0333")),
        ("global_batch_rows", "plan", (111, 222), ("111", "222")),
        ("rope_theta", "model_config", (111, 222), ("111", "222")),
    ],
)
def test_both_values_of_a_setting_that_varies_are_in_the_card(name, place, values, shown):
    of = record_of_phases()
    for phase, value in zip(of["phases"], values, strict=True):
        sections = phase[place].values() if place == "settings" else [phase[place]]
        (section,) = (candidate for candidate in sections if name in candidate or place == "model_config")
        section[name] = value
    once, table = card(of | of["phases"][1]).split("| phase |")
    rows = re.findall(r"^\| \d \| .*", table, flags=re.M)
    for row, text in zip(rows[:2], shown, strict=True):
        assert re.search(rf"\b{re.escape(text)}", row), row
    assert "| attention |" not in once
    assert ("weight decay" in once) == (name != "weight_decay_rate")


def test_evaluations_are_shown_with_the_data_of_their_phase():
    of = record_of_phases()
    of["phases"][1]["eval_data"] = of["eval_data"] = of["eval_data"] | {"unigram_entropy_nats": 5.5, "split": "test"}
    metrics = [METRICS[1] | {"phase": 1}, METRICS[2] | {"phase": 2, "num_masked_tokens": 88}]
    text = card(of, metrics=metrics)
    first, second = text.split("In phase 1:")[-1].split("In phase 2:")
    assert all(words in first for words in ("75 masked tokens", "a loss of 4.2000", "| 3 | 4.5000 |"))
    assert all(words in second for words in ("88 masked tokens", "a loss of 5.5000", "| 6 | 4.0000 |"))
    assert {result.dataset_split for result in ModelCard(text).data.eval_results} == {"test"}
    of["phases"][1]["eval_data"] = of["eval_data"] = of["phases"][0]["eval_data"]
    assert "In phase 1:" not in card(of, metrics=metrics).split("## Evaluation")[1]


@pytest.mark.parametrize("eval_data", [None, record()["eval_data"]])
def test_an_evaluation_of_another_step_is_not_the_result(eval_data):
    of = record_of_phases()
    of["phases"][1]["eval_data"] = of["eval_data"] = eval_data
    text = card(of, metrics=[METRICS[1] | {"phase": 1}])
    assert "The model of step 6 was not evaluated; the newest evaluation is of step 3." in text
    assert "| 3 | 4.5000 |" in text
    assert "model-index" not in ModelCard(text).data.to_dict()


@pytest.mark.parametrize("name", ["phases", "continued, as published"])
def test_a_card_is_checked_before_training(name, caplog):
    of, config = RECORDS[name], AutoConfig.for_model(**CONFIGS["roberta"])
    assert "as published" not in name or "/home" not in json.dumps(of)
    check_card(of, tiny_tokenizer(), config)
    assert "cannot be built" not in caplog.text
    caplog.clear()
    broken = copy.deepcopy(of)
    del (broken.get("phases") or [broken])[-1]["settings"]["optimization"]["schedule"]
    check_card(broken, tiny_tokenizer(), config)
    line = caplog.messages[-1]
    assert "card cannot be built, so the export will have a minimal one: KeyError: 'schedule' (model_card.py" in line


@pytest.mark.parametrize(
    ("name", "metrics"),
    [
        *((name, METRICS) for name in RECORDS),
        ("files", []),
        ("phases", []),
        ("files", [METRICS[2] | {"perplexity": float("inf")}]),
    ],
)
def test_every_card_is_valid(name, metrics, hub_here):
    text = card(RECORDS[name], metrics=metrics, files=("loss.png",) if metrics else ())
    HfApi()._validate_yaml(text)
    assert len(hub_here.requests("POST", "validate-yaml")) == 1
    data = ModelCard(text).data.to_dict()
    assert (data["library_name"], data["pipeline_tag"], data["mask_token"]) == ("transformers", "fill-mask", "[MASK]")
    assert ("model-index" in data) == bool(metrics)
    assert ("The model was not evaluated." in text) == (not metrics)
    assert ("loss.png" in text) == bool(metrics)
    assert "base_model" not in data
    assert not re.search(r"fine.?tun", text, flags=re.IGNORECASE)
    for words in ("/home", "private", "None"):
        assert words not in text


def test_metadata_of_a_hub_data_set():
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
        ("files", ["pretrained from scratch.", "1 file of the author, 2.0 MB", "| tokens | 56,789 |"]),
        ("hub data set", ["`alice/corpus`, configuration `en`, split `train`", "| revision | v2 |"]),
        ("builtin", ["docstrings of Python's standard library"]),
        ("continued", ["pretrained further, starting from `bob/model`, revision `abc123`."]),
        *(
            (name, ["starting from a local checkpoint."])
            for name in ("continued from a folder", "continued, as published")
        ),
        *((name, ["1 file of the author, 2.0 MB"]) for name in ("a folder", "continued, as published")),
        ("nothing stated", ["| license | not stated |", "| languages | not stated |", 'model="."']),
        ("tutorial's shards", ["| source | not recorded |"]),
    ],
)
def test_what_a_card_says(name, says):
    text = card(RECORDS[name])
    num_parameters = vocabulary_size(tiny_tokenizer()) * 32 + 32 * 64
    always = [
        f"| parameters | {num_parameters:,} |", "RobertaForMaskedLM (`roberta`)", "mask token `[MASK]`",
        "| steps | 6 |", "| tokens seen | 768, padding included |", "| epochs | 0.37 |", "TPU v5e-8, 8 replicas",
        "| computation | compiled with XLA, TPU-optimized layers |",
        "| 6 | 4.0000 | 54.60 | 0.2500 |", "![Loss over the steps](loss.png)", "Over 75 masked tokens",
    ]  # fmt: skip
    for words in [*always, *says]:
        assert words in text, words


def test_the_task_is_read_from_the_record():
    of = record()
    assert "| masking | token, 15% of the tokens: 80% masked, 10% random, the rest kept |" in card(of)
    assert "Guessing from token frequencies alone gives a loss of 4.2000." in card(of)
    task = copy.deepcopy(of["task"])
    task["card"] |= {"predicts_tokens": False, "usage": None, "procedure": {}, "pipeline_tag": "other"}
    text = card(of | {"task": task})
    assert ModelCard(text).data.pipeline_tag == "other"
    assert 'AutoModelForMaskedLM.from_pretrained("alice/tiny")' in text
    for words in ("| masking |", "frequencies", "widget"):
        assert words not in text


def test_the_example_has_the_tokenizers_own_mask_token():
    hub = PretrainingHub(hub_model_id="alice/tiny", hub_revision="trial", hub_example="Das ist [MASK].")
    tokenizer = tiny_tokenizer()
    tokenizer.mask_token = "<m>"
    text = card(record(hub), tokenizer=tokenizer)
    assert 'pipeline("fill-mask", model="alice/tiny", revision="trial")' in text
    assert 'fill_mask("Das ist <m>.")' in text
    assert ModelCard(text).data.to_dict()["widget"] == [{"text": "Das ist <m>."}]


def test_of_the_best_checkpoint_of_a_run_that_went_on():
    """Its figures are those of that checkpoint, not the run's last ones."""
    text = card(RECORDS["files"], step=3)
    assert "This is the checkpoint of step 3 of 6, which had the best evaluation." in text
    assert "not finished" not in text
    values = {result.metric_type: result.metric_value for result in ModelCard(text).data.eval_results}
    assert (values["loss"], values["perplexity"]) == (4.5, 90.0)
    assert "4.0000" not in text
