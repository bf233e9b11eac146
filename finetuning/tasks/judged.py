"""Queries and passages of which it is known which belong together, and how well vectors find them."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from finetuning.tasks.metrics import scores
from finetuning.tasks.retrieval import DEPTH, METRICS, Scores, interval, lexical_rankings, ranking_scores, search

SCORED_METRICS = ("spearmanr", "pearson")
# What a model is compared with, {name in the figures: in words}.
OTHERS = {"random": "random encoder", "tfidf": "tf-idf", "bm25": "BM25"}


@dataclass(frozen=True)
class Judged:
    """Queries, passages, and grades.

    queries, passages: different texts, or those of a folder in BeIR's form.
    pairs: int (pairs, 2), a query and a passage.
    grades: (pairs,), how relevant the passage is, 0 if it is not; of scored pairs how alike the two are.
    has_scores: pairs are scored, and passages are not searched.
    others: {name in `OTHERS`: what else found}, to be compared with.
    """

    queries: Sequence[str]
    passages: Sequence[str]
    pairs: NDArray[np.int32]
    grades: NDArray[np.float64]
    has_scores: bool = False
    others: dict[str, Scores] = field(default_factory=dict)

    @classmethod
    def of(cls, texts: Sequence[Sequence[str]], of_rows: Sequence[float] | None) -> "Judged":
        """Let the first passage of each row be relevant, among all passages of all rows; or score the two texts.

        Args:
            texts: columns of queries, passages, and passages that are not relevant.
            of_rows: the score of each row, if there are any.
        """
        joined = [text for column in texts[1:] for text in column]
        pairs = np.stack([numbered(texts[0]), numbered(joined)[: len(texts[0])]], axis=1)
        queries, passages = (list(dict.fromkeys(column)) for column in (texts[0], joined))
        if of_rows is not None:
            return cls(queries, passages, pairs, np.asarray(of_rows, np.float64), has_scores=True)
        pairs = np.unique(pairs, axis=0)
        return cls(queries, passages, pairs, np.ones(len(pairs)))

    def first(self, num_queries: int | None) -> "Judged":
        """Keep the first queries, all by default, and all passages."""
        kept = self.pairs[:, 0] < (num_queries or len(self.queries))
        return Judged(self.queries[:num_queries], self.passages, self.pairs[kept], self.grades[kept])

    @property
    def metrics(self) -> tuple[str, ...]:
        return SCORED_METRICS if self.has_scores else METRICS

    @functools.cached_property
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

    def searched(self, vectors: NDArray[np.float32], temperature: float = 1.0) -> tuple[Scores, float]:
        """Compute the scores of each query from vectors as `cosines` takes them, and the contrastive loss.

        The loss is the mean over relevant passages, with all passages as negatives that are not relevant.
        """
        queries, passages = np.split(vectors, [len(self.queries)])
        ranked, totals = search(queries, passages, DEPTH, temperature)
        is_relevant = self.grades > 0
        query = self.pairs[is_relevant, 0]
        logits = self.cosines(vectors)[is_relevant] / temperature - totals[query]
        others = 1 - np.bincount(query, np.exp(logits), minlength=len(self.queries))[query]
        losses = np.log(np.maximum(others, 0) + np.exp(logits)) - logits
        return ranking_scores(ranked, self.relevant), float(losses.mean()) if len(losses) else 0.0

    def figures(self, vectors: NDArray[np.float32], temperature: float) -> dict[str, float]:
        """Compute loss and figures of vectors as `cosines` takes them, and how far they are above `others`."""
        figures: dict[str, float] = {"num_queries": len(self.queries), "num_passages": len(self.passages)}
        if self.has_scores:
            cosines = self.cosines(vectors)
            difference = cosines - self.grades / max(1.0, float(self.grades.max()))
            found = scores(SCORED_METRICS, cosines, self.grades)
            return figures | {"loss": float(np.mean(np.square(difference)))} | {m: found[m] for m in SCORED_METRICS}
        by_query, figures["loss"] = self.searched(vectors, temperature)
        figures |= {name: float(values.mean()) for name, values in by_query.items()}
        for other, by_other in self.others.items():
            ends = interval(np.stack([by_query[name] - by_other[name] for name in METRICS], axis=1))
            for name, low, high in zip(METRICS, *ends, strict=True):
                figures[f"{other}_{name}"] = float(by_other[name].mean())
                figures |= {f"above_{other}_{name}_low": float(low), f"above_{other}_{name}_high": float(high)}
        return figures

    def compare_with(self, random_vectors: NDArray[np.float32]) -> None:
        """Let `figures` compare with a random encoder, and with searches for words."""
        self.others["random"], _ = self.searched(random_vectors)
        for name, ranked in lexical_rankings(self.queries, self.passages).items():
            self.others[name] = ranking_scores(ranked, self.relevant)


def numbered(texts: Sequence[str]) -> NDArray[np.int32]:
    """Number texts by their first appearance, equal ones alike."""
    numbers: dict[str, int] = {}
    return np.array([numbers.setdefault(text, len(numbers)) for text in texts], np.int32)
