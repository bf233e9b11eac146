"""The quick start: what it runs, and what it prints, on a terminal and in a file."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import quickstart

PROJECT = Path(__file__).parents[2]
PREDICTIONS = """done
Return a [MASK] of strings.
   60.3%  list
    9.2%  tuple

The first [MASK] is the name of the file.
   12.0 %  argument
"""


def test_predictions_are_read_from_what_the_command_prints():
    assert quickstart.read_predictions(PREDICTIONS) == [
        ("Return a [MASK] of strings.", [(60.3, "list"), (9.2, "tuple")]),
        ("The first [MASK] is the name of the file.", [(12.0, "argument")]),
    ]


def test_it_ends_with_what_to_type_next():
    lines = quickstart.closing_lines(Path("runs/quickstart"), str(PROJECT / ".venv" / "bin" / "python"))
    assert "    source .venv/bin/activate\n    python train/fill_mask.py --model runs/quickstart/model " in lines
    assert "runs/quickstart/model/loss.png" in lines


def test_make_runs_it():
    shown = subprocess.run(
        ["make", "--dry-run", "quickstart", "QUICKSTART_DIR=there", "QUICKSTART_STEPS=4", "PYTHON=python3"],
        cwd=PROJECT,
        capture_output=True,
        encoding="utf-8",
        check=True,
    ).stdout
    assert "python3 quickstart.py --environment .venv --output-dir there --max-steps 4" in shown.splitlines()


def test_a_failed_stage_names_its_log(tmp_path, capsys):
    assert quickstart.main(["--python", "false", "--output-dir", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1].startswith("2/4  Tokenizer")
    assert f"ended with status 1; all its output: {tmp_path}/train_unigram.log" in printed.err


@pytest.mark.slow
def test_the_quick_start(tmp_path):
    """All of it, with few steps, in the environment that the tests run in."""
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
    assert "loss of guessing from word frequencies alone: 6." in done.stdout
    assert re.search(r"step +4   validation loss \d", done.stdout)
    assert sum("[MASK]" in line and " % " in line for line in lines) == 3
    assert (tmp_path / "model" / "export" / "model.safetensors").exists()
    # Two processes have used the same text, about as much as is wanted at most.
    num_bytes = float(re.findall(r"read (\d+) MB of text", done.stdout)[0])
    assert 10 < num_bytes <= 25
