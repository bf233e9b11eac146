"""Runs of several seeds: each in its folder, all in one table."""

import json

import pytest
from sklearn.metrics import accuracy_score

from finetuning.loop.training import seeds_table
from finetuning.run_classification import main
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
