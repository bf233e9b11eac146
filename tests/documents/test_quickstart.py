"""The quick start: what it runs, and what it prints, on a terminal and in a file."""

import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import matplotlib
import numpy as np
import pytest

import quickstart
from mlm_common.corpus import builtin
from mlm_common.corpus.identity import keep

PROJECT = Path(__file__).parents[2]
PREDICTIONS = """done
Return a [MASK] of strings.
   60.3%  list
    9.2%  tuple

The first [MASK] is the name of the file.
   12.0%  argument
"""


def test_predictions_are_read_from_what_the_command_prints():
    assert quickstart.read_predictions(PREDICTIONS) == [
        ("Return a [MASK] of strings.", [(60.3, "list"), (9.2, "tuple")]),
        ("The first [MASK] is the name of the file.", [(12.0, "argument")]),
    ]


def test_a_failed_stage_names_its_log(tmp_path, capsys):
    assert quickstart.main(["--python", "false", "--output-dir", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1].startswith("2/4  Tokenizer")
    assert f"ended with status 1; all its output: {tmp_path}/train_unigram.log" in printed.err


def keep_docstrings() -> None:
    """Fill the user's cache with the docstrings of two packages, instead of those of 15,000 files."""
    files = builtin.python_files([sysconfig.get_path("stdlib"), *builtin._package_folders()])
    of_packages = builtin.python_files([str(Path(package.__file__).parent) for package in (matplotlib, np)])
    keep(builtin.CACHE_NAME, builtin._key(list(files)), builtin.read_files(list(of_packages)))


@pytest.mark.slow
def test_the_quick_start(tmp_path, monkeypatch):
    """All of it, with few steps and little text, in the environment that the tests run in."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    keep_docstrings()
    command = [sys.executable, "quickstart.py", "--python", sys.executable, "--output-dir", str(tmp_path)]
    done = subprocess.run(
        [*command, "--max-steps", "4"], cwd=PROJECT, capture_output=True, encoding="utf-8", check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr == ""
    lines = [line for line in done.stdout.splitlines() if not re.match(r" +\d+ s  ", line)]  # of a slow machine
    assert 20 <= len(lines) <= 45
    assert max(len(line) for line in lines if str(tmp_path) not in line) <= 100
    assert "\r" not in done.stdout
    assert [line[:3] for line in lines if re.match("./4", line)] == ["1/4", "2/4", "3/4", "4/4"]
    assert '"Return a list of strings." becomes ▁' in done.stdout
    assert re.search(r"loss of guessing from word frequencies alone: \d\.\d\d", done.stdout)
    assert re.search(r"step +4   validation loss \d", done.stdout)
    assert sum("[MASK]" in line and "% " in line for line in lines) == 3
    assert (tmp_path / "model" / "export" / "model.safetensors").exists()
    assert re.search(r"read [1-4] MB of text", done.stdout)
