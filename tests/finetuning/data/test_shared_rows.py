"""Rows that training shares with a scored part, and rows with an empty text, found through the command line."""

import shutil

import pytest

from finetuning import run_classification, run_multiple_choice, run_qa, run_tagging, run_task
from finetuning.data.shared_rows import check_shared_rows
from mlm_common.errors import InputError
from tests.fixtures.finetuned_runs import TASK, write_questions
from tests.fixtures.results import write_jsonl

ROWS = {
    run_classification: [{"text": f"text {row}", "label": "xy"[row % 2]} for row in range(6)],
    run_tagging: [{"tokens": ["a", f"b{row}"], "ner_tags": ["O", "B-X"]} for row in range(6)],
    run_multiple_choice: [
        {"premise": f"text {row}", "question": "cause", "choice1": "a", "choice2": "b", "label": row % 2}
        for row in range(6)
    ],
}


def flags(start, folder, train, other, part="validation"):
    return [
        *("--init-from", start / "start", "--output-dir", folder / "run", "--max-seq-length", "30", "--dry-run"),
        *("--train-file", train, f"--{part}-file", other),
    ]


@pytest.mark.parametrize(("command", "part"), zip(ROWS, ("validation", "test", "validation"), strict=True))
def test_the_training_file_is_no_other_part(tiny_start, tmp_path, run, command, part):
    train = write_jsonl(tmp_path / "train.jsonl", *ROWS[command])
    copy = shutil.copy(train, tmp_path / "copy.jsonl")
    for other in (train, copy):
        refusal = run(command.main, *flags(tiny_start, tmp_path, train, other, part)).refusal
        assert f"6 of 6 rows of {other} are also in the training split, {train}, so scores" in refusal


def test_the_training_questions_are_no_other_part(tiny_start, tmp_path, run):
    write_questions(tmp_path / "train.json", 6, 1)
    train = tmp_path / "train.json"
    refusal = run(run_qa.main, *flags(tiny_start, tmp_path, train, train)).refusal
    assert f"6 of 6 rows of {train} are also in the training split, {train}, so scores" in refusal


def test_a_few_shared_rows_are_counted_and_texts_without_labels_may_all_be_shared(caplog):
    names = {"train": "a.csv", "eval": "b.csv", "test": "c.csv"}
    check_shared_rows({"train": [1, 2, 3], "eval": [3, 4], "test": [1, 2]}, names, ["test"])
    assert "1 of 2 rows of b.csv are also in the training split" in caplog.text
    assert "2 of 2 rows of c.csv are also in the training split" in caplog.text
    caplog.clear()
    check_shared_rows({"train": [1, 2, 3], "eval": [4, 5]}, names)
    assert not caplog.text
    with pytest.raises(InputError, match=r"2 of 3 rows of b\.csv are also in the training split, .* Use other rows"):
        check_shared_rows({"train": [1, 2], "eval": [1, 2, 3]}, names)


def test_texts_that_training_repeats_may_all_be_shared(caplog):
    train = ["yes", "no", "stop", "go"] * 5 + ["once"]
    check_shared_rows({"train": train, "eval": ["yes", "go", "once", "go"]}, {"train": "a.csv", "eval": "b.csv"})
    assert "4 of 4 rows of b.csv are also in the training split" in caplog.text
    with pytest.raises(InputError, match=r"3 of 3 rows of b\.csv are also in the training split, .* Use other rows"):
        check_shared_rows(
            {"train": [*train, "twice"], "eval": ["yes", "once", "twice"]}, {"train": "a", "eval": "b.csv"}
        )


@pytest.mark.parametrize("command", [run_classification, run_task], ids=lambda command: command.__name__)
def test_rows_with_an_empty_text_are_counted_and_kept(command, tiny_start, tmp_path, run, caplog):
    columns, task_flags = (("review", "stars"), ("--task", TASK)) if command is run_task else (("text", "label"), ())
    texts = {"train": [*map(str, range(6)), "", " "], "validation": list("abcdef")}
    for split in texts:
        rows = [dict(zip(columns, (text, 1 + row % 2), strict=True)) for row, text in enumerate(texts[split])]
        write_jsonl(tmp_path / f"{split}.jsonl", *rows)
    files = [str(tmp_path / f"{split}.jsonl") for split in texts]
    assert run(command.main, *flags(tiny_start, tmp_path, *files), *task_flags).status == 0
    (message,) = [message for message in caplog.messages if "empty text" in message]
    assert message.startswith(f"2 of 8 rows of {files[0]} have an empty text.")
