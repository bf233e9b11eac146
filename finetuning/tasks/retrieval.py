"""Scores of embeddings: how well queries find their passages, and how cosines rank pairs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from finetuning.tasks.metrics import scores
from finetuning.tasks.pairs import Pairs, numbered

# Ranks that are looked at; recall counts among the first of these, the others among the first ten.
DEPTH, NUM_FIRST, RECALL_AT = 100, 10, (1, 10, 100)
METRICS = ("ndcg_at_10", "mrr_at_10", *(f"recall_at_{rank}" for rank in RECALL_AT))
SCORED_METRICS = ("spearmanr", "pearson")
# Queries that are compared with all passages at once.
QUERIES_AT_ONCE = 256


@dataclass(frozen=True)
class Judged:
    """Queries and passages of which it is known which belong together.

    queries, passages: different texts.
    pairs: int (pairs, 2), a query and a passage.
    grades: (pairs,), how relevant the passage is, 0 if it is not; of scored pairs how alike the two are.
    has_scores: pairs are scored, and passages are not searched.
    """

    queries: Sequence[str]
    passages: Sequence[str]
    pairs: NDArray[np.int32]
    grades: NDArray[np.float64]
    has_scores: bool = False

    @classmethod
    def of(cls, pairs: Pairs) -> "Judged":
        """Let the first passage of each row be relevant, among all passages of all rows."""
        joined = [text for column in pairs.texts[1:] for text in column]
        numbers = np.stack([numbered(pairs.texts[0]), numbered(joined)[: pairs.num_rows]], axis=1)
        queries, passages = (list(dict.fromkeys(texts)) for texts in (pairs.texts[0], joined))
        if pairs.scores is not None:
            return cls(queries, passages, numbers, pairs.scores, has_scores=True)
        different = np.unique(numbers, axis=0)
        return cls(queries, passages, different, np.ones(len(different)))

    @property
    def metrics(self) -> tuple[str, ...]:
        return SCORED_METRICS if self.has_scores else METRICS

    @property
    def relevant(self) -> list[dict[int, float]]:
        """{passage: grade} of each query."""
        grades: list[dict[int, float]] = [{} for _ in self.queries]
        for (query, passage), grade in zip(self.pairs.tolist(), self.grades.tolist(), strict=True):
            grades[query][passage] = grade
        return grades

    def cosines(self, vectors: NDArray[np.float32]) -> NDArray[np.float64]:
        """Compute the cosine of each pair from vectors of length 1, of the queries and then of the passages."""
        queries, passages = np.split(vectors, [len(self.queries)])
        first, second = queries[self.pairs[:, 0]], passages[self.pairs[:, 1]]
        return np.einsum("pw,pw->p", first, second, dtype=np.float64)

    def figures(self, vectors: NDArray[np.float32], temperature: float) -> dict[str, float]:
        """Compute the figures of vectors as `cosines` takes them.

        The loss is that of the training with all passages as negatives, or of scored pairs.
        """
        figures: dict[str, float] = {"num_queries": len(self.queries), "num_passages": len(self.passages)}
        if self.has_scores:
            cosines = self.cosines(vectors)
            difference = cosines - self.grades / max(1.0, float(self.grades.max()))
            found = scores(SCORED_METRICS, cosines, self.grades)
            return figures | {"loss": float(np.mean(np.square(difference)))} | {m: found[m] for m in SCORED_METRICS}
        queries, passages = np.split(vectors, [len(self.queries)])
        relevant = self.relevant
        ranked, losses = search(queries, passages, DEPTH, relevant, temperature)
        by_query = ranking_scores(ranked, relevant)
        means = {name: float(values.mean()) for name, values in by_query.items()}
        return figures | {"loss": float(losses.mean()) if len(losses) else 0.0} | means


def search(
    queries: NDArray[np.float32],
    passages: NDArray[np.float32],
    depth: int,
    relevant: Sequence[Mapping[int, float]] = (),
    temperature: float = 1.0,
) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """Compare each query with all passages, on the device.

    Returns:
        The passages with the highest cosines, the earlier of equal ones first, int32 (queries, depth or all passages);
        and the contrastive loss of each relevant passage, without the others that are relevant.
    """
    import tensorflow as tf

    among, ranked, losses = tf.constant(passages), [], []
    for start in range(0, len(queries), QUERIES_AT_ONCE):
        cosines = tf.matmul(queries[start : start + QUERIES_AT_ONCE], among, transpose_b=True)
        ranked.append(tf.math.top_k(cosines, min(depth, len(passages))).indices.numpy())
        if not relevant:
            continue
        logits = cosines.numpy().astype(np.float64) / temperature
        for row, grades in zip(logits, relevant[start : start + QUERIES_AT_ONCE], strict=True):
            found = [passage for passage, grade in grades.items() if grade > 0]
            highest = row.max()
            exponentials = np.exp(row - highest)
            others = exponentials.sum() - exponentials[found].sum()
            losses += [math.log(max(others, 0) + exponentials[one]) + highest - row[one] for one in found]
    return np.concatenate(ranked), np.array(losses)


def ranking_scores(
    ranked: NDArray[np.int32], relevant: Sequence[Mapping[int, float]]
) -> dict[str, NDArray[np.float64]]:
    """Compute each metric for each query with a judged passage, {metric: (queries,)}, as trec_eval defines them.

    Gains are the grades, discounted by the logarithm of the rank; passages of grade 0, and those not judged, are not
    relevant.

    Args:
        ranked: passages of each query, the best first.
        relevant: {passage: grade} of each query.
    """
    discounts = 1 / np.log2(np.arange(2, NUM_FIRST + 2))
    by_query: dict[str, list[float]] = {name: [] for name in METRICS}
    for found, grades in zip(ranked.tolist(), relevant, strict=True):
        if not grades:
            continue
        gains = np.array([max(grades.get(passage, 0.0), 0.0) for passage in found])
        best = np.sort([max(grade, 0.0) for grade in grades.values()])[::-1]
        ideal = float(best[:NUM_FIRST] @ discounts[: len(best[:NUM_FIRST])])
        first = np.flatnonzero(gains[:NUM_FIRST] > 0)
        num_relevant = np.count_nonzero(best)
        by_query["ndcg_at_10"].append(float(gains[:NUM_FIRST] @ discounts[: len(gains[:NUM_FIRST])]) / (ideal or 1))
        by_query["mrr_at_10"].append(1 / (first[0] + 1) if len(first) else 0.0)
        for rank in RECALL_AT:
            by_query[f"recall_at_{rank}"].append(np.count_nonzero(gains[:rank]) / (num_relevant or 1))
    return {name: np.array(values) for name, values in by_query.items()}
