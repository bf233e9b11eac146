"""Folders in BeIR's format: read and scored by BEIR's rules, or refused in one line."""

import gzip
import json
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetuning.tasks.beir import is_beir, read_beir, read_documents
from finetuning.tasks.retrieval import METRICS
from mlm_common.errors import InputError
from tests.fixtures.rankings import direct_scores, read_beir_directly, similarities_of
from tests.fixtures.results import write_jsonl

CORPUS = [{"_id": "d2", "title": "A", "text": "cat"}, {"_id": "d1", "title": "", "text": "dog"}]
QUERIES = [{"_id": "7", "text": "bird"}, {"_id": "q", "text": "pet"}]
QRELS = [("q", "d1", "2"), ("q", "d2", "0")]


def write_beir(folder: Path, corpus: list, queries: list, qrels: list, split: str = "test") -> Path:
    (folder / "qrels").mkdir(parents=True)
    for name, rows in (("corpus", corpus), ("queries", queries)):
        write_jsonl(folder / f"{name}.jsonl", *rows)
    lines = [("query-id", "corpus-id", "score"), *qrels]
    (folder / "qrels" / f"{split}.tsv").write_text("".join("\t".join(line) + "\n" for line in lines), encoding="utf-8")
    return folder


def test_compressed_files_are_read(tmp_path):
    folder = write_beir(tmp_path / "data", CORPUS, QUERIES, QRELS)
    for name in ("corpus.jsonl", "queries.jsonl", "qrels/test.tsv"):
        (folder / f"{name}.gz").write_bytes(gzip.compress((folder / name).read_bytes()))
        (folder / name).unlink()
        judged = read_beir(str(folder), "test")
        assert (judged.queries, judged.passages, judged.relevant) == (["pet"], ["A cat", "dog"], [{1: 2.0, 0: 0.0}])
    assert is_beir(str(folder))
    assert read_documents(str(folder), "--train-file") == ["A cat", "dog"]
    (folder / "corpus.jsonl.gz").write_bytes(b"\x1f\x8b damaged")
    with pytest.raises(InputError, match=r"--test-file: .*corpus\.jsonl\.gz must be a file of UTF-8 text in gzip; "):
        read_beir(str(folder), "test")


def test_a_graded_document_that_is_missing_is_never_found(tmp_path, caplog):
    folder = write_beir(tmp_path / "data", CORPUS, QUERIES, [*QRELS, ("q", "lost", "1")])
    judged = read_beir(str(folder), "test")
    assert "test.tsv grades 1 document that corpus.jsonl lacks, such as 'lost'" in caplog.text
    by_query, _ = judged.searched(np.eye(2, dtype=np.float32)[[1, 0, 1]])
    assert by_query["recall_at_1"] == [0.5]


def test_the_document_that_is_the_query_is_not_found(tmp_path):
    """Nor is it a negative of the query in the loss."""
    corpus = [{"_id": "d1", "text": "one two"}, {"_id": "d2", "text": "one"}, {"_id": "d3", "text": "other words"}]
    folder = write_beir(tmp_path / "data", corpus, [{"_id": "d1", "text": "one two"}], [("d1", "d2", "1")])
    judged = read_beir(str(folder), "test")
    vectors = np.array([[1, 0], [0, 1], [0.6, 0.8], [1, 0]], np.float32)  # query, d3, d2, d1
    by_query, loss = judged.searched(vectors, temperature=0.5)
    assert (by_query["mrr_at_10"], by_query["ndcg_at_10"]) == ([1], [1])
    assert loss == pytest.approx(np.log(1 + np.exp(-1.2)), abs=1e-6)
    judged.compare_with(vectors)
    assert judged.others["bm25"]["mrr_at_10"] == judged.others["tfidf"]["mrr_at_10"] == [1]


IDS = st.sampled_from(["1", "2", "10", "a", "Ä", "b c", "d/e"])
WORDS = st.lists(st.sampled_from(["cat", "dog", "Ünder", "日本", "the", '"', "\\"]), max_size=4).map(" ".join)
OPTIONAL = st.fixed_dictionaries({}, optional={"title": st.none() | WORDS, "metadata": st.just({"a": [1]})})
UGLY = st.sampled_from(["", "", "no title", "odd grade", "no text", "unknown query", "two columns", "not JSON"])


@st.composite
def ugly_folders(draw: st.DrawFn) -> dict[str, str]:
    """{name: content} of a folder with some of what published ones have, and perhaps a fault."""
    ugly = draw(UGLY)
    ids = draw(st.lists(IDS, min_size=1, unique=True))
    corpus = [{"_id": name, "text": draw(WORDS)} | draw(OPTIONAL) for name in ids]
    queries = [{"_id": name, "text": draw(WORDS)} for name in draw(st.lists(IDS, min_size=1, unique=True))]
    names = st.sampled_from([query["_id"] for query in queries])
    pairs = draw(st.lists(st.tuples(names, IDS), min_size=1, max_size=8, unique=True))
    rows = [(query, document, str(draw(st.integers(-1, 3)))) for query, document in pairs]
    rows += rows[:1] * draw(st.booleans())
    if ugly == "no text":
        del corpus[0]["text"]
    elif ugly in ("odd grade", "unknown query"):
        rows[-1] = (rows[-1][0], rows[-1][1], "good") if ugly == "odd grade" else ("?", *rows[-1][1:])
    elif ugly == "two columns":
        rows[-1] = rows[-1][:2]
    if draw(st.booleans()):
        rows = [(row[0], "0", *row[1:]) for row in rows]
    elif draw(st.booleans()):
        rows = [("query-id", "corpus-id", "score"), *rows]
    end = draw(st.sampled_from(["\n", "\r\n", "\n\n"]))
    contents = {"corpus.jsonl": [json.dumps(row, ensure_ascii=draw(st.booleans())) for row in corpus]}
    contents["queries.jsonl"] = [json.dumps(row) for row in queries]
    contents["qrels/test.tsv"] = ["\t".join(row) for row in rows]
    if ugly == "not JSON":
        contents["corpus.jsonl"][-1] = contents["corpus.jsonl"][-1][:-1]
    mark = draw(st.sampled_from(["", "\ufeff"]))
    return {name: mark + end.join(lines) + draw(st.sampled_from(["", "\n"])) for name, lines in contents.items()}


def vectors_of(texts: list[str]) -> np.ndarray:
    """Compute vectors that depend on the texts alone, of small numbers: many cosines are equal."""
    return np.array([np.random.default_rng(zlib.crc32(text.encode())).integers(-1, 2, 3) for text in texts], np.float32)


@settings(max_examples=40)
@given(contents=ugly_folders())
def test_a_folder_is_scored_by_beirs_rules_or_refused_in_one_line(contents, tmp_path_factory):
    folder = tmp_path_factory.mktemp("beir")
    (folder / "qrels").mkdir()
    for name, content in contents.items():
        (folder / name).write_text(content, encoding="utf-8", newline="")
    try:
        expected = score_directly(folder)
    except (ValueError, KeyError):
        with pytest.raises(InputError) as refused:
            read_beir(str(folder), "test")
        assert "\n" not in str(refused.value)
        assert str(folder) in str(refused.value)
        return
    judged = read_beir(str(folder), "test")
    figures = judged.figures(vectors_of([*judged.queries, *judged.passages]), 1.0)
    for name in judged.metrics:
        assert figures[name] == pytest.approx(expected[name], abs=1e-6), name
    assert set(METRICS) - set(judged.metrics) == {
        f"recall_at_{depth}" for depth in (1, 10, 100) if depth >= len(judged.passages)
    }


def score_directly(folder: Path) -> dict[str, float]:
    """Score `vectors_of`; a ValueError or KeyError where BEIR raises, or where no graded document exists."""
    documents, queries, grades = read_beir_directly(folder, "test")
    if not any(document in documents for of_query in grades.values() for document in of_query):
        raise ValueError(folder)
    judged = {query: queries[query] for query in grades}
    return direct_scores(similarities_of(judged, documents, vectors_of), grades)


OTHER_TEXT, NO_IDS = {"_id": "d2", "text": "bird"}, {"text": "cat"}
# (documents, queries, grades, what the error says)
BAD = [
    ([*CORPUS, OTHER_TEXT], QUERIES, QRELS, "texts with the same _id must be equal; line 3 of"),
    (CORPUS, [*QUERIES, QUERIES[0] | {"text": "x"}], QRELS, "queries.jsonl repeats '7' with another text."),
    (CORPUS, QUERIES, [("q", "d9", "1")], "test.tsv must grade documents of corpus.jsonl; it grades none of them."),
    (CORPUS, QUERIES, [("x", "d1", "1")], "line 2 has the query 'x', which queries.jsonl lacks."),
    (CORPUS, QUERIES, [*QRELS, ("q", "d1", "1")], "each pair once; line 4 repeats 'q' with 'd1'."),
    ([], QUERIES, QRELS, "must be a folder with texts in corpus.jsonl"),
    ([NO_IDS], QUERIES, QRELS, "_id must be text; line 1 of"),
]


@pytest.mark.parametrize(("corpus", "queries", "qrels", "message"), BAD)
def test_bad_folders_are_refused(corpus, queries, qrels, message, tmp_path):
    folder = write_beir(tmp_path / "data", corpus, queries, qrels)
    with pytest.raises(InputError) as error:
        read_beir(str(folder), "test")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_grades_of_the_test_do_not_choose_a_checkpoint(tmp_path):
    folder = write_beir(tmp_path / "data", CORPUS, QUERIES, QRELS)
    with pytest.raises(InputError, match=r"has no qrels/dev\.tsv\. The test split must not .* with --test-file"):
        read_beir(str(folder), "validation")
    (folder / "qrels" / "test.tsv").rename(folder / "qrels" / "validation.tsv")
    assert read_beir(str(folder), "validation").relevant == [{1: 2.0, 0: 0.0}]
