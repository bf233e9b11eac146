"""Folders in BeIR's form: what is read, and that bad ones are refused in one line."""

from pathlib import Path

import numpy as np
import pytest

from finetuning.config.embedding import EmbeddingData
from finetuning.tasks.pairs import is_beir, read_beir, read_parts
from mlm_common.errors import InputError
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


def test_judged_queries_and_all_passages_are_read(tmp_path):
    folder = write_beir(tmp_path / "data", CORPUS, QUERIES, QRELS)
    assert is_beir(str(folder))
    assert not is_beir(str(folder / "corpus.jsonl"))
    judged = read_beir(str(folder), "test")
    assert (judged.queries, judged.passages) == (["pet"], ["A cat", "dog"])
    assert judged.relevant == [{1: 2.0, 0: 0.0}]


def test_the_first_queries_are_kept(tmp_path):
    folder = write_beir(tmp_path / "data", CORPUS, QUERIES, [("7", "d1", "1"), *QRELS])
    judged = read_beir(str(folder), "test").first(1)
    assert (judged.queries, judged.relevant) == (["bird"], [{1: 1.0}])
    np.testing.assert_array_equal(judged.pairs, [[0, 1]])


EMPTY_TEXT, NO_IDS = {"_id": "d3", "title": "", "text": ""}, {"text": "cat"}
# (documents, queries, grades, what the error says)
BAD = [
    ([*CORPUS, CORPUS[0]], QUERIES, QRELS, "corpus.jsonl must be unique; row 3 repeats d2."),
    (CORPUS, [*QUERIES, QUERIES[0]], QRELS, "queries.jsonl must be unique; row 3 repeats 7."),
    (CORPUS, QUERIES, [("q", "d9", "1")], "test.tsv must grade a document of the folder for a query by a number"),
    (CORPUS, QUERIES, [("x", "d1", "1")], "row 1 has x, d1, 1."),
    (CORPUS, QUERIES, [*QRELS, QRELS[0]], "row 3 has q, d1, 2."),
    (CORPUS, QUERIES, [("q", "d1", "good")], "row 1 has q, d1, good."),
    ([], QUERIES, QRELS, "must name a file with rows"),
    ([*CORPUS, EMPTY_TEXT], QUERIES, QRELS, "row 3 of"),
    ([NO_IDS], QUERIES, QRELS, "The id must name a column of"),
    (CORPUS, QUERIES, [], "must name a file with rows"),
]


@pytest.mark.parametrize(("corpus", "queries", "qrels", "message"), BAD)
def test_bad_folders_are_refused(corpus, queries, qrels, message, tmp_path):
    folder = write_beir(tmp_path / "data", corpus, queries, qrels)
    with pytest.raises(InputError) as error:
        read_beir(str(folder), "test")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_part_without_grades_is_refused(tmp_path):
    folder = write_beir(tmp_path / "data", CORPUS, QUERIES, QRELS)
    with pytest.raises(InputError, match=r"has no qrels/train\.tsv"):
        read_beir(str(folder), "train")


def test_grades_of_the_test_do_not_choose_a_checkpoint(tmp_path):
    folder = write_beir(tmp_path / "data", CORPUS, QUERIES, QRELS)
    with pytest.raises(InputError, match=r"has no qrels/dev\.tsv\. The grades of the test .*: use --test-file"):
        read_beir(str(folder), "validation")
    (folder / "qrels" / "test.tsv").rename(folder / "qrels" / "validation.tsv")
    assert read_beir(str(folder), "validation").relevant == [{1: 2.0, 0: 0.0}]


def test_a_folder_to_train_on_gives_its_relevant_pairs(tmp_path):
    folder = write_beir(tmp_path / "data", CORPUS, QUERIES, QRELS, "train")
    train, judged = read_parts(EmbeddingData(train_file=str(folder)))
    assert (train.texts, train.labels, judged) == ((["pet"], ["dog"]), None, {})
    single, _ = read_parts(EmbeddingData(train_file=str(folder), unsupervised=True))
    assert single.texts == (["A cat", "dog"],)
    folder = write_beir(tmp_path / "other", CORPUS, QUERIES, [("q", "d1", "0")], "train")
    with pytest.raises(InputError, match="--train-file must have a grade above 0; received"):
        read_parts(EmbeddingData(train_file=str(folder)))


def test_scores_of_a_test_may_have_been_taken_out(tmp_path):
    files = {}
    for split, scores in (("train", (1, 2)), ("validation", (2, 1)), ("test", (-1, -1))):
        rows = [{"a": f"one {score}", "b": f"two {row}", "s": score} for row, score in enumerate(scores)]
        files[f"{split}_file"] = str(write_jsonl(tmp_path / f"{split}.jsonl", *rows))
    _, judged = read_parts(EmbeddingData(**files, score_column_name="s", do_predict=True))
    assert judged["test"].grades.tolist() == [-1, -1]
    with pytest.raises(InputError, match=r"Column s of .*test.jsonl must hold different numbers; all are -1"):
        read_parts(EmbeddingData(**files | {"validation_file": files["test_file"]}, score_column_name="s"))
