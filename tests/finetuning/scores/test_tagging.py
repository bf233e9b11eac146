"""Scores of tags against those counted by hand."""

import pytest

from finetuning.scores.tagging import baseline, default_tag, is_degenerate, metrics_of, scores

REFERENCES = [["B-PER", "I-PER", "O"], ["B-ORG", "O", "B-PER"]]
# One entity of three is right; another has wrong bounds, a third is of another kind.
PREDICTIONS = [["B-PER", "O", "O"], ["B-PER", "O", "B-PER"]]


def test_scores_of_entities() -> None:
    found = scores(("f1", "precision", "recall", "accuracy"), PREDICTIONS, REFERENCES)
    assert found["precision"] == pytest.approx(1 / 3)
    assert found["recall"] == pytest.approx(1 / 3)
    assert found["f1"] == pytest.approx(1 / 3)
    assert found["accuracy"] == pytest.approx(4 / 6)
    assert scores(("f1",), [["O"] * 3] * 2, REFERENCES)["f1"] == 0


def test_which_metrics_suit_tags() -> None:
    assert metrics_of(("O", "B-X"))[0] == "f1"
    assert metrics_of(("NOUN", "VERB")) == ("accuracy",)


def test_guesses_and_degenerate_runs() -> None:
    assert baseline(REFERENCES, [["a", "b"], ["c"]]) in ([["O", "O"], ["O"]], [["B-PER", "B-PER"], ["B-PER"]])
    assert is_degenerate([["O", "O"], ["O"]])
    assert not is_degenerate(PREDICTIONS)
    assert (default_tag(("B-X", "O")), default_tag(("NOUN", "VERB"))) == (1, 0)
