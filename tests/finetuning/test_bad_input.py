"""Bad input to fine-tuning: one line with the hint, exit status 2, before TensorFlow is imported."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.fresh_process import Answer, answers_of

TRAIN = "text\tlabel\na list\tx\na file\ty\n"
NUMBERS = "text\tlabel\nt\t0.5\nu\t0.75\n"


def with_file(name: str, content: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(content, encoding="utf-8") and None


def other_tokenizer(folder: Path) -> None:
    shutil.copytree(folder / "model", folder / "other")
    path = folder / "other" / "tokenizer.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["model"]["vocab"].append(["more", -9.0])
    path.write_text(json.dumps(settings), encoding="utf-8")


FILE = "--train-file {}/train.tsv"
FILES = f"{FILE} --validation-file {{}}/b.tsv"
CUSTOM = f"{FILE} --task {{}}/task.py:Mine"
CUSTOM_TASK = """
from finetuning.data.examples import Examples
from finetuning.tasks.custom import CustomTask
class Mine(CustomTask):
    def read(self, data):
        return READ
    head = losses = predict = lambda self, *_: None
    def scores(self, predictions, labels):
        return {"share": 1.0}
"""


def custom_task(read: str) -> Callable[[Path], None]:
    return with_file("task.py", CUSTOM_TASK.replace("READ", read))


LABELLED = custom_task("{'train': Examples('a', (['t', 'u'],), [1, 2])}")
# (flags in which {} is the folder, what the error says, what is done to that folder before)
CASES: list[tuple[Any, ...]] = [
    ("", "--train-file is required, or a --dataset-name"),
    (FILES, "--validation-file: there is no file"),
    (FILES, "Label 'z' in row 1 of", with_file("b.tsv", "text\tlabel\nt\tz\n")),
    (f"{FILE} --label-smoothing 0.1", "--label-smoothing needs one class per row", with_file("train.tsv", NUMBERS)),
    (f"{FILE} --max-seq-length 31", "takes rows of at most 30 tokens, but --max-seq-length is 31. Use --max-seq"),
    (f"{FILE} --length-buckets 16", "--length-buckets must end with --max-seq-len"),
    (f"{FILE} --tokenizer-name {{}}/other", "--tokenizer-name must have the vocabulary of", other_tokenizer),
    (f"{FILE} --config-overrides num_hidden_layers=0", "--config-overrides must not change num_hidden_layers"),
    (CUSTOM, "--task: there is no file"),
    (CUSTOM, "failed with ModuleNotFoundError: No module named 'none_such'", with_file("task.py", "import none_such")),
    (CUSTOM, "Mine.read must return a train split; it returned nothing", custom_task("{}")),
    (f"{CUSTOM} --do-predict", "--do-predict needs a test split; Mine.read returned train", LABELLED),
    (f"{CUSTOM} --metric-name f1", "--metric-name must be one of share, loss; received f1", LABELLED),
]


@pytest.fixture(scope="module")
def answers(tiny_start: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    commands = []
    for case_flags, _, *changes in CASES:
        folder = tmp_path_factory.mktemp("case")
        shutil.copytree(tiny_start / "start", folder / "model")
        (folder / "train.tsv").write_text(TRAIN, encoding="utf-8")
        for change in changes:
            change(folder)
        given = f"--init-from {{}}/model --output-dir {{}}/run --max-seq-length 30 {case_flags}"
        flags = given.replace("{}", str(folder)).split()
        commands.append(("finetuning.run_task" if "--task" in flags else "finetuning.run_classification", flags))
    return answers_of(commands)


@pytest.mark.parametrize("index", range(len(CASES)), ids=[f"{flags} {said}" for flags, said, *_ in CASES])
def test_bad_input(answers, index):
    answer = answers[index]
    (line,) = [line for line in answer.err.splitlines() if line.startswith("error: ")]
    assert CASES[index][1] in line
    assert (answer.status, answer.has_tensorflow) == (2, False)
