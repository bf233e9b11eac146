"""How well queries find their passages: metrics on rankings that can be worked out by hand, and losses."""

import numpy as np
import pytest

from finetuning.tasks.pairs import Pairs
from finetuning.tasks.retrieval import Judged, ranking_scores, search


def test_metrics_worked_out_by_hand() -> None:
    """A query without judged passages is left out; one whose passages are all of grade 0 counts as 0."""
    ranked = np.array([[3, 1, 0, 2], [0, 1, 2, 3], [0, 1, 2, 3], [2, 3, 1, 0]], np.int32)
    found = ranking_scores(ranked, [{1: 2, 2: 1}, {}, {3: 0}, {2: 1}])
    expected = (2 / np.log2(3) + 1 / np.log2(5)) / (2 + 1 / np.log2(3))
    np.testing.assert_allclose(found["ndcg_at_10"], [expected, 0, 1])
    np.testing.assert_allclose(found["mrr_at_10"], [1 / 2, 0, 1])
    np.testing.assert_allclose(found["recall_at_1"], [0, 0, 1])
    np.testing.assert_allclose(found["recall_at_10"], [1, 0, 1])


def test_the_earlier_of_equal_passages_comes_first() -> None:
    vectors = np.array([[1, 0], [0, 1], [1, 0], [0, 1]], np.float32)
    ranked, _ = search(vectors[:1], vectors, 3)
    assert ranked.tolist() == [[0, 2, 1]]


def test_equal_texts_are_one_text() -> None:
    """The positive of any row with the same query is relevant; hard negatives are passages that are not."""
    judged = Judged.of(Pairs("t", ("q", "p", "n"), (["a", "b", "a"], ["x", "y", "z"], ["y", "w", "w"]), None))
    assert (list(judged.queries), list(judged.passages)) == (["a", "b"], ["x", "y", "z", "w"])
    assert judged.relevant == [{0: 1.0, 2: 1.0}, {1: 1.0}]
    units = np.eye(6, dtype=np.float32)[[0, 1, 0, 1, 2, 3]]
    figures = judged.figures(units, temperature=1.0)
    e = np.e
    losses = [np.log((e + 2) / e), np.log(3.0), np.log((e + 3) / e)]
    assert figures["loss"] == pytest.approx(np.mean(losses))
    assert figures["recall_at_1"] == pytest.approx((0.5 + 1) / 2)
    assert (figures["num_queries"], figures["num_passages"]) == (2, 4)


def test_scored_pairs() -> None:
    pairs = Pairs("t", ("a", "b"), (["a", "b", "c"], ["x", "y", "x"]), np.array([0.0, 5.0, 2.0]))
    vectors = np.array([[1, 0], [0, 1], [0.6, 0.8], [0, 1], [0, 1]], np.float32)
    figures = Judged.of(pairs).figures(vectors, temperature=1.0)
    assert figures["spearmanr"] == pytest.approx(1.0)
    assert figures["loss"] == pytest.approx((0.8 - 0.4) ** 2 / 3, abs=1e-6)
