"""Bad input to fine-tuning: one line with the hint, exit status 2, before TensorFlow is imported."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fixtures.fresh_process import Answer, answers_of

TRAIN = "text\tlabel\na list\tx\na file\ty\n"


def with_file(name: str, content: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(content, encoding="utf-8") and None


def run_without_export(folder: Path) -> None:
    (folder / "model" / "run.json").write_text("{}", encoding="utf-8")


def other_tokenizer(folder: Path) -> None:
    shutil.copytree(folder / "model", folder / "other")
    path = folder / "other" / "tokenizer.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["model"]["vocab"].append(["more", -9.0])
    path.write_text(json.dumps(settings), encoding="utf-8")


def no_weights(folder: Path) -> None:
    (folder / "model" / "model.safetensors").unlink()


def another_run(folder: Path) -> None:
    (folder / "run").mkdir()
    (folder / "run" / "run.json").write_text(json.dumps({"fingerprint": {"run.seed": 7}}), encoding="utf-8")


FILES = ["--train-file", "{}/train.tsv", "--validation-file", "{}/b.tsv"]
CUSTOM = [*FILES[:2], "--task", "{}/task.py:Mine"]
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


# name: (what is done to the folder, flags in which {} is that folder, what the error says)
CASES = {
    "nothing to train on": (None, [], "--train-file is required, or a --dataset-name"),
    "two sources": (None, [*FILES, "--task-name", "cola"], "--task-name and --train-file cannot be combined"),
    "no file": (None, FILES, "--validation-file: there is no file"),
    "an empty file": (with_file("b.tsv", ""), FILES, "--validation-file must name a file with rows"),
    "an unknown label": (
        with_file("b.tsv", "text\tlabel\nt\tz\n"),
        FILES,
        "Each label must be one of the training part's: x, y; row 1 of",
    ),
    "a column missing": (with_file("b.tsv", "text\tclass\nt\tx\n"), FILES, "--label-column-name must name a column of"),
    "a label missing": (with_file("b.tsv", "text\tlabel\nt\t\n"), FILES, "must have a label; row 1 of"),
    "weights of other classes": (
        None,
        [*FILES[:2], "--class-weights", "1", "2", "3"],
        "--class-weights must be balanced or 2 numbers, for x, y; received 1 2 3",
    ),
    "smoothed numbers": (
        with_file("train.tsv", "text\tlabel\nt\t0.5\nu\t0.75\n"),
        [*FILES[:2], "--label-smoothing", "0.1"],
        "--label-smoothing needs labels of one class; those of",
    ),
    "one label": (with_file("train.tsv", "text\tlabel\nt\tx\n"), FILES[:2], "must be of two classes at least"),
    "no such metric": (None, [*FILES[:2], "--metric-name", "f1"], "--metric-name must be one of accuracy, f1_macro"),
    "rows longer than the model": (
        None,
        [*FILES[:2], "--max-seq-length", "31"],
        "takes rows of at most 30 tokens, but --max-seq-length is 31. Use --max-seq-length 30, or pretrain",
    ),
    "buckets out of order": (None, [*FILES[:2], "--length-buckets", "16", "8", "30"], "must be increasing numbers"),
    "buckets too short": (None, [*FILES[:2], "--length-buckets", "16"], "--length-buckets must end with --max-seq-len"),
    "another tokenizer": (
        other_tokenizer,
        [*FILES[:2], "--tokenizer-name", "{}/other"],
        "--tokenizer-name must have the vocabulary of",
    ),
    "no weights": (no_weights, FILES[:2], "A model must hold model.safetensors or tf_model.h5"),
    "no model": (None, [*FILES[:2], "--init-from", "{}/nowhere"], "--init-from: there is no folder"),
    "a run without an export": (run_without_export, FILES[:2], "has no export and no checkpoint yet"),
    "GLUE without its files": (None, ["--task-name", "rte", "--glue-dir", "{}"], "--glue-dir: there is no file"),
    "no task": (None, [*FILES[:2], "--task", "stars"], "--task must be FILE.py:CLASS, a local file and a class in it"),
    "no file of the task": (None, CUSTOM, "--task: there is no file"),
    "a task of the Hub": (None, [*CUSTOM[:3], "alice/model/task.py:Mine"], "--task: there is no file"),
    "a file that fails": (
        with_file("task.py", "import nothing_of_that_name\n"),
        CUSTOM,
        "failed with ModuleNotFoundError: No module named 'nothing_of_that_name'",
    ),
    "no such class": (with_file("task.py", "class Other: ...\n"), CUSTOM, "has no class Mine; it has Other"),
    "a class that is no task": (with_file("task.py", "class Mine: ...\n"), CUSTOM, "is not a subclass of"),
    "methods that are missing": (
        with_file("task.py", "from finetuning.tasks.custom import CustomTask\nclass Mine(CustomTask): ...\n"),
        CUSTOM,
        "lacks these methods: head, losses, predict, read, scores",
    ),
    "a task without training": (
        custom_task("{}"),
        CUSTOM,
        "read of Mine must give examples under train; received nothing",
    ),
    "a task without labels": (
        custom_task("{'train': Examples('a', (['t'],), None)}"),
        CUSTOM,
        "read of Mine must give labels to train and evaluate on; under train are none",
    ),
    "a task without texts": (
        custom_task("{'train': Examples('a', ([7, 8],), [1])}"),
        CUSTOM,
        "under train are 1 and 2 of them",
    ),
    "a task with nothing to predict": (
        custom_task("{'train': Examples('a', (['t'],), [1])}"),
        [*CUSTOM, "--do-predict"],
        "--do-predict needs a part to predict; read of Mine gives train",
    ),
    "no such metric of a task": (
        custom_task("{'train': Examples('a', (['t'],), [1])}"),
        [*CUSTOM, "--metric-name", "f1"],
        "--metric-name must be one of share, loss; received f1",
    ),
    "another run": (another_run, FILES[:2], "contains a different run"),
}


@pytest.fixture(scope="module")
def answers(tiny_start: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    commands = []
    for change, more, _ in CASES.values():
        folder = tmp_path_factory.mktemp("case")
        shutil.copytree(tiny_start / "start", folder / "model")
        (folder / "train.tsv").write_text(TRAIN, encoding="utf-8")
        if change is not None:
            change(folder)
        flags = ["--init-from", "{}/model", "--output-dir", "{}/run", "--max-seq-length", "30", *more]
        module = "finetuning.run_task" if "--task" in flags else "finetuning.run_classification"
        commands.append((module, [flag.format(folder) for flag in flags]))
    return dict(zip(CASES, answers_of(commands), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_bad_input(answers: dict[str, Answer], name: str) -> None:
    answer = answers[name]
    (line,) = [line for line in answer.err.splitlines() if line.startswith("error: ")]
    assert CASES[name][2] in line
    assert (answer.status, answer.has_tensorflow) == (2, False)
