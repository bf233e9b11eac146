"""The flags of the three commands: all listed, the tutorial's among them; `--help` and the configs import little."""

import dataclasses
import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.fixtures.commands import COMMANDS, SMALL_COMMANDS, parse
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
    printed, imported, _ = ask_for_help(SCRIPTS, CONFIGS)[script]
    assert not imported & SLOW_IMPORTS
    assert "usage: " in printed
    unbroken = printed.replace("\n", "").replace(" ", "")
    for path in (PROJECT, sys.prefix, Path.home()):  # what is printed is on the site
        assert str(path) not in unbroken
    for listed in COMMANDS.get(script, (0, ""))[1].split():
        assert f"--{listed.replace('_', '-')}" in printed


FLAG_PARSERS = tuple(script for script in SCRIPTS if script in COMMANDS or script in SMALL_COMMANDS)


@pytest.mark.parametrize("script", FLAG_PARSERS)
def test_help_is_short_and_shows_what_must_be_given(script):
    seen = ask_for_help(SCRIPTS, CONFIGS)[script]
    usage, _, listed_flags = seen.short.partition("\n\n")
    for name in re.findall(r"--[\w-]+", usage):
        assert f"\n  {name} " in listed_flags
    assert "--help-all" in listed_flags
    assert len(seen.short.splitlines()) <= min(80, len(seen.printed.splitlines()))
    assert script != "train/run_mlm.py" or len(seen.short.splitlines()) <= 60


@pytest.mark.parametrize("script", FLAG_PARSERS)
def test_examples_of_help_are_real(script):
    seen = ask_for_help(SCRIPTS, CONFIGS)[script]
    (examples,) = re.findall(r"\nExamples:\n((?:  .*\n)+)", seen.short)
    assert f"\nExamples:\n{examples}" in seen.printed
    lines = examples.replace("\\\n", " ").splitlines()
    assert 1 <= len(lines) <= 3
    for line in lines:
        python, path, *flags = shlex.split(line)
        assert path == script
        assert python in ("python", ".venv-preflight/bin/python")
        assert parse(script, flags)
    assert all(len(line) <= 90 for line in examples.splitlines())


@pytest.mark.parametrize("module", CONFIGS)
def test_a_config_imports_nothing_slow(module):
    imported = ask_for_help(SCRIPTS, CONFIGS)[module].imported
    assert module in imported
    assert not imported & SLOW_IMPORTS
