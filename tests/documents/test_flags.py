"""The flags of the three commands: all listed, the tutorial's among them; `--help` and the configs import little."""

import dataclasses
import sys
from pathlib import Path

import pytest

from tests.fixtures.commands import COMMANDS
from tests.fixtures.script_help import ask_for_help

PROJECT = Path(__file__).parents[2]
SLOW_IMPORTS = {
    *("tensorflow", "tf_keras", "torch", "datasets", "pandas", "apache_beam", "matplotlib", "sentencepiece"),
    *("google.cloud.storage", "transformers"),
}
CONFIGS = (
    "mlm_common.corpus.config",
    "tokenizer_training.config",
    "tfrecord_prep.config",
    "train.config.settings",
    "finetuning.config.settings",
    "finetuning.config.embedding",
    "finetuning.config.prediction",
)


@pytest.mark.parametrize("script", COMMANDS)
def test_all_flags_are_listed(script):
    dataclass_types, listed, _ = COMMANDS[script]
    fields = [
        field.name for dataclass_type in dataclass_types for field in dataclasses.fields(dataclass_type) if field.init
    ]
    assert sorted(fields) == sorted(listed.split())


@pytest.mark.parametrize("script", COMMANDS)
def test_the_tutorials_flags_work_here(script):
    _, listed, tutorial = COMMANDS[script]
    assert set(tutorial.split()) <= set(listed.split())


SCRIPTS = (
    *("install.py", *COMMANDS, "train/fill_mask.py", "train/score_mlm.py", "train/export.py", "train/compare_runs.py"),
    *("train/convert_bert.py", "finetuning/glue_submission.py", "finetuning/predict.py"),
    *("finetuning/search.py", "recipes/whiten.py"),
)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_imports_nothing_slow(script):
    printed, imported = ask_for_help(SCRIPTS, CONFIGS)[script]
    assert not imported & SLOW_IMPORTS
    assert "usage: " in printed
    unbroken = printed.replace("\n", "").replace(" ", "")
    for path in (PROJECT, sys.prefix, Path.home()):  # what is printed is on the site
        assert str(path) not in unbroken
    for listed in COMMANDS.get(script, (0, ""))[1].split():
        assert f"--{listed.replace('_', '-')}" in printed


@pytest.mark.parametrize("module", CONFIGS)
def test_a_config_imports_nothing_slow(module):
    _, imported = ask_for_help(SCRIPTS, CONFIGS)[module]
    assert module in imported
    assert not imported & SLOW_IMPORTS
