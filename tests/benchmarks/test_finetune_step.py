"""Fine-tuning beside its peers: the stand-in has SST-2's lengths, and each contender prints its line."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.finetune_step import tokens_of_rows, write_stand_in
from finetuning.config.settings import ClassificationData
from finetuning.tasks.classification import read_parts

PROJECT = Path(__file__).parents[2]
# One of each program.
MEASURED = ("ours", "trainer grouped", "tf script dynamic")
NAMES = ("ours", "trainer", "trainer grouped", "tf script", "tf script dynamic")


def test_sentences_of_the_stand_in_are_as_long_as_those_of_sst2(tmp_path: Path) -> None:
    write_stand_in(tmp_path, num_rows=5000)
    parts = read_parts(ClassificationData(task_name="sst2", glue_dir=str(tmp_path)))
    words = [len(text.split()) for text in parts.train.texts[0]]
    assert len(words) == 5000
    assert parts.validation[""].num_rows == 872
    # Counted in the 67,349 rows of GLUE's download.
    assert np.mean(words) == pytest.approx(9.41, rel=0.05)
    assert np.quantile(words, [0.1, 0.5, 0.9]) == pytest.approx([2, 7, 21], abs=1)
    assert set(parts.train.labels or ()) == {"negative", "positive"}


def test_tokens_of_a_row_are_those_that_it_is_filled_up_to() -> None:
    settings = {"batch_rows": 2, "length": 64}
    tokens = tokens_of_rows(list(NAMES), np.array([3, 16, 17, 40] * 50), settings)
    assert tokens["ours"] == (16 + 16 + 32 + 64) / 4
    assert tokens["tf script"] == 40
    assert tokens["trainer grouped"] == (3 + 16 + 17 + 40) / 4
    assert 19 < tokens["trainer"] == tokens["tf script dynamic"] < 40
    assert tokens_of_rows(["ours with XLA"], np.array([3, 17]), settings) == {"ours with XLA": 24}


@pytest.mark.slow
def test_contenders_of_both_sides_print_their_lines(torch_python: Path) -> None:
    flags = ["--torch-python", torch_python, "--num-rows=700", "--num-layers=1", "--hidden-size=32", "--vocab-size=600"]
    flags += ["--length=32", "--rounds=1", "--steps-per-round=2", "--warmup-steps=2", "--contenders", *MEASURED]
    command = [sys.executable, PROJECT / "benchmarks" / "finetune_step.py", *flags]
    tables = subprocess.run(command, stdout=subprocess.PIPE, encoding="utf-8", check=True).stdout
    assert "700 rows of a stand-in for SST-2" in tables
    assert re.search(r"^ours is warm: programs 2, seconds to compile ", tables, re.MULTILINE), tables
    for name in MEASURED:
        assert re.search(rf"^{name} +[\d,]+ +\(", tables, re.MULTILINE), tables
    for name in MEASURED[1:]:
        assert re.search(rf"^ours / {name} +\d", tables, re.MULTILINE), tables
