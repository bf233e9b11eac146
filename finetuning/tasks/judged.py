"""Queries and passages of which it is known which belong together: of rows of texts, or of a folder in BeIR's form."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from finetuning.config.embedding import EmbeddingData
from finetuning.data.examples import SPLITS, num_samples
from finetuning.data.tables import Table, read_table
from finetuning.tasks.metrics import scores
from finetuning.tasks.pairs import Pairs, number, numbered, read_pairs
from finetuning.tasks.retrieval import DEPTH, METRICS, Scores, interval, lexical_rankings, ranking_scores, search
from mlm_common.errors import InputError
from mlm_common.storage import open_folder

SCORED_METRICS = ("spearmanr", "pearson")
# What a model is compared with, {name in the figures: in words}.
OTHERS = {"random": "random encoder", "tfidf": "tf-idf", "bm25": "BM25"}
# Of a folder in BeIR's form (Thakur et al. 2021), and the files of its grades, the first that exists for each part.
CORPUS, QUERIES = "corpus.jsonl", "queries.jsonl"
GRADES = {"train": ("train",), "validation": ("dev", "validation", "test"), "test": ("test",)}


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
    def of(cls, pairs: Pairs) -> "Judged":
        """Let the first passage of each row be relevant, among all passages of all rows."""
        joined = [text for column in pairs.texts[1:] for text in column]
        numbers = np.stack([numbered(pairs.texts[0]), numbered(joined)[: pairs.num_rows]], axis=1)
        queries, passages = (list(dict.fromkeys(texts)) for texts in (pairs.texts[0], joined))
        if pairs.scores is not None:
            return cls(queries, passages, numbers, pairs.scores, has_scores=True)
        different = np.unique(numbers, axis=0)
        return cls(queries, passages, different, np.ones(len(different)))

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


def read_parts(data: EmbeddingData) -> tuple[Pairs, dict[str, Judged]]:
    """Read what to train on, and {validation or test: what to evaluate on}, of the parts that are given.

    Raises:
        InputError: as `read_pairs` and `read_beir` say.
        HubAwayError: the Hub cannot be reached.
    """
    files = {split: getattr(data, f"{split}_file") for split in SPLITS}
    folders = {split: path for split, path in files.items() if path is not None and is_beir(path)}
    limits = num_samples(data)
    pairs = read_pairs(data, without=tuple(folders))
    judged = {split: Judged.of(part) for split, part in pairs.items() if split != "train"}
    for split, path in folders.items():
        flag = f"--{split}-file"
        if split != "train":
            judged[split] = read_beir(path, split, flag).first(limits[split])
        elif data.unsupervised:
            texts = list(_texts(read_table(open_folder(path).path_of(CORPUS), flag)).values())
            pairs["train"] = Pairs(path, ("text",), (texts[: limits[split]],), None)
        else:
            part = read_beir(path, split, flag)
            query, passage = part.pairs[part.grades > 0][: limits[split]].T.tolist()
            columns = [part.queries[one] for one in query], [part.passages[one] for one in passage]
            pairs["train"] = Pairs(path, ("query", "passage"), columns, None)
    return pairs["train"], judged


def is_beir(path: str) -> bool:
    """Return whether a path is of a folder in BeIR's form, and not of a file."""
    return open_folder(path).exists(CORPUS)


def read_beir(path: str, split: str, flag: str) -> Judged:
    """Read the passages of a folder, those queries that are judged, and their grades.

    Raises:
        InputError: a file or a column is missing, an id occurs twice, or a grade is of an unknown query or passage.
    """
    folder = open_folder(path)
    names = [f"qrels/{name}.tsv" for name in GRADES[split]]
    qrels = next((name for name in names if folder.exists(name)), names[0])
    for name in (QUERIES, qrels):
        if not folder.exists(name):
            raise InputError(f"{flag} must be a folder with {CORPUS}, {QUERIES} and {qrels}; {path} has no {name}.")
    passages, queries = (_texts(read_table(folder.path_of(name), flag)) for name in (CORPUS, QUERIES))
    table = read_table(folder.path_of(qrels), flag)
    if len(table.columns) != 3:
        raise InputError(
            f"{table.name} must have the columns query-id, corpus-id and score; it has {', '.join(table.columns)}."
        )
    grades: dict[tuple[str, str], float] = {}
    for row, (query, passage, grade) in enumerate(zip(*table.columns.values(), strict=True), start=1):
        for kind, name, known in (("query", query, queries), ("document", passage, passages)):
            if name not in known:
                raise InputError(f"Row {row:,} of {table.name} grades the {kind} {name}, which is unknown.")
        if not np.isfinite(number(grade)):
            raise InputError(f"Row {row:,} of {table.name} must have a number as score; it has {grade!r}.")
        if (query, passage) in grades:
            raise InputError(f"Row {row:,} of {table.name} grades document {passage} for query {query} again.")
        grades[query, passage] = number(grade)
    judged = list(dict.fromkeys(query for query, _ in grades))
    rows, columns = ({name: place for place, name in enumerate(names)} for names in (judged, passages))
    pairs = np.array([(rows[query], columns[passage]) for query, passage in grades], np.int32)
    return Judged([queries[one] for one in judged], list(passages.values()), pairs, np.array(list(grades.values())))


def _texts(table: Table) -> Mapping[str, str]:
    """Return {id: title and text}, in the order of the table."""
    texts: dict[str, str] = {}
    titles = table.columns.get("title") or [""] * len(table.column("_id", "The id"))
    rows = zip(table.columns["_id"], titles, table.column("text", "The text"), strict=True)
    for row, (name, title, text) in enumerate(rows, start=1):
        if str(name) in texts:
            raise InputError(f"Each _id of {table.name} must be unique; row {row:,} repeats {name}.")
        texts[str(name)] = f"{title or ''} {text}".strip()
        if not isinstance(text, str) or not texts[str(name)]:
            raise InputError(f"Texts must not be empty; row {row:,} of {table.name} has none.")
    return texts
