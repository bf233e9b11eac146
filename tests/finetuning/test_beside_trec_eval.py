"""Metrics of rankings beside trec_eval's, and BM25 beside bm25s, in an environment with both."""

import json
from pathlib import Path

import numpy as np
import pytest

from finetuning.tasks.retrieval import METRICS, lexical_rankings, ranking_scores, search
from tests.fixtures.other_environments import made_environment, output_of

pytestmark = pytest.mark.slow

NUM_QUERIES, NUM_PASSAGES = 40, 150
# Documents have names that trec_eval, which puts the later name first, orders as we do: the earlier passage first.
TREC_EVAL = """
import json, sys
import pytrec_eval

qrels, runs = json.loads(sys.argv[1])
first = {query: dict(sorted(run.items(), key=lambda pair: (pair[1], pair[0]))[-10:]) for query, run in runs.items()}
measures = {"ndcg_cut.10", "recall.1,10,100"}
results = pytrec_eval.RelevanceEvaluator(qrels, measures).evaluate(runs)
ranks = pytrec_eval.RelevanceEvaluator(qrels, {"recip_rank"}).evaluate(first)
print(json.dumps({
    query: [scores["ndcg_cut_10"], ranks[query]["recip_rank"], *(scores[f"recall_{n}"] for n in (1, 10, 100))]
    for query, scores in results.items()
}))
"""
BM25 = """
import json, sys
import bm25s

queries, passages = json.loads(sys.argv[1])
searcher = bm25s.BM25(method="lucene", k1=1.5, b=0.75)
searcher.index([passage.split() for passage in passages], show_progress=False)
print(json.dumps([searcher.get_scores(query.split()).tolist() for query in queries]))
"""


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_environment(tmp_path_factory, "rankings", "pytrec-eval-terrier>=0.5.7", "bm25s>=0.2.10")


def test_metrics_are_those_of_trec_eval(python):
    """Rankings have many ties; some queries have no grades, or only grades of 0, and some grades no query."""
    draw = np.random.default_rng(0)
    queries, passages = (draw.integers(-1, 2, (num, 5)).astype(np.float32) for num in (NUM_QUERIES, NUM_PASSAGES))
    relevant = [
        {
            int(passage): float(draw.integers(0, 3))
            for passage in draw.choice(NUM_PASSAGES, draw.integers(1, 15), replace=False)
        }
        for _ in range(NUM_QUERIES)
    ]
    relevant[3], relevant[5] = {}, {2: 0.0}
    names = [f"d{NUM_PASSAGES - passage:04d}" for passage in range(NUM_PASSAGES)]
    qrels = {
        f"q{row}": {names[passage]: int(grade) for passage, grade in grades.items()}
        for row, grades in enumerate(relevant)
    }
    qrels = {query: grades for query, grades in qrels.items() if grades} | {"unknown": {names[0]: 1}}
    cosines = (queries @ passages.T).tolist()
    runs = {f"q{row}": dict(zip(names, query_cosines, strict=True)) for row, query_cosines in enumerate(cosines)}
    theirs = json.loads(output_of(python, TREC_EVAL, json.dumps([qrels, runs])))
    ranked, _ = search(queries, passages, 100)
    ours = np.stack(list(ranking_scores(ranked, relevant).values()), axis=1)
    judged = [f"q{row}" for row in range(NUM_QUERIES) if relevant[row]]
    assert set(theirs) == set(judged)
    assert len(METRICS) == ours.shape[1] == 5
    np.testing.assert_allclose(ours, [theirs[query] for query in judged], atol=1e-9)


def test_bm25_is_that_of_bm25s(python):
    draw = np.random.default_rng(1)
    words = [f"word{number}" for number in range(60)]
    texts = [" ".join(draw.choice(words, draw.integers(2, 40), p=np.arange(1, 61) / 1830)) for _ in range(100)]
    queries = [" ".join(draw.choice(words, draw.integers(1, 6), replace=False)) for _ in range(20)]
    scores = np.array(json.loads(output_of(python, BM25, json.dumps([queries, texts]))))
    ranked = lexical_rankings(queries, texts)["bm25"]
    expected = np.argsort(-scores, axis=1, kind="stable")[:, :100]
    ranked_scores = np.take_along_axis(scores, ranked, axis=1)
    np.testing.assert_allclose(ranked_scores, np.take_along_axis(scores, expected, axis=1), rtol=1e-4)
