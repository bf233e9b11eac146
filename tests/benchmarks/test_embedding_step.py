"""Training embeddings beside sentence-transformers: the stand-in has SQuAD's lengths, and both print their lines."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.embedding_step import write_stand_in

PROJECT = Path(__file__).parents[2]
NAMES = ("ours", "sentence-transformers")
# A tenth, a half and nine tenths of the 87,599 questions of the training part have at most these, and their paragraphs.
SQUAD_WORDS = {"query": (6, 10, 15), "passage": (72, 110, 183)}


def test_texts_of_the_stand_in_are_as_long_as_those_of_squad(tmp_path: Path) -> None:
    write_stand_in(tmp_path / "pairs.jsonl", num_rows=2000)
    rows = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text(encoding="utf-8").splitlines()]
    for name, quantiles in SQUAD_WORDS.items():
        words = [len(row[name].split()) for row in rows]
        assert np.quantile(words, [0.1, 0.5, 0.9]) == pytest.approx(quantiles, rel=0.15), name


@pytest.mark.slow
def test_both_sides_print_their_lines(torch_python: Path) -> None:
    flags = ["--torch-python", torch_python, "--num-rows=300", "--num-layers=1", "--hidden-size=32", "--vocab-size=600"]
    flags += ["--length=32", "--batch-rows=8", "--rounds=1", "--steps-per-round=2", "--warmup-steps=2"]
    command = [sys.executable, PROJECT / "benchmarks" / "embedding_step.py", *flags]
    tables = subprocess.run(command, stdout=subprocess.PIPE, encoding="utf-8", check=True).stdout
    assert "300 pairs of a stand-in for SQuAD" in tables
    for name in NAMES:
        assert re.search(rf"^{name} +[\d,.]+ +\(", tables, re.MULTILINE), tables
    assert re.search(r"^ours / sentence-transformers +\d", tables, re.MULTILINE), tables
