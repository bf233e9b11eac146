"""How well queries find their passages: metrics on rankings that can be worked out by hand, and losses."""

import numpy as np
import pytest

from finetuning.tasks import retrieval
from finetuning.tasks.retrieval import Judged, interval, lexical_rankings, ranking_scores, search


def test_metrics_worked_out_by_hand():
    """A query without judged passages is left out; one whose passages are all of grade 0 counts as 0."""
    ranked = np.array([[3, 1, 0, 2], [0, 1, 2, 3], [0, 1, 2, 3], [2, 3, 1, 0]], np.int32)
    scores = ranking_scores(ranked, [{1: 2, 2: 1}, {}, {3: 0}, {2: 1}])
    expected = (2 / np.log2(3) + 1 / np.log2(5)) / (2 + 1 / np.log2(3))
    np.testing.assert_allclose(scores["ndcg_at_10"], [expected, 0, 1])
    np.testing.assert_allclose(scores["mrr_at_10"], [1 / 2, 0, 1])
    np.testing.assert_allclose(scores["recall_at_1"], [0, 0, 1])
    np.testing.assert_allclose(scores["recall_at_10"], [1, 0, 1])


def test_blocks_change_nothing(monkeypatch):
    vectors = np.random.default_rng(1).integers(-2, 3, (50, 4)).astype(np.float32)  # many equal products
    whole = search(vectors, vectors, 9, 0.5)
    monkeypatch.setattr(retrieval, "QUERIES_AT_ONCE", 7)
    monkeypatch.setattr(retrieval, "PASSAGES_AT_ONCE", 6)
    ranked, totals = search(vectors, vectors, 9, 0.5)
    expected = np.argsort(-(vectors @ vectors.T), axis=1, kind="stable")[:, :9]
    np.testing.assert_array_equal(ranked, expected)
    np.testing.assert_array_equal(whole[0], expected)
    np.testing.assert_allclose(totals, whole[1], rtol=1e-6)


def test_searches_for_words():
    """A rare word counts more than a frequent one, and a short text more than a long one; no word is no error."""
    passages = ["the cat sat", "the dog", "the the dog ran far away home", "a bird"]
    rankings = lexical_rankings(["the bird", "dog", "unknown"], passages)
    assert set(rankings) == {"tfidf", "bm25"}
    for ranked in rankings.values():
        assert ranked[0, 0] == 3
        assert ranked[1, :2].tolist() == [1, 2]
        assert ranked[2].tolist() == [0, 1, 2, 3]
    assert lexical_rankings(["a"], ["b", "c"]) == {}


def test_the_interval_of_a_difference():
    differences = np.random.default_rng(3).normal(0.5, 1.0, (400, 1))
    low, high = interval(differences)
    assert low < differences.mean() < high
    np.testing.assert_allclose(high - low, 2 * 1.96 * differences.std() / 20, rtol=0.1)
    assert interval(differences) == (low, high)
    assert interval(np.full(5, 0.25)) == (0.25, 0.25)


def test_equal_texts_are_one_text():
    """The positive of any row with the same query is relevant; hard negatives are passages that are not."""
    judged = Judged.of((["a", "b", "a"], ["x", "y", "z"], ["y", "w", "w"]), None)
    assert (list(judged.queries), list(judged.passages)) == (["a", "b"], ["x", "y", "z", "w"])
    assert judged.relevant == [{0: 1.0, 2: 1.0}, {1: 1.0}]
    units = np.eye(6, dtype=np.float32)[[0, 1, 0, 1, 2, 3]]
    figures = judged.figures(units, temperature=1.0)
    e = np.e
    losses = [np.log((e + 2) / e), np.log(3.0), np.log((e + 3) / e)]
    assert figures["loss"] == pytest.approx(np.mean(losses))
    assert figures["recall_at_1"] == pytest.approx((0.5 + 1) / 2)
    assert (figures["num_queries"], figures["num_passages"]) == (2, 4)


def test_figures_beside_others():
    judged = Judged.of((["a cat", "a dog"], ["cat food", "dog food"]), None)
    perfect = np.eye(2, dtype=np.float32)[[0, 1, 0, 1]]
    assert "random_ndcg_at_10" not in judged.figures(perfect, 1.0)
    judged.compare_with(perfect[[1, 0, 2, 3]])
    figures = judged.figures(perfect, 1.0)
    assert (figures["tfidf_recall_at_1"], figures["bm25_recall_at_1"], figures["random_recall_at_1"]) == (1, 1, 0)
    assert (figures["above_random_recall_at_1_low"], figures["above_tfidf_recall_at_1_high"]) == (1, 0)


def test_scored_pairs():
    judged = Judged.of((["a", "b", "c"], ["x", "y", "x"]), [0.0, 5.0, 2.0])
    vectors = np.array([[1, 0], [0, 1], [0.6, 0.8], [0, 1], [0, 1]], np.float32)
    figures = judged.figures(vectors, temperature=1.0)
    assert figures["spearmanr"] == pytest.approx(1.0)
    assert figures["loss"] == pytest.approx((0.8 - 0.4) ** 2 / 3, abs=1e-6)
