"""Windows of paragraphs, where answers stand in them, and what is wrong with questions."""

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from finetuning.config.settings import QuestionData
from finetuning.data.questions import END, OUTSIDE, START, Question, Windows, make_windows, read_questions
from mlm_common.errors import InputError
from tests.fixtures.tiny_models import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
DATA = QuestionData(max_seq_length=30, doc_stride=5)
CONTEXT = "the list of a file, a value in text. " * 4 + "The 42nd name is a model"
QUESTIONS = [
    Question("a", "is the name", CONTEXT, (("42nd name", CONTEXT.index("42nd")),)),
    Question("b", "the list", "a list", (("list", 2),)),
    Question("c", "is", CONTEXT, ()),
]


def texts_of(windows: Windows) -> dict[str, set[str]]:
    """Collect the answers that stand in the windows of each question."""
    found: dict[str, set[str]] = {one.id: set() for one in windows.questions}
    for row, question in enumerate(windows.question):
        start, end = windows.rows.of_rows[START][row], windows.rows.of_rows[END][row]
        if end:
            first = windows.rows.starts[row]
            one = windows.questions[question]
            found[one.id].add(one.context[windows.begins[first + start] : windows.ends[first + end]].strip())
    return found


@pytest.mark.parametrize("kind", ["overlap", "step"])
def test_answers_come_back(kind: str) -> None:
    windows = make_windows(TOKENIZER, QUESTIONS, replace(DATA, doc_stride_is=kind), token_types=True)
    assert texts_of(windows) == {"a": {"42nd name"}, "b": {"list"}, "c": set()}
    assert windows.rows.lengths.max() == 30
    types = windows.rows.of_tokens["token_type_ids"]
    assert ((windows.begins != OUTSIDE) <= (types == 1)).all()


def test_windows_are_those_of_transformers() -> None:
    windows = make_windows(TOKENIZER, QUESTIONS, DATA, token_types=False)
    encoded = TOKENIZER(
        [one.question for one in QUESTIONS],
        [one.context for one in QUESTIONS],
        truncation="only_second",
        max_length=30,
        stride=5,
        return_overflowing_tokens=True,
    )
    assert windows.rows.of_tokens["input_ids"].tolist() == [one for row in encoded["input_ids"] for one in row]
    assert windows.question.tolist() == encoded["overflow_to_sample_mapping"]


def test_windows_overlap_or_step() -> None:
    """Every character of a paragraph is in a window, and windows differ by the tokens that were asked for."""
    for kind in ("overlap", "step"):
        windows = make_windows(TOKENIZER, QUESTIONS[:1], replace(DATA, doc_stride_is=kind), token_types=False)
        firsts, lasts = [], []
        for row in range(windows.rows.num_rows):
            tokens = slice(*windows.rows.starts[row : row + 2])
            context = windows.begins[tokens] != OUTSIDE
            firsts.append(int(windows.begins[tokens][context][0]))
            lasts.append(int(windows.ends[tokens][context][-1]))
        assert (firsts[0], lasts[-1]) == (0, len(CONTEXT))
        assert all(begin < end for begin, end in zip(firsts[1:], lasts, strict=False))


def squad(**changes: Any) -> dict[str, Any]:
    one = {"id": "q", "question": "what", "answers": [{"text": "list", "answer_start": 2}], **changes}
    return {"data": [{"title": "t", "paragraphs": [{"context": "a list", "qas": [one]}]}]}


def read(folder: Path, content: Any, name: str = "train.json") -> list[Question]:
    text = json.dumps(content).encode()
    (folder / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    return read_questions(QuestionData(train_file=str(folder / name)))["train"]


def test_files_of_squad_are_read(tmp_path: Path) -> None:
    expected = [Question("q", "what", "a list", (("list", 2),))]
    assert read(tmp_path, squad()) == read(tmp_path, squad(), "train.json.gz") == expected
    (none,) = read(tmp_path, squad(is_impossible=True))
    assert none.answers == ()
    row = {"id": 1, "question": "what", "context": "a list", "answers": {"text": ["list"], "answer_start": [2]}}
    assert read(tmp_path, row, "train.jsonl") == [replace(expected[0], id="1")]


def test_a_test_part_has_no_answers(tmp_path: Path) -> None:
    paths = {name: tmp_path / f"{name}.json" for name in ("train", "test")}
    unanswered = squad()
    del unanswered["data"][0]["paragraphs"][0]["qas"][0]["answers"]
    paths["train"].write_text(json.dumps(squad()))
    paths["test"].write_text(json.dumps(unanswered))
    data = QuestionData(train_file=str(paths["train"]), test_file=str(paths["test"]))
    assert read_questions(data)["test"][0].answers is None
    with pytest.raises(InputError, match="must have answers; q has none"):
        read(tmp_path, unanswered)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (squad(answers=[{"text": "list", "answer_start": 1}]), "question q has 'list' at 1, where ' lis' stands"),
        (squad(answers=[{"text": "lost", "answer_start": 2}]), "must stand at its answer_start"),
        ({"data": []}, "must name a file with questions"),
        ({"rows": []}, "must be of SQuAD's form"),
    ],
)
def test_what_are_no_questions(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(tmp_path, content)


def test_a_question_that_leaves_no_room() -> None:
    long = replace(QUESTIONS[0], question="the list of a file " * 9)
    with pytest.raises(InputError, match="--max-seq-length 30 must leave room beside each question"):
        make_windows(TOKENIZER, [long], DATA, token_types=False)
