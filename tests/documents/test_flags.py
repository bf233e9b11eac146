"""The flags of the three commands: all listed, the tutorial's among them; `--help` and the configs import little."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.commands import COMMANDS

PROJECT = Path(__file__).parents[2]
SLOW_IMPORTS = {
    *("tensorflow", "tf_keras", "torch", "datasets", "pandas", "apache_beam", "matplotlib", "sentencepiece"),
    "google.cloud.storage",
}
CONFIGS = (
    "tokenizer_training.corpus.config",
    "tokenizer_training.unigram.config",
    "tfrecord_prep.config",
    "train.config",
)


@pytest.mark.parametrize("script", COMMANDS)
def test_all_flags_are_listed(script):
    dataclass_types, listed, _ = COMMANDS[script]
    fields = [field.name for dataclass_type in dataclass_types for field in dataclasses.fields(dataclass_type)]
    assert sorted(fields) == sorted(listed.split())


@pytest.mark.parametrize("script", COMMANDS)
def test_the_tutorials_flags_work_here(script):
    _, listed, tutorial = COMMANDS[script]
    assert set(tutorial.split()) <= set(listed.split())


def run_listing_imports(*arguments):
    command = [sys.executable, "-X", "importtime", *arguments]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True)
    return done.stdout, {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}


@pytest.mark.parametrize(
    "script", [*COMMANDS, "train/fill_mask.py", "train/export.py", "train/compare_runs.py", "install.py"]
)
def test_help_imports_nothing_slow(script):
    printed, imported = run_listing_imports(str(PROJECT / script), "--help")
    assert not imported & SLOW_IMPORTS
    for listed in COMMANDS.get(script, (0, ""))[1].split():
        assert f"--{listed.replace('_', '-')}" in printed


@pytest.mark.parametrize("module", CONFIGS)
def test_a_config_imports_nothing_slow(module):
    _, imported = run_listing_imports("-c", f"import {module}")
    assert module in imported
    assert not imported & (SLOW_IMPORTS | {"transformers"})
