"""Windows of paragraphs, where answers are in them, and what is wrong with questions."""

import gzip
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetuning.config.settings import QuestionData
from finetuning.tasks.squad import Question, read_questions
from finetuning.tasks.windows import END, OUTSIDE, START, Windows, make_windows
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
    """Collect the answers in the windows of each question."""
    texts: dict[str, set[str]] = {question.id: set() for question in windows.questions}
    for row, index in enumerate(windows.question):
        start, end = windows.rows.row_values[START][row], windows.rows.row_values[END][row]
        if end:
            first = windows.rows.starts[row]
            question = windows.questions[index]
            texts[question.id].add(question.context[windows.begins[first + start] : windows.ends[first + end]].strip())
    return texts


@pytest.mark.parametrize("kind", ["overlap", "step"])
def test_answers_come_back(kind):
    """And all of a paragraph is in its windows."""
    windows = make_windows(TOKENIZER, QUESTIONS, replace(DATA, doc_stride_is=kind), token_types=True)
    assert texts_of(windows) == {"a": {"42nd name"}, "b": {"list"}, "c": set()}
    assert windows.rows.lengths.max() == 30
    types = windows.rows.token_values["token_type_ids"]
    assert ((windows.begins != OUTSIDE) <= (types == 1)).all()
    rows = np.repeat(windows.question, windows.rows.lengths)
    spans = sorted((begin, end) for row, begin, end in zip(rows, windows.begins, windows.ends, strict=True) if not row)
    spans = [span for span in spans if span[0] != OUTSIDE]
    assert (spans[0][0], spans[-1][1]) == (0, len(CONTEXT))
    assert all(CONTEXT[end:begin].strip() == "" for (_, end), (begin, _) in itertools.pairwise(spans))


def test_windows_are_those_of_transformers():
    windows = make_windows(TOKENIZER, QUESTIONS, DATA, token_types=False)
    encoded = TOKENIZER(
        [question.question for question in QUESTIONS],
        [question.context for question in QUESTIONS],
        truncation="only_second",
        max_length=30,
        stride=5,
        return_overflowing_tokens=True,
    )
    assert windows.rows.token_values["input_ids"].tolist() == [
        token_id for row in encoded["input_ids"] for token_id in row
    ]
    assert windows.question.tolist() == encoded["overflow_to_sample_mapping"]


def squad(**changes: Any) -> dict[str, Any]:
    question = {"id": "q", "question": "what", "answers": [{"text": "list", "answer_start": 2}], **changes}
    return {"data": [{"title": "t", "paragraphs": [{"context": "a list", "qas": [question]}]}]}


def read(folder: Path, content: Any, name: str = "train.json") -> list[Question]:
    text = json.dumps(content).encode()
    (folder / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    return read_questions(QuestionData(train_file=str(folder / name)))["train"]


def test_files_of_squad_are_read(tmp_path):
    expected = [Question("q", "what", "a list", (("list", 2),))]
    assert read(tmp_path, squad()) == read(tmp_path, squad(), "train.json.gz") == expected
    with pytest.raises(InputError, match="Some questions to train on must have an answer"):
        read(tmp_path, squad(is_impossible=True))
    row = {"id": 1, "question": "what", "context": "a list", "answers": {"text": ["list"], "answer_start": [2]}}
    assert read(tmp_path, row, "train.jsonl") == [replace(expected[0], id="1")]


def test_a_test_part_has_no_answers(tmp_path):
    paths = {name: tmp_path / f"{name}.json" for name in ("train", "test")}
    unanswered = squad()
    del unanswered["data"][0]["paragraphs"][0]["qas"][0]["answers"]
    paths["train"].write_text(json.dumps(squad()), encoding="utf-8")
    paths["test"].write_text(json.dumps(unanswered), encoding="utf-8")
    data = QuestionData(train_file=str(paths["train"]), test_file=str(paths["test"]))
    assert read_questions(data)["test"][0].answers is None
    with pytest.raises(InputError, match=r"must have answers; question 'q' of .* has none"):
        read(tmp_path, unanswered)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (squad(answers=[{"text": " ", "answer_start": 1}]), "Each answer must have text"),
        (squad(id=None), "Each id must be text or a whole number; question 1 of"),
        (squad(answers=[{"text": "lost", "answer_start": 2}]), "must be in the paragraph at its answer_start"),
    ],
)
def test_what_are_no_questions(tmp_path, content, message):
    with pytest.raises(InputError, match=message):
        read(tmp_path, content)


def test_a_question_that_leaves_no_room():
    long = replace(QUESTIONS[0], question="the list of a file " * 9)
    windows = make_windows(TOKENIZER, [long, QUESTIONS[1]], DATA, token_types=False)
    assert (windows.too_long, texts_of(windows)) == (["a"], {"a": set(), "b": {"list"}})
    with pytest.raises(
        InputError, match="None of 1 questions can be used: 1 are too long for --max-seq-length 30 with --doc-stride"
    ):
        make_windows(TOKENIZER, [long], DATA, token_types=False)
    says = r"--doc-stride 29 is too large for --max-seq-length 30: .* only 2. tokens .* Try --doc-stride [78]\.$"
    with pytest.raises(InputError, match=says):
        make_windows(TOKENIZER, QUESTIONS, replace(DATA, doc_stride=29), token_types=False)


def test_ids_that_are_not_unique(tmp_path):
    content = squad()
    content["data"] *= 2
    for name, text in (("train", content), ("validation", content)):
        (tmp_path / f"{name}.json").write_text(json.dumps(text), encoding="utf-8")
    train = str(tmp_path / "train.json")
    assert len(read_questions(QuestionData(train_file=train))["train"]) == 2
    with pytest.raises(InputError, match=r"Each id of .* must be unique.*; questions 1 and 2 both have 'q'"):
        read_questions(QuestionData(train_file=train, validation_file=str(tmp_path / "validation.json")))


@pytest.mark.parametrize("answer", ["mat ", "mat\u200e ", "\u200emat"])
def test_ends_of_an_answer_that_no_token_covers(answer):
    context = f"the list of{' ' if answer[0] != ' ' else ''}{answer}"
    question = Question("q", "what", context, ((answer, context.index(answer)),))
    windows = make_windows(TOKENIZER, [question], DATA, token_types=False)
    (text,) = texts_of(windows)["q"]
    assert text.strip("\u200b\u200e ") == "mat"
    assert windows.not_found == []


def test_a_tokenizer_that_pads():
    padding = tiny_tokenizer()
    padding.backend_tokenizer.enable_padding(length=64)
    expected = make_windows(TOKENIZER, QUESTIONS, DATA, token_types=False)
    windows = make_windows(padding, QUESTIONS, DATA, token_types=False)
    assert windows.rows.token_values["input_ids"].tolist() == expected.rows.token_values["input_ids"].tolist()
    assert padding.backend_tokenizer.padding is not None


WORDS = st.sampled_from(["list", "file", "mate\u0301", "of", "\u200b", "\u200e", "½", "", "1999", "-"])


@st.composite
def entries(draw: st.DrawFn) -> dict[str, Any]:
    """Make a question in the form of SQuAD or of a table, or in one that is wrong."""
    words = draw(st.lists(WORDS, max_size=6))
    context, text = " ".join(words), draw(st.sampled_from([*words, ""])) + draw(st.sampled_from(["", " "]))
    start = draw(st.one_of(st.just(context.find(text)), st.sampled_from([-4, 0, 1, "2", None, 2.0])))
    as_columns = {"text": [text], "answer_start": [start]}
    forms = [[{"text": text, "answer_start": start}], as_columns, as_columns | {"answer_start": []}, None, [], text]
    optional = {"answers": st.sampled_from(forms), "is_impossible": st.sampled_from([None, False, True])}
    required = {"id": draw(st.sampled_from(["a", "b", 1, None])), "question": "what is", "context": context}
    return required | draw(st.fixed_dictionaries({}, optional=optional))


@given(entries=st.lists(entries(), min_size=1, max_size=4), name=st.sampled_from(["train.json", "train.jsonl"]))
def test_questions_are_read_as_written_or_refused(tmp_path_factory, entries, name):
    path = tmp_path_factory.mktemp("questions") / name
    if name == "train.json":
        text = json.dumps(
            {"data": [{"paragraphs": [{"context": entry["context"], "qas": [entry]} for entry in entries]}]}
        )
    else:
        text = "".join(json.dumps(entry) + "\n" for entry in entries)
    path.write_text(text, encoding="utf-8")
    refused = None
    try:
        questions = read_questions(QuestionData(train_file=str(path)))["train"]
        windows = make_windows(TOKENIZER, questions, DATA, token_types=True, to_train=True)
    except InputError as error:
        refused = str(error)
    if refused is not None:
        assert len(refused.splitlines()) == 1
        return
    answer_texts = texts_of(windows)
    for question, entry in zip(questions, entries, strict=True):
        assert (question.id, question.context) == (str(entry["id"]), entry["context"])
        answers = entry.get("answers")
        if entry.get("is_impossible") or not answers or answers == {"text": [], "answer_start": []}:
            assert question.answers == ()
            continue
        written = answers[0]["text"] if isinstance(answers, list) else answers["text"][0]
        ((text, begin),) = question.answers
        assert text == written == question.context[begin : begin + len(text)]
        if [other.id for other in questions].count(question.id) == 1 and question.id not in windows.not_found:
            (learned,) = answer_texts[question.id]
            assert written.strip("\u200b\u200e ") in learned or learned in written
