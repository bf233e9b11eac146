"""Metrics against sums done by hand, guesses without the text, and runs that learned nothing."""

import math

import numpy as np
import pytest

from finetuning.data.labels import Labels
from finetuning.loop.task import is_degenerate
from finetuning.tasks.metrics import baseline, chosen_metric, predict, scores, with_mean
from mlm_common.errors import InputError

REFERENCES = np.array([1, 1, 1, 0, 0, 1])
PREDICTIONS = np.array([1, 0, 1, 1, 0, 1])  # 3 true positives, 1 false, 1 missed, 1 true negative


def test_metrics_of_classes():
    results = scores(("accuracy", "f1", "matthews_correlation", "f1_macro"), PREDICTIONS, REFERENCES)
    assert results["accuracy"] == 4 / 6
    assert results["f1"] == pytest.approx(3 / 4)
    assert results["matthews_correlation"] == pytest.approx((3 * 1 - 1 * 1) / math.sqrt(4 * 4 * 2 * 2))
    assert results["f1_macro"] == pytest.approx((3 / 4 + 1 / 2) / 2)
    assert results["combined_score"] == pytest.approx(sum(list(results.values())[:4]) / 4)


def test_a_constant_scores_nothing():
    results = scores(("pearson", "spearmanr"), np.ones(4), np.arange(4.0))
    assert results == {"pearson": 0.0, "spearmanr": 0.0, "combined_score": 0.0}
    assert scores(("matthews_correlation", "f1"), np.zeros(6, int), REFERENCES)["combined_score"] == 0.0


def test_predictions_of_logits():
    logits = np.array([[0.1, -2.0, 0.3], [3.0, 1.0, 0.0]], np.float32)
    assert predict(logits, "single_label_classification").tolist() == [2, 0]
    assert predict(logits, "multi_label_classification").tolist() == [[1, 0, 1], [1, 1, 0]]
    assert predict(logits[:, :1], "regression").tolist() == logits[:, 0].tolist()


def test_a_guess_without_the_text():
    single = Labels("single_label_classification", ("a", "b"))
    assert baseline(single, np.array([0, 1, 1]), 2).tolist() == [1, 1]
    several = Labels("multi_label_classification", ("a", "b"))
    assert baseline(several, np.array([[1, 0], [1, 1], [1, 0]]), 2).tolist() == [[1, 0], [1, 0]]
    assert baseline(Labels("regression", ("score",)), np.array([1.0, 2.0]), 2).tolist() == [1.5, 1.5]


def test_degenerate_runs():
    assert is_degenerate(np.array([1, 1, 1]))
    assert is_degenerate(np.array([[0, 1], [0, 1]]))
    assert is_degenerate(np.array(["O", "O"]))
    assert not is_degenerate(np.array([1, 1, 0]))
    assert not is_degenerate(np.array([1]))


def test_the_metric_by_which_the_best_is_chosen():
    assert chosen_metric(("accuracy", "f1"), None) == "accuracy"
    assert chosen_metric(with_mean(("accuracy", "f1")), "combined_score") == "combined_score"
    with pytest.raises(InputError, match="--metric-name must be one of accuracy, loss; received f1"):
        chosen_metric(("accuracy",), "f1")
