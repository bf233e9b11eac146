"""The loss of classes with weights and smoothed labels, compared with NumPy and scikit-learn."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.utils.class_weight import compute_class_weight

from finetuning.config.optimization import ClassOptimization, SmoothedOptimization
from finetuning.data.labels import Labels
from finetuning.loop.task import ClassLoss, class_loss, describe_loss
from finetuning.tasks.classification import TextClassification
from finetuning.tasks.tagging import NO_TAG, Tagging
from mlm_common.errors import InputError

NAMES = ("a", "b", "c")


def mean_loss(logits: NDArray[Any], labels: NDArray[Any], weights: NDArray[Any], smoothing: float) -> float:
    """Compute what `torch.nn.CrossEntropyLoss` does, by its documentation, with its mean."""
    logs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    hard = -weights[labels] * np.take_along_axis(logs, labels[:, np.newaxis], axis=-1)[:, 0]
    smooth = -(weights * logs).sum(axis=-1) / logits.shape[-1]
    return float(((1 - smoothing) * hard + smoothing * smooth).sum() / weights[labels].sum())


@given(st.lists(st.floats(0.1, 9), min_size=3, max_size=3), st.floats(0, 0.9), st.integers(0, 99))
def test_it_is_that_of_numpy(weights, smoothing, seed):
    draw = np.random.default_rng(seed)
    logits, labels = draw.normal(size=(5, 3)), draw.integers(0, 3, 5)
    given_tensors = tf.constant(logits, tf.float32), tf.constant(labels, tf.int32)
    losses, of_labels = ClassLoss(tuple(weights), smoothing).losses(*given_tensors)
    expected = mean_loss(logits, labels, np.array(weights), smoothing)
    assert float(tf.reduce_sum(losses) / tf.reduce_sum(of_labels)) == pytest.approx(expected, rel=1e-4)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30))
def test_balanced_weights_are_those_of_scikit_learn(labels):
    labels = [0, 1, 2, *labels]
    balanced = class_loss(ClassOptimization(class_weights=["balanced"]), NAMES, np.array(labels, np.int32))
    assert balanced is not None
    expected = compute_class_weight("balanced", classes=np.arange(3), y=labels)
    np.testing.assert_allclose(balanced.weights, expected, rtol=1e-12)


def test_flags_say_which_loss():
    labels = np.array([0, 1, 1], np.int32)
    assert class_loss(ClassOptimization(), NAMES, labels) is None
    assert class_loss(SmoothedOptimization(label_smoothing=0.1), NAMES, labels) == ClassLoss((1.0, 1.0, 1.0), 0.1)
    weighted = class_loss(ClassOptimization(class_weights=["1", "2.5", "1e-3"], label_smoothing=0.1), NAMES, labels)
    assert weighted == ClassLoss((1.0, 2.5, 0.001), 0.1)
    assert describe_loss(weighted, NAMES) == {"class weights": "a 1, b 2.5, c 0.001"}
    assert describe_loss(None, NAMES) == describe_loss(ClassLoss((1.0, 1.0), 0.1), NAMES) == {}
    with pytest.raises(InputError, match="--class-weights must be balanced or 3 numbers, for a, b, c; received 1 2"):
        class_loss(ClassOptimization(class_weights=["1", "2"]), NAMES, labels)
    with pytest.raises(
        InputError, match=r"--class-weights needs training examples of every class, .* received none of c"
    ):
        class_loss(ClassOptimization(class_weights=["balanced"]), NAMES, labels)


@pytest.mark.parametrize("weights", [["1", "balanced"], ["0", "1"], ["nan", "1"]])
def test_weights_are_numbers_above_0(weights):
    with pytest.raises(InputError, match=f"--class-weights must be balanced, or .*; received {' '.join(weights)}"):
        ClassOptimization(class_weights=weights)


@pytest.mark.parametrize("task_class", [TextClassification, Tagging])
def test_training_is_by_it_and_evaluation_is_not(task_class):
    """Rows of padding, and tokens without a tag, do not count."""
    labels = Labels("single_label_classification", NAMES)
    draw = np.random.default_rng(2)
    weights, smoothing = (1.0, 2.0, 5.0), 0.2
    if task_class is Tagging:
        task = Tagging(labels, pad_token_id=1, token_types=False, max_length=3)
        logits, ids = draw.normal(size=(2, 3, 3)), np.array([[0, NO_TAG, 2], [2, 1, NO_TAG]])
        rows = {"word": tf.zeros((2, 3), tf.int32), "index": tf.constant([0, 1])}
        counted = ids != NO_TAG
    else:
        task = TextClassification(labels, ("accuracy",), pad_token_id=1, token_types=False)
        logits, ids = draw.normal(size=(4, 3)), np.array([0, 2, 1, 0])
        rows = {"index": tf.constant([2, 0, 1, -1])}
        counted = np.array([True, True, True, False])
    rows |= {"label": tf.constant(ids, tf.int32), "input_ids": tf.ones(ids.shape), "attention_mask": tf.ones(ids.shape)}
    task.class_loss = ClassLoss(weights, smoothing)
    network = lambda *_, **__: SimpleNamespace(logits=tf.constant(logits, tf.float32))  # noqa: E731
    for training, used in ((True, (np.array(weights), smoothing)), (False, (np.ones(3), 0.0))):
        sums = task.sums(network, rows, training=training)
        expected = mean_loss(logits[counted], ids[counted], *used)
        name, total, weight = task.means[0]
        assert name == "loss"
        assert float(sums[total] / sums[weight]) == pytest.approx(expected, rel=1e-5)
