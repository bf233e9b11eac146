"""Results on disk: scores are those that an independent scorer computes from the predictions."""

import csv
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import stats
from sklearn import metrics

from finetuning.data.labels import Labels, ProblemType
from finetuning.loop.task import Split
from finetuning.loop.training import describe_worse
from finetuning.run_classification import main
from finetuning.tasks.classification import ClassificationJob, TextClassification
from finetuning.tasks.metrics import DEFAULT_METRICS
from finetuning.tasks.tagging import Tagging
from mlm_common.errors import InputError
from tests.fixtures.results import predictions, results
from tests.fixtures.tiny_classification import NUM_VALIDATION, examples, flags
from train.runtime.run_folder import RunFolder

EXACT = 1e-9
NAMES = ("good", "bad", "so, so")


def assert_scores(scores: dict[str, Any], prefix: str, expected: dict[str, float]) -> None:
    assert {name: scores[f"{prefix}_{name}"] for name in expected} == pytest.approx(expected, rel=EXACT, abs=EXACT)


def scored_numbers(references: Sequence[float], run: Path, name: str) -> dict[str, float]:
    predicted = np.array(predictions(run, name), np.float32).astype(np.float64)  # nine digits are of float32 numbers
    return {
        "pearson": float(np.corrcoef(references, predicted)[0, 1]),
        "spearmanr": stats.spearmanr(references, predicted).statistic,
        "mse": metrics.mean_squared_error(references, predicted),
    }


def scored_classes(references: Sequence[str], run: Path, name: str) -> dict[str, float]:
    predicted = predictions(run, name)
    return {
        "accuracy": metrics.accuracy_score(references, predicted),
        "f1_macro": metrics.f1_score(references, predicted, average="macro", zero_division=0),
    }


def scored_sets(references: Sequence[Sequence[str]], run: Path, name: str) -> dict[str, float]:
    predicted = list(csv.reader(predictions(run, name)))
    pairs = [[[name in row for name in NAMES] for row in rows] for rows in (references, predicted)]
    averages = {
        f"f1_{average}": metrics.f1_score(*pairs, average=average, zero_division=0) for average in ("micro", "macro")
    }
    return {"accuracy": metrics.accuracy_score(*pairs), **averages}


def fake_trainer(task: Any, run: Path, *, is_chief: bool = True) -> Any:
    run.mkdir(exist_ok=True)
    opened = SimpleNamespace(folder=RunFolder(run), cluster=SimpleNamespace(is_chief=is_chief))
    phase = SimpleNamespace(task=task, inputs=SimpleNamespace(num_rows=5))
    plan = SimpleNamespace(row_after=lambda step: 5 * step, num_rows=5)
    return SimpleNamespace(run=opened, phase=phase, plan=plan, log=SimpleNamespace(lines=[]))


def totals_of(outputs: np.ndarray) -> dict[str, np.ndarray]:
    """Make what a model says of rows in another order, with a row of padding."""
    order = np.random.default_rng(1).permutation(len(outputs))
    padded = np.concatenate([outputs[order], np.full((1, *outputs.shape[1:]), 7, outputs.dtype)])
    sums = {"loss": 2.0, "total_weight": 4.0, "num_rows": 4.0, "num_correct": 1.0}
    totals = {name: np.array(value) for name, value in sums.items()}
    return {**totals, "outputs": padded, "index": np.append(order, -1)}


CASES: dict[ProblemType, tuple[tuple[str, ...], Callable[..., dict[str, float]]]] = {
    "single_label_classification": (NAMES, scored_classes),
    "multi_label_classification": (NAMES, scored_sets),
    "regression": (("score",), scored_numbers),
}


def task_of(problem_type: ProblemType, names: Sequence[str]) -> TextClassification:
    labels = Labels(problem_type, tuple(names))
    return TextClassification(labels, DEFAULT_METRICS[problem_type], pad_token_id=1, token_types=False)


@pytest.mark.parametrize("problem_type", CASES)
def test_scores_of_rows_are_those_of_the_predictions(problem_type, tmp_path, caplog):
    """With tiny numbers, of both validation parts and of a test part with labels; one without gets no scores."""
    caplog.set_level("INFO")
    names, scored = CASES[problem_type]
    draw = np.random.default_rng(3)
    task, parts, references = task_of(problem_type, names), {}, {}
    task_outputs: dict[str, dict[str, np.ndarray]] = {}
    for file in ("eval_predictions", "eval_predictions_mm", "predict_results_test", "predict_results_unlabeled"):
        outputs = draw.normal(size=(40, len(names))).astype(np.float32)
        if problem_type == "regression":
            outputs *= 1e-4
            references[file] = [float(number) for number in draw.integers(-99, 99, 40) / 2**20]
        elif problem_type == "multi_label_classification":
            references[file] = [[name for name in names if draw.random() < 0.5] for _ in range(40)]
        else:
            references[file] = [str(name) for name in draw.choice(names, 40)]
        task_outputs[file] = totals_of(outputs)
        rows: Any = file
        labels = task.labels.encode(references[file], "a")
        parts[file] = Split(rows, labels, f"{file}.txt", is_scored="unlabeled" not in file)
    evaluated, mismatched, *tests = parts.values()
    job = ClassificationJob()
    job.validation, job.tests, task.evaluated = {"": evaluated, "_mm": mismatched}, tests, evaluated
    figures = job.write_results(fake_trainer(task, tmp_path), 3, lambda rows: task_outputs[str(rows)])

    eval_results, everything = results(tmp_path, "eval"), results(tmp_path, "all")
    assert figures is not None
    for ending in ("", "_mm"):
        name = f"eval_predictions{ending}"
        expected = scored(references[name], tmp_path, name)
        assert_scores(eval_results, "eval", {f"{name}{ending}": value for name, value in expected.items()})
        if not ending:
            assert {name: figures[name] for name in expected} == pytest.approx(expected, rel=EXACT, abs=EXACT)
    name = "predict_results_test"
    expected = scored(references[name], tmp_path, name)
    assert_scores(everything, "predict", expected)
    assert printed_test_scores(caplog) == {f"{name}.txt": pytest.approx(expected, rel=1e-3, abs=5e-5)}
    assert eval_results["eval_loss"] == figures["loss"] == 0.5
    assert len(predictions(tmp_path, "predict_results_unlabeled")) == 40
    assert sum(name.startswith("predict_loss") for name in everything) == 1
    assert (tmp_path / "confusion_matrix.png").exists() == (problem_type == "single_label_classification")


def printed_test_scores(caplog: pytest.LogCaptureFixture) -> dict[str, dict[str, float]]:
    """Read the scores of test parts from the log, {file of the predictions: {metric: score}}."""
    by_file = {}
    for message in caplog.messages:
        if message.startswith("Test scores"):
            start, _, scores = message.removesuffix(".").partition(": ")
            pairs = (score.rpartition(" ") for score in scores.split(", "))
            by_file[start.rpartition(" ")[2]] = {name.replace(" ", "_"): float(score) for name, _, score in pairs}
    return by_file


@pytest.mark.parametrize("is_chief", [True, False])
def test_without_validation_or_without_being_chief(is_chief, tmp_path, caplog):
    """A test part without labels gets no scores. All workers predict, and one writes."""
    caplog.set_level("INFO")
    task, rows = task_of("single_label_classification", NAMES), None
    part = Split(rows, np.arange(3), "predict_results_test.txt", is_scored=not is_chief)  # type: ignore[arg-type]
    job = ClassificationJob()
    job.validation, job.tests, task.evaluated = {} if is_chief else {"": part}, [part], part
    trainer = fake_trainer(task, tmp_path, is_chief=is_chief)
    figures = job.write_results(trainer, 3, lambda _: totals_of(np.eye(3, dtype=np.float32)))
    assert printed_test_scores(caplog) == {}
    if not is_chief:
        assert figures is not None
        assert figures["accuracy"] == 1
        assert list(tmp_path.iterdir()) == []
        return
    assert figures is None
    assert set(results(tmp_path, "all")) == {"train_samples", "epoch"}
    assert predictions(tmp_path, "predict_results_test") == list(NAMES)
    assert {path.name for path in tmp_path.glob("*eval*")} == set()


@pytest.mark.parametrize(("error", "warnings"), [(0.5, []), (-2.0, ["mse 4.0000 instead of 1.0000"])])
def test_numbers_that_are_worse_than_the_mean_are_warned_of(error, warnings, tmp_path, caplog):
    labels, rows = np.array([-1, 1, -1, 1], np.float32), None
    task, job = task_of("regression", ("score",)), ClassificationJob()
    task.guess = {"pearson": 0.0, "spearmanr": 0.0, "mse": 1.0}
    part = Split(rows, labels, "eval_predictions.txt")  # type: ignore[arg-type]
    job.validation, job.tests, task.evaluated = {"": part}, [], part
    job.write_results(fake_trainer(task, tmp_path), 3, lambda _: totals_of((labels + np.float32(error))[:, np.newaxis]))
    start = "On the validation split, the model is worse than a guess: "
    assert caplog.messages == [f"{start}{warning}." for warning in warnings]


def test_tags_that_are_worse_than_the_most_frequent_tag_are_described():
    labels = Labels("single_label_classification", ("O", "B-X"))
    task = Tagging(labels, max_length=5, pad_token_id=1, token_types=False)
    guess = dict.fromkeys(task.metrics, 0.0)
    task.guess = guess | {"accuracy": 0.75}
    assert describe_worse(task, guess | {"accuracy": 0.75}) == ""
    assert describe_worse(task, guess | {"accuracy": 0.5}) == "accuracy 0.5000 instead of 0.7500"


def test_predictions_keep_their_digits():
    task = task_of("regression", ("score",))
    values = np.random.default_rng(1).normal(size=1000).astype(np.float32) * np.float32(2e-4)
    written = [task.format_label(value) for value in values]
    assert [np.float32(text) for text in written] == list(values)
    assert task.format_label(np.float64(1 / 3)) == str(1 / 3)
    assert task.format_label(np.array([[0.1, 2]], np.float32)) == "0.100000001,2"
    assert task.format_label(np.int64(3)) == "3"


@pytest.mark.parametrize("name", ["a\tb", "a\u2028b"])
def test_labels_that_do_not_fit_on_a_line_are_refused(name):
    with pytest.raises(InputError, match="Each label must be one line without tabs"):
        task_of("single_label_classification", ("x", name))
    with pytest.raises(InputError, match="Each tag must be without white space"):
        Tagging(Labels("single_label_classification", ("x", name)), pad_token_id=1, token_types=False, max_length=5)


@pytest.mark.usefixtures("one_device")
def test_a_finished_run_is_scored_again_by_its_new_settings(classified, tiny_start, tmp_path, caplog, run, monkeypatch):
    """With another metric, by which the best evaluation has no checkpoint any more.

    What is printed is what `write_results` returns.
    """
    write_results = ClassificationJob.write_results
    monkeypatch.setattr(ClassificationJob, "write_results", lambda *args: {**write_results(*args), "accuracy": 0.1234})
    references = [label for _, label in examples(NUM_VALIDATION, len("dev"))]
    expected = {"accuracy": scored_classes(references, classified, "eval_predictions")["accuracy"]}
    assert_scores(results(classified, "eval"), "eval", expected)
    folder = tmp_path / "run"
    shutil.copytree(classified, folder)
    # Not by the log's lines: those that were not yet written at the last checkpoint are taken from there.
    monkeypatch.setattr(TextClassification, "score", lambda _, figures: float(figures.get("step") == 27))
    outcome = run(main, *flags(tiny_start, folder, "--metric-name", "loss"))
    assert outcome.status == 0
    assert any("step 27 (score 1), no longer exists" in message for message in caplog.messages)
    assert_scores(results(folder, "eval"), "eval", expected)
    assert (folder / "eval_predictions.txt").read_bytes() == (classified / "eval_predictions.txt").read_bytes()
    assert results(folder, "eval")["eval_loss"] == results(classified, "eval")["eval_loss"]
    assert "accuracy               0.1234; a guess" in outcome.out
