"""Files of each form, given to the command: it trains, and its scores are those of a direct computation."""

import gzip
import json
import re
from pathlib import Path

import numpy as np
import pytest

from finetuning.run_embedding import main
from finetuning.tasks.retrieval import K1, B
from finetuning.tasks.vectors import TextEncoder
from tests.fixtures.rankings import Grades, direct_scores, read_beir_directly, similarities_of
from tests.fixtures.results import results, write_jsonl
from tests.fixtures.tiny_texts import embedding_flags, rows_of

pytestmark = pytest.mark.usefixtures("one_device", "eagerly")

# {id of a document: text}, {id of a query: text}, {id of a query: {id of a document: grade}}
Search = tuple[dict[str, str], dict[str, str], Grades]
ROWS = rows_of("validation", num_negatives=1)


def search_of(pairs: list[tuple[str, str]], passages: list[str], num_queries: int) -> Search:
    """Each passage is a document, each of the first queries is searched; of equal cosines the earlier comes first."""
    documents = {f"{9999 - index}": text for index, text in enumerate(dict.fromkeys(passages))}
    names = {text: name for name, text in documents.items()}
    queries = list(dict.fromkeys(query for query, _ in pairs))[:num_queries]
    grades = {query: {names[passage]: 1 for one, passage in pairs if one == query} for query in queries}
    return documents, {query: query for query in queries}, grades


def write_table(folder: Path, name: str) -> tuple[Path, Search]:
    lines = [list(ROWS[0]), *(list(row.values()) for row in ROWS)]
    (folder / name).write_text("".join("\t".join(line) + "\n" for line in lines), encoding="utf-8")
    passages = [row["passage"] for row in ROWS] + [row["negative_0"] for row in ROWS]
    return folder / name, search_of([(row["query"], row["passage"]) for row in ROWS], passages, 5)


def write_squad(folder: Path, name: str) -> tuple[Path, Search]:
    """Every third question has no answer, and the last paragraph no question."""
    paragraphs, pairs = [], []
    for number, row in enumerate(ROWS):
        answers = [{"text": row["passage"][:3], "answer_start": 0}] if number % 3 else []
        pairs += [(row["query"], row["passage"])] * bool(answers)
        qas = [{"id": str(number), "question": row["query"], "answers": answers, "is_impossible": not answers}]
        paragraphs.append({"context": row["passage"], "qas": qas})
    paragraphs.append({"context": "a paragraph without questions", "qas": []})
    content = json.dumps({"version": "2.0", "data": [{"title": "t", "paragraphs": paragraphs}]}).encode()
    (folder / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    # Positives come first among equal cosines, as the paragraphs of questions are read before the others.
    passages = [passage for _, passage in pairs] + [one["context"] for one in paragraphs]
    return folder / name, search_of(pairs, passages, 5)


def write_beir(folder: Path, name: str) -> tuple[Path, Search]:
    """Queries are documents too, one document is empty and one missing; lines lack titles and metadata."""
    texts = dict.fromkeys([*(row["passage"] for row in ROWS), *(row["query"] for row in ROWS), ""])
    ids = {text: f"d{index}" for index, text in enumerate(texts)}
    corpus: list[dict[str, object]] = [{"_id": name, "text": text} for text, name in ids.items()]
    corpus[0] |= {"title": "a title", "metadata": {"url": "u"}}
    corpus[1] |= {"title": None}
    path = folder / name
    (path / "qrels").mkdir(parents=True)
    write_jsonl(path / "corpus.jsonl", *corpus)
    queries = {ids[row["query"]]: row["query"] for row in ROWS}
    write_jsonl(path / "queries.jsonl", *({"_id": name, "text": text} for name, text in queries.items()))
    rows = {(ids[row["query"]], ids[row["passage"]]): 1 + number % 3 for number, row in enumerate(ROWS)}
    first = ids[ROWS[0]["query"]]
    rows |= {(first, "lost"): 2, (first, ids[""]): 1, (first, first): 1, (first, ids[ROWS[-1]["passage"]]): 0}
    lines = [f"{query}\t{document}\t{grade}" for (query, document), grade in rows.items()]
    lines = ["query-id\tcorpus-id\tscore", *lines]
    for split in ("train", "dev"):
        (path / "qrels" / f"{split}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    documents, queries, grades = read_beir_directly(path, "dev")
    kept = list(grades)[:5]
    return path, (documents, {query: queries[query] for query in kept}, {query: grades[query] for query in kept})


FORMS = {"squad.json.gz": write_squad, "beir": write_beir, "rows.tsv": write_table}


@pytest.mark.parametrize("form", ["squad.json.gz", "beir", pytest.param("rows.tsv", marks=pytest.mark.slow)])
def test_scores_are_those_of_a_direct_computation(form, tiny_start, tmp_path, run):
    path, (documents, queries, grades) = FORMS[form](tmp_path, form)
    flags = [f"--{split}-file={path}" for split in ("train", "validation")]
    flags += ["--max-steps", "1", "--max-eval-samples", "5"]
    outcome = run(main, *embedding_flags(tiny_start / "start", tmp_path), *flags)
    assert outcome.status == 0, outcome.err
    found = results(tmp_path / "run")
    assert (found["eval_num_queries"], found["eval_num_passages"]) == (5, len(documents))
    encoder = TextEncoder.open(str(tmp_path / "run" / "export"))
    expected = direct_scores(similarities_of(queries, documents, lambda texts: encoder.encode(texts, "", 8)), grades)
    of_words = direct_scores(bm25(queries, documents), grades)
    names = [name for name in expected if f"eval_{name}" in found]
    assert names == ["ndcg_at_10", "mrr_at_10", "recall_at_1", "recall_at_10"]
    for name in names:
        assert found[f"eval_{name}"] == pytest.approx(expected[name], abs=1e-6), name
        assert found[f"eval_bm25_{name}"] == pytest.approx(of_words[name], abs=1e-6), name
    assert found["eval_ndcg_at_10"] > 0.05


def bm25(queries: dict[str, str], documents: dict[str, str]) -> dict[str, dict[str, float]]:
    def words(text: str) -> list[str]:
        return re.findall(r"\b\w\w+\b", text.lower())

    texts = {name: words(text) for name, text in documents.items()}
    mean = np.mean([len(text) for text in texts.values()])
    scores = {}
    for query, asked in queries.items():
        scores[query] = dict.fromkeys(documents, 0.0)
        for name, text in texts.items():
            for word in words(asked):
                num_with = sum(word in other for other in texts.values())
                idf = np.log(1 + (len(texts) - num_with + 0.5) / (num_with + 0.5))
                count = text.count(word)
                scores[query][name] += idf * count / (count + K1 * (1 - B + B * len(text) / mean))
        scores[query] = {name: float(np.float32(score)) for name, score in scores[query].items()}
    return scores


def test_single_texts_of_all_forms(tiny_start, tmp_path, run):
    """Each trains on as many texts as there are different ones."""
    passages = list(dict.fromkeys(row["passage"] for row in ROWS))
    (tmp_path / "texts.txt").write_text("\n".join(passages), encoding="utf-8")
    write_jsonl(tmp_path / "texts.jsonl", *({"id": n, "text": text} for n, text in enumerate(passages)))
    write_jsonl(tmp_path / "validation.jsonl", *ROWS)
    squad, _ = write_squad(tmp_path, "squad.json")
    beir, (documents, *_) = write_beir(tmp_path, "beir")
    num_documents = sum(bool(text) for text in documents.values())
    num_texts = {
        "texts.txt": len(passages),
        "texts.jsonl": len(passages),
        squad: len(passages) + 1,
        beir: num_documents,
    }
    for path, num in num_texts.items():
        flags = (f"--train-file={tmp_path / path}", "--unsupervised", "--max-steps", "1", "--overwrite-output-dir")
        outcome = run(main, *embedding_flags(tiny_start / "start", tmp_path), *flags, "--dropout", "0.1", "--dry-run")
        assert outcome.status == 0, outcome.err
        assert f"{num} to train on" in outcome.out
