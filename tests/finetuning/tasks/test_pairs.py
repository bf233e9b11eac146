"""Which columns and files are read as queries, passages, hard negatives and scores."""

import gzip
import json
from pathlib import Path

import pytest

from finetuning.config.embedding import EmbeddingData
from finetuning.tasks.pairs import read_splits
from mlm_common.errors import InputError
from tests.finetuning.tasks.test_beir import CORPUS, QRELS, QUERIES, write_beir
from tests.fixtures.results import write_jsonl

ANSWER = {"text": "two", "answer_start": 0}


def test_a_folder_to_train_on_gives_its_relevant_pairs(tmp_path):
    folder = write_beir(tmp_path / "data", CORPUS, QUERIES, QRELS, "train")
    train, judged = read_splits(EmbeddingData(train_file=str(folder)))
    assert (train.texts, train.labels, judged) == ((["pet"], ["dog"]), None, {})
    single, _ = read_splits(EmbeddingData(train_file=str(folder), unsupervised=True))
    assert single.texts == (["A cat", "dog"],)
    folder = write_beir(tmp_path / "other", CORPUS, QUERIES, [("q", "d1", "0")], "train")
    with pytest.raises(InputError, match="--train-file must have a grade above 0 for a document with text; received"):
        read_splits(EmbeddingData(train_file=str(folder)))


def write_table(path: Path, names: list[str], *rows: list[str]) -> str:
    divider = "," if path.suffix == ".csv" else "\t"
    path.write_text("".join(divider.join(row) + "\n" for row in [names, *rows]), encoding="utf-8")
    return str(path)


def test_only_columns_called_negative_are_hard_negatives_by_themselves(tmp_path):
    names = ["query", "Hard_Negative", "passage", "negative_1", "neg2", "id"]
    path = write_table(tmp_path / "rows.tsv", names, ["q", "h", "p", "n", "m", "7"], ["r", "i", "s", "o", "l", "8"])
    train, _ = read_splits(EmbeddingData(train_file=path))
    assert [column[0] for column in train.texts] == ["q", "p", "h", "n", "m"]


def test_a_label_of_text_is_no_hard_negative(tmp_path):
    label = "contradiction"
    path = write_table(
        tmp_path / "nli.csv", ["sentence1", "sentence2", "label"], ["a", "b", label], ["c", "d", "other"]
    )
    with pytest.raises(InputError) as error:
        read_splits(EmbeddingData(train_file=path))
    assert "--text-column-names must name the columns of queries, passages, and any hard negatives" in str(error.value)
    assert "has sentence1, sentence2, label." in str(error.value)
    train, _ = read_splits(EmbeddingData(train_file=path, text_column_names=["sentence1", "sentence2"]))
    assert train.texts == (["a", "c"], ["b", "d"])
    train, _ = read_splits(EmbeddingData(train_file=path, text_column_names=["sentence2", "sentence1", "label"]))
    assert train.texts[2] == [label, "other"]


NO_NAMES = [
    ["query one", "a passage", "another"],
    ["cat", "It is a cat."],
    ["猫とは何ですか。", "動物"],
    ["cat", "a" * 50],
    ["cat", "1048585"],
]


@pytest.mark.parametrize(
    ("first", "ending"), [*((first, "tsv") for first in NO_NAMES), (NO_NAMES[0], "csv"), (NO_NAMES[0], "tsv.gz")]
)
def test_a_first_row_is_not_lost_where_no_line_names_the_columns(first, ending, tmp_path):
    path = Path(write_table(tmp_path / f"rows.{ending[:3]}", first, ["b"] * len(first), ["c"] * len(first)))
    if ending.endswith(".gz"):
        path = path.rename(tmp_path / "rows.tsv.gz")
        path.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(InputError, match=r"The first line of .* must name its columns; .* does not look like a name"):
        read_splits(EmbeddingData(train_file=str(path)))
    train, _ = read_splits(EmbeddingData(train_file=str(path), text_column_names=first))
    assert train.num_rows == 2


def test_a_column_called_hard_negative_has_a_name(tmp_path):
    path = write_table(tmp_path / "rows.csv", ["query", "passage", "hard negative"], ["a", "b", "c"], ["d", "e", "f"])
    train, _ = read_splits(EmbeddingData(train_file=path))
    assert train.texts == (["a", "d"], ["b", "e"], ["c", "f"])


def test_all_passages_of_a_part_are_searched_with_its_first_queries(tmp_path):
    files = {"train_file": write_table(tmp_path / "train.tsv", ["q", "p"], ["a", "b"], ["c", "d"])}
    names = ["query", "passage", "negative"]
    files["validation_file"] = write_table(
        tmp_path / "rows.tsv", names, ["a", "x", "n"], ["b", "y", "m"], ["a", "z", "n"], ["c", "x", "l"]
    )
    paragraphs = [
        {"context": "one", "qas": [{"id": "1", "question": "?", "answers": [], "is_impossible": True}]},
        {"context": "two", "qas": [{"id": str(n), "question": f"{n}?", "answers": [ANSWER]} for n in (2, 3)]},
        {"context": "three", "qas": []},
        {"context": "four"},
        {"context": "two", "qas": [{"id": "4", "question": "4?", "answers": [ANSWER]}]},
    ]
    squad = tmp_path / "squad.json"
    squad.write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}), encoding="utf-8")
    _, judged = read_splits(EmbeddingData(**files, test_file=str(squad), max_eval_samples=1, max_predict_samples=2))
    rows, questions = judged["validation"], judged["test"]
    assert (rows.queries, rows.passages) == (["a"], ["x", "y", "z", "n", "m", "l"])
    assert rows.relevant == [{0: 1.0, 2: 1.0}]
    assert (questions.queries, sorted(questions.passages)) == (["2?", "3?"], ["four", "one", "three", "two"])
    assert questions.relevant == [{questions.passages.index("two"): 1.0}] * 2
    single, _ = read_splits(EmbeddingData(train_file=str(squad), unsupervised=True))
    assert single.texts == (["one", "two", "three", "four"],)


def test_scores_of_a_test_may_have_been_taken_out(tmp_path):
    files = {}
    for split, scores in (("train", (1, 2)), ("validation", (2, 1)), ("test", (-1, -1))):
        rows = [{"a": f"one {score}", "b": f"two {row}", "s": score} for row, score in enumerate(scores)]
        files[f"{split}_file"] = str(write_jsonl(tmp_path / f"{split}.jsonl", *rows))
    _, judged = read_splits(EmbeddingData(**files, score_column_name="s", do_predict=True))
    assert judged["test"].grades.tolist() == [-1, -1]
    with pytest.raises(InputError, match=r"Column s of .*test.jsonl must hold different numbers; all are -1"):
        read_splits(EmbeddingData(**files | {"validation_file": files["test_file"]}, score_column_name="s"))


def test_pairs_of_the_training_file_are_no_other_part(tmp_path):
    rows = [["q", "p"], ["r", "s"], ["t", "u"]]
    train = write_table(tmp_path / "train.tsv", ["query", "passage"], *rows)
    for shared, others in ((2, 1), (3, 0), (3, 2)):
        part = write_table(
            tmp_path / "part.tsv", ["query", "passage"], *rows[:shared], *([f"q{n}", "p"] for n in range(others))
        )
        for flag in ("validation_file", "test_file"):
            with pytest.raises(
                InputError, match=rf"^{shared} of {shared + others} rows of .*part.tsv are also in the tra"
            ):
                read_splits(EmbeddingData(train_file=train, **{flag: part}))
    part = write_table(tmp_path / "part.tsv", ["query", "passage"], rows[0], ["q", "s"])
    _, judged = read_splits(EmbeddingData(train_file=train, validation_file=part))  # the half is no error
    assert judged["validation"].queries == ["q"]
