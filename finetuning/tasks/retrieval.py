"""Evaluate retrieval: exact search, metrics of rankings, lexical baselines, and confidence intervals of differences."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from finetuning.tasks.metrics import scores

# Number of passages that a search returns, the last rank that counts in nDCG and MRR, and the last ranks that count in
# recall.
DEPTH, NUM_FIRST, RECALL_AT = 100, 10, (1, 10, 100)
RECALLS = {f"recall_at_{rank}": rank for rank in RECALL_AT}
METRICS = ("ndcg_at_10", "mrr_at_10", *RECALLS)
SCORED_METRICS = ("spearmanr", "pearson")
# Baselines, {name in the result keys: description}.
OTHERS = {"random": "random encoder", "tfidf": "tf-idf", "bm25": "BM25"}
# Number of queries and of passages in a block of a search.
QUERIES_AT_ONCE, PASSAGES_AT_ONCE = 256, 65_536
# Parameters of BM25 (Robertson and Zaragoza 2009), in Lucene's variant.
K1, B = 1.5, 0.75
# Number of bootstrap samples of the queries for a confidence interval.
NUM_SAMPLES = 1_000

# {metric: (queries,)}
Scores = dict[str, NDArray[np.float64]]


def search(
    queries: Any, passages: Any, depth: int, temperature: float = 1.0
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Find for each query the passages with the largest dot products, on the device, in blocks.

    Args:
        queries: (queries, width), an array, or a sparse matrix of scipy.
        passages: (passages, width), of the same kind as `queries`.
        depth: number of passages to find.
        temperature: number by which dot products are divided for the second result.

    Returns:
        The passages, best first, int32 (queries, depth or all passages), with equally good passages in their original
        order; and the logsumexp of the dot products with all passages, divided by the temperature, (queries,).
    """
    import tensorflow as tf
    from scipy.sparse import issparse

    starts = range(0, queries.shape[0], QUERIES_AT_ONCE)
    results: list[list[tuple[tf.Tensor, ...]]] = [[] for _ in starts]  # by block of queries, then by block of passages
    for first in range(0, passages.shape[0], PASSAGES_AT_ONCE):
        block = passages[first : first + PASSAGES_AT_ONCE]
        columns = block.T if issparse(block) else tf.transpose(tf.cast(block, tf.float32))
        for query_results, start in zip(results, starts, strict=True):
            products = queries[start : start + QUERIES_AT_ONCE] @ columns
            values = tf.cast(products.toarray() if issparse(products) else products, tf.float32)
            best = tf.math.top_k(values, min(depth, values.shape[1]))
            total = tf.reduce_logsumexp(values / temperature, axis=1, keepdims=True)
            query_results.append((best.values, best.indices + first, total))
    ranked, totals = [], []
    for query_results in results:
        values, indices, sums = (tf.concat(blocks, axis=1) for blocks in zip(*query_results, strict=True))
        order = tf.math.top_k(values, min(depth, passages.shape[0])).indices
        ranked.append(tf.gather(indices, order, batch_dims=1))
        totals.append(tf.reduce_logsumexp(sums, axis=1))
    return tf.concat(ranked, axis=0).numpy(), tf.concat(totals, axis=0).numpy()


def lexical_rankings(
    queries: Sequence[str], passages: Sequence[str], depth: int = DEPTH
) -> dict[str, NDArray[np.int32]]:
    """Rank passages by the words that they share with the query, with tf-idf and with BM25.

    Returns:
        {"tfidf" or "bm25": ranked passages, as from `search`}; empty if no passage has a word of two or more letters.
    """
    from sklearn.feature_extraction.text import CountVectorizer, TfidfTransformer

    words = CountVectorizer(dtype=np.float32)
    try:
        passage_counts = words.fit_transform(passages)
    except ValueError:  # no passage has a word of two letters
        return {}
    query_counts = words.transform(queries)
    tfidf = TfidfTransformer().fit(passage_counts)
    lengths = np.asarray(passage_counts.sum(axis=1)).ravel()
    num_with_word = passage_counts.getnnz(axis=0)
    bm25 = passage_counts.tocoo()
    bm25.data = bm25.data / (bm25.data + K1 * (1 - B + B * lengths[bm25.row] / lengths.mean()))
    bm25.data *= np.log1p((len(passages) - num_with_word + 0.5) / (num_with_word + 0.5))[bm25.col]

    return {
        "tfidf": search(tfidf.transform(query_counts), tfidf.transform(passage_counts), depth)[0],
        "bm25": search(query_counts, bm25.tocsr(), depth)[0],
    }


def ranking_scores(ranked: NDArray[np.int32], relevant: Sequence[Mapping[int, float]]) -> Scores:
    """Compute each metric for each query that has grades, as trec_eval does.

    The gain of a passage is its grade, discounted by the logarithm of the rank. Passages of grade 0, and passages
    without a grade, are not relevant.

    Args:
        ranked: passages of each query, best first, (queries, depth).
        relevant: for each query, {passage: grade}.
    """
    discounts = 1 / np.log2(np.arange(2, NUM_FIRST + 2))
    by_query: dict[str, list[float]] = {name: [] for name in METRICS}
    for passages, grades in zip(ranked.tolist(), relevant, strict=True):
        if not grades:
            continue
        gains = np.array([max(grades.get(passage, 0.0), 0.0) for passage in passages])
        best = np.sort([max(grade, 0.0) for grade in grades.values()])[::-1]
        ideal = float(best[:NUM_FIRST] @ discounts[: len(best[:NUM_FIRST])])
        first = np.flatnonzero(gains[:NUM_FIRST] > 0)
        num_relevant = np.count_nonzero(best)
        by_query["ndcg_at_10"].append(float(gains[:NUM_FIRST] @ discounts[: len(gains[:NUM_FIRST])]) / (ideal or 1))
        by_query["mrr_at_10"].append(1 / (first[0] + 1) if len(first) else 0.0)
        for last in RECALL_AT:
            by_query[f"recall_at_{last}"].append(np.count_nonzero(gains[:last]) / (num_relevant or 1))
    return {name: np.array(values) for name, values in by_query.items()}


def interval(differences: NDArray[np.float64], seed: int = 0) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Compute the 95% confidence interval of a mean difference, by a paired bootstrap over queries.

    Args:
        differences: differences between two systems, for each query, (queries,) or (queries, metrics).
        seed: seed of the samples.

    Returns:
        The lower and the upper end of the interval.
    """
    random, size = np.random.default_rng(seed), len(differences)
    means = [differences[random.integers(size, size=size)].mean(axis=0) for _ in range(NUM_SAMPLES)]
    low, high = np.quantile(means, (0.025, 0.975), axis=0)
    return low, high


@dataclass(frozen=True)
class Judged:
    """Queries, passages, and grades that say which passages are relevant to which queries.

    Attributes:
        queries, passages: distinct texts, or the texts of a folder in BeIR's format.
        pairs: int (pairs, 2), the indices of a query and a passage. An index of `len(passages)` or more is a passage
            that is not in the corpus and so is never found.
        grades: (pairs,), the relevance of the passage, 0 if it is irrelevant; for scored pairs, the similarity of the
            two texts.
        has_scores: whether pairs are scored. If so, the cosines of the pairs are evaluated instead of a search.
        identical: int (queries,), the passage that is the query itself and is left out of its ranking; -1 without such
            a passage.
        others: {name in `OTHERS`: metrics of this baseline}, filled by `compare_with`.
    """

    queries: Sequence[str]
    passages: Sequence[str]
    pairs: NDArray[np.int32]
    grades: NDArray[np.float64]
    has_scores: bool = False
    identical: NDArray[np.int32] | None = None
    others: dict[str, Scores] = field(default_factory=dict)

    @classmethod
    def of(
        cls, texts: Sequence[Sequence[str]], row_scores: Sequence[float] | None, more_passages: Sequence[str] = ()
    ) -> "Judged":
        """Make grades from rows of texts. The first passage of a row is relevant to its query, unless rows have scores.

        Args:
            texts: columns of queries, passages, and hard negatives.
            row_scores: the score of each row; None without scores.
            more_passages: further passages to search.
        """
        joined = [*(text for column in texts[1:] for text in column), *more_passages]
        pairs = np.stack([numbered(texts[0]), numbered(joined)[: len(texts[0])]], axis=1)
        queries, passages = (list(dict.fromkeys(column)) for column in (texts[0], joined))
        if row_scores is not None:
            return cls(queries, passages, pairs, np.asarray(row_scores, np.float64), has_scores=True)
        pairs = np.unique(pairs, axis=0)
        return cls(queries, passages, pairs, np.ones(len(pairs)))

    def first(self, num_queries: int | None) -> "Judged":
        """Return the first queries (all if `num_queries` is None) with all passages."""
        kept = self.pairs[:, 0] < (num_queries or len(self.queries))
        return replace(
            self,
            queries=self.queries[:num_queries],
            pairs=self.pairs[kept],
            grades=self.grades[kept],
            identical=None if self.identical is None else self.identical[:num_queries],
        )

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics. Recall at a rank is left out if there are not more passages than this rank."""
        if self.has_scores:
            return SCORED_METRICS
        return tuple(name for name in METRICS if RECALLS.get(name, 0) < len(self.passages))

    @property
    def is_positive(self) -> NDArray[np.bool_]:
        """Whether each pair is relevant and can be found, bool (pairs,)."""
        queries, passages = self.pairs.T
        is_found = (self.grades > 0) & (passages < len(self.passages))
        return is_found if self.identical is None else is_found & (passages != self.identical[queries])

    @functools.cached_property
    def relevant(self) -> list[dict[int, float]]:
        """For each query, {passage: grade}."""
        grades: list[dict[int, float]] = [{} for _ in self.queries]
        for (query, passage), grade in zip(self.pairs.tolist(), self.grades.tolist(), strict=True):
            grades[query][passage] = grade
        return grades

    def cosines(self, vectors: NDArray[np.float32]) -> NDArray[np.float64]:
        """Compute the cosine of each pair, (pairs,).

        Args:
            vectors: (queries + passages, width), of length 1; the vectors of the queries come first.
        """
        queries, passages = np.split(vectors, [len(self.queries)])
        return cosines(queries, passages, self.pairs)

    def searched(self, vectors: NDArray[np.float32], temperature: float = 1.0) -> tuple[Scores, float]:
        """Search the passages with each query; return the metrics of each query, and the contrastive loss.

        The loss is the mean over the relevant pairs. All passages that are not relevant are negatives.

        Args:
            vectors: (queries + passages, width), of length 1; the vectors of the queries come first.
            temperature: number by which cosines are divided in the loss.
        """
        queries, passages = np.split(vectors, [len(self.queries)])
        ranked, totals = search(queries, passages, self.depth, temperature)
        pairs = self.pairs[self.is_positive]
        query = pairs[:, 0]
        logits = cosines(queries, passages, pairs) / temperature - totals[query]
        others = 1.0 - np.bincount(query, np.exp(logits), minlength=len(self.queries))
        if self.identical is not None:
            own = np.stack([np.arange(len(self.queries)), self.identical], axis=1)[self.identical >= 0]
            others[own[:, 0]] -= np.exp(cosines(queries, passages, own) / temperature - totals[own[:, 0]])
        losses = np.log(np.maximum(others, 0)[query] + np.exp(logits)) - logits
        return self.ranking_scores(ranked), float(losses.mean()) if len(losses) else 0.0

    @property
    def depth(self) -> int:
        """Number of passages that a search must find, plus one if these may include the query itself."""
        return DEPTH if self.identical is None else DEPTH + 1

    def ranking_scores(self, ranked: NDArray[np.int32]) -> Scores:
        """Compute each metric for each query from rankings of `depth` passages, (queries, depth)."""
        if self.identical is not None:
            is_other = ranked != self.identical[:, np.newaxis]
            order = np.argsort(~is_other, axis=1, kind="stable")[:, :DEPTH]
            ranked = np.where(np.take_along_axis(is_other, order, 1), np.take_along_axis(ranked, order, 1), -1)
        by_query = ranking_scores(ranked, self.relevant)
        return {name: by_query[name] for name in self.metrics}

    def figures(self, vectors: NDArray[np.float32], temperature: float) -> dict[str, float]:
        """Compute loss and metrics of vectors in the form of `cosines`, and the differences from the baselines."""
        figures: dict[str, float] = {"num_queries": len(self.queries), "num_passages": len(self.passages)}
        if self.has_scores:
            cosines = self.cosines(vectors)
            difference = cosines - self.grades / max(1.0, float(self.grades.max()))
            correlations = scores(SCORED_METRICS, cosines, self.grades)
            figures["loss"] = float(np.mean(np.square(difference)))
            return figures | {name: correlations[name] for name in SCORED_METRICS}
        by_query, figures["loss"] = self.searched(vectors, temperature)
        figures |= {name: float(values.mean()) for name, values in by_query.items()}
        for other, by_other in self.others.items():
            ends = interval(np.stack([by_query[name] - by_other[name] for name in self.metrics], axis=1))
            for name, low, high in zip(self.metrics, *ends, strict=True):
                figures[f"{other}_{name}"] = float(by_other[name].mean())
                figures |= {f"above_{other}_{name}_low": float(low), f"above_{other}_{name}_high": float(high)}
        return figures

    def compare_with(self, random_vectors: NDArray[np.float32]) -> None:
        """Compute the metrics of the baselines, with which `figures` then compares the model.

        Args:
            random_vectors: vectors of a random encoder, in the form of `cosines`.
        """
        self.others["random"], _ = self.searched(random_vectors)
        for name, ranked in lexical_rankings(self.queries, self.passages, self.depth).items():
            self.others[name] = self.ranking_scores(ranked)


def cosines(
    queries: NDArray[np.float32], passages: NDArray[np.float32], pairs: NDArray[np.int32]
) -> NDArray[np.float64]:
    """Compute the cosine of each pair (pairs, 2) of vectors with length 1: (pairs,)."""
    return np.einsum("pw,pw->p", queries[pairs[:, 0]], passages[pairs[:, 1]], dtype=np.float64)


def numbered(texts: Sequence[str]) -> NDArray[np.int32]:
    """Number texts in the order of their first occurrence, (texts,); equal texts get the same number."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(text, len(numbers)) for text in texts], np.int32)
