"""Every recipe is read, its commands too, and planned with its model; one is trained, made small."""

import dataclasses
import re
import shlex
from pathlib import Path

import pytest
import yaml

from tests.fixtures.commands import parse
from tests.fixtures.plans import phase_of
from tests.fixtures.results import read_json
from tests.fixtures.same_run import logged
from tests.fixtures.tiny_run import MODEL
from tfrecord_prep.config import PrepareConfig
from train.checks.preflight.report import synthetic_inputs
from train.config.phases import phases_of
from train.config.settings import parse_training_config
from train.loop.phase import make_plans
from train.model.config import resolve_model_config
from train.run_mlm import main

FOLDER = Path(__file__).parents[2] / "recipes"
RECIPES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
NUM_REPLICAS = 8
# Steps and billions of tokens of the papers, over the scale that the recipe has; of the others with 1.2 million rows.
EXPECTED = {
    "babylm-strict-small": (93_750, 1.536),
    "bert-base-2018": (1_000_000, 42.6),
    "colab-one-chip": (6_000, 3.15),
    "domain-adaptation": (12_500 + 468_750, 74.5),
    "kaggle-v5e-8": (48_000, 25.2),
    "modernbert-base": (891_368, 2019),
    "modernbert-v5e-8": (9_500, 9.96),
    "multilingual": (100_000, 52.4),
    "retriever": (50_000, 26.2),
    "roberta-base": (500_000, 2097),
    "small-language": (234_375 + 187_500, 13.8),
}


def text_of(name: str) -> str:
    return (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")


def lengths_of_shards(name: str) -> dict[str, int]:
    """Read from the commands in a recipe how long the rows of its shards are, {folder or `hub:` address: tokens}."""
    lengths = {}
    for line in re.findall(r"^#   python (.+)$", text_of(name), flags=re.M):
        script, *flags = shlex.split(line)
        settings = parse(script, flags)
        if script.startswith("tfrecord_prep/"):
            (prepared,) = (config for config in settings if isinstance(config, PrepareConfig))
            lengths |= dict.fromkeys((str(prepared.output_dir), f"hub:{prepared.push_to_hub}"), prepared.max_length)
    return lengths


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_can_be_planned_and_has_one_model(name):
    lengths = lengths_of_shards(name)
    config = parse_training_config(["--phases", str(FOLDER / f"{name}.yaml"), "--output-dir", "run"], "")
    phases = phases_of(config)
    to_plan, model_configs = [], []
    for phase in phases:
        folder = str(phase.config.data.train_dataset).removesuffix("/train")
        is_mixture = folder == phase.config.data.train_dataset  # the folder of all sources
        assert phase.config.data.eval_dataset == (folder if is_mixture else f"{folder}/validation")
        assert phase.config.data.max_length == lengths[folder]
        inputs = synthetic_inputs(max_length=lengths[folder], vocab_size=1000)
        model = dataclasses.replace(phase.config.model, init_from=None)
        model_configs.append(resolve_model_config(model, inputs, max(lengths.values())))
        settings = (phase.config.optimization, phase.config.run, 1_200_000, lengths[folder])
        to_plan.append(phase_of(*settings, has_separate_schedule=phase.has_separate_schedule, name=phase.name))
    plans = make_plans(to_plan, NUM_REPLICAS)
    scale = yaml.safe_load(text_of(name)).get("scale", 1)
    num_steps, billions = EXPECTED[name]
    assert plans[-1].num_steps == pytest.approx(num_steps * scale, rel=1e-4)
    assert sum(plan.num_tokens for plan in plans) / 1e9 == pytest.approx(billions * scale, rel=2e-3)
    assert len({model_config.hidden_size for model_config in model_configs}) == 1
    if name == "modernbert-base":
        bases = [(model_config.local_rope_theta, model_config.global_rope_theta) for model_config in model_configs]
        assert bases == [(1e4, 1e4)] * 6 + [(1e4, 1.6e5)] * 2
    assert "not run it at this size" in " ".join(text_of(name).replace("#", "").split())


@pytest.mark.slow
@pytest.mark.usefixtures("one_device", "eagerly")
def test_a_recipe_trains_when_it_is_small(phase_shards, tmp_path):
    recipe = yaml.safe_load(text_of("modernbert-base"))
    overrides = filter(None, (recipe["settings"].get("config_overrides"), MODEL))
    recipe["settings"] |= {"config_overrides": ",".join(overrides), "bfloat16": False, "block_attention": False}
    recipe["phases"] = recipe["phases"][-3:]
    recipe["scale"] = 6e-6
    for index, phase in enumerate(recipe["phases"]):
        length = 32 if index else 16
        for split in ("train", "eval"):
            phase[f"{split}_dataset"] = f"{phase_shards}/{length}/{split.replace('eval', 'validation')}"
        phase |= {"max_length": length, "global_batch_size": 8, "per_replica_batch_size": 4}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    flags = ["--phases", str(tmp_path / "recipe.yaml"), "--output-dir", str(tmp_path / "run"), "--log-steps", "1"]
    assert main(flags) == 0
    lines = logged(tmp_path / "run", "train")
    assert [line["phase"] for line in lines] == [1, 1, 2, 2, 2, 3]
    assert [line["learning_rate"] for line in lines] == pytest.approx([8e-4] * 2 + [3e-4] * 4, abs=1e-9)
    assert read_json(tmp_path / "run" / "export" / "config.json")["global_rope_theta"] == 160_000.0


@pytest.mark.slow
@pytest.mark.usefixtures("one_device", "eagerly")
def test_the_recipe_of_a_mixture_trains_when_it_is_small(mixture_shards, tmp_path):
    recipe = yaml.safe_load(text_of("multilingual"))
    data = {"train_dataset": str(mixture_shards), "eval_dataset": str(mixture_shards), "max_length": 16}
    recipe["settings"] |= data | {"config_overrides": MODEL, "global_batch_size": 8, "per_replica_batch_size": 4}
    recipe["phases"] = recipe["phases"][1:]
    recipe["scale"] = 4e-5
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    assert main(["--phases", str(tmp_path / "recipe.yaml"), "--output-dir", str(tmp_path / "run")]) == 0
    record = read_json(tmp_path / "run" / "run.json")
    weights = [phase["train_data"]["sources"]["small"]["weight"] for phase in record["phases"]]
    assert len(weights) == 2
    assert weights[0] < weights[1]
    lines = logged(tmp_path / "run", "validation")
    assert {line["phase"] for line in lines if "loss_small" in line} == {1, 2}
