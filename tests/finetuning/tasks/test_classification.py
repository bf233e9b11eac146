"""The sums of each kind of problem, of given logits, against those done by hand; rows of padding count nothing."""

from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from finetuning.data.labels import Labels
from finetuning.loop.task import Split
from finetuning.tasks.classification import TextClassification

PAD = 1
IDS = np.array([[0, 7, 2, PAD], [0, PAD, 9, 2], [PAD] * 4], np.int32)  # the second text holds the padding token
MASK = np.array([[1, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]], np.int32)
INDEX = np.array([1, 0, -1], np.int32)
LOGITS = np.array([[1.0, -1.0], [0.5, 2.0], [9.0, 9.0]], np.float32)


def make_task(problem_type: str, references: list, metrics: tuple[str, ...], num_labels: int = 2) -> TextClassification:
    labels = Labels(problem_type, tuple("abc"[:num_labels]))  # type: ignore[arg-type]
    task = TextClassification(labels, metrics, pad_token_id=PAD, token_types=False)
    task.evaluated = Split(None, np.array(references))  # type: ignore[arg-type]
    return task


def sums_of(task: TextClassification, logits: np.ndarray, labels: list, dtype: type, *, training: bool = False) -> dict:
    seen = []

    def network(inputs: dict, training: bool) -> SimpleNamespace:
        seen.append((inputs["attention_mask"].numpy().tolist(), training))
        return SimpleNamespace(logits=tf.constant(logits, tf.float16))

    rows = {"input_ids": tf.constant(IDS), "attention_mask": tf.constant(MASK), "index": tf.constant(INDEX)}
    rows["label"] = tf.constant(labels, dtype)
    sums = task.sums(network, rows, training=training)
    assert seen == [(MASK.tolist(), training)]
    return {name: value.numpy() for name, value in sums.items()}


def test_one_class():
    task = make_task("single_label_classification", [1, 1], ("accuracy", "f1"))
    sums = sums_of(task, LOGITS, [0, 0, 0], np.int32)
    losses = np.log(1 + np.exp([-2.0, 1.5]))
    assert sums["loss"] == pytest.approx(losses.sum(), rel=1e-3)
    assert (sums["num_rows"], sums["num_correct"]) == (2, 1)
    figures = task.figures(sums)
    # In the order of the rows: the second is predicted as 0, the first as 1.
    assert task.predictions(sums, task.evaluated).tolist() == [1, 0]
    assert figures["loss"] == pytest.approx(losses.mean(), rel=1e-3)
    assert (figures["accuracy"], figures["num_rows"], figures["is_degenerate"]) == (0.5, 2, 0)
    assert task.score(figures) == figures["accuracy"]
    names = {"loss", "total_weight", "num_rows", "num_correct"}
    assert set(sums_of(task, LOGITS, [0, 0, 0], np.int32, training=True)) == names


def test_several_classes():
    task = make_task("multi_label_classification", [[0, 1], [1, 0]], ("f1_micro",))
    sums = sums_of(task, LOGITS, [[1, 0], [1, 1], [0, 0]], np.float32)
    losses = [np.log(1 + np.exp(-1.0)), (np.log(1 + np.exp(-0.5)) + np.log(1 + np.exp(-2.0))) / 2]
    assert sums["loss"] == pytest.approx(sum(losses), rel=1e-3)
    assert task.predictions(sums, task.evaluated).tolist() == [[1, 1], [1, 0]]
    assert task.figures(sums)["f1_micro"] == pytest.approx(2 * 2 / (2 * 2 + 1))


def test_a_number():
    task = make_task("regression", [2.0, 0.0], ("mse",), num_labels=1)
    sums = sums_of(task, LOGITS[:, :1], [3.0, 0.0, 5.0], np.float32)
    assert sums["loss"] == pytest.approx(2.0**2 + 0.5**2, rel=1e-3)
    figures = task.figures(sums)
    assert figures["mse"] == pytest.approx(((0.5 - 2) ** 2 + 1) / 2)
    assert task.score(figures) == -figures["mse"]


def test_only_rows_with_a_label_are_scored():
    """The loss, which the step computes over all rows, is left out."""
    task = make_task("single_label_classification", [1, 1], ("accuracy",))
    task.evaluated = Split(None, np.array([1, 1]), is_labelled=np.array([True, False]))  # type: ignore[arg-type]
    figures = task.figures(sums_of(task, LOGITS, [0, 0, 0], np.int32))
    assert figures == {"accuracy": 1.0, "num_rows": 1, "is_degenerate": 0}
