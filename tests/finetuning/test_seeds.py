"""Runs of several seeds: each in its folder, all in one table."""

import json
import re
from pathlib import Path

import pytest
from sklearn.metrics import accuracy_score

from finetuning.loop.training import seeds_table
from finetuning.run_classification import main
from mlm_common.cli import PROJECT_FOLDER
from tests.fixtures.tiny_classification import NUM_VALIDATION, examples, flags


def test_the_table():
    results = {
        3: {"eval_accuracy": 0.5, "eval_guess_accuracy": 0.1, "eval_samples": 9, "epoch": 1.0},
        1: {"eval_accuracy": 0.7, "eval_guess_accuracy": 0.1, "eval_samples": 9, "epoch": 2.0},
    }
    counts = {"eval_num_words": 7, "eval_num_words_cut_off": 0, "eval_num_questions": 5, "eval_is_degenerate": False}
    results = {seed: {**counts, **figures} for seed, figures in results.items()}
    table = seeds_table(results)
    assert table["seeds"] == [3, 1]
    assert list(table["scores"]) == ["eval_accuracy"]
    figures = table["scores"]["eval_accuracy"]
    assert (figures["values"], figures["mean"]) == ([0.5, 0.7], pytest.approx(0.6))
    assert figures["deviation"] == pytest.approx(0.2 / 2**0.5)
    assert seeds_table({3: results[3]})["scores"]["eval_accuracy"]["deviation"] == 0


def test_seeds_need_a_validation_part(tiny_start, tmp_path, run):
    (tmp_path / "train.csv").write_text("text,label\nthe list,a\nthe file,b\n", encoding="utf-8")
    files = ("--init-from", str(tiny_start / "start"), "--train-file", str(tmp_path / "train.csv"))
    seeds = ("--max-seq-length", "16", "--output-dir", str(tmp_path / "run"), "--seeds", "1", "2")
    assert "--seeds compares validation scores, but there is no validation split." in run(main, *files, *seeds).refusal
    assert not (tmp_path / "run").exists()


def test_the_guide_splits_a_file(tmp_path, monkeypatch):
    guide = (PROJECT_FOLDER / "docs/guides/finetuning.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(import pandas.*?)```", guide, flags=re.S)
    monkeypatch.chdir(tmp_path)
    rows = [f'"a, {number}",NA\n' for number in range(20)]
    Path("all.csv").write_text("text,label\n" + "".join(rows), encoding="utf-8")
    exec(program, {})
    parts = [
        Path(name).read_text(encoding="utf-8").splitlines(keepends=True) for name in ("train.csv", "validation.csv")
    ]
    assert [(part[0], len(part)) for part in parts] == [("text,label\n", 19), ("text,label\n", 3)]
    assert sorted(parts[0][1:] + parts[1][1:]) == sorted(rows)


@pytest.mark.slow
@pytest.mark.usefixtures("one_device", "eagerly")
def test_two_seeds(tiny_start, tmp_path, run):
    argv = flags(tiny_start, tmp_path / "run", "--seeds", "1", "2", "--max-steps", "1", "--no-load-best-model-at-end")
    outcome = run(main, *argv)
    assert outcome.status == 0
    table = json.loads((tmp_path / "run" / "seeds_results.json").read_text(encoding="utf-8"))
    assert set(table["scores"]) == {"eval_loss", "eval_accuracy"}
    losses = table["scores"]["eval_loss"]["values"]
    assert losses[0] != losses[1]
    assert f"of {losses[0]:.4f}, {losses[1]:.4f}" in outcome.out
    labels = [label for _, label in examples(NUM_VALIDATION, len("dev"))]
    for seed, accuracy in zip((1, 2), table["scores"]["eval_accuracy"]["values"], strict=True):
        path = tmp_path / "run" / f"seed-{seed}" / "eval_predictions.txt"
        predicted = [line.split("\t")[1] for line in path.read_text(encoding="utf-8").splitlines()[1:]]
        assert accuracy == pytest.approx(accuracy_score(labels, predicted), abs=1e-9)
    assert len(list((tmp_path / "run").glob("seed-*/export/model.safetensors"))) == 2
